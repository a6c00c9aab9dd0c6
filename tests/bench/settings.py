"""How much of everything a run does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.stats import Row


@dataclass(frozen=True)
class Settings:
    """Amounts of one run.

    Attributes:
        repeats: Interleaved repeats of every comparison.
        quick: A small run that shows that everything works; its figures mean little.
        say: Called with a line of progress now and then.
    """

    repeats: int = 5
    quick: bool = False
    say: Callable[[str], None] = lambda text: None

    @property
    def world_sizes(self) -> tuple[int, ...]:
        return (2,) if self.quick else (1, 2, 4)

    @property
    def calls(self) -> int:
        """Round trips in a row."""
        return 500 if self.quick else 4000

    @property
    def paced_calls(self) -> int:
        """Round trips at one every 5 ms."""
        return 40 if self.quick else 200

    @property
    def kills(self) -> int:
        """SIGKILLs for each state of the surviving rank, by the fork server."""
        return 4 if self.quick else 20


Part = Callable[[Settings], list[Row]]


def in_turn(peers: list[str], repeat: int) -> list[str]:
    """The peers in the order for this repeat: forwards and backwards by turns, so that drift favours nobody."""
    return peers if repeat % 2 == 0 else peers[::-1]
