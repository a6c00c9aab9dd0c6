"""What ranks are doing right now: their Python stacks, taken from outside, also while a rank holds the interpreter."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mpexec.executor.link import RankLink
from mpexec.processes import RankProcess
from mpexec.transport.linux import OwnedFd

_PATIENCE_S = 0.25
_STEP_MS = 5


class StackSource(Protocol):
    """A rank's process on this machine, and the memory file that it writes its stacks to."""

    @property
    def pidfd(self) -> OwnedFd | None:
        """Readable when the process has ended."""

    @property
    def stack_signal(self) -> int:
        """The signal on which it writes them, 0 where it could not be registered."""

    def state(self) -> str:
        """What the kernel says of the process."""

    def signal_stacks(self) -> None:
        """Send that signal."""

    def stack_bytes(self) -> int:
        """Length of the file by now."""

    def read_stacks(self, start: int) -> str:
        """The file's text from byte `start` on."""


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """The stacks of a process that this driver has started."""

    process: RankProcess
    link: RankLink
    stack_signal: int

    @property
    def pidfd(self) -> OwnedFd:
        """Readable when the process has ended."""
        return self.process.pidfd

    def state(self) -> str:
        """What the kernel says of the process."""
        return self.process.state()

    def signal_stacks(self) -> None:
        """Send the signal."""
        self.process.send_signal(self.stack_signal, group=False)

    def stack_bytes(self) -> int:
        """Length of the file by now."""
        return self.link.stack_bytes()

    def read_stacks(self, start: int) -> str:
        """The file's text from byte `start` on."""
        return self.link.read_stacks(start)


def collect_stacks(sources: Mapping[int, StackSource]) -> dict[int, str]:
    """The stacks of ranks, as text; where a rank cannot show one, the reason. Takes a quarter of a second at most.

    `faulthandler` in the rank writes them from a signal handler in C into a memory file. A memory file cannot be waited
    for, so its length is looked at until it has stood still for two looks; a rank that ends meanwhile ends the look.
    """
    lengths: dict[int, int] = {}
    reasons: dict[int, str] = {}
    for rank, source in sources.items():
        state = source.state()
        if state != "running" or not source.stack_signal:
            reasons[rank] = f"<no stack: the process is {state}>"
            continue
        lengths[rank] = source.stack_bytes()
        source.signal_stacks()
    _await_still(sources, lengths)
    texts = {rank: sources[rank].read_stacks(start).strip() for rank, start in lengths.items()}
    for rank, text in texts.items():
        if not text:
            reasons[rank] = f"<no stack: the process is {sources[rank].state()} and did not react>"
    return {rank: reasons.get(rank) or texts[rank] for rank in sorted(lengths.keys() | reasons.keys())}


def _await_still(sources: Mapping[int, StackSource], starts: dict[int, int]) -> None:
    end = time.monotonic() + _PATIENCE_S
    poll = select.poll()
    for rank in starts:
        pidfd = sources[rank].pidfd
        if pidfd is not None and not pidfd.closed:
            poll.register(pidfd.fd, select.POLLIN)
    still, last = 0, dict(starts)
    while starts and still < 2 and time.monotonic() < end:
        poll.poll(_STEP_MS)
        now = {rank: sources[rank].stack_bytes() for rank in starts}
        written = all(now[rank] > starts[rank] for rank in starts)
        still = still + 1 if written and now == last else 0
        last = now
