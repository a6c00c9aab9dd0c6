"""A byte ring in shared memory: one writer, N readers, records of any length up to a quarter of it.

Layout of the segment: a header of 64-bit words, each hot one on a cache line of its own, then the data. Positions count
bytes since the start and never wrap; a record never does either: where it would, the rest of the data area is skipped.
Free space is measured against the slowest live reader. The idea of one shared ring for calls is that of vLLM's message
queue; positions in place of flag bytes make a lost step visible and a record as short as it is.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

from mpexec.errors import TransportError
from mpexec.transport import linux
from mpexec.transport.segment import PAGE, Segment

MAGIC = 0x5052584D
_HEADER = Struct("<QQQII")  # magic and generation, sequence, call id, kind, bytes that follow
_HEADER_BYTES = _HEADER.size
_SHORT = Struct("<QQQII96s")  # a header and up to 96 bytes, padded with zeros: most records, in one step
_SHORT_BYTES = 96
_UNIT = _SHORT.size  # 128, two cache lines; records are multiples of it, so a short one never lies across the end
_TABLES = Struct("<IIQ")  # before the payload of a tabled record: numbers of ranks and of buffers, flags
_BUFFER = Struct("<QQQQ")  # offset, length, slot, mark
_TABLED = 1 << 31  # in the kind: tables come before the payload
_PAD = 0xFFFFFFFF  # as the kind: the rest of the data area is skipped

_HEAD = 0
DRIVER_PARKED = 1  # call ring only: a mask of the driver's doorbells that a rank must ring after a reply
# Words for the two sides of a ring to talk through; each on a cache line of its own.
WANT_SPACE = 8  # the writer waits for room: wake it after reading
PROGRESS_CALL = 16  # reply rings only: the call that this rank is in, 0 when it is in none
PROGRESS_SINCE = 17  # monotonic ns since when
FORWARD_SINCE = 18  # monotonic ns since when this rank is in the forward hook of its agent, 0 when it is not
SPIN_HITS = 19  # waits of this rank that ended while it was spinning, as of when it last went to sleep
PARKS = 20  # how often it went to sleep
_FIRST_READER = 24
_READER_WORDS = 8
_PARKED = 1  # after a reader's tail: it sleeps, ring its doorbell

_NEEDS_FENCE = platform.machine() not in ("x86_64", "AMD64", "i686")


_PACK_SHORT = _SHORT.pack_into
_UNPACK_SHORT = _SHORT.unpack_from
_ROUND = _UNIT - 1
_NO_BUFFERS: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Buffer:
    """Where one large buffer lies: `length` bytes at `offset` of the writer's pool, in a slot marked with `mark`.

    `private` buffers are mapped so that a write by the reader is seen by nobody else.
    """

    offset: int
    length: int
    slot: int
    mark: int
    private: bool


class Record:
    """One record as a reader finds it. A reader has two of these, with and without tables, and fills them again.

    Attributes:
        payload: Its bytes: if few, with zeros behind them; if many, as a view that is valid until `advance`.
        length: How many bytes the payload really has. Whoever unpickles need not know: a pickle knows its end.
    """

    __slots__ = ("buffers", "call_id", "flags", "kind", "length", "payload", "ranks")

    def __init__(self) -> None:
        self.kind = 0
        self.flags = 0
        self.call_id = 0
        self.ranks: tuple[int, ...] | None = None
        self.buffers: Sequence[Buffer] = _NO_BUFFERS
        self.payload: bytes | memoryview = b""
        self.length = 0


def _header_bytes(readers: int) -> int:
    words = _FIRST_READER + _READER_WORDS * readers
    return -(-words * 8 // PAGE) * PAGE


def create_ring(name: str, capacity: int, readers: int) -> Segment:
    """A segment for a ring of `capacity` data bytes (a multiple of 4096) and `readers` readers."""
    return Segment.create(name, _header_bytes(readers) + capacity)


class _Side:
    """What writer and readers of one ring share."""

    def __init__(self, segment: Segment, readers: int, generation: int) -> None:
        self.segment = segment
        self.words = segment.words
        self._readers = readers
        self._stamp = generation << 32 | MAGIC
        self._base = _header_bytes(readers)
        self.capacity = segment.size - self._base
        self._data = segment.data[self._base :]

    def release(self) -> None:
        """Drop the view into the segment, so that it can be closed."""
        self._data.release()


class RingWriter(_Side):
    """The writing side; the caller serialises writes with a lock of its own."""

    def __init__(self, segment: Segment, readers: int, generation: int) -> None:
        super().__init__(segment, readers, generation)
        self._live = list(range(readers))
        # Head and sequence change in one assignment, and the shared head is what counts: a KeyboardInterrupt between
        # any two steps of a write leaves either no record or a whole one.
        self._at = (0, 0)
        self._free_until = self.capacity
        self.largest = self.capacity // 4

    def drop_reader(self, reader: int) -> None:
        """Stop waiting for a reader that is dead."""
        self._live = [live for live in self._live if live != reader]
        self._refresh()

    def _refresh(self) -> None:
        words = self.words
        slowest = min((words[_FIRST_READER + _READER_WORDS * r] for r in self._live), default=self._at[0])
        if _NEEDS_FENCE:
            linux.fence()
        self._free_until = slowest + self.capacity

    @staticmethod
    def parked_word(reader: int) -> int:
        """Index of the word that is not 0 while a reader wants its doorbell rung. Fence before looking."""
        return _FIRST_READER + _READER_WORDS * reader + _PARKED

    @property
    def fill(self) -> float:
        """How full the ring is for the slowest live reader, 0 to 1. For any thread, at any time."""
        words = self.words
        slowest = min((words[_FIRST_READER + _READER_WORDS * r] for r in self._live), default=words[_HEAD])
        return max(0, words[_HEAD] - slowest) / self.capacity

    @property
    def backlog(self) -> int:
        """Bytes that the slowest live reader has not read."""
        self._refresh()
        return self._at[0] - (self._free_until - self.capacity)

    def try_write(
        self,
        kind: int,
        call_id: int,
        payload: bytes = b"",
        flags: int = 0,
        ranks: tuple[int, ...] = (),
        buffers: tuple[Buffer, ...] = (),
    ) -> bool:
        """Write one record whole, or nothing and give False where there is no room now.

        Raises:
            TransportError: The record is longer than a quarter of the ring; such a payload belongs in a slot.
        """
        if ranks or buffers or flags:
            payload = _with_tables(payload, flags, ranks, buffers)
            kind |= _TABLED
        length = len(payload)
        head, sequence = self._at
        if head != self.words[_HEAD]:
            head, sequence = self._at = (self.words[_HEAD], sequence + 1)
        if length <= _SHORT_BYTES and head + _UNIT <= self._free_until:
            _PACK_SHORT(self._data, head % self.capacity, self._stamp, sequence, call_id, kind, length, payload)
            end = head + _UNIT
        else:
            total = _HEADER_BYTES + length + _ROUND & ~_ROUND
            place = self._find_place(head, sequence, total)
            if place is None:
                return False
            at, data = place % self.capacity, self._data
            _HEADER.pack_into(data, at, self._stamp, sequence, call_id, kind, length)
            at += _HEADER_BYTES
            data[at : at + length] = payload
            end = place + total
        if _NEEDS_FENCE:
            linux.fence()
        self.words[_HEAD] = end
        self._at = (end, sequence + 1)
        return True

    def _find_place(self, head: int, sequence: int, total: int) -> int | None:
        """Where a record of `total` bytes may go, behind a pad if need be; None where there is no room now."""
        if total > self.largest:
            raise TransportError(f"a record of {total} bytes does not fit a ring of {self.capacity}: send it in a slot")
        self._refresh()
        at = head % self.capacity
        place = head if at + total <= self.capacity else head + self.capacity - at
        if place + total > self._free_until:
            return None
        if place != head:
            _HEADER.pack_into(self._data, at, self._stamp, sequence, 0, _PAD, 0)
        return place


def _with_tables(payload: bytes, flags: int, ranks: tuple[int, ...], buffers: tuple[Buffer, ...]) -> bytes:
    parts = [_TABLES.pack(len(ranks), len(buffers), flags)]
    parts += [_BUFFER.pack(b.offset, b.length, b.slot, b.mark << 1 | b.private) for b in buffers]
    parts += [Struct(f"<{len(ranks)}I").pack(*ranks), payload]
    return b"".join(parts)


class RingReader(_Side):
    """One of the reading sides."""

    def __init__(self, segment: Segment, readers: int, generation: int, reader: int = 0) -> None:
        super().__init__(segment, readers, generation)
        self._tail_word = _FIRST_READER + _READER_WORDS * reader
        self.tail = 0
        self._plain = Record()
        self._tabled = Record()
        self._sequence = 0
        self._next = 0
        self._half = self.capacity >> 1
        self.busy = False

    def release(self) -> None:
        """As `_Side.release`; the last record's payload is a view too."""
        self._plain.payload = self._tabled.payload = b""
        super().release()

    @property
    def records(self) -> int:
        """How many records have been read and given back."""
        return self._sequence

    @property
    def fill(self) -> float:
        """How full the ring is for this reader, 0 to 1. For any thread, at any time."""
        return max(0, self.words[_HEAD] - self.tail) / self.capacity

    def has_news(self) -> bool:
        """True if a record waits."""
        if _NEEDS_FENCE:
            linux.fence()
        return self.words[_HEAD] != self.tail

    def park(self, value: int) -> None:
        """Say how this reader wants to be woken; 0 is not at all. Fence and look again before sleeping."""
        self.words[self._tail_word + _PARKED] = value

    def read(self) -> Record | None:
        """The next record, or None. It must be given back with `advance` before the next `read`.

        Raises:
            TransportError: The record is foreign, torn or out of sequence; both values are named.
        """
        tail = self.tail
        head = self.words[_HEAD]
        if head == tail:
            return None
        if _NEEDS_FENCE:
            linux.fence()
        # Measured before a pad is skipped, as the writer measures: it must be woken once it sees room.
        self.busy = head - tail > self._half
        stamp, sequence, call_id, kind, length, body = _UNPACK_SHORT(self._data, tail % self.capacity)
        if stamp != self._stamp or sequence != self._sequence:
            self._check(stamp, sequence)
        if length > _SHORT_BYTES or kind >= _TABLED:
            return self._read_long(head, tail)
        self._next = tail + _UNIT
        record = self._plain
        record.kind = kind
        record.call_id = call_id
        record.payload = body
        record.length = length
        return record

    def _read_long(self, head: int, tail: int) -> Record:
        """Read a record that has tables, or is long, or lies behind a pad."""
        at = tail % self.capacity
        stamp, sequence, call_id, kind, length = _HEADER.unpack_from(self._data, at)
        if kind == _PAD:
            tail += self.capacity - at
            at = 0
            stamp, sequence, call_id, kind, length = _HEADER.unpack_from(self._data, 0)
            self._check(stamp, sequence)
        self._next = end = tail + (_HEADER_BYTES + length + _ROUND & ~_ROUND)
        if end > head:
            raise TransportError(f"record {sequence} ends at {end}, beyond the ring's head at {head}")
        at += _HEADER_BYTES
        record = self._plain
        if kind & _TABLED:
            record = self._tabled
            at, length = self._read_tables(record, at, length)
        record.kind = kind & ~_TABLED
        record.call_id = call_id
        record.payload = self._data[at : at + length]
        record.length = length
        return record

    def _check(self, stamp: int, sequence: int) -> None:
        found, expected = (stamp & 0xFFFFFFFF, stamp >> 32, sequence), (MAGIC, self._stamp >> 32, self._sequence)
        if found != expected:
            raise TransportError(
                f"foreign or torn record: magic, generation and sequence are {found}, expected {expected}"
            )

    def _read_tables(self, record: Record, at: int, length: int) -> tuple[int, int]:
        """Fill in ranks, buffers and flags; gives start and length of the payload behind them."""
        n_ranks, n_buffers, record.flags = _TABLES.unpack_from(self._data, at) if length >= _TABLES.size else (0, 0, 0)
        size = _TABLES.size + n_ranks * 4 + n_buffers * _BUFFER.size
        if size > length:
            raise TransportError(f"a record of {length} bytes claims {n_ranks} ranks and {n_buffers} buffers")
        place = at + _TABLES.size
        buffers = []
        for _ in range(n_buffers):
            offset, buffer_length, slot, mark = _BUFFER.unpack_from(self._data, place)
            buffers.append(Buffer(offset, buffer_length, slot, mark >> 1, bool(mark & 1)))
            place += _BUFFER.size
        record.buffers = buffers
        record.ranks = Struct(f"<{n_ranks}I").unpack_from(self._data, place) if n_ranks else None
        return at + size, length - size

    def advance(self) -> None:
        """Give the record's room back to the writer."""
        self._sequence += 1
        self.tail = self._next
        if _NEEDS_FENCE:
            linux.fence()
        self.words[self._tail_word] = self._next

    def writer_wants_space(self) -> bool:
        """True if the writer waits for room; asked after `advance`, and only if the ring was `busy`: over half full."""
        linux.fence()
        return self.words[WANT_SPACE] != 0
