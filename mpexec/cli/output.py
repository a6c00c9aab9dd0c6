"""Writing to stdout while an event loop runs: a reader that is slow, stuck or gone must not block the loop."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from typing import Any

from mpexec.cli.report import ReaderGoneError


class StdoutWriter:
    """Writes to stdout, unbuffered, in a daemon thread of its own.

    It goes around `sys.stdout`, whose lock would be held by a blocked write when the interpreter ends.
    """

    def __init__(self) -> None:
        """Start the thread. `is_inside_line` tells whether a terminal's cursor stands after unfinished text."""
        self.is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._fd = sys.stdout.fileno() if sys.stdout is not None else None
        self._encoding = (sys.stdout.encoding if sys.stdout is not None else None) or "utf-8"
        self.is_inside_line = False
        self._work: queue.SimpleQueue[tuple[bytes, asyncio.AbstractEventLoop, asyncio.Future[None]]] = (
            queue.SimpleQueue()
        )
        if sys.stdout is not None:
            sys.stdout.flush()
        threading.Thread(target=self._run, name="mpexec-stdout", daemon=True).start()

    async def write_async(self, text: str) -> None:
        """Write all of `text`; returns when the reader's side has taken it.

        Raises:
            ReaderGoneError: The other end of the pipe is closed.
            OSError: For example, the disk is full.
        """
        if text:
            self.is_inside_line = self.is_terminal and not text.endswith("\n")
            await self._put(text.encode(self._encoding, errors="replace"))

    async def write_json_async(self, line: str) -> None:
        """Write one line, in UTF-8 whatever the locale is. Raises as `write_async`."""
        await self._put(line.encode() + b"\n")

    async def _put(self, data: bytes) -> None:
        if self._fd is None:
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._work.put((data, loop, done))
        await done

    def _run(self) -> None:
        while True:
            data, loop, done = self._work.get()
            error: Exception | None = None
            try:
                self._write(data)
            except (BrokenPipeError, ConnectionResetError) as gone:
                error = ReaderGoneError(str(gone))
            except OSError as failed:
                error = failed
            try:
                loop.call_soon_threadsafe(_settle, done, error)
            except RuntimeError:  # the loop has been closed: the command is ending
                return

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd or 1, view) :]


def _settle(done: asyncio.Future[Any], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
