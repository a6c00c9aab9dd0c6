"""The byte ring: whole records in order, room measured against the slowest live reader, and no garbage ever."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpexec.errors import TransportError
from mpexec.transport.ring import WANT_SPACE, Buffer, RingReader, RingWriter, create_ring
from mpexec.transport.segment import Segment

CAPACITY = 4096
GENERATION = 0xABCD


class Ring:
    """One writer and its readers in one process."""

    def __init__(self, readers: int = 1, capacity: int = CAPACITY) -> None:
        self.segment = create_ring("test", capacity, readers)
        self.writer = RingWriter(self.segment, readers, GENERATION)
        self.readers = [RingReader(self.segment, readers, GENERATION, reader) for reader in range(readers)]

    def close(self) -> None:
        for side in (self.writer, *self.readers):
            side.release()
        self.segment.close()

    def take(self, reader: int = 0) -> tuple[Any, ...] | None:
        """One record, read and given back."""
        record = self.readers[reader].read()
        if record is None:
            return None
        payload = bytes(record.payload[: record.length])
        got = record.kind, record.call_id, payload, record.flags, record.ranks, tuple(record.buffers)
        self.readers[reader].advance()
        return got


@pytest.fixture
def make_ring() -> Iterator[Callable[..., Ring]]:
    with ExitStack() as stack:

        def make(readers: int = 1, capacity: int = CAPACITY) -> Ring:
            ring = Ring(readers, capacity)
            stack.callback(ring.close)
            return ring

        yield make


Make = Callable[..., Ring]


def test_a_record_arrives_with_all_its_parts(make_ring: Make) -> None:
    ring = make_ring(2)
    buffers = (Buffer(4096, 70_000, 1, 9, True), Buffer(0, 1, 0, (1 << 62) + 1, False))
    assert ring.writer.try_write(7, 1 << 60, b"payload", flags=3, ranks=(0, 5, 70_000), buffers=buffers)
    for reader in range(2):
        assert ring.take(reader) == (7, 1 << 60, b"payload", 3, (0, 5, 70_000), buffers)
        assert ring.take(reader) is None


def test_an_empty_record_is_a_record(make_ring: Make) -> None:
    ring = make_ring()
    assert ring.writer.try_write(1, 0)
    assert ring.take() == (1, 0, b"", 0, None, ())


def test_records_wrap_many_times_and_stay_whole(make_ring: Make) -> None:
    ring = make_ring()
    for number in range(2000):
        payload = bytes([number % 251]) * (number * 37 % 900)
        assert ring.writer.try_write(1, number, payload)
        assert ring.take() == (1, number, payload, 0, None, ())
    assert ring.readers[0].tail > 100 * CAPACITY


def test_every_remainder_at_the_end_of_the_data_is_skipped_well(make_ring: Make) -> None:
    """Records of every length bring the head to every possible distance from the end."""
    ring = make_ring()
    for length in range(961):
        for filler in (b"", b"x" * 8, b"x" * 16, b"x" * 24):
            for payload in (bytes(length), filler):
                assert ring.writer.try_write(1, length, payload)
                assert ring.take() == (1, length, payload, 0, None, ())


def test_a_full_ring_takes_nothing_and_goes_on_once_there_is_room(make_ring: Make) -> None:
    ring = make_ring()
    written = 0
    while ring.writer.try_write(1, written, bytes(200)):
        written += 1
    assert CAPACITY // 256 <= written <= CAPACITY // 200
    assert not ring.writer.try_write(1, 99, bytes(200))
    assert ring.take() == (1, 0, bytes(200), 0, None, ())
    assert ring.take() == (1, 1, bytes(200), 0, None, ())
    assert ring.writer.try_write(1, written, bytes(200))
    for number in range(2, written + 1):
        assert ring.take() == (1, number, bytes(200), 0, None, ())


def test_room_is_measured_against_the_slowest_reader(make_ring: Make) -> None:
    ring = make_ring(3)
    while ring.writer.try_write(1, 0, bytes(400)):
        for reader in (0, 1):
            assert ring.take(reader) is not None
    assert not ring.writer.try_write(1, 0, bytes(400))
    assert ring.writer.backlog > CAPACITY - 500
    assert ring.take(2) is not None
    assert ring.take(2) is not None
    assert ring.writer.try_write(1, 0, bytes(400))


def test_a_reader_that_is_dropped_holds_nobody_up(make_ring: Make) -> None:
    ring = make_ring(2)
    while ring.writer.try_write(1, 0, bytes(400)):
        assert ring.take(0) is not None
    ring.writer.drop_reader(1)
    for _ in range(100):
        assert ring.writer.try_write(1, 0, bytes(400))
        assert ring.take(0) is not None


def test_with_every_reader_dropped_writing_goes_on(make_ring: Make) -> None:
    ring = make_ring(2)
    for reader in (1, 0, 0):
        ring.writer.drop_reader(reader)
    for _ in range(100):
        assert ring.writer.try_write(1, 0, bytes(900))
    assert ring.writer.backlog == 0


def test_a_record_above_a_quarter_of_the_ring_is_refused_by_name(make_ring: Make) -> None:
    ring = make_ring()
    with pytest.raises(TransportError, match="slot"):
        ring.writer.try_write(1, 0, bytes(CAPACITY // 4))
    assert ring.writer.try_write(1, 0, bytes(CAPACITY // 4 - 64))
    assert ring.take() is not None


def test_parked_words_belong_to_their_readers(make_ring: Make) -> None:
    ring = make_ring(3)
    ring.readers[1].park(1)
    assert [ring.segment.words[ring.writer.parked_word(reader)] for reader in range(3)] == [0, 1, 0]
    ring.readers[1].park(0)
    assert ring.segment.words[ring.writer.parked_word(1)] == 0


def test_news_and_wishes_for_room_are_seen(make_ring: Make) -> None:
    ring = make_ring()
    reader = ring.readers[0]
    assert not reader.has_news()
    while ring.writer.try_write(1, 0, bytes(400)):
        pass
    assert reader.has_news()
    ring.segment.words[WANT_SPACE] = 1
    ring.take()
    assert reader.writer_wants_space()
    while ring.take():
        pass
    assert not reader.has_news()


# -- integrity -------------------------------------------------------------------------------------------------------


def corrupt(ring: Ring, word: int, value: int) -> None:
    """Overwrite a word of the first record."""
    base = ring.segment.size - ring.writer.capacity
    ring.segment.words[base // 8 + word] = value


@pytest.mark.parametrize("word, value", [(0, 0x1111111122222222), (1, 7), (0, GENERATION + 1 << 32 | 0x5052584D)])
def test_a_foreign_or_torn_header_is_an_error_with_both_values(make_ring: Make, word: int, value: int) -> None:
    ring = make_ring()
    ring.writer.try_write(1, 5, b"x")
    corrupt(ring, word, value)
    with pytest.raises(TransportError, match=r"expected \(\d+, 43981, 0\)"):
        ring.readers[0].read()


def test_a_record_whose_counts_are_torn_is_an_error_and_no_garbage(make_ring: Make) -> None:
    ring = make_ring()
    ring.writer.try_write(1, 5, b"x" * 100, ranks=(3,))
    base = ring.segment.size - ring.writer.capacity
    for place in (28, 32, 36):  # the numbers of payload bytes, of ranks and of buffers
        torn = ring.segment.data[base + place : base + place + 4]
        before = bytes(torn)
        torn[:] = (1 << 20).to_bytes(4, "little")
        with pytest.raises(TransportError, match=r"beyond|claims"):
            ring.readers[0].read()
        torn[:] = before
        torn.release()
    assert ring.take() == (1, 5, b"x" * 100, 0, (3,), ())


def test_another_generation_is_foreign(make_ring: Make) -> None:
    ring = make_ring()
    ring.writer.try_write(1, 5, b"x")
    stranger = RingReader(ring.segment, 1, GENERATION + 1)
    with pytest.raises(TransportError, match="foreign"):
        stranger.read()
    stranger.release()


def test_a_reader_that_missed_a_record_does_not_continue(make_ring: Make) -> None:
    ring = make_ring()
    for number in range(3):
        ring.writer.try_write(1, number, b"x")
    reader = ring.readers[0]
    assert reader.read() is not None
    reader.tail = reader._next  # moved on without counting
    with pytest.raises(TransportError, match="expected"):
        reader.read()


@pytest.mark.parametrize("rest", [0, 128, 256])  # bytes left in the lap: 0 is a ring that has just begun
@pytest.mark.parametrize("body", [b"interrupted", b"interrupted" * 30])
@pytest.mark.parametrize("step", range(24))
def test_a_write_that_was_interrupted_leaves_no_record_or_a_whole_one(
    make_ring: Make, step: int, body: bytes, rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt after the n-th line of a write; the next write goes on as if nothing had been."""
    ring = make_ring()
    while rest and ring.writer._at[0] < CAPACITY - rest:
        length = min(640, CAPACITY - rest - ring.writer._at[0])
        assert ring.writer.try_write(1, 0, bytes(length - 32))
        ring.take()
    assert rest == 0 or ring.writer._at[0] == CAPACITY - rest
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code in (RingWriter.try_write.__code__, RingWriter._find_place.__code__) and event == "line":
            lines += 1
            if lines == 2 + step:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        ring.writer.try_write(1, 2, body)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(previous)
    assert ring.writer.try_write(1, 3, b"after")
    assert ring.writer.try_write(1, 4, b"later" * 20)
    got = [record[2] for record in iter(ring.take, None)]
    assert got[-2:] == [b"after", b"later" * 20]
    assert got[:-2] in ([], [body])


