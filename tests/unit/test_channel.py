"""Objects over a ring and a pool: small ones inline, large ones in slots, and nothing kept of what is not sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from mpexec.errors import TransportError
from mpexec.transport import linux
from mpexec.transport import pool as pool_module
from mpexec.transport.channel import CALL, NOTHING, Parcel, Receiver, Sender
from mpexec.transport.frame import encode
from mpexec.transport.pool import PoolReader, PoolWriter, create_pool_memory
from mpexec.transport.ring import RingReader, RingWriter, create_ring

CAPACITY = 65536
Make = Callable[..., tuple[Sender, list[Receiver]]]


@pytest.fixture
def make_channel() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(readers: int = 1) -> tuple[Sender, list[Receiver]]:
            segment = create_ring("test", CAPACITY, readers)
            stack.callback(segment.close)
            fd = create_pool_memory("test-pool", readers)
            bells = [linux.OwnedFd(linux.eventfd()) for _ in range(readers)]
            sender = Sender(RingWriter(segment, readers, 1), PoolWriter(fd, readers), bells)
            stack.callback(sender.close)
            receivers = []
            for reader in range(readers):
                pool = PoolReader(os.dup(fd), readers, reader)
                receivers.append(Receiver(RingReader(segment, readers, 1, reader), pool))
                stack.callback(receivers[-1].close)
            return sender, receivers

        yield make


def send(sender: Sender, value: Any, readers: tuple[int, ...] = (0,), call_id: int = 1) -> Parcel:
    parcel = sender.pack(encode(value, "a value"), readers)
    assert sender.try_send(CALL, call_id, parcel)
    return parcel


def receive(receiver: Receiver) -> Any:
    record = receiver.ring.read()
    assert record is not None
    value = receiver.open(record)
    receiver.ring.advance()
    return value


def test_a_small_value_travels_inside_the_record(make_channel: Make) -> None:
    sender, (receiver,) = make_channel()
    parcel = send(sender, {"a": [1, 2]})
    assert parcel.buffers == ()
    assert receive(receiver) == {"a": [1, 2]}
    assert sender.pool.reserved_bytes == 0


@pytest.mark.parametrize("size", [10_000, 12_287, 12_288, 13_000, 16_384, 20_000, CAPACITY, 5 * CAPACITY])
def test_a_long_stream_travels_whole_in_a_slot(make_channel: Make, size: int) -> None:
    sender, (receiver,) = make_channel()
    value = os.urandom(size)
    for _ in range(10):
        send(sender, value)
        assert receive(receiver) == value
    assert sender.pool.reserved_bytes <= max(65536, 2 * size)


def test_buffers_and_a_long_stream_travel_together(make_channel: Make) -> None:
    sender, (receiver,) = make_channel()
    value = [os.urandom(50_000), np.arange(100_000), os.urandom(50_000), np.ones(100_000)]
    parcel = send(sender, value)
    assert len(parcel.buffers) == 3
    back = receive(receiver)
    assert (back[0], back[2]) == (value[0], value[2])
    assert (back[1] == value[1]).all()
    assert (back[3] == value[3]).all()


def test_a_table_of_very_many_buffers_fits(make_channel: Make) -> None:
    sender, (receiver,) = make_channel()
    value = [np.full(65_536, number % 256, np.uint8) for number in range(350)]
    send(sender, value)
    back = receive(receiver)
    assert [array[-1] for array in back] == [number % 256 for number in range(350)]


def test_every_reader_gets_the_value_and_the_slot_returns_after_the_last(make_channel: Make) -> None:
    sender, receivers = make_channel(3)
    first = send(sender, np.ones(100_000), (0, 1, 2))
    views = [receive(receiver) for receiver in receivers]
    assert all(view.sum() == 100_000 for view in views)
    del views[0], views[0]
    second = send(sender, np.ones(100_000), (0, 1, 2))
    assert second.buffers[0].slot != first.buffers[0].slot
    views.clear()
    third = send(sender, np.ones(100_000), (0, 1, 2))
    assert third.buffers[0].slot == first.buffers[0].slot


def test_a_record_that_is_not_wanted_gives_its_slots_back(make_channel: Make) -> None:
    sender, (receiver,) = make_channel()
    first = send(sender, np.ones(100_000))
    record = receiver.ring.read()
    assert record is not None
    receiver.forget(record)
    receiver.ring.advance()
    assert send(sender, np.ones(100_000)).buffers[0].slot == first.buffers[0].slot


def test_a_parcel_that_is_not_sent_gives_its_slots_back(make_channel: Make) -> None:
    sender, _ = make_channel()
    first = sender.pack(encode(np.ones(100_000), "a value"), (0,))
    sender.discard(first)
    assert sender.pack(encode(np.ones(100_000), "a value"), (0,)).buffers[0].slot == first.buffers[0].slot


def test_packing_that_fails_half_way_gives_its_slots_back(make_channel: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, (receiver,) = make_channel()
    monkeypatch.setattr(pool_module, "_MAX_SLOTS", 3)
    with pytest.raises(TransportError):
        sender.pack(encode([np.ones(10_000) for _ in range(5)], "a value"), (0,))
    send(sender, [np.ones(10_000) for _ in range(3)])
    assert len(receive(receiver)) == 3


def test_a_full_ring_refuses_and_keeps_the_parcel_usable(make_channel: Make) -> None:
    sender, (receiver,) = make_channel()
    sent = 0
    parcel = sender.pack(encode(bytes(10_000), "a value"), (0,))
    while sender.try_send(CALL, sent, parcel):
        sent += 1
    assert sent >= 5
    assert receive(receiver) == bytes(10_000)
    assert receive(receiver) == bytes(10_000)
    assert sender.try_send(CALL, sent, parcel)


def test_a_rank_that_was_not_asked_for_its_value_sends_none(make_channel: Make) -> None:
    sender, (receiver,) = make_channel()
    assert sender.try_send(CALL, 9, NOTHING, (0,))
    record = receiver.ring.read()
    assert record is not None
    assert (record.call_id, receiver.open(record), tuple(record.buffers), record.ranks) == (9, None, (), (0,))
    receiver.ring.advance()


def test_doorbells_ring_for_those_who_sleep_only(make_channel: Make) -> None:
    sender, receivers = make_channel(2)
    bells = [bell for _, bell in sender._bells]
    receivers[1].ring.park(1)
    sender.ring_doorbells()
    with pytest.raises(BlockingIOError):
        os.read(bells[0].fd, 8)
    assert os.read(bells[1].fd, 8) == (1).to_bytes(8, "little")
    receivers[1].ring.park(0)
    sender.ring_doorbells()
    with pytest.raises(BlockingIOError):
        os.read(bells[1].fd, 8)
