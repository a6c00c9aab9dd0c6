"""The driver's ends of everything that connects it with the ranks: rings, pools, doorbells, stack files."""

from __future__ import annotations

import contextlib
import os
import secrets

from mpexec.config import WorkerSpec
from mpexec.histogram import Histogram
from mpexec.transport import linux
from mpexec.transport.channel import Receiver, Sender
from mpexec.transport.durations import Durations, create_durations
from mpexec.transport.pool import PoolReader, PoolWriter, create_pool_memory
from mpexec.transport.ring import (
    FORWARD_SINCE,
    PARKS,
    PROGRESS_CALL,
    PROGRESS_SINCE,
    SPIN_HITS,
    RingReader,
    RingWriter,
    create_ring,
)

_STACK_LIMIT = 1 << 20


class RankLink:
    """The driver's ends for one rank.

    Attributes:
        replies: The reading end of its reply ring.
        bell: The eventfd that wakes it.
    """

    def __init__(self, spec: WorkerSpec, generation: int, stack: contextlib.ExitStack) -> None:
        self._segment = create_ring("mpexec-replies", spec.ring_bytes, 1)
        stack.callback(self._segment.close)
        pool = create_pool_memory("mpexec-replies-pool", 1)
        self._pool = pool
        self.replies = Receiver(
            RingReader(self._segment, 1, generation), PoolReader(pool, 1, 0, shared_views=spec.shared_views)
        )
        stack.callback(self.replies.close)
        self.bell = linux.OwnedFd(linux.eventfd())
        stack.callback(self.bell.close)
        self._stacks = linux.OwnedFd(linux.memfd_create("mpexec-stacks", 0))
        stack.callback(self._stacks.close)
        self._durations = create_durations()
        stack.callback(self._durations.close)

    def fds(self) -> dict[str, int]:
        """What the rank needs of these."""
        return {
            "replies": self._segment.fd.fd,
            "reply_pool": self._pool,
            "call_bell": self.bell.fd,
            "stacks": self._stacks.fd,
            "durations": self._durations.fd.fd,
        }

    def progress(self) -> tuple[int, int]:
        """The call it is in (0: none), and since when (monotonic ns)."""
        words = self._segment.words
        return words[PROGRESS_CALL], words[PROGRESS_SINCE]

    def forward_since(self) -> int:
        """Monotonic ns since when it is in the forward hook of its agent; 0 if it is not."""
        return self._segment.words[FORWARD_SINCE]

    def waits(self) -> tuple[int, int]:
        """How many of its waits ended while it was spinning, and how many in sleep."""
        words = self._segment.words
        return words[SPIN_HITS], words[PARKS]

    def durations(self) -> dict[str, Histogram]:
        """How long methods took in it, by name."""
        return Durations(self._durations.words).read()

    def stack_bytes(self) -> int:
        """Length of the stack file by now."""
        return 0 if self._stacks.closed else os.fstat(self._stacks.fd).st_size

    def read_stacks(self, start: int) -> str:
        """The stack file's text from byte `start` on."""
        return os.pread(self._stacks.fd, _STACK_LIMIT, start).decode(errors="replace")


class Link:
    """The driver's ends for all ranks; made before the ranks are, closed after they have ended.

    Attributes:
        generation: A random number in every record; a foreign or left-over record does not have it.
        board: The call ring's segment.
        sender: The writing end of the call ring.
        ranks: The ends for each rank, index = rank.
    """

    def __init__(self, spec: WorkerSpec, stack: contextlib.ExitStack) -> None:
        self.generation = secrets.randbits(32)
        readers = spec.world_size
        self.board = create_ring("mpexec-calls", spec.ring_bytes, readers)
        stack.callback(self.board.close)
        self._pool_fd = create_pool_memory("mpexec-calls-pool", readers)
        self._store = linux.OwnedFd(linux.memfd_create("mpexec-store", 0))
        stack.callback(self._store.close)
        self.ranks = [RankLink(spec, self.generation, stack) for _ in range(readers)]
        self.sender = Sender(
            RingWriter(self.board, readers, self.generation),
            PoolWriter(self._pool_fd, readers),
            [link.bell for link in self.ranks],
        )
        stack.callback(self.sender.close)

    def fds(self, rank: int, bells: list[linux.OwnedFd]) -> dict[str, int]:
        """The descriptors that a rank inherits, by name."""
        return {
            "calls": self.board.fd.fd,
            "call_pool": self._pool_fd,
            "store": self._store.fd,
            **{f"bell_{bit}": bell.fd for bit, bell in enumerate(bells)},
            **self.ranks[rank].fds(),
        }

    def drop_rank(self, rank: int) -> None:
        """A rank is dead: nobody waits for it to read or to give slots back."""
        with self.sender.lock:
            self.sender.ring.drop_reader(rank)
        self.sender.pool.drop_reader(rank)
