"""Everything that a rank can do wrong, by name. Imported in ranks and in drivers that tests start."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from typing import Any

from mpexec.pytest_plugin.misdeeds import Unpicklable, hang_in_c, hang_in_python

BIG = 64 << 20
EXIT_CODE = 3
TEXT = "the model is on fire"


def announce(path: str) -> None:
    """Write this process's pid as a line into a named pipe that a test reads; nothing without a path."""
    if path:
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, f"{os.getpid()}\n".encode())
        os.close(fd)


def big_value() -> bytes:
    """64 MiB that show whether they came whole."""
    return bytes(range(256)) * (BIG // 256)


def misbehave(manner: str) -> Any:
    """Do it: raise, end, stop or hang; the three manners that concern values return them."""
    if manner == "raise":
        raise ValueError(TEXT)
    if manner == "system_exit":
        raise SystemExit(EXIT_CODE)
    if manner == "os_exit":
        os._exit(EXIT_CODE)
    if manner in ("sigkill", "sigstop"):
        os.kill(os.getpid(), getattr(signal, manner.upper()))
    elif manner == "sigsegv":
        faulthandler._sigsegv()
    elif manner == "hang_python":
        hang_in_python()
    elif manner == "hang_c":
        hang_in_c()
    elif manner == "unpicklable_value":
        return threading.Lock()
    elif manner == "unpicklable_exception":
        raise Unpicklable(TEXT)
    elif manner == "big_reply":
        return big_value()
    return None


class Explosive:
    """A value that misbehaves while it is pickled, which is after the method has returned."""

    def __init__(self, manner: str) -> None:
        self.manner = manner

    def __reduce__(self) -> Any:
        return bytes, (misbehave(self.manner),)
