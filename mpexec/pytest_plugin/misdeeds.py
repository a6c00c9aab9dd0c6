"""What a rank can do wrong on purpose. Runs in ranks: nothing here imports pytest."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class Fault:
    """One misdeed of one rank; it travels to the rank, which reports there.

    Attributes:
        number: Its number within the test, from 1.
        kind: Name of the method of `faults` that made it.
        rank: The rank that misbehaves.
        at: Name of the method on whose entry it happens, or "".
        after: Name of the method on whose return it happens, or "". Without either it happens at once.
        nth: It happens the n-th time that point is reached, counted from when the rank knows of it.
        seconds: Delay of `slow`.
        error: Exception of `raises`.
        report_to: Path of a pipe into which the rank writes "number pid" just before it misbehaves.
        pipe: What the kernel calls that pipe: a closed one's number may be another file's.
    """

    number: int
    kind: str
    rank: int
    at: str = ""
    after: str = ""
    nth: int = 1
    seconds: float = 0.0
    error: BaseException | None = None
    report_to: str = ""
    pipe: str = ""

    @property
    def point(self) -> str:
        """Name of the method at which it happens; "" for at once."""
        return self.at or self.after

    def __str__(self) -> str:
        facts = [str(self.rank)]
        facts += [str(self.seconds)] if self.kind == "slow" else []
        facts += [repr(self.error)] if self.kind == "raises" else []
        facts += [f"{name}={getattr(self, name)!r}" for name in ("at", "after") if getattr(self, name)]
        facts += [f"nth={self.nth}"] if self.nth != 1 else []
        return f"faults.{self.kind}({', '.join(facts)})"


class Unpicklable(Exception):
    """An exception that holds what no pickle can hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def hang_in_python() -> NoReturn:
    """Wait for an event that never comes; other threads of the process get their turns."""
    while True:
        threading.Event().wait()


def hang_in_c() -> NoReturn:
    """Never return, never give the interpreter to another thread, and let no signal handler end it.

    A sleep would end at the signal that asks for the stacks; a mutex that is locked twice goes on waiting.
    """
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    while True:
        libc.pthread_mutex_lock(mutex)


def misbehave(fault: Fault, value: Any = None) -> Any:
    """Report the fault, then commit it; one whose test is over does not happen.

    Returns:
        For those that go on: what the method is to return in place of `value`.
    """
    if not _report(fault):
        return value
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segv":
            signal.raise_signal(signal.SIGSEGV)
        case "hang":
            hang_in_python()
        case "hang_in_c":
            hang_in_c()
        case "slow":
            time.sleep(fault.seconds)
        case "raises":
            assert fault.error is not None
            raise fault.error
        case "unpicklable":
            if fault.after:
                return threading.Lock()
            raise Unpicklable(f"raised by {fault}")
    return value


async def misbehave_async(fault: Fault, value: Any = None) -> Any:
    """As `misbehave`; one that waits does so as a coroutine, so that the rank goes on serving others."""
    match fault.kind:
        case "hang":
            if _report(fault):
                await asyncio.Event().wait()
        case "slow":
            if _report(fault):
                await asyncio.sleep(fault.seconds)
        case _:
            return misbehave(fault, value)
    return value


def _report(fault: Fault) -> bool:
    """Tell the test; False if the test that gave the fault is over, and then it must not happen."""
    try:
        fd = os.open(fault.report_to, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != fault.pipe:  # the driver has another file of that number by now
            return False
        os.write(fd, f"{fault.number} {os.getpid()}\n".encode())
    finally:
        os.close(fd)
    return True
