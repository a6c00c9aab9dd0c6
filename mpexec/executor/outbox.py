"""The sending side of a driver: calls are pickled once, written once, and kept in order while the ring is full.

Sending never waits. What finds no room stays in a backlog that whoever drains replies also flushes, so a driver blocked
on a full call ring and ranks blocked on full reply rings cannot wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from mpexec.executor.link import Link
from mpexec.executor.pending import CallTable, PendingCall
from mpexec.transport.channel import CALL, CANCEL, PLAIN_CALL, Parcel
from mpexec.transport.frame import dump_plain, encode, is_plain
from mpexec.transport.linux import fence, ring_eventfd
from mpexec.transport.ring import WANT_SPACE, Buffer

_EVERYONE: tuple[int, ...] = ()
Addressed = Sequence[tuple[Parcel, tuple[int, ...]]]
_Record = tuple[int, int, bytes, int, tuple[int, ...], tuple[Buffer, ...]]  # as `RingWriter.try_write` takes it


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
        self._backlog: deque[_Record] = deque()
        self._writing = False
        self.has_backlog = False

    def pack_plain(self, content: tuple[Any, ...]) -> bytes | None:
        """The bytes of a call whose arguments are numbers, strings and the like; None for every other call."""
        method, args, kwargs, reply_ranks = content
        if type(method) is not str or not is_plain(args):
            return None
        if (kwargs and not is_plain((*kwargs, *kwargs.values()))) or (reply_ranks and not is_plain(reply_ranks)):
            return None
        return dump_plain(content, self._sender.inline)

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
        parcels: list[tuple[Parcel, tuple[int, ...]]] = []
        method, _, kwargs, reply_ranks = content
        try:
            for own, rank in zip(args_per_rank, pending.ranks, strict=True):
                parcels.append((self._parcel(pending, (method, own, kwargs, reply_ranks), (rank,)), (rank,)))
        except BaseException:
            self.discard(parcels)
            raise
        return parcels

    def _parcel(self, pending: PendingCall, content: tuple[Any, ...], ranks: tuple[int, ...]) -> Parcel:
        return self._sender.pack(encode(content, f"the arguments of {pending.method!r}"), ranks)

    def discard(self, parcels: Addressed) -> None:
        """Free the slots of parcels that are not going to be sent."""
        for parcel, _ in parcels:
            self._sender.discard(parcel)

    def send(self, pending: PendingCall, plain: bytes | None, parcels: Addressed = ()) -> None:
        """Give the call an id, enter it, send it. Ids ascend in the order of sending, which is that of all ranks.

        Args:
            pending: The call.
            plain: What `pack_plain` gave, for all ranks; None where there are parcels.
            parcels: What `pack` gave.
        """
        sender, calls = self._sender, self._calls
        with sender.lock:
            pending.call_id = call_id = calls.next_id()
            calls.by_id[call_id] = pending  # before the record is out, or a fast reply would find nobody
            if plain is not None:
                self._put(PLAIN_CALL, call_id, plain)
            for parcel, ranks in parcels:
                self._put(CALL, call_id, parcel.payload, parcel.flags, ranks, parcel.buffers)
        sender.ring_doorbells()

    def cancel(self, pending: PendingCall) -> None:
        """Tell the ranks that nobody waits for a call any more; its coroutines end."""
        with self._sender.lock:
            self._put(CANCEL, pending.call_id, b"", 0, pending.ranks)
        self._sender.ring_doorbells()

    def last_id(self) -> int:
        """Id of the last call sent; every call up to it is in the table."""
        with self._sender.lock:
            return self._calls.last_id

    def _put(
        self,
        kind: int,
        call_id: int,
        payload: bytes,
        flags: int = 0,
        ranks: tuple[int, ...] = (),
        buffers: tuple[Buffer, ...] = (),
    ) -> None:
        if not (self._backlog or self._writing):
            # The lock does not stop a signal handler on this thread from sending in between.
            self._writing = True
            try:
                if self._ring.try_write(kind, call_id, payload, flags, ranks, buffers):
                    return
            finally:
                self._writing = False
        self._backlog.append((kind, call_id, payload, flags, ranks, buffers))
        self.has_backlog = True
        self._link.board.words[WANT_SPACE] = 1
        # A rank that made room before it could see that word wakes nobody: look once more.
        fence()
        self.flush()

    def _write(self, record: _Record) -> bool:
        self._writing = True
        try:
            return self._ring.try_write(*record)
        finally:
            self._writing = False

    def flush(self) -> None:
        """Send what had found no room, in order. Called by whoever drains."""
        sender = self._sender
        with sender.lock:
            while self._backlog and not self._writing and self._write(self._backlog[0]):
                self._backlog.popleft()
            if not self._backlog:
                self.has_backlog = False
                self._link.board.words[WANT_SPACE] = 0
        sender.ring_doorbells()

    def wake_rank(self, rank: int) -> None:
        """Ring a rank's doorbell: there is room in its reply ring again."""
        ring_eventfd(self._link.ranks[rank].bell.fd)
