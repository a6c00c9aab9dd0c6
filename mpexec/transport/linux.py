"""The Linux calls that mpexec stands on, in one place: memfd, eventfd, pidfd, madvise, fences.

Python lacks some of them in some builds; then the raw system call is made, and where the kernel refuses, the error
names kernel and call. Another operating system would be a second module with these functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import signal
import struct
import threading
import weakref
from collections.abc import Iterator

from mpexec.errors import ConfigError

_libc = ctypes.CDLL(None, use_errno=True)
_SYSCALLS = {"memfd_create": {"x86_64": 319, "aarch64": 279}, "eventfd2": {"x86_64": 290, "aarch64": 19}}
# pidfd_open has one number on every architecture
_PIDFD_OPEN = 434
_PIDFD_SEND_SIGNAL = 424
# _IOWR(0xFF, 11, struct pidfd_info), of which the first 64 bytes are enough: a mask first, the exit status last.
_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_MFD_CLOEXEC = 1
_EFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


def _refused(call: str, error: int) -> ConfigError | OSError:
    if error in _EXHAUSTED:
        return OSError(error, f"{call}: {os.strerror(error)}")
    return ConfigError(
        f"the kernel refused {call}: {os.strerror(error)} (Linux {platform.release()}, {platform.machine()}). "
        "mpexec needs Linux 5.3 or newer, and a sandbox that allows this call."
    )


def _raw(call: str, number: int | None, *args: object) -> int:
    if number is None:
        raise ConfigError(f"{call} is not known on {platform.machine()}; use a Python built with os.{call}")
    result = int(_libc.syscall(ctypes.c_long(number), *args))
    if result < 0:
        raise _refused(call, ctypes.get_errno())
    return result


def memfd_create(name: str, size: int) -> int:
    """An anonymous memory file of `size` bytes, close-on-exec; it vanishes with its last descriptor and mapping."""
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, _MFD_CLOEXEC)
        else:
            number = _SYSCALLS["memfd_create"].get(platform.machine())
            fd = _raw("memfd_create", number, ctypes.c_char_p(name.encode()), ctypes.c_uint(_MFD_CLOEXEC))
    except OSError as error:
        raise _refused("memfd_create", error.errno or 0) from error
    os.ftruncate(fd, size)
    return fd


def eventfd() -> int:
    """A non-blocking, close-on-exec eventfd with count 0."""
    try:
        if hasattr(os, "eventfd"):
            return os.eventfd(0, _EFD_FLAGS)
        number = _SYSCALLS["eventfd2"].get(platform.machine())
        return _raw("eventfd2", number, ctypes.c_uint(0), ctypes.c_int(_EFD_FLAGS))
    except OSError as error:
        raise _refused("eventfd", error.errno or 0) from error


_ONE = (1).to_bytes(8, "little")


def ring_eventfd(fd: int) -> None:
    """Wake whoever watches `fd`. A full counter is a wake-up already under way."""
    with contextlib.suppress(BlockingIOError):
        os.write(fd, _ONE)


def drain_eventfd(fd: int) -> None:
    """Set the count back to 0."""
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 8)


def pidfd_open(pid: int) -> int:
    """A descriptor that becomes readable when process `pid` ends.

    Raises:
        ProcessLookupError: There is no such process.
    """
    if hasattr(os, "pidfd_open"):
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise _refused("pidfd_open", error.errno or 0) from error
    return _raw("pidfd_open", _PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def pidfd_send_signal(pidfd: int, signum: int) -> None:
    """Signal the process behind `pidfd`, never a later process with the same number; silent if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(signal, "pidfd_send_signal"):
            signal.pidfd_send_signal(pidfd, signum)
        else:
            _raw(
                "pidfd_send_signal",
                _PIDFD_SEND_SIGNAL,
                ctypes.c_int(pidfd),
                ctypes.c_int(signum),
                None,
                ctypes.c_uint(0),
            )


