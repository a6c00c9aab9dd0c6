"""Where a check and its ranks meet: the check knows, without a guess, that a rank has come so far."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from faults.drivers import Pipe


class Meeting(Pipe):
    """A named pipe for announcements, and one in which the ranks wait for a word."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.mkfifo(self.path + ".go")

    def go(self) -> None:
        """Give the word to the one rank that waits for it."""
        with open(self.path + ".go", "w"):
            pass

    def await_sleeper(self) -> None:
        """Return when the peer of `act_in_all_reduce` sleeps in the kernel: then it sits in the collective."""
        stat, asleep = Path(Path(self.path + ".thread").read_text()), 0
        end = time.monotonic() + 30.0
        while asleep < 5:
            assert time.monotonic() < end, "the peer never came to the collective"
            time.sleep(0.01)
            asleep = asleep + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0


@contextlib.contextmanager
def meeting() -> Iterator[Meeting]:
    """A meeting place in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="meet") as folder:
        pipe = Meeting(Path(folder))
        try:
            yield pipe
        finally:
            pipe.close()
