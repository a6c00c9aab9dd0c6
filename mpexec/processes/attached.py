"""The process of an attached rank as its driver sees it: somebody else has started it, and takes its exit status."""

from __future__ import annotations

import functools
import select

from mpexec.processes.boot import hung_up
from mpexec.processes.death import read_status
from mpexec.processes.logs import RankLog
from mpexec.processes.process import RankProcess
from mpexec.transport.lane import ControlLane
from mpexec.transport.linux import OwnedFd, pidfd_send_signal

_MOMENT_S = 0.5


class AttachedProcess(RankProcess):
    """A process that serves as a rank until it is let go.

    Its output goes where its launcher has it go, and its process group may be that of others: signals go to it alone.
    Once it has hung up the lane it belongs to its launcher again: it is neither waited for nor killed.
    """

    def __init__(self, rank: int, pid: int, pidfd: OwnedFd, lane: ControlLane, death_pipe: OwnedFd) -> None:
        """Take over the descriptors."""
        log = RankLog(rank, streams=())
        super().__init__(rank, pid, pidfd, lane, log, death_pipe, functools.partial(read_status, pid))
        self._has_left = False

    def _signal_group(self, number: int) -> None:
        pidfd_send_signal(self.pidfd.fd, number)

    def send_signal(self, number: int, *, group: bool = True) -> None:
        """As `RankProcess.send_signal`; one that has left gets no signal any more."""
        if not self.is_over():
            super().send_signal(number, group=group)

    def state(self) -> str:
        """As `RankProcess.state`; "gone" too once it has left."""
        return "gone" if self.is_over() else super().state()

    def is_over(self) -> bool:
        """True once it has ended, or has left to end by itself."""
        self._has_left = self._has_left or (not self.lane.closed and hung_up(self.lane.fileno()))
        return self._has_left or super().is_over()

    def describe_end(self) -> str:
        """How one that `is_over` has ended, as `Death.describe`, or that it has left; waits a moment at most."""
        self._await_end(_MOMENT_S)  # of a process that dies, the kernel closes the lane before it says so
        death = self.poll_death()
        return "left" if death is None else death.describe()

    def end_events(self) -> dict[int, int]:
        """What to poll for a change of `is_over`."""
        lane = {} if self.lane.closed else {self.lane.fileno(): 0}
        return {self.pidfd.fd: select.POLLIN, **lane}
