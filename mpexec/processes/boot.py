"""The first steps of a rank, inside its process: from the control socket to the call of its entry.

The order matters. Signals come first, then the lane, so that every later failure can be reported; parent death is armed
and the environment set before any code of the user runs; `__main__` is imported last but one, the entry last.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpexec.deadline import Deadline
from mpexec.errors import StartupError
from mpexec.messages import Failure
from mpexec.processes import streams
from mpexec.transport.lane import ControlLane, LaneClosed
from mpexec.transport.linux import set_process_title

_F_SETSIG = 10
_MISSING_GUARD = (
    "an executor was built while a rank imports your main module. Ranks are new interpreters that import it, so what "
    'builds the executor must stand beneath\n\n    if __name__ == "__main__":\n'
)


@dataclass(slots=True)
class Boot:
    """What an entry is given.

    Attributes:
        lane: This rank's end of the control lane.
        payload: The bytes given to `launch`.
        fds: Descriptors by the names of `RankPlan.fds`; they are the entry's to close.
        driver_pid: Process id of the driver.
        driver_pidfd: Readable when the driver has ended.
        death_fd: The pipe whose hang-up makes the kernel kill this process group; to be kept open.
        forked: This process came from a fork and shares memory pages with its parent.
    """

    rank: int
    lane: ControlLane
    payload: bytes
    fds: dict[str, int]
    driver_pid: int
    driver_pidfd: int
    death_fd: int
    forked: bool


@dataclass(frozen=True, slots=True)
class BootMessage:
    """What the driver sends to a rank that has opened its lane.

    Attributes:
        entry: "module:function", called with a `Boot`.
        fd_names: Names of the descriptors that come with this message, after the driver's pidfd.
        environ: The whole environment to set, None where the process was started with it.
        preparation: Data for `multiprocessing.spawn.prepare`, None where the process is a copy of the driver.
        working_directory: Where to go, None to stay.
    """

    rank: int
    entry: str
    payload: bytes
    title: str
    driver_pid: int
    fd_names: tuple[str, ...] = ()
    environ: dict[str, str] | None = None
    preparation: dict[str, Any] | None = field(default=None, repr=False)
    working_directory: str | None = None


_importing_main = False
_guard_was_missing = False


def refuse_while_importing_main() -> None:
    """Called by whatever starts processes: refuses while this process, itself a child, imports the user's `__main__`.

    Raises:
        StartupError: It does; the message names the missing `if __name__ == "__main__":`.
    """
    global _guard_was_missing
    module = sys.modules.get("multiprocessing.process")
    # set by multiprocessing too, in children that it spawned itself
    inheriting = module is not None and getattr(module.current_process(), "_inheriting", False)
    if _importing_main or inheriting:
        _guard_was_missing = True
        raise StartupError(_MISSING_GUARD, phase="import main")


def reset_signals() -> None:
    """Unblock all signals, leave Ctrl-C to the driver; SIGTERM ends the process, and its children can be waited for."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def arm_parent_death(death_fd: int, group: int, *, alone: bool = False) -> None:
    """Let the kernel kill process group `group` when the last write end of `death_fd`'s pipe is closed.

    It needs no thread of that group, and no GIL. The setting belongs to the open pipe end, so either side may make it,
    and it holds as long as anybody has that end open.

    Args:
        alone: Kill only the process of that number: it shares its group with others.
    """
    fcntl.fcntl(death_fd, fcntl.F_SETOWN, group if alone else -group)
    fcntl.fcntl(death_fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(death_fd, fcntl.F_SETFL, fcntl.fcntl(death_fd, fcntl.F_GETFL) | os.O_ASYNC)


def disarm_parent_death(death_fd: int) -> None:
    """Undo `arm_parent_death`, whoever else has the pipe's end open."""
    fcntl.fcntl(death_fd, fcntl.F_SETFL, fcntl.fcntl(death_fd, fcntl.F_GETFL) & ~os.O_ASYNC)


def main(control: int, death_fd: int) -> None:
    """Entry of a spawned rank, called by the stub with two inherited descriptors."""
    os.set_inheritable(control, False)
    os.set_inheritable(death_fd, False)
    run_rank(control, death_fd, forked=False)


def run_rank(control: int, death_fd: int, *, forked: bool) -> None:
    """Boot and run the entry; returns when it does.

    A failure before the entry is sent to the driver as `("failed", phase, Failure)` and ends the process with status 1.
    The end of the driver ends it quietly.
    """
    lane = ControlLane(control)
    phases = _Phases(lane)
    try:
        phases.enter("interpreter")
        message, fds = lane.recv(Deadline.after(None))
        phases.rank = message.rank
        _settle(message, death_fd)
        _import_main(message, phases)
        phases.enter("import entry")
        entry = resolve_entry(message.entry)
    except LaneClosed:
        os._exit(0)
    except BaseException as error:  # SystemExit of an unguarded script included
        phases.report(error)
        streams.flush_standard_streams()
        # not sys.exit: threads that the imported code started could hold a process that has nothing left to do
        os._exit(1)
    driver_pidfd, *rest = fds
    entry(
        Boot(
            rank=message.rank,
            lane=lane,
            payload=message.payload,
            fds=dict(zip(message.fd_names, rest, strict=True)),
            driver_pid=message.driver_pid,
            driver_pidfd=driver_pidfd,
            death_fd=death_fd,
            forked=forked,
        )
    )


class _Phases:
    """Tells the driver how far this rank is, and what went wrong in which phase."""

    def __init__(self, lane: ControlLane) -> None:
        self._lane = lane
        self._phase = ""
        self.rank = -1

    def enter(self, phase: str) -> None:
        self._phase = phase
        self._lane.send(("phase", phase))

    def report(self, error: BaseException) -> None:
        failure = Failure.of(error, call_id=0, rank=self.rank, method=self._phase)
        try:
            self._lane.send(("failed", self._phase, failure))
        except LaneClosed:  # the driver is gone, and nobody is left to be told
            os._exit(0)


def _settle(message: BootMessage, death_fd: int) -> None:
    """Everything that must hold before code of the user runs."""
    arm_parent_death(death_fd, os.getpgrp())
    if hung_up(death_fd):  # the driver died before the line above: no signal will come
        os._exit(0)
    if message.environ is not None:
        os.environ.clear()
        os.environ.update(message.environ)
    if message.working_directory is not None:
        os.chdir(message.working_directory)
    streams.replace_standard_streams()
    _enable_crash_reports()
    set_process_title(message.title)


def hung_up(fd: int) -> bool:
    """True if the other end of a pipe or socket is closed, whatever is still to be read."""
    poller = select.poll()
    poller.register(fd, 0)
    return bool(poller.poll(0))


def _enable_crash_reports() -> None:
    """Let a segmentation fault or an abort write the Python stacks among the rank's last lines."""
    import faulthandler

    faulthandler.enable(file=2)


def _import_main(message: BootMessage, phases: _Phases) -> None:
    """Make this interpreter like the driver's: paths, arguments, and its main module under the name `__mp_main__`."""
    global _importing_main
    if message.preparation is None:
        return
    phases.enter("import main")
    from multiprocessing import process, spawn

    current = process.current_process()
    _importing_main = True
    current._inheriting = True  # type: ignore[attr-defined]  # so that multiprocessing refuses for the same reason
    try:
        spawn.prepare(message.preparation)
    finally:
        _importing_main = False
        del current._inheriting  # type: ignore[attr-defined]
    if _guard_was_missing:  # the script caught the error and went on; nothing was built all the same
        raise StartupError(_MISSING_GUARD, phase="import main")


def resolve_entry(entry: str) -> Callable[[Boot], None]:
    """The function that "module:function" names."""
    module, _, name = entry.partition(":")
    function: Callable[[Boot], None] = getattr(importlib.import_module(module), name)
    return function
