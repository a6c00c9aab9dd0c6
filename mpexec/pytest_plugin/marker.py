"""`@pytest.mark.ranks`: what its arguments mean, and errors that name the value and the remedy."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

DEVICES = ("auto", "cpu", "cuda")
RANK_PLUGIN = "mpexec-rank"  # the name of the plug-in by which a rank's pytest is told from the driver's
PARAMETER = "_mpexec_world_size"
_USE = "use @pytest.mark.ranks(2), or ranks(1, 2, 4) for one test per number of ranks"


class MarkerError(ValueError):
    """The arguments of a `ranks` marker cannot work; the message names the value and the remedy."""


@dataclass(frozen=True, slots=True)
class RanksMark:
    """The arguments of a `ranks` marker.

    Attributes:
        sizes: Numbers of ranks; the test runs once for each.
        device: "auto", "cpu" or "cuda".
        timeout: Seconds for one test; 0 is no limit, None is the default of the session.
    """

    sizes: tuple[int, ...]
    device: str = "auto"
    timeout: float | None = None

    @classmethod
    def parse(cls, mark: pytest.Mark) -> RanksMark:
        """Read a marker.

        Raises:
            MarkerError: An argument is missing, unknown or out of range.
        """
        unknown = set(mark.kwargs) - {"device", "timeout"}
        if unknown:
            raise MarkerError(f"ranks: unknown argument {sorted(unknown)}; there are device= and timeout=")
        if not mark.args:
            raise MarkerError(f"ranks: the number of ranks is missing; {_USE}")
        for size in mark.args:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MarkerError(f"ranks: {size!r} is not a number of ranks of at least 1; {_USE}")
        if len(set(mark.args)) < len(mark.args):
            raise MarkerError(f"ranks: {mark.args!r} has a number twice; {_USE}")
        device, timeout = mark.kwargs.get("device", "auto"), mark.kwargs.get("timeout")
        if device not in DEVICES:
            raise MarkerError(f"ranks: device={device!r}; use one of {', '.join(map(repr, DEVICES))}")
        if timeout is not None and not is_seconds(timeout):
            raise MarkerError(f"ranks: timeout={timeout!r}; use seconds of at least 0, where 0 is no limit")
        return cls(mark.args, device, timeout)


def is_seconds(value: object) -> bool:
    """True for a number of seconds of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def size_id(size: int) -> str:
    """How a number of ranks reads in a test's name."""
    return "1rank" if size == 1 else f"{size}ranks"
