"""Standard output and error inside a rank: whole lines into pipes that the driver reads, never blocking for long."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import select
import sys
import threading
import time
from typing import Any, TextIO

_PATIENCE_NS = 1_000_000_000
_LINE_BUFFERED = 1


class PatientWriter(io.RawIOBase):
    """Writes to a non-blocking pipe; waits at most one second for room, then drops whole lines and counts them.

    After lines were dropped the next writes do not wait at all, until one of them finds room: a rank that prints much
    loses one second in all, not one per line. The count is written before the first line that gets through again.
    """

    def __init__(self, fd: int) -> None:
        """Write to `fd`, which stays the caller's."""
        self._fd = fd
        self._lock = threading.RLock()
        self._dropped = 0
        self._torn = False
        # a lock held by another thread at the time of a fork would stay locked in the child for ever
        os.register_at_fork(after_in_child=self._new_lock)

    def _new_lock(self) -> None:
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Take all of `data`, whether it got through or not; the text layer above must not send it twice."""
        content = bytes(data)
        with self._lock:
            if content and self._say_what_was_dropped():
                self._put(content)
            elif content:
                self._dropped += _lines(content)
        return len(content)

    def _say_what_was_dropped(self) -> bool:
        """True if lines flow: none was dropped, or there is room again and the note is written."""
        if not self._dropped:
            return True
        note = f"[{self._dropped} lines dropped: the driver did not read]\n".encode()
        try:
            # shorter than PIPE_BUF: all of it or nothing
            os.write(self._fd, b"\n" + note if self._torn else note)
        except OSError:  # still no room; or the driver is gone, and this process with it in a moment
            return False
        self._dropped, self._torn = 0, False
        return True

    def _put(self, content: bytes) -> None:
        give_up_at = time.monotonic_ns() + _PATIENCE_NS
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                if not self._room(give_up_at):
                    self._dropped = _lines(bytes(rest))
                    self._torn = len(rest) < len(content) and content[-len(rest) - 1 : -len(rest)] != b"\n"
                    return
            except OSError:  # the driver is gone, and this process with it in a moment
                return

    def _room(self, give_up_at: int) -> bool:
        left_ms = (give_up_at - time.monotonic_ns()) // 1_000_000
        if left_ms <= 0:
            return False
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        return bool(poller.poll(left_ms))


def _lines(content: bytes) -> int:
    return content.count(b"\n") or 1


# The streams that were there before: were they collected, text that a forked child inherited in them would be written.
_former: list[TextIO] = []


def replace_standard_streams() -> None:
    """Put line-buffered text streams over descriptors 1 and 2 in place of `sys.stdout` and `sys.stderr`.

    C's stdout is made line-buffered too, so that lines written before an `abort()` are not lost.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        former = getattr(sys, name)
        if former is not None:
            _former.append(former)
        stream = io.TextIOWrapper(
            PatientWriter(fd),  # type: ignore[type-var]  # a raw stream that takes all it is given buffers nothing
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # a C library without these names only loses the courtesy
    with contextlib.suppress(ValueError, AttributeError, OSError):
        libc = ctypes.CDLL(None)
        c_stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        libc["__fpurge"](c_stdout)
        libc.setvbuf(c_stdout, None, _LINE_BUFFERED, 0)


def flush_standard_streams() -> None:
    """Write what is buffered; a closed or broken stream is left as it is."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
