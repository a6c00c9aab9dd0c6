"""Clocks and observers of the fault tests."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator

# Both cores are busy with something else: everything may take three times as long.
LOAD = 3.0 if os.environ.get("MPEXEC_LOAD") == "1" else 1.0


class Stopwatch:
    """Seconds since a block was entered; the block must end within a bound, which load may stretch."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


@contextlib.contextmanager
def within(seconds: float) -> Iterator[Stopwatch]:
    """The block takes at most that long, three times as long under load."""
    watch = Stopwatch()
    yield watch
    assert watch.seconds <= seconds * LOAD, f"took {watch.seconds:.3f} s, bound {seconds * LOAD:g} s"


class ExitWatch:
    """Sees the end of a process by a pidfd of its own, as nobody can see it earlier."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        self.at = 0.0
        self._thread = threading.Thread(target=self._watch, name="exit-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if poller.poll(60_000):
            self.at = time.monotonic()
        os.close(self._fd)

    def seconds_since(self, moment: float) -> float:
        """How much later than the end of the process `moment` was."""
        self._thread.join()
        assert self.at, "the process has not ended"
        return moment - self.at
