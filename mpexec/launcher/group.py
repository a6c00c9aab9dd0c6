"""One attempt at a job: its ranks, from the first start to the end of the last."""

from __future__ import annotations

import enum
import select
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from mpexec.deadline import NEVER, Deadline
from mpexec.launcher.console import tell
from mpexec.launcher.rank import Rank
from mpexec.launcher.signals import Signals
from mpexec.messages import tells_of_lost_peer
from mpexec.processes.death import Death

_SETTLE_S = 0.1  # a rank that lost its peer may end before the peer does
_KILLED_S = 5.0  # the kernel frees the memory of a killed process first
_TELLING_LINES = 5


class Phase(enum.Enum):
    """How far the end of a group is."""

    RUNNING = "running"
    SETTLING = "a failure that may be the consequence of another one"
    STOPPING = "signalled"
    KILLING = "killed"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a group ended.

    Attributes:
        root: The failure that ended it, None if there was none.
        signal_number: The signal to the launcher that ended it, None if there was none.
        deaths: The ends of all ranks, by local rank; None for one that could not be killed.
    """

    root: Death | None
    signal_number: int | None
    deaths: tuple[Death | None, ...]


class Group:
    """Waits for the ranks, for signals and for the clock, all in one place, and ends the ranks when it must."""

    def __init__(self, ranks: Sequence[Rank], signals: Signals, grace: float) -> None:
        self._ranks = ranks
        self._signals = signals
        self._grace = grace
        self._phase = Phase.RUNNING
        self._deadline = NEVER
        self._signal_number: int | None = None
        self._failures: list[Death] = []
        self._root: Death | None = None
        self._poller = select.poll()
        self._alive = {rank.process.pidfd.fd: rank for rank in ranks}
        for fd in (*self._alive, signals.fd):
            self._poller.register(fd, select.POLLIN)

    def run(self) -> Ending:
        """Wait for the end of all ranks; bounded from the first failure or signal on."""
        while self._alive:
            ready = {fd for fd, _ in self._poller.poll(self._deadline.poll_ms())}
            for fd in [fd for fd in self._alive if fd in ready]:  # by rank
                self._see(fd)
            if self._signals.fd in ready:
                for number in self._signals.take():
                    self._obey(number)
            if self._failures and self._phase is Phase.RUNNING:
                self._fail()
            if self._deadline.expired and not self._go_on():
                break
        if self._failures and self._root is None:
            self._root = root_cause(self._failures)
        return Ending(self._root, self._signal_number, tuple(rank.process.death for rank in self._ranks))

    def _see(self, fd: int) -> None:
        death = self._alive[fd].process.poll_death()
        if death is None:
            return
        self._poller.unregister(fd)
        del self._alive[fd]
        if death.exit_code != 0 and self._phase in (Phase.RUNNING, Phase.SETTLING):
            self._failures.append(death)

    def _fail(self) -> None:
        if all(is_consequence(death) for death in self._failures):
            self._enter(Phase.SETTLING, _SETTLE_S)
        else:
            self._stop(signal.SIGTERM)

    def _obey(self, number: int) -> None:
        """Pass the first signal on; a second one, or one while the ranks are being stopped, kills."""
        if self._phase in (Phase.RUNNING, Phase.SETTLING) and not self._failures:
            self._signal_number = number
            # nobody reads our output: what went to nobody is no reason for more than the usual request
            self._stop(signal.SIGTERM if number == signal.SIGPIPE else number)
        elif number != signal.SIGPIPE:
            self._kill()

    def _go_on(self) -> bool:
        """The time of a phase is over. False if nothing more can be done."""
        if self._phase is Phase.KILLING:
            for process in (rank.process for rank in self._alive.values()):
                tell(f"mpexec: rank {process.rank} (pid {process.pid}) cannot be killed: {process.state()}")
            return False
        if self._phase is Phase.SETTLING:
            self._stop(signal.SIGTERM)
        else:
            self._kill()
        return True

    def _stop(self, number: int) -> None:
        if self._failures:
            self._root = root_cause(self._failures)
        self._enter(Phase.STOPPING, self._grace)
        self._send(number)

    def _kill(self) -> None:
        self._enter(Phase.KILLING, _KILLED_S)
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for rank in self._alive.values():
            rank.process.send_signal(number)

    def _enter(self, phase: Phase, seconds: float) -> None:
        self._phase, self._deadline = phase, Deadline.after(seconds)


def is_consequence(death: Death) -> bool:
    """True if a rank's last words are those of one whose peer is gone."""
    return death.signal_name is None and tells_of_lost_peer("\n".join(death.last_lines[-_TELLING_LINES:]))


def root_cause(failures: Sequence[Death]) -> Death:
    """The first failure that is not the consequence of another one; a signal comes before an exit seen with it.

    Of several seen together it is the lowest rank's: the driver's, where its end has taken attached workers along.
    """

    def order(death: Death) -> tuple[bool, int, bool, int]:
        return is_consequence(death), death.at_ns // 1_000_000, death.signal_name is None, death.rank

    return min(failures, key=order)
