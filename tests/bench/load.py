"""One compute process on every core that this process may use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from tests.bench.fresh import BenchError

_COMPUTE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    sum(range(10000))
"""


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep all cores busy for the length of the block."""
    processes = [
        subprocess.Popen([sys.executable, "-c", _COMPUTE, str(core)], stdout=subprocess.PIPE)
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise BenchError("a core is not busy: its process has ended")
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()
