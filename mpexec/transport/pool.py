"""Pooled slots for large buffers: one copy in, none or one out.

Each writer has one pool: a memfd that grows and is mapped piecewise. A slot is a piece of it, reused while warm,
because the first touch of fresh memory costs nine times the copy. A reader gives a slot back without a message: it
stores the slot's mark in a word of its own once the last view has died; the writer compares.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from mpexec.errors import TransportError
from mpexec.transport import linux
from mpexec.transport.ring import Buffer
from mpexec.transport.segment import PAGE

_MAX_SLOTS = 1 << 17  # the table of their marks is sparse: it takes memory only where slots are used
_LOOKS = 8  # at slots in the order of their use, before another one is made
_BIG_STEP = 4 << 20
_IDLE_NS = 60 * 1_000_000_000
_TRIM_EVERY_NS = 5 * 1_000_000_000


def _size_class(length: int) -> int:
    """Powers of two up to 4 MiB, then multiples of 4 MiB: few classes, so that slots fit again."""
    if length <= _BIG_STEP:
        return max(65536, 1 << (length - 1).bit_length())
    return -(-length // _BIG_STEP) * _BIG_STEP


def _table_bytes(readers: int) -> int:
    return -(-_MAX_SLOTS * readers * 8 // PAGE) * PAGE


def _table_words(fd: int, readers: int) -> memoryview:
    """The table of marks as aligned words; it stays mapped as long as it is referred to."""
    size = _table_bytes(readers)
    return linux.Mapping(fd, size).view().cast("Q")


def create_pool_memory(name: str, readers: int) -> int:
    """A memfd for a pool: the table of returned marks, sparse until used, and room that grows behind it."""
    return linux.memfd_create(name, _table_bytes(readers))


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy bytes; through numpy where it is loaded, because that lets other threads run meanwhile."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and len(source) >= 65536:
        numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))
    else:
        target[:] = source


class _Slot:
    __slots__ = ("index", "mark", "memory", "offset", "readers", "size", "used_ns")

    def __init__(self, index: int, offset: int, size: int, memory: linux.Mapping) -> None:
        self.index = index
        self.offset = offset
        self.size = size
        self.memory = memory
        self.mark = 0
        self.readers: tuple[int, ...] = ()
        self.used_ns = 0


class PoolWriter:
    """The side that owns a pool and puts buffers into it. Thread-safe.

    Args:
        fd: The pool's memfd; owned from now on.
        readers: Number of readers, who each have a column in the table of marks.
    """

    def __init__(self, fd: int, readers: int) -> None:
        self.fd = linux.OwnedFd(fd)
        self._n_readers = readers
        self._live = set(range(readers))
        self._end = _table_bytes(readers)
        self._words = _table_words(fd, readers)
        self._lock = threading.Lock()
        self._slots: dict[int, deque[_Slot]] = {}
        self._count = 0
        self._next_mark = 1
        self._trimmed_ns = time.monotonic_ns()

    def drop_reader(self, reader: int) -> None:
        """Stop waiting for a reader that is dead."""
        self._live.discard(reader)

    def store(self, source: memoryview, readers: Iterable[int], *, private: bool) -> Buffer:
        """Copy `source` (contiguous bytes) into a free slot that `readers` will give back.

        Raises:
            TransportError: All slots are in use: readers keep views of as many buffers.
        """
        with self._lock:
            slot = self._take(_size_class(source.nbytes))
            slot.mark = self._next_mark
            self._next_mark += 1
            slot.readers = tuple(readers)
        try:
            copy_into(slot.memory.view()[: source.nbytes], source)
        except BaseException:  # a Ctrl-C in the copy, where the time goes, must not keep the slot for good
            slot.readers = ()
            raise
        return Buffer(slot.offset, source.nbytes, slot.index, slot.mark, private)

    def _is_free(self, slot: _Slot) -> bool:
        base = slot.index * self._n_readers
        return all(self._words[base + r] == slot.mark or r not in self._live for r in slot.readers)

    def _take(self, size: int) -> _Slot:
        now = time.monotonic_ns()
        if now - self._trimmed_ns > _TRIM_EVERY_NS:
            self._trim(now)
        slots = self._slots.setdefault(size, deque())
        for _ in range(min(_LOOKS, len(slots))):
            slot = slots[0]
            slots.rotate(-1)
            if self._is_free(slot):
                slot.used_ns = now
                return slot
        if self._count == _MAX_SLOTS:
            raise TransportError(f"{_MAX_SLOTS} large buffers are still viewed by their receivers: drop some")
        offset, self._end = self._end, self._end + size
        os.ftruncate(self.fd.fd, self._end)
        slot = _Slot(self._count, offset, size, linux.Mapping(self.fd.fd, size, offset=offset))
        slot.used_ns = now
        self._count += 1
        slots.append(slot)
        return slot

    def _trim(self, now: int) -> None:
        """Give back the memory of slots that nobody used for a minute; the slots stay, cold."""
        self._trimmed_ns = now
        for slots in self._slots.values():
            for slot in slots:
                if slot.used_ns and now - slot.used_ns > _IDLE_NS and self._is_free(slot):
                    linux.punch_hole(self.fd.fd, slot.offset, slot.size)
                    slot.used_ns = 0

    def give_back(self, buffer: Buffer) -> None:
        """Free a slot whose record was never written."""
        with self._lock:
            for slots in self._slots.values():
                for slot in slots:
                    if slot.index == buffer.slot and slot.mark == buffer.mark:
                        slot.readers = ()

    def trim(self) -> None:
        """Give back memory unused for a minute; to be called by a thread that is idle, at `next_trim`."""
        with self._lock:
            self._trim(time.monotonic_ns())

    def next_trim(self) -> int | None:
        """Monotonic ns at which some slot will have been unused for a minute; None if all are cold."""
        with self._lock:
            used = [slot.used_ns for slots in self._slots.values() for slot in slots if slot.used_ns]
        return max(min(used) + _IDLE_NS, self._trimmed_ns + _TRIM_EVERY_NS) if used else None

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all slots, warm or cold."""
        return self._end - _table_bytes(self._n_readers)

    def close(self) -> None:
        """Unmap and close; readers keep their own mappings."""
        self._slots.clear()
        self._words.release()
        self.fd.close()


