"""One rank's process as its driver sees it: the descriptors, the end, the signals, the state."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from mpexec.processes.death import Death, ExitStatus, memory_kills, reap, signal_name
from mpexec.processes.logs import RankLog
from mpexec.transport.lane import ControlLane
from mpexec.transport.linux import OwnedFd, pidfd_send_signal

# Linux 6.9 and newer: the signal goes to the process group that the process leads, also when it has been reaped.
_PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2
_FATAL = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT),
    *(signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
)
_STATES = {"T": "stopped", "t": "stopped", "D": "uninterruptible", "Z": "zombie", "X": "zombie"}
# Seconds that `close` waits for a process it had to kill.
_CLOSE_SECONDS = 1.0


def process_state(pid: int, pidfd: int) -> str:
    """What the kernel says: "running" (idle too), "stopped", "uninterruptible", "zombie" or "gone"."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            letter = stat.read().rpartition(")")[2].split()[0]
        # after the reading: while the process is not reaped, the number in the path is its own
        signal.pidfd_send_signal(pidfd, 0)
    except (OSError, IndexError):
        return "gone"
    return _STATES.get(letter, "running")


class RankProcess:
    """The process of one rank, leader of its own process group.

    It belongs to the process that launched it: in a child forked later its descriptors are closed, `poll_death` shows
    what was known, and signals are not sent.

    Attributes:
        rank: Its rank.
        pid: Its process id; only a number for people once the process is gone.
        pidfd: Readable when the process has ended.
        lane: The driver's end of its control lane.
        log: What it writes to stdout and stderr.
    """

    def __init__(
        self,
        rank: int,
        pid: int,
        pidfd: OwnedFd,
        lane: ControlLane,
        log: RankLog,
        death_pipe: OwnedFd,
        exit_status: Callable[[int], ExitStatus | None] = reap,
    ) -> None:
        """Take over the descriptors.

        Args:
            death_pipe: The write end whose closing makes the kernel kill the rank's process group.
            exit_status: Called with the pidfd once it is readable; None means not known yet, ask again.
        """
        self.rank = rank
        self.pid = pid
        self.pidfd = pidfd
        self.lane = lane
        self.log = log
        self._death_pipe = death_pipe
        self._exit_status = exit_status
        self._death: Death | None = None
        self._sent: set[int] = set()
        self._memory_kills_before = memory_kills()
        self._owner = os.getpid()
        # Re-entrant: a finalizer that the collector runs on the holding thread may ask too.
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<RankProcess rank={self.rank} pid={self.pid} {self._death.describe() if self._death else 'alive'}>"

    @property
    def death(self) -> Death | None:
        """The facts of its end, once `poll_death` has seen it."""
        return self._death

    def poll_death(self) -> Death | None:
        """The facts of its end, or None while it lives. From any thread; the first to see the end reaps the process.

        Does not wait, but up to a second where a fork server owes the exit status. What the process had written is read
        first, so `last_lines` is complete; then the rest of its process group is killed.
        """
        if self._death is not None or not self._has_ended():
            return self._death
        with self._lock:
            if self._death is None:
                self._death = self._bury()
            return self._death

    def _has_ended(self) -> bool:
        if self.pidfd.closed or os.getpid() != self._owner:
            return False
        poller = select.poll()
        poller.register(self.pidfd.fd, select.POLLIN)
        return bool(poller.poll(0))

    def _bury(self) -> Death | None:
        at_ns = time.monotonic_ns()
        # Before the reaping: until then nobody else can get this number as a group.
        self._signal_group(signal.SIGKILL)
        status = self._exit_status(self.pidfd.fd)
        if status is None:
            return None
        self.log.drain(final=True)
        number = status.signal_number
        ours = number in self._sent
        now = memory_kills() if number == signal.SIGKILL and not ours else None
        return Death(
            rank=self.rank,
            pid=self.pid,
            exit_code=status.exit_code,
            signal_name=None if number is None else signal_name(number),
            sent_by_us=ours,
            at_ns=at_ns,
            last_lines=self.log.last_lines,
            out_of_memory=now is not None and now > (self._memory_kills_before or 0),
        )

    def send_signal(self, number: int, *, group: bool = True) -> None:
        """Signal the process, with `group` all of its process group; never a later process with the same number.

        Silent if it is gone. A fatal signal counts as ours in `Death.sent_by_us`.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self.pidfd.closed:
                return
            # a signal to a process that has ended already explains nothing
            if number in _FATAL and not self._has_ended():
                self._sent.add(number)
            if group:
                self._signal_group(number)
            else:
                pidfd_send_signal(self.pidfd.fd, number)

    def _signal_group(self, number: int) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd.fd, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)
        except ProcessLookupError:
            return
        except OSError:  # a kernel that does not know the flag
            self._signal_group_by_number(number)

    def _signal_group_by_number(self, number: int) -> None:
        """As long as the leader is not reaped, its number cannot be given to another process or group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd.fd, 0)
            os.killpg(self.pid, number)

    def state(self) -> str:
        """What the kernel says: "running" (idle too), "stopped", "uninterruptible", "zombie" or "gone"."""
        if self._death is not None or self.pidfd.closed:
            return "gone"
        return process_state(self.pid, self.pidfd.fd)

    def close(self) -> None:
        """Close all descriptors; again changes nothing. Whoever polls one of them must have stopped before.

        Meant for processes that have ended (`end_processes`). One that still lives is killed and waited for, one second
        at most.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            if not self.is_over():
                self.send_signal(signal.SIGKILL)
                self._await_end(_CLOSE_SECONDS)
            # Its closing kills what is left of the group, so it comes after the reaping.
            self._death_pipe.close()
            self.lane.close()
            self.log.close()
            self.pidfd.close()

    def is_over(self) -> bool:
        """True once there is nothing of it to be ended, or to be waited for."""
        return self.poll_death() is not None or self.pidfd.closed

    def end_events(self) -> dict[int, int]:
        """What to poll for a change of `is_over`: descriptors and their events."""
        return {self.pidfd.fd: select.POLLIN}

    def _await_end(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self.pidfd.fd, select.POLLIN)
        poller.poll(seconds * 1000)
        self.poll_death()
