"""What ranks write to stdout and stderr: read in the driver, prefixed, shown, and the last lines kept for errors."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import sys
import threading
from collections.abc import Sequence
from typing import Any

from mpexec.transport.linux import OwnedFd

_PIPE_BYTES = 1 << 20
_KEPT_LINES = 200
_LONGEST_LINE = 64 << 10
_READ_BYTES = 64 << 10
# Bounds of one reading: short turns while the rank lives, because a death must not wait for the lock; at the end all
# that a pipe can hold, and no more, because another process may go on writing.
_TURN_BYTES = 4 * _READ_BYTES
_FINAL_BYTES = 2 * _PIPE_BYTES
# A pipe that poll calls writable takes PIPE_BUF (4096) bytes without blocking; a character is up to four bytes.
_CHUNK_CHARACTERS = 1000
_PATIENCE_MS = 1000


class RankLog:
    """The two pipes of one rank, and its last 200 lines.

    Reading takes a lock for microseconds and never waits. Showing lines may wait for whoever reads the driver's own
    stdout, so it has a lock of its own: `drain` and `last_lines` never wait for it.
    """

    def __init__(self, rank: int, label: str = "", *, streams: Sequence[str] = ("stdout", "stderr")) -> None:
        """Open a pipe for each of `streams`; () for a rank whose output goes elsewhere, of which no line is known."""
        self.rank = rank
        self._label = label or f"rank {rank}"
        self._pipes = {name: _Pipe() for name in streams}
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._unshown: collections.deque[tuple[str, list[str]]] = collections.deque()
        self._reading = threading.RLock()
        self._showing = threading.Lock()

    def write_ends(self) -> tuple[OwnedFd, OwnedFd]:
        """The ends for the rank's stdout and stderr; call `close_write_ends` once the rank has its copies."""
        return self._pipes["stdout"].write_end, self._pipes["stderr"].write_end

    def close_write_ends(self) -> None:
        """Close this process's copies, without which the end of the rank could not be seen on the pipes."""
        for pipe in self._pipes.values():
            pipe.write_end.close()

    def read_ends(self) -> tuple[int, ...]:
        """Numbers to poll; each is readable when there is text or the rank's last writer is gone."""
        return tuple(pipe.read_end.fd for pipe in self._pipes.values() if not pipe.read_end.closed)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of both streams, oldest first, without prefix; a line not ended yet is not among them."""
        with self._reading:
            return tuple(self._last)

    def pump(self, fd: int) -> bool:
        """Read what is there on read end `fd` and show it. False once that pipe has ended.

        May wait up to a second for the driver's own stdout; after that lines are dropped and counted.
        """
        going_on = self._read(fd, _TURN_BYTES)
        self.show()
        return going_on

    def drain(self, *, final: bool = False) -> None:
        """Read what is in the pipes without showing it and without waiting; `final` ends an unfinished last line."""
        for fd in self.read_ends():
            self._read(fd, _FINAL_BYTES)
        if final:
            with self._reading:
                for name, pipe in self._pipes.items():
                    self._keep(name, pipe.lines.finish())

    def show(self, wait: float = -1) -> None:
        """Write the lines read so far to the driver's `sys.stdout` and `sys.stderr`.

        Args:
            wait: Seconds to wait for another thread that is showing lines of this rank; -1 means as long as it takes.
        """
        if not self._showing.acquire(timeout=wait):
            return
        try:
            while self._unshown:
                self._show_next()
        finally:
            self._showing.release()

    def close(self) -> None:
        """Show what is left and close both pipes; again changes nothing. Whoever polls them must have stopped."""
        self.drain(final=True)
        self.show(wait=2.0)
        for pipe in self._pipes.values():
            pipe.write_end.close()
            pipe.read_end.close()

    def _read(self, fd: int, most: int) -> bool:
        with self._reading:
            for name, pipe in self._pipes.items():
                if pipe.read_end.fd == fd >= 0:
                    lines, going_on = pipe.read(most)
                    self._keep(name, lines)
                    return going_on
        return False

    def _keep(self, name: str, lines: list[str]) -> None:
        """Little work for each line: this is on the way of the news of a death."""
        if lines:
            self._last.extend(lines[-_KEPT_LINES:])
            self._unshown.append((name, lines))

    def _show_next(self) -> None:
        """Show the lines of one reading, as many at a time as fit into one write."""
        name, lines = self._unshown.popleft()
        prefix = f"[{self._label}] "
        parts: list[str] = []
        size = 0
        for line in lines:
            text = f"{prefix}{line}\n"
            if parts and size + len(text) > _CHUNK_CHARACTERS:
                _show(name, "".join(parts), len(parts))
                parts, size = [], 0
            parts.append(text)
            size += len(text)
        _show(name, "".join(parts), len(parts))


class _Pipe:
    """One pipe and the lines that come out of it."""

    def __init__(self) -> None:
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.read_end = OwnedFd(read_end)
        self.write_end = OwnedFd(write_end)
        self.lines = LineSplitter()
        # refused to unprivileged users beyond their share: then the pipe keeps its 64 KiB
        with contextlib.suppress(OSError):
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def read(self, most: int) -> tuple[list[str], bool]:
        """New whole lines out of about `most` bytes, and False once every writer is gone."""
        lines: list[str] = []
        for _ in range(most // _READ_BYTES):
            try:
                chunk = os.read(self.read_end.fd, _READ_BYTES)
            except BlockingIOError:
                return lines, True
            if not chunk:
                return lines + self.lines.finish(), False
            lines += self.lines.feed(chunk)
        return lines, True


class LineSplitter:
    """Cuts a byte stream into lines of text; lines above 64 KiB come in parts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes."""
        whole, newline, self._rest = (self._rest + chunk).rpartition(b"\n")
        lines = _texts(whole) if newline else []
        while len(self._rest) > _LONGEST_LINE:
            lines += _texts(self._rest[:_LONGEST_LINE])
            self._rest = self._rest[_LONGEST_LINE:]
        return lines

    def finish(self) -> list[str]:
        """The unfinished last line, if there is one; it counts as ended from here on."""
        rest, self._rest = self._rest, b""
        return _texts(rest) if rest else []


def _texts(content: bytes) -> list[str]:
    """The lines of `content`; nothing is done line by line unless it has to be."""
    lines = content.decode("utf-8", "backslashreplace").split("\n")
    if b"\r" in content:
        lines = [line.rstrip("\r") for line in lines]
    if len(content) > _LONGEST_LINE:
        lines = [part for line in lines for part in _parts(line)]
    return lines


def _parts(line: str) -> list[str]:
    return [line[i : i + _LONGEST_LINE] for i in range(0, len(line), _LONGEST_LINE)] or [line]


# Lines lost because nobody reads the driver's own stream, by name; while it is above 0 nobody waits for that stream.
_lost = {"stdout": 0, "stderr": 0}


def _show(name: str, text: str, lines: int) -> None:
    """Write to the driver's stream of this moment: a notebook or a test may have replaced it."""
    stream = getattr(sys, name)
    if stream is None:
        return
    try:
        if _lost[name] and _has_room(stream, 0):
            text = f"[{_lost[name]} lines of ranks dropped: nobody read the driver's {name}]\n{text}"
            _lost[name] = 0
        for start in range(0, len(text), _CHUNK_CHARACTERS):
            if not _has_room(stream, 0 if _lost[name] else _PATIENCE_MS):
                _lost[name] += lines
                return
            _write(stream, text[start : start + _CHUNK_CHARACTERS])
    except Exception:  # closed, broken, or the user's own class: showing lines must not end the reading of them
        _lost[name] += lines


def _has_room(stream: Any, wait_ms: int) -> bool:
    """False if a write would block for longer than `wait_ms`; a stream without a descriptor counts as ready."""
    try:
        fd = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(wait_ms))


def _write(stream: Any, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
