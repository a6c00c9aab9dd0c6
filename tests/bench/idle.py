"""CPU that driver and two ranks use while nobody calls."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tests.bench import fresh
from tests.bench.agents import EchoAgent, TorchAgent
from tests.bench.pipes import hear_each, spawned
from tests.bench.settings import Settings
from tests.bench.stats import Row

FIRST_SECOND_BAR = 0.5  # percent of a core
IDLE_BAR = 0.1
FIRST_SECOND, IDLE = "first second", "5 s, from 2 s on"
CASES = {
    "thread": "driver sleeps, no gloo",
    "thread gloo": "driver sleeps, gloo",
    "loop gloo": "driver awaits wait_tasks, gloo",
}

Figures = dict[str, float]


def run(settings: Settings) -> list[Row]:
    """All repeats at once, because each counts the CPU of its own processes only.

    A gloo group keeps a thread in each rank that wakes a hundred times a second, whoever made the group. What two bare
    processes with such a group use is the comparator of those rows; it is included in the figure of mpexec.
    """
    settings.say("idle")
    start_at = time.time() + 4.0 + 2.0 * settings.repeats  # by then all ranks should be up
    every: list[dict[str, Any]] = [
        {"case": case, "start_at": start_at} for case in CASES for _ in range(settings.repeats)
    ]
    every.append({"case": "bare gloo", "start_at": start_at})
    results = fresh.call_together(drive, every)
    bare = results[-1][IDLE]
    rows = []
    for case, text in CASES.items():
        figures = [result for result, arguments in zip(results, every, strict=True) if arguments["case"] == case]
        other = [bare] if "gloo" in case else []
        for key, bar in ((FIRST_SECOND, FIRST_SECOND_BAR), (IDLE, IDLE_BAR)):
            rows.append(Row(f"{key}, {text}", [f[key] for f in figures], "% of a core", other, bar, "value"))
    return rows


# -- in the driver processes ---------------------------------------------------------------------------------------


def drive(case: str, start_at: float) -> Figures:
    """Percent of a core in the first second after a call, and in 5 s that begin 2 s after it."""
    if case == "bare gloo":
        return _bare_gloo(start_at)
    from mpexec import MPExecutor

    gloo = "gloo" in case
    with MPExecutor(
        TorchAgent if gloo else EchoAgent,
        world_size=2,
        init_process_group=gloo,
        start_method="forkserver" if gloo else "spawn",
    ) as executor:
        for number in range(200):
            executor.collective_rpc("echo", (number,))
        time.sleep(max(0.0, start_at - time.time()))
        if case.startswith("loop"):
            return asyncio.run(_on_loop(executor))
        executor.collective_rpc("echo", (1,))
        return _watch(executor.pids)


def _watch(pids: Sequence[int]) -> Figures:
    marks = [_cpu_seconds(pids)]
    for seconds in (1.0, 1.0, 5.0):
        time.sleep(seconds)
        marks.append(_cpu_seconds(pids))
    return _percent(marks)


async def _on_loop(executor: Any) -> Figures:
    waiting = asyncio.create_task(executor.wait_tasks())
    await asyncio.sleep(0.01)
    await executor.collective_rpc_async("echo", (1,))
    marks = [_cpu_seconds(executor.pids)]
    for seconds in (1.0, 1.0, 5.0):
        await asyncio.sleep(seconds)
        marks.append(_cpu_seconds(executor.pids))
    await executor.stop_async()
    await waiting
    return _percent(marks)


def _bare_gloo(start_at: float) -> Figures:
    with (
        tempfile.TemporaryDirectory() as folder,
        spawned(join_gloo, *((f"{folder}/store", rank) for rank in range(2))) as pipes,
    ):
        pids = hear_each(pipes)
        time.sleep(max(0.0, start_at - time.time()))
        return _watch(pids)


def join_gloo(pipe: Any, store: str, rank: int) -> None:
    """What a bare child does: form a group with its peer, say so, and wait."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    pipe.send(os.getpid())
    pipe.recv()


def _cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of this process and those, every thread of theirs, to the nanosecond."""
    own = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
    return own + sum(time.clock_gettime(_clock_of(pid)) for pid in pids)


def _clock_of(pid: int) -> int:
    """The number of another process's CPU clock; see clock_getcpuclockid(3)."""
    return (~pid << 3) | 2


def _percent(marks: list[float]) -> Figures:
    return {FIRST_SECOND: (marks[1] - marks[0]) * 100, IDLE: (marks[3] - marks[2]) * 20}
