"""CPU that driver and two ranks use while nobody calls."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.bench import fresh
from tests.bench.agents import TorchAgent
from tests.bench.settings import Settings
from tests.bench.stats import Row

FIRST_SECOND_BAR = 0.5  # percent of a core
IDLE_BAR = 0.1
WAITERS = {"thread": "the driver sleeps", "loop": "the driver awaits wait_tasks"}

Figures = dict[str, float]


def run(settings: Settings) -> list[Row]:
    """Both kinds of waiting; all repeats at once, because each counts the CPU of its own processes only."""
    settings.say("idle")
    start_at = time.time() + (8.0 if settings.quick else 20.0)  # by then all ranks are up
    every = [{"waiter": waiter, "start_at": start_at} for waiter in WAITERS for _ in range(settings.repeats)]
    results = fresh.call_together(drive, every)
    rows = []
    for waiter, text in WAITERS.items():
        figures = [result for result, arguments in zip(results, every, strict=True) if arguments["waiter"] == waiter]
        for key, bar in (("first second", FIRST_SECOND_BAR), ("5 s, from 2 s on", IDLE_BAR)):
            rows.append(Row(f"{key}, {text}", [f[key] for f in figures], "% of a core", bar=bar, kind="value"))
    return rows


# -- in the driver processes ---------------------------------------------------------------------------------------


def drive(waiter: str, start_at: float) -> Figures:
    """Percent of a core in the first second after a call, and in 5 s that begin 2 s after it."""
    from mpexec import MPExecutor

    with MPExecutor(TorchAgent, world_size=2, start_method="forkserver") as executor:
        for number in range(200):
            executor.collective_rpc("echo", (number,))
        time.sleep(max(0.0, start_at - time.time()))
        if waiter == "loop":
            return asyncio.run(_on_loop(executor))
        executor.collective_rpc("echo", (1,))
        marks = [_cpu_seconds(executor)]
        for seconds in (1.0, 1.0, 5.0):
            time.sleep(seconds)
            marks.append(_cpu_seconds(executor))
        return _percent(marks)


async def _on_loop(executor: Any) -> Figures:
    waiting = asyncio.create_task(executor.wait_tasks())
    await asyncio.sleep(0.01)
    await executor.collective_rpc_async("echo", (1,))
    marks = [_cpu_seconds(executor)]
    for seconds in (1.0, 1.0, 5.0):
        await asyncio.sleep(seconds)
        marks.append(_cpu_seconds(executor))
    await executor.stop_async()
    await waiting
    return _percent(marks)


def _cpu_seconds(executor: Any) -> float:
    """CPU time of the driver and all ranks, every thread of theirs, to the nanosecond."""
    ranks = sum(time.clock_gettime(_clock_of(pid)) for pid in executor.pids)
    return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) + ranks


def _clock_of(pid: int) -> int:
    """The number of another process's CPU clock; see clock_getcpuclockid(3)."""
    return (~pid << 3) | 2


def _percent(marks: list[float]) -> Figures:
    return {"first second": (marks[1] - marks[0]) * 100, "5 s, from 2 s on": (marks[3] - marks[2]) * 20}