def test_a_writer_that_waits_for_half_a_ring_is_woken_by_the_record_behind_a_pad(make_ring: Make) -> None:
    """The writer counts the pad as unread. So must the reader, or nobody rings once there is room."""
    ring = make_ring(capacity=65536)
    writer, reader = ring.writer, ring.readers[0]
    quarter = 16384
    for size in (quarter, quarter, 9824):
        writer.try_write(1, 0, bytes(size - 32))
        ring.take()
    for size in (quarter, quarter, 12288):  # the second does not fit the lap: a pad goes before it
        assert writer.try_write(1, 0, bytes(size - 32))
    assert not writer.try_write(1, 0, bytes(quarter - 32))
    ring.segment.words[WANT_SPACE] = 1
    woken = False
    while not woken:
        assert ring.take() is not None, "everything is read, and nobody has woken the writer"
        woken = reader.busy and reader.writer_wants_space() and writer.backlog <= writer.capacity // 2


# -- fuzz ------------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 960)),
        st.tuples(st.just("read"), st.integers(0, 2)),
        st.tuples(st.just("drop"), st.integers(0, 2)),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_a_ring_with_three_readers_behaves_like_three_queues(steps: list[tuple[str, int]]) -> None:
    ring = Ring(3)
    try:
        model: list[deque[tuple[int, bytes]]] = [deque() for _ in range(3)]
        live = {0, 1, 2}
        number = 0
        for what, value in steps:
            if what == "write":
                payload = bytes([number % 256]) * value
                if ring.writer.try_write(1, number, payload):
                    for queue in model:
                        queue.append((number, payload))
                    number += 1
                else:  # refused only when the slowest reader really leaves too little room
                    unread = max((sum(len(p) + 160 for _, p in model[r]) for r in live), default=0)
                    assert unread + 2 * (value + 160) + 1024 > CAPACITY
            elif what == "drop":
                if len(live) > 1 and value in live:
                    live.discard(value)
                    ring.writer.drop_reader(value)
            elif value in live:
                got = ring.take(value)
                if model[value]:
                    assert got is not None
                    assert (got[1], got[2]) == model[value].popleft()
                else:
                    assert got is None
        for reader in live:
            for expected in model[reader]:
                got = ring.take(reader)
                assert got is not None
                assert (got[1], got[2]) == expected
            assert ring.take(reader) is None
    finally:
        ring.close()


