"""Ending processes within one deadline: asked, then SIGTERM, then SIGKILL."""

from __future__ import annotations

import logging
import select
import signal
from collections.abc import Callable, Sequence

from mpexec.deadline import Deadline
from mpexec.processes.process import RankProcess

logger = logging.getLogger(__name__)

# What each rung may use of the time that is left; the last one gets all of it, and at least the floor.
_ASK_SHARE = 0.5
_TERM_SHARE = 0.5
# A deadline that never comes would let a rank that never answers hold its driver.
_LONGEST_SECONDS = 5.0
# The kernel needs some time to free a killed process's memory; without it every late caller would see "unkillable".
_KILL_FLOOR_SECONDS = 2.0


def end_processes(
    processes: Sequence[RankProcess], deadline: Deadline, *, ask: Callable[[RankProcess], None] | None
) -> dict[int, str]:
    """End all processes and what is left of their process groups, and reap them. Bounded, whatever they do.

    Waits until `deadline` (five seconds if that is never), and at least two seconds after SIGKILL. A stopped process
    cannot answer and is killed at once.
    The descriptors stay open; calling it again is harmless.

    Args:
        ask: Asks one process to end by itself, without waiting for it; None begins with SIGTERM.

    Returns:
        The rung that each rank needed: "exited" (it had ended before), "asked", "TERM", "KILL", or "unkillable": it is
        still there, which is logged as a warning with its pid and state.
    """
    rungs: dict[int, str] = {}
    if deadline.at_ns is None:
        deadline = Deadline.after(_LONGEST_SECONDS)
    alive = _drop_ended(processes, "exited", rungs)
    if ask is not None:
        for process in alive:
            _ask(ask, process)
        alive = _wait(alive, deadline.share(_ASK_SHARE), "asked", rungs, give_up_stopped=True)
    for process in alive:
        process.send_signal(signal.SIGTERM)
    alive = _wait(alive, deadline.share(_TERM_SHARE), "TERM", rungs, give_up_stopped=True)
    for process in alive:
        process.send_signal(signal.SIGKILL)
    last = deadline if (deadline.remaining() or 0) > _KILL_FLOOR_SECONDS else Deadline.after(_KILL_FLOOR_SECONDS)
    for process in _wait(alive, last, "KILL", rungs, give_up_stopped=False):
        rungs[process.rank] = "unkillable"
        logger.warning("rank left behind: rank=%d pid=%d state=%s", process.rank, process.pid, process.state())
    return rungs


def _ask(ask: Callable[[RankProcess], None], process: RankProcess) -> None:
    try:
        ask(process)
    except Exception as error:  # a lane that is closed or full: the next rung ends the process
        logger.debug("could not ask: rank=%d pid=%d error=%r", process.rank, process.pid, error)


def _drop_ended(processes: Sequence[RankProcess], rung: str, rungs: dict[int, str]) -> list[RankProcess]:
    """Note `rung` for those that have ended; give back the others."""
    left = []
    for process in processes:
        if process.is_over():
            rungs[process.rank] = rung
        else:
            left.append(process)
    return left


def _wait(
    processes: Sequence[RankProcess], deadline: Deadline, rung: str, rungs: dict[int, str], *, give_up_stopped: bool
) -> list[RankProcess]:
    """Wait for all at once; those that are left at the deadline, or that are not worth waiting for."""
    poller = select.poll()
    waiting = {}
    for process in processes:
        if not (give_up_stopped and process.state() == "stopped"):
            events = process.end_events()
            for fd, event in events.items():
                poller.register(fd, event)
                waiting[fd] = events
    while waiting:
        ready = poller.poll(deadline.poll_ms())
        for first, _ in ready:
            # Out of the set in any case: one that claims to have ended and cannot be reaped must not spin here.
            for fd in waiting.get(first, ()):
                poller.unregister(fd)
                del waiting[fd]
        if not ready:
            break
    return _drop_ended(processes, rung, rungs)
