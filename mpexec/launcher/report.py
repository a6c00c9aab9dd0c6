"""The last thing a failed job prints: which rank, how it ended, its traceback, its last lines."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from mpexec.launcher.group import Ending
from mpexec.launcher.rank import Rank
from mpexec.processes.death import Death

_LINES = 20
_TRACEBACK = "Traceback (most recent call last)"


def exit_code_of(ending: Ending) -> int:
    """The launcher's: that of the root cause, 128 + n for a signal."""
    if ending.root is not None:
        return _exit_code(ending.root)
    if ending.signal_number is not None:
        return 128 + ending.signal_number
    # every rank exited with 0, unless one could not be killed or nobody knows how it ended
    return 0 if all(death is not None and death.exit_code == 0 for death in ending.deaths) else 1


def _exit_code(death: Death) -> int:
    if death.exit_code is not None:
        return death.exit_code
    try:
        return 128 + signal.Signals[death.signal_name or ""]
    except KeyError:  # a real-time signal, or an end that nobody saw
        return 1


def describe_failure(ending: Ending, root: Death, ranks: Sequence[Rank], restart: str = "") -> str:
    """The message: the other ranks in a line each, and then the root cause.

    Args:
        restart: What follows, "" if nothing.
    """
    lines = ["mpexec: how the ranks ended:"]
    for rank, death in zip(ranks, ending.deaths, strict=True):
        how = "still there" if death is None else death.describe()
        note = "  <- root cause" if death is root else ""
        lines.append(f"  rank {rank.process.rank} (pid {rank.process.pid}) {how}{note}")
    rank = next(rank for rank in ranks if rank.process.rank == root.rank)
    follows = restart or ("" if root.exit_code is not None else f"; exit code {_exit_code(root)}")
    lines.append(f"mpexec: rank {root.rank} (local rank {rank.local_rank}, pid {root.pid}) {root.describe()}{follows}")
    recorded = rank.recorded_error()
    if recorded:
        lines += ["its error:", *(f"  {line}" for line in recorded.splitlines())]
    if root.last_lines:
        lines += ["its last lines:", *(f"  {line}" for line in _telling(root.last_lines))]
    return "\n".join(lines)


def _telling(lines: Sequence[str]) -> Sequence[str]:
    """The last lines, and a whole traceback if they end with one."""
    starts = [at for at, line in enumerate(lines) if _TRACEBACK in line]
    return lines[min(starts[-1] if starts else len(lines), max(0, len(lines) - _LINES)) :]
