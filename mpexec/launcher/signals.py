"""Signals to the launcher, as numbers from a pipe that its one loop waits for together with everything else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from mpexec.transport.linux import OwnedFd


class Signals:
    """Takes signals within a `with` block; only in the main thread, and of a program that is nothing but a launcher."""

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self._numbers = numbers
        self._before: dict[int, Any] = {}
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._read_end, self._write_end = OwnedFd(read_end), OwnedFd(write_end)
        # The ranks have ended and only output is left to write: then the first signal ends this process.
        self.leave_at_once = False

    @property
    def fd(self) -> int:
        """Readable when a signal has come."""
        return self._read_end.fd

    def take(self) -> list[int]:
        """Those that came since the last time, oldest first."""
        with contextlib.suppress(BlockingIOError):
            return list(os.read(self.fd, 256))
        return []

    def post(self, number: int) -> None:
        """As if the signal had come; from any thread."""
        with contextlib.suppress(BlockingIOError):  # 64 KiB of signals that nobody has looked at
            os.write(self._write_end.fd, bytes((number,)))

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.leave_at_once:
            os._exit(128 + number)
        self.post(number)

    def __enter__(self) -> Signals:
        for number in self._numbers:
            # ignored since before our start, as after nohup: it is to stay so
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._read_end.close()
        self._write_end.close()