READER = """
import os, sys, zlib
from mpexec.transport.ring import RingReader
from mpexec.transport.segment import Segment
fd, readers, me, count = map(int, sys.argv[1:])
segment = Segment.attach(fd)
ring = RingReader(segment, readers, 77, me)
for number in range(count):
    while (record := ring.read()) is None:
        os.sched_yield()
    assert record.call_id == number, (record.call_id, number)
    assert zlib.crc32(record.payload[: record.length]) == record.flags | record.kind << 16, number
    ring.advance()
print("read", number + 1)
"""


# F056
def test_two_processes_exchange_two_hundred_thousand_records_without_a_torn_one() -> None:
    count, readers = 200_000, 1
    segment = create_ring("stress", 65536, readers)
    writer = RingWriter(segment, readers, 77)
    command = [sys.executable, "-c", READER, str(segment.fd.fd), str(readers), "0", str(count)]
    process = subprocess.Popen(command, pass_fds=(segment.fd.fd,), stdout=subprocess.PIPE, text=True)
    stock = random.Random(56).randbytes(2048)
    sums = [zlib.crc32(stock[:length]) for length in range(600)]
    try:
        for number in range(count):
            length = number * 131 % 600
            checksum = sums[length]
            while not writer.try_write(checksum >> 16, number, stock[:length], flags=checksum & 0xFFFF):
                assert process.poll() is None, "the reader gave up"
                os.sched_yield()
        output, _ = process.communicate(timeout=60)
        assert output.strip() == f"read {count}"
    finally:
        process.kill()
        process.wait()
        writer.release()
        segment.close()


def test_a_segment_is_shared_memory_without_a_name() -> None:
    first = Segment.create("x", 8192)
    second = Segment.attach(os.dup(first.fd.fd))
    first.words[1000] = 1 << 63
    assert second.words[1000] == 1 << 63
    assert second.size == 8192
    second.close()
    first.close()
    first.close()