class _Process:
    """This process's id, kept current across forks; asking the system each time would cost as much as the rest."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def refresh(self) -> None:
        """To be called in a forked child."""
        self.pid = os.getpid()


_process = _Process()
os.register_at_fork(after_in_child=_process.refresh)


class _Mapping:
    """One slot as a reader has mapped it: shared for arrays, private for tensors."""

    __slots__ = ("private", "shared")

    def __init__(self) -> None:
        self.shared: linux.Mapping | None = None
        self.private: linux.Mapping | None = None


class PoolReader:
    """One reader's view of another process's pool.

    Views stay valid after `close`: each holds the mapping it points into.

    Args:
        fd: The pool's memfd; owned from now on.
        readers: Number of readers of that pool.
        reader: Which of them this is.
        shared_views: Hand out plain writable views of the shared memory.
    """

    def __init__(self, fd: int, readers: int, reader: int, *, shared_views: bool = False) -> None:
        self.fd = linux.OwnedFd(fd)
        self._n_readers = readers
        self._reader = reader
        self._shared_views = shared_views
        self._words = _table_words(fd, readers)
        self._mappings: dict[int, tuple[int, _Mapping]] = {}
        # By slot and mark: a record that a Ctrl-C has had read twice must not give its slot back early.
        self._exporters: dict[tuple[int, int], weakref.ref[Any]] = {}

    def view(self, buffer: Buffer) -> memoryview:
        """The buffer's bytes: read-only, or writable and private to this process where it says so.

        The slot goes back to the writer when the last object made from the view has died. What dies last is the
        exporter, a ctypes array over the mapping; a finalizer on the memoryview itself would run while arrays live.
        """
        private = buffer.private and not self._shared_views
        known = self._exporters.get((buffer.slot, buffer.mark))
        exporter = known() if known is not None else None
        if exporter is None:
            exporter = self._export(buffer, private=private)
        view = memoryview(exporter).cast("B")
        return view if buffer.private or self._shared_views else view.toreadonly()

    def _export(self, buffer: Buffer, *, private: bool) -> Any:
        memory = self._map(buffer, private=private)
        exporter = memory.export(buffer.length)
        index, mark, words = buffer.slot * self._n_readers + self._reader, buffer.mark, self._words
        exporters, key = self._exporters, (buffer.slot, buffer.mark)
        length = -(-buffer.length // PAGE) * PAGE

        owner = _process.pid

        def give_back(_: object) -> None:
            exporters.pop(key, None)
            if _process.pid != owner:  # a copy that died in a forked child: the view of the parent lives on
                return
            if private:
                memory.drop_pages(length)
            words[index] = mark

        exporters[key] = weakref.ref(exporter, give_back)
        return exporter

    def _map(self, buffer: Buffer, *, private: bool) -> linux.Mapping:
        size = _size_class(buffer.length)
        known = self._mappings.get(buffer.slot)
        if known is None or known[0] != size:
            known = self._mappings[buffer.slot] = (size, _Mapping())
        mapping = known[1]
        memory = mapping.private if private else mapping.shared
        if memory is None:
            memory = linux.Mapping(self.fd.fd, size, offset=buffer.offset, private=private)
            if private:
                mapping.private = memory
            else:
                mapping.shared = memory
        return memory

    def forget(self, buffer: Buffer) -> None:
        """Give a slot back unread; one that has been read goes back when its views have died."""
        if (buffer.slot, buffer.mark) in self._exporters:
            return
        self._words[buffer.slot * self._n_readers + self._reader] = buffer.mark

    def close(self) -> None:
        """Close the descriptor. Mappings go when the last view of each has died."""
        self._mappings.clear()
        if not self._exporters:
            self._words.release()
        self.fd.close()
