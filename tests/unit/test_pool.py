"""Pooled slots: used again when the last view has died, private where they must be, given back when idle."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from mpexec.errors import TransportError
from mpexec.transport import pool as pool_module
from mpexec.transport.pool import PoolReader, PoolWriter, create_pool_memory

KIB = 1024
Make = Callable[..., tuple[PoolWriter, list[PoolReader]]]


@pytest.fixture
def make_pool() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(readers: int = 1, **options: Any) -> tuple[PoolWriter, list[PoolReader]]:
            fd = create_pool_memory("test", readers)
            writer = PoolWriter(fd, readers)
            stack.callback(writer.close)
            reading = [PoolReader(os.dup(fd), readers, reader, **options) for reader in range(readers)]
            for one in reading:
                stack.callback(one.close)
            return writer, reading

        yield make


def data(size: int, fill: int = 1) -> memoryview:
    return memoryview(bytes([fill]) * size)


def test_what_is_stored_is_what_is_viewed(make_pool: Make) -> None:
    writer, (reader,) = make_pool()
    for size in (1, 65_535, 65_536, 65_537, 1 << 20, (4 << 20) + 1):
        source = memoryview(os.urandom(size))
        assert reader.view(writer.store(source, (0,), private=False)) == source


def test_a_slot_is_used_again_once_its_view_has_died(make_pool: Make) -> None:
    writer, (reader,) = make_pool()
    first = writer.store(data(100 * KIB), (0,), private=False)
    view = reader.view(first)
    second = writer.store(data(100 * KIB, 2), (0,), private=False)
    assert second.slot != first.slot
    del view
    third = writer.store(data(100 * KIB, 3), (0,), private=False)
    assert third.slot == first.slot
    assert third.mark != first.mark


def test_an_array_made_from_a_view_keeps_the_slot_though_the_view_has_died(make_pool: Make) -> None:
    writer, (reader,) = make_pool()
    buffer = writer.store(data(100 * KIB, 5), (0,), private=False)
    view = reader.view(buffer)
    array = np.frombuffer(view, np.uint8)
    part = array[10:20]
    del view, array
    gc.collect()
    for _ in range(5):
        assert writer.store(data(100 * KIB, 9), (0,), private=False).slot != buffer.slot
    assert (part == 5).all()
    del part
    assert writer.store(data(100 * KIB), (0,), private=False).slot == buffer.slot


def test_a_slot_is_free_only_when_all_its_readers_gave_it_back(make_pool: Make) -> None:
    writer, readers = make_pool(3)
    buffer = writer.store(data(64 * KIB), (0, 2), private=False)
    first, last = readers[0].view(buffer), readers[2].view(buffer)
    del first
    assert writer.store(data(64 * KIB), (0,), private=False).slot != buffer.slot
    del last
    assert writer.store(data(64 * KIB), (1,), private=False).slot == buffer.slot


def test_a_dead_reader_keeps_no_slot(make_pool: Make) -> None:
    writer, readers = make_pool(2)
    buffer = writer.store(data(64 * KIB), (0, 1), private=False)
    readers[0].forget(buffer)
    writer.drop_reader(1)
    assert writer.store(data(64 * KIB), (0,), private=False).slot == buffer.slot


def test_a_slot_that_was_never_sent_can_be_taken_back(make_pool: Make) -> None:
    writer, _ = make_pool()
    buffer = writer.store(data(64 * KIB), (0,), private=False)
    writer.give_back(buffer)
    assert writer.store(data(64 * KIB), (0,), private=False).slot == buffer.slot


def test_forgetting_a_slot_that_is_viewed_does_not_give_it_back_early(make_pool: Make) -> None:
    """A record that a Ctrl-C has had read twice is forgotten the second time, while the first reader has its view."""
    writer, (reader,) = make_pool()
    first = writer.store(data(70 * KIB), (0,), private=False)
    view = reader.view(first)
    reader.forget(first)
    assert writer.store(data(70 * KIB, 2), (0,), private=False).slot != first.slot
    assert view[:2] == b"\1\1"
    del view
    assert writer.store(data(70 * KIB, 3), (0,), private=False).slot == first.slot


def test_slots_fit_again_by_size_class(make_pool: Make) -> None:
    writer, (reader,) = make_pool()
    reader.forget(writer.store(data(70 * KIB), (0,), private=False))
    reserved = writer.reserved_bytes
    for size in (65 * KIB, 100 * KIB, 128 * KIB):
        reader.forget(writer.store(data(size), (0,), private=False))
    assert writer.reserved_bytes == reserved
    reader.forget(writer.store(data(129 * KIB), (0,), private=False))
    assert writer.reserved_bytes > reserved


def test_shared_views_are_read_only(make_pool: Make) -> None:
    writer, (reader,) = make_pool()
    view = reader.view(writer.store(data(64 * KIB), (0,), private=False))
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1


def test_a_write_into_a_private_view_is_seen_by_nobody_else_and_not_by_the_next_use(make_pool: Make) -> None:
    writer, readers = make_pool(2)
    for fill in (1, 2, 3):
        buffer = writer.store(data(64 * KIB, fill), (0, 1), private=True)
        mine, theirs = readers[0].view(buffer), readers[1].view(buffer)
        assert (mine[0], mine[-1], theirs[0]) == (fill, fill, fill)
        mine[0] = 99
        assert (mine[0], theirs[0]) == (99, fill)
        del mine, theirs


def test_private_and_shared_uses_of_one_slot_do_not_mix(make_pool: Make) -> None:
    writer, (reader,) = make_pool()
    slots = set()
    for number in range(1, 20):
        private = bool(number % 2)
        buffer = writer.store(data(64 * KIB, number), (0,), private=private)
        slots.add(buffer.slot)
        view = reader.view(buffer)
        assert bytes(view[:3]) == bytes([number] * 3)
        assert view.readonly is not private
        if private:
            view[0] = 255
        del view
    assert len(slots) == 1


def test_those_who_ask_get_views_of_the_memory_that_all_share(make_pool: Make) -> None:
    writer, readers = make_pool(2, shared_views=True)
    buffer = writer.store(data(64 * KIB), (0, 1), private=True)
    mine, theirs = readers[0].view(buffer), readers[1].view(buffer)
    mine[0] = 42
    assert theirs[0] == 42


# F055
def test_views_outlive_both_ends(make_pool: Make) -> None:
    fd = create_pool_memory("test", 1)
    writer = PoolWriter(fd, 1)
    reader = PoolReader(os.dup(fd), 1, 0)
    shared = reader.view(writer.store(data(64 * KIB, 7), (0,), private=False))
    private = reader.view(writer.store(data(64 * KIB, 8), (0,), private=True))
    writer.close()
    reader.close()
    assert (shared[-1], private[-1]) == (7, 8)
    private[0] = 1
    del shared, private
    gc.collect()


def test_memory_that_nobody_used_for_a_minute_goes_back(make_pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    writer, (reader,) = make_pool()
    held = reader.view(writer.store(data(1 << 20, 3), (0,), private=False))
    reader.forget(writer.store(data(8 << 20), (0,), private=False))

    def used() -> int:
        return os.fstat(writer.fd.fd).st_blocks * 512

    before = used()
    now += 59_000_000_000
    writer.trim()
    assert used() == before
    now += 2_000_000_000
    writer.trim()
    assert used() <= before - (8 << 20)
    assert held[0] == 3
    again = reader.view(writer.store(data(8 << 20, 4), (0,), private=False))
    assert (again[0], again[-1]) == (4, 4)


def test_when_every_slot_is_viewed_the_error_says_what_to_do(make_pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MAX_SLOTS", 4)
    writer, _ = make_pool()
    for _ in range(4):
        writer.store(data(64 * KIB), (0,), private=False)
    with pytest.raises(TransportError, match="drop"):
        writer.store(data(64 * KIB), (0,), private=False)