def pidfd_exit_status(pidfd: int) -> int | None:
    """The wait status of a process that has ended and been reaped; None where the kernel (before 6.15) has none."""
    request = struct.pack("=Q52xi", _PIDFD_INFO_EXIT, 0)
    try:
        answer = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError:
        return None
    mask, status = struct.unpack("=Q52xi", answer)
    return status if mask & _PIDFD_INFO_EXIT else None


_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A piece of a memory file in this process's memory, until the last object made from it has died.

    `mmap.mmap` duplicates the descriptor for as long as it lives; with a mapping for every large buffer that a user
    keeps, descriptors would run out. This one needs none.
    """

    __slots__ = ("__weakref__", "_address", "size")

    def __init__(self, fd: int, size: int, *, offset: int = 0, private: bool = False) -> None:
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if address is None or address == _MAP_FAILED:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot map {size} bytes: {os.strerror(error)}")
        self._address: int = address
        self.size = size
        weakref.finalize(self, _libc.munmap, address, size).atexit = False

    def view(self) -> memoryview:
        """All bytes, writable; the view keeps the mapping."""
        return memoryview(self.export(self.size)).cast("B")

    def export(self, length: int) -> ctypes.Array[ctypes.c_char]:
        """The first `length` bytes as an object that keeps the mapping and can be referred to weakly."""
        exporter = (ctypes.c_char * length).from_address(self._address)
        exporter.mapping = self  # type: ignore[attr-defined]  # ctypes instances take attributes
        return exporter

    def drop_pages(self, length: int) -> None:
        """Forget a private mapping's own copies of the first pages; the next touch shows the shared file again."""
        _libc.madvise(self._address, length, mmap.MADV_DONTNEED)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the memory of a memory file's range back; it reads as zeros afterwards."""
    keep_size_and_punch = 3
    _libc.fallocate(
        ctypes.c_int(fd), ctypes.c_int(keep_size_and_punch), ctypes.c_longlong(offset), ctypes.c_longlong(length)
    )


_fence_lock = threading.Lock()
_ONE_LOCK_IS_A_FENCE = platform.machine() in ("x86_64", "AMD64", "i686")


def fence() -> None:
    """Order all earlier loads and stores before all later ones.

    An uncontended lock is a locked instruction on x86, a full fence; elsewhere acquire and release are one-way, and
    two pairs in a row are needed. The idea is that of vLLM's shared-memory queue.
    """
    with _fence_lock:
        pass
    if not _ONE_LOCK_IS_A_FENCE:
        with _fence_lock:
            pass


def set_process_title(title: str) -> None:
    """Name this process in `ps -o comm` and `top`; at most 15 bytes are kept."""
    _libc.prctl(ctypes.c_int(_PR_SET_NAME), ctypes.c_char_p(title.encode()[:15]), 0, 0, 0)


@contextlib.contextmanager
def timer_slack(nanoseconds: int) -> Iterator[None]:
    """Let this thread's timers, and for ever those of threads that it starts meanwhile, be late by so much.

    Sleepers whose time-outs may be late wake together, and less often. A descriptor that becomes ready wakes them at
    once as ever. A kernel that refuses changes nothing.
    """
    before = _libc.prctl(ctypes.c_int(_PR_GET_TIMERSLACK), 0, 0, 0, 0)
    _libc.prctl(ctypes.c_int(_PR_SET_TIMERSLACK), ctypes.c_ulong(nanoseconds), 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(ctypes.c_int(_PR_SET_TIMERSLACK), ctypes.c_ulong(max(0, before)), 0, 0, 0)


class OwnedFd:
    """A descriptor with one owner: closed once, and closed in children that the user's program forks.

    A forked child that kept a driver-side end open would hide the driver's death from the ranks.
    """

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _owned.add(self)

    @property
    def fd(self) -> int:
        """The number, -1 once closed."""
        return self._fd

    def fileno(self) -> int:
        """As `fd`, so that select and socket functions take the object."""
        return self._fd

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._fd < 0

    def close(self) -> None:
        """Close it; again changes nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


_owned: weakref.WeakSet[OwnedFd] = weakref.WeakSet()


def _close_owned_in_child() -> None:
    for owned in list(_owned):
        owned.close()


os.register_at_fork(after_in_child=_close_owned_in_child)
