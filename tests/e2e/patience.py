"""How long a test waits for what is promised: longer while the machine has more to do than cores."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil


def is_overloaded() -> bool:
    """True while the machine has more to do than cores."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def within(seconds: float, stretch: float = 3.0) -> float:
    """The seconds of the contract; more by a factor on an overloaded machine."""
    return seconds * (stretch if is_overloaded() else 1)


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for what is told a moment later; fail if it is not."""
    deadline = time.monotonic() + within(seconds)
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


def alive(*pids: int) -> list[int]:
    """Those that still run. A zombie has ended: it is its new parent's to reap."""
    return [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def left_of(pids: Iterable[int], seconds: float) -> list[int]:
    """Those that have not ended within so many seconds."""
    give_up = time.monotonic() + seconds
    while (left := alive(*pids)) and time.monotonic() < give_up:
        time.sleep(0.01)
    return left
