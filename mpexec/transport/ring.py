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
_HEADER = Struct("<IIQQHHIII")  # magic, generation, sequence, call id, kind, flags, ranks, buffers, payload bytes
_HEADER_BYTES = _HEADER.size
_BUFFER = Struct("<QQQQ")  # offset, length, slot, mark
_PAD = 0xFFFF

_HEAD = 0
DRIVER_PARKED = 1  # call ring only: a mask of the driver's doorbells that a rank must ring after a reply
# Words for the two sides of a ring to talk through; each on a cache line of its own.
WANT_SPACE = 8  # the writer waits for room: wake it after reading
PROGRESS_CALL = 16  # reply rings only: the call that this rank is in, 0 when it is in none
PROGRESS_SINCE = 17  # monotonic ns since when
PROGRESS_DONE = 18  # calls finished
_FIRST_READER = 24
_READER_WORDS = 8
_PARKED = 1  # after a reader's tail: it sleeps, ring its doorbell

_NEEDS_FENCE = platform.machine() not in ("x86_64", "AMD64", "i686")


_PACK_HEADER = _HEADER.pack_into
_UNPACK_HEADER = _HEADER.unpack_from
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
    """One record as a reader finds it; `payload` points into the ring and is valid until `advance`.

    A reader has one of these and fills it anew for each record.
    """

    __slots__ = ("buffers", "call_id", "flags", "kind", "payload", "ranks")

    def __init__(self) -> None:
        self.kind = 0
        self.flags = 0
        self.call_id = 0
        self.ranks: tuple[int, ...] | None = None
        self.buffers: Sequence[Buffer] = _NO_BUFFERS
        self.payload = memoryview(b"")


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
        self._generation = generation
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
    def backlog(self) -> int:
        """Bytes that the slowest live reader has not read."""
        self._refresh()
        return self._at[0] - (self._free_until - self.capacity)

    def try_write(
        self,
        kind: int,
        call_id: int,
        payload: bytes | bytearray | memoryview = b"",
        *,
        flags: int = 0,
        ranks: tuple[int, ...] = (),
        buffers: tuple[Buffer, ...] = (),
    ) -> bool:
        """Write one record whole, or nothing and give False where there is no room now.

        Raises:
            TransportError: The record is longer than a quarter of the ring; such a payload belongs in a slot.
        """
        length = len(payload)
        table = (len(ranks) * 4 + 7 & ~7) + len(buffers) * _BUFFER.size if ranks or buffers else 0
        total = _HEADER_BYTES + table + (length + 7 & ~7)
        if total > self.largest:
            raise TransportError(f"a record of {total} bytes does not fit a ring of {self.capacity}: send it in a slot")
        head, sequence = self._at
        if head != self.words[_HEAD]:
            head, sequence = self._at = (self.words[_HEAD], sequence + 1)
        at = head % self.capacity
        rest = self.capacity - at
        skip = rest if rest < total else 0
        if head + skip + total > self._free_until:
            self._refresh()
            if head + skip + total > self._free_until:
                return False
        if skip:
            if rest >= _HEADER_BYTES:
                _HEADER.pack_into(self._data, at, MAGIC, self._generation, sequence, 0, _PAD, 0, 0, 0, 0)
            head += skip
            at = 0
        data = self._data
        _PACK_HEADER(
            data, at, MAGIC, self._generation, sequence, call_id, kind, flags, len(ranks), len(buffers), length
        )
        place = at + _HEADER_BYTES
        if table:
            place = self._write_tables(place, ranks, buffers)
        data[place : place + length] = payload
        if _NEEDS_FENCE:
            linux.fence()
        self.words[_HEAD] = head + total
        self._at = (head + total, sequence + 1)
        return True

    def _write_tables(self, place: int, ranks: tuple[int, ...], buffers: tuple[Buffer, ...]) -> int:
        if ranks:
            packed = Struct(f"<{len(ranks)}I")
            packed.pack_into(self._data, place, *ranks)
            place += packed.size + 7 & ~7
        for buffer in buffers:
            mark = buffer.mark << 1 | buffer.private
            _BUFFER.pack_into(self._data, place, buffer.offset, buffer.length, buffer.slot, mark)
            place += _BUFFER.size
        return place


class RingReader(_Side):
    """One of the reading sides."""

    def __init__(self, segment: Segment, readers: int, generation: int, reader: int = 0) -> None:
        super().__init__(segment, readers, generation)
        self._tail_word = _FIRST_READER + _READER_WORDS * reader
        self.tail = 0
        self._record = Record()
        self._sequence = 0
        self._next = 0
        self.busy = False

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
        head = self.words[_HEAD]
        tail = self.tail
        if head == tail:
            return None
        if _NEEDS_FENCE:
            linux.fence()
        capacity = self.capacity
        self.busy = head - tail > capacity >> 1
        at = tail % capacity
        if capacity - at < _HEADER_BYTES:
            tail += capacity - at
            at = 0
        header = _UNPACK_HEADER(self._data, at)
        if header[4] == _PAD:
            self._check(header)
            tail += capacity - at
            at = 0
            header = _UNPACK_HEADER(self._data, 0)
        magic, generation, sequence, call_id, kind, flags, n_ranks, n_buffers, length = header
        if magic != MAGIC or generation != self._generation or sequence != self._sequence:
            self._check(header)
        place = at + _HEADER_BYTES
        record = self._record
        record.kind, record.flags, record.call_id = kind, flags, call_id
        if n_ranks or n_buffers:
            if tail + n_ranks * 4 + n_buffers * _BUFFER.size + length > head:
                raise TransportError(f"record {sequence} claims {n_ranks} ranks, {n_buffers} buffers, {length} bytes")
            place, record.ranks, record.buffers = self._read_tables(place, n_ranks, n_buffers)
        else:
            record.ranks, record.buffers = None, _NO_BUFFERS
        self._next = tail + place - at + (length + 7 & ~7)
        if self._next > head:
            raise TransportError(f"record {self._sequence} ends at {self._next}, beyond the ring's head at {head}")
        record.payload = self._data[place : place + length]
        return record

    def _check(self, header: tuple[int, ...]) -> None:
        expected = (MAGIC, self._generation, self._sequence)
        if header[:3] != expected:
            raise TransportError(
                f"foreign or torn record: magic, generation and sequence are {header[:3]}, expected {expected}"
            )

    def _read_tables(
        self, place: int, n_ranks: int, n_buffers: int
    ) -> tuple[int, tuple[int, ...] | None, list[Buffer]]:
        ranks = None
        if n_ranks:
            packed = Struct(f"<{n_ranks}I")
            ranks = packed.unpack_from(self._data, place)
            place += packed.size + 7 & ~7
        buffers = []
        for _ in range(n_buffers):
            offset, length, slot, mark = _BUFFER.unpack_from(self._data, place)
            buffers.append(Buffer(offset, length, slot, mark >> 1, bool(mark & 1)))
            place += _BUFFER.size
        return place, ranks, buffers

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
