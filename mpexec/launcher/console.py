"""What ranks write: whole lines to the console and to files, and the last of them kept for the message of a failure."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from mpexec.processes.logs import LineSplitter, RankLog

_LONGEST_PIECE = 1 << 20


class Console:
    """The launcher's own stdout and stderr. A write waits for its reader, and no other one comes between."""

    def __init__(self, on_reader_gone: Callable[[], None]) -> None:
        """`on_reader_gone` is called once, on the writing thread, when nobody reads stdout or stderr any more."""
        self._lock = threading.Lock()
        self._on_reader_gone = on_reader_gone
        self._gone = False

    def write(self, name: str, content: bytes) -> None:
        """Write all of it to "stdout" or "stderr"."""
        with self._lock:
            if self._gone:
                return
            try:
                _write_all({"stdout": 1, "stderr": 2}[name], content)
            except OSError:
                self._gone = True
                self._on_reader_gone()


def _write_all(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # somebody who shares our stdout has made it non-blocking
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            poller.poll()


@dataclass(slots=True)
class Outlet:
    """Where one stream of a rank goes.

    Attributes:
        console: None where it is not shown.
        prefix: What each of its lines begins with on the console.
        file: None where it is not written to one.
    """

    console: Console | None = None
    prefix: str = ""
    file: BinaryIO | None = field(default=None, repr=False)

    def write(self, name: str, lines: list[str]) -> None:
        """Write whole lines, each with its own end."""
        if self.file is not None:
            try:
                self.file.write(_encode("".join(lines)))
                self.file.flush()  # people read it while the rank runs
            except OSError as error:
                self._lose_file(error)
        if self.console is not None:
            self.console.write(name, _encode("".join(f"{self.prefix}{line}" for line in lines)))

    def _lose_file(self, error: OSError) -> None:
        """The disk is full, most likely: the rank goes on, which must not wait for a reader that is gone."""
        assert self.file is not None
        tell(f"mpexec: {self.file.name} is not written any more: {error.strerror}")
        with contextlib.suppress(OSError):
            self.file.close()
        self.file = None


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class RankOutput(RankLog):
    """The pipes of one rank. Nothing is dropped: where nobody reads the console, the rank waits."""

    def __init__(self, rank: int, outlets: dict[str, Outlet]) -> None:
        super().__init__(rank)
        self._outlets = outlets
        for pipe in self._pipes.values():
            pipe.lines = _Pieces()
            # any program writes to it, and most lose what a non-blocking pipe does not take
            os.set_blocking(pipe.write_end.fd, True)

    def _keep(self, name: str, lines: list[str]) -> None:
        if lines:
            tail = lines[-(self._last.maxlen or 0) :]
            self._last.extend(printable(line.rstrip("\r\n")) for line in tail)
            self._unshown.append((name, lines))

    def _show_next(self) -> None:
        name, lines = self._unshown.popleft()
        self._outlets[name].write(name, lines)

    def close(self) -> None:
        """Write what is left, close the pipes and the files; again changes nothing."""
        super().close()
        for outlet in self._outlets.values():
            if outlet.file is not None:
                outlet.file.close()


def printable(line: str) -> str:
    """The line with what is not UTF-8 spelled out, fit for any stream."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class _Pieces(LineSplitter):
    """Lines with their ends, byte for byte. A carriage return ends one too: progress bars live by it."""

    def feed(self, chunk: bytes) -> list[str]:
        content = self._rest + chunk
        end = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
        if not end and len(content) > _LONGEST_PIECE:
            end = len(content)
        whole, self._rest = content[:end], content[end:]
        return [line.decode("utf-8", "surrogateescape") for line in whole.splitlines(keepends=True)]

    def finish(self) -> list[str]:
        """The unfinished last line, with the end that it lacks: no other rank may go on in it."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", "surrogateescape") + "\n"] if rest else []


def tell(text: str) -> None:
    """Print a message of the launcher to stderr, if somebody is there to read it."""
    with contextlib.suppress(OSError):
        _write_all(2, f"{text}\n".encode("utf-8", "backslashreplace"))
