"""A process that kills ranks and watches them end: the floor that the death benchmark is held against.

Reads a pid a line; after a short pause it kills that process, and prints the monotonic ns at which it killed and at
which the pid's descriptor told of the end. It must not import mpexec: it stands for the machine.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

PAUSE = 0.05  # seconds, in which the driver gets to its waiting


def main() -> None:
    """Until stdin ends."""
    for line in sys.stdin:
        pid = int(line)
        descriptor = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        time.sleep(PAUSE)
        killed = time.monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        poll.poll(10_000)
        seen = time.monotonic_ns()
        os.close(descriptor)
        print(killed, seen, flush=True)


if __name__ == "__main__":
    main()
