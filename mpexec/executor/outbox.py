"""The sending side of a driver: calls are pickled once, written once, and kept in order while the ring is full.

Sending never waits. What finds no room stays in a backlog that whoever drains replies also flushes, so a driver blocked
on a full call ring and ranks blocked on full reply rings cannot wait for each other.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

from mpexec.executor.link import Link
from mpexec.executor.pending import CallTable, PendingCall
from mpexec.transport.channel import CALL, CANCEL, EMPTY, Parcel
from mpexec.transport.frame import PROTOCOL, Frame, encode, is_plain
from mpexec.transport.linux import fence, ring_eventfd
from mpexec.transport.ring import WANT_SPACE

_EVERYONE: tuple[int, ...] = ()
Addressed = list[tuple[Parcel, tuple[int, ...]]]


class Outbox:
    """Sends calls to ranks. Thread-safe.

    Args:
        link: The driver's ends.
        calls: Where a call is entered before its record is out.

    Attributes:
        has_backlog: Records wait for room.
    """

    def __init__(self, link: Link, calls: CallTable) -> None:
        self._link = link
        self._sender = link.sender
        self._ring = link.sender.ring
        self._calls = calls
        self._backlog: deque[tuple[int, int, Parcel, tuple[int, ...]]] = deque()
        self._writing = False
        self.has_backlog = False

    def pack(
        self,
        pending: PendingCall,
        content: tuple[Any, ...],
        args_per_rank: Sequence[tuple[Any, ...]] | None,
        everyone: bool,
    ) -> Addressed:
        """Pickle a call, large parts into slots; outside any lock, because that takes as long as the copy.

        Args:
            pending: The call.
            content: Method, args, kwargs and reply ranks, as they travel.
            args_per_rank: In place of the args in `content`: one tuple for each rank of the call.
            everyone: All ranks run it.

        Raises:
            SerializationError: Something cannot be pickled; nothing is left in the pool.
        """
        if args_per_rank is None:
            return [(self._parcel(pending, content, pending.ranks), _EVERYONE if everyone else pending.ranks)]
        parcels: Addressed = []
        method, _, kwargs, reply_ranks = content
        try:
            for own, rank in zip(args_per_rank, pending.ranks, strict=True):
                parcels.append((self._parcel(pending, (method, own, kwargs, reply_ranks), (rank,)), (rank,)))
        except BaseException:
            self.discard(parcels)
            raise
        return parcels

    def _parcel(self, pending: PendingCall, content: tuple[Any, ...], ranks: tuple[int, ...]) -> Parcel:
        method, args, kwargs, _ = content
        sender = self._sender
        if type(method) is str and is_plain(args) and (not kwargs or is_plain(tuple(kwargs.values()))):
            payload = pickle.dumps(content, PROTOCOL)
            return Parcel(payload, (), 0) if len(payload) <= sender.inline else sender.pack(Frame(payload), ranks)
        return sender.pack(encode(content, f"the arguments of {pending.method!r}"), ranks)

    def discard(self, parcels: Addressed) -> None:
        """Free the slots of parcels that are not going to be sent."""
        for parcel, _ in parcels:
            self._sender.discard(parcel)

    def send(self, pending: PendingCall, parcels: Addressed) -> None:
        """Give the call an id, enter it, send it. Ids ascend in the order of sending, which is that of all ranks."""
        sender = self._sender
        with sender.lock:
            pending.call_id = call_id = self._calls.next_id()
            self._calls.by_id[call_id] = pending  # before the record is out, or a fast reply would find nobody
            for parcel, ranks in parcels:
                self._put(CALL, call_id, parcel, ranks)
        sender.ring_doorbells()

    def cancel(self, pending: PendingCall) -> None:
        """Tell the ranks that nobody waits for a call any more; its coroutines end."""
        with self._sender.lock:
            self._put(CANCEL, pending.call_id, EMPTY, pending.ranks)
        self._sender.ring_doorbells()

    def last_id(self) -> int:
        """Id of the last call sent; every call up to it is in the table."""
        with self._sender.lock:
            return self._calls.last_id

    def _put(self, kind: int, call_id: int, parcel: Parcel, ranks: tuple[int, ...]) -> None:
        if self._backlog or self._writing or not self._write(kind, call_id, parcel, ranks):
            self._backlog.append((kind, call_id, parcel, ranks))
            self.has_backlog = True
            self._link.board.words[WANT_SPACE] = 1
            # A rank that made room before it could see that word wakes nobody: look once more.
            fence()
            self.flush()

    def _write(self, kind: int, call_id: int, parcel: Parcel, ranks: tuple[int, ...]) -> bool:
        self._writing = True  # the lock does not stop a signal handler on this thread from sending in between
        try:
            if not ranks and not parcel.buffers:
                return self._ring.try_write(kind, call_id, parcel.payload)
            return self._ring.try_write(
                kind, call_id, parcel.payload, flags=parcel.flags, ranks=ranks, buffers=parcel.buffers
            )
        finally:
            self._writing = False

    def flush(self) -> None:
        """Send what had found no room, in order. Called by whoever drains."""
        sender = self._sender
        with sender.lock:
            while self._backlog and not self._writing and self._write(*self._backlog[0]):
                self._backlog.popleft()
            if not self._backlog:
                self.has_backlog = False
                self._link.board.words[WANT_SPACE] = 0
        sender.ring_doorbells()

    def wake_rank(self, rank: int) -> None:
        """Ring a rank's doorbell: there is room in its reply ring again."""
        ring_eventfd(self._link.ranks[rank].bell.fd)
