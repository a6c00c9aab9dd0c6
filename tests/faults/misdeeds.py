"""Everything that a rank can do wrong, by name. Imported in ranks and in drivers that tests start."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
import time
from typing import Any, NoReturn

BIG = 64 << 20
EXIT_CODE = 3
TEXT = "the model is on fire"


class Unpicklable(Exception):
    """An exception that holds what no pickle can hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def announce(path: str) -> None:
    """Write this process's pid as a line into a named pipe that a test reads; nothing without a path."""
    if path:
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, f"{os.getpid()}\n".encode())
        os.close(fd)


def big_value() -> bytes:
    """64 MiB that show whether they came whole."""
    return bytes(range(256)) * (BIG // 256)


def hang_in_python() -> NoReturn:
    """Never return; other threads of the process get their turns."""
    while True:
        time.sleep(3600)


def hang_in_c() -> NoReturn:
    """Never return, never give the interpreter to another thread, and let no signal handler end it.

    A sleep would end at the signal that asks for the stacks; a mutex that is locked twice goes on waiting.
    """
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    while True:
        libc.pthread_mutex_lock(mutex)


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
