"""Records with objects in them: a ring, a pool for what is large, and the frames between.

`Sender` belongs to the one writer of a ring; `Receiver` to one of its readers. Neither waits for anything.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

from mpexec.transport import linux
from mpexec.transport.frame import Frame, decode
from mpexec.transport.pool import PoolReader, PoolWriter
from mpexec.transport.ring import Buffer, Record, RingReader, RingWriter

# Kinds of records.
CALL = 1
CANCEL = 2
DONE = 3
FAILED = 4
OUTPUT = 5
PLAIN_CALL = 6  # as CALL and DONE, for all ranks, and with a payload that `dump_plain` made
PLAIN_DONE = 7

_IN_SLOT = 1  # flag: the pickle stream itself lies in the last buffer


class Parcel:
    """A frame whose large parts lie in slots already; what is left goes into the ring."""

    __slots__ = ("buffers", "flags", "payload")

    def __init__(self, payload: bytes, buffers: tuple[Buffer, ...], flags: int) -> None:
        self.payload = payload
        self.buffers = buffers
        self.flags = flags


class Sender:
    """The writing end. `pack` may run in many threads at once; `try_send` takes a lock of its own.

    Attributes:
        ring: The ring that it writes.
        pool: The pool of its large buffers.
        inline: Bytes up to which a payload goes into the ring itself.
        lock: Held while a record is written; a caller takes it to keep several records together.
    """

    def __init__(self, ring: RingWriter, pool: PoolWriter, doorbells: list[linux.OwnedFd]) -> None:
        self.ring = ring
        self.pool = pool
        self.lock = threading.RLock()
        self._bells = [(ring.parked_word(reader), bell) for reader, bell in enumerate(doorbells)]
        self.inline = ring.largest - 4096

    def pack(self, frame: Frame, readers: tuple[int, ...]) -> Parcel:
        """Copy the large parts of a frame into slots. Outside any lock, because it takes as long as the copy."""
        if not frame.buffers and len(frame.payload) <= self.inline:
            return Parcel(frame.payload, (), 0)
        slots: list[Buffer] = []
        try:
            for source, private in zip(frame.buffers, frame.private, strict=True):
                slots.append(self.pool.store(source, readers, private=private))
            # Many buffers make a long table, which counts towards the record too.
            if len(frame.payload) + 32 * len(slots) <= self.inline:
                return Parcel(frame.payload, tuple(slots), 0)
            slots.append(self.pool.store(memoryview(frame.payload), readers, private=False))
        except BaseException:
            for slot in slots:
                self.pool.give_back(slot)
            raise
        return Parcel(b"", tuple(slots), _IN_SLOT)

    def discard(self, parcel: Parcel) -> None:
        """Free the slots of a parcel that is not going to be sent."""
        for slot in parcel.buffers:
            self.pool.give_back(slot)

    def try_send(self, kind: int, call_id: int, parcel: Parcel, ranks: tuple[int, ...] = ()) -> bool:
        """Write one record and wake parked readers; False where the ring has no room now."""
        with self.lock:
            return self.ring.try_write(
                kind, call_id, parcel.payload, flags=parcel.flags, ranks=ranks, buffers=parcel.buffers
            )

    def ring_doorbells(self) -> None:
        """Wake the readers that sleep. The fence orders the record before the look at their parked words."""
        linux.fence()
        words = self.ring.words
        for parked, bell in self._bells:
            if words[parked]:
                linux.ring_eventfd(bell.fd)

    def close(self) -> None:
        """Close pool and doorbells; the ring's segment belongs to whoever made it."""
        self.ring.release()
        self.pool.close()
        for _, bell in self._bells:
            bell.close()


NOTHING = Parcel(pickle.dumps(None), (), 0)


class Receiver:
    """The reading end of one ring."""

    def __init__(self, ring: RingReader, pool: PoolReader) -> None:
        self.ring = ring
        self.pool = pool

    def open(self, record: Record) -> Any:
        """Rebuild the object of a record; raises whatever unpickling raises. The record may be advanced afterwards."""
        if not record.buffers:
            return pickle.loads(record.payload)
        views = [self.pool.view(buffer) for buffer in record.buffers]
        payload: Any = views.pop() if record.flags & _IN_SLOT else record.payload
        return decode(payload, views)

    def forget(self, record: Record) -> None:
        """Give a record's slots back unread."""
        for buffer in record.buffers:
            self.pool.forget(buffer)

    def close(self) -> None:
        """Close; views that users hold stay valid."""
        self.ring.release()
        self.pool.close()
