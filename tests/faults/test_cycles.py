"""Made, used and released again and again in one process: nothing grows."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import threading
from collections.abc import Callable
from typing import Any

import leaks
import pytest
from faults.agents import FaultyAgent, HostAgent

from mpexec import WorkerDiedError

CYCLES = 50
WARM_UP = 5
Make = Callable[..., Any]


def _count() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for _ in maps)
    return {
        "descriptors": len(leaks.open_descriptors()),
        "threads": threading.active_count(),
        "tasks of the kernel": len(os.listdir("/proc/self/task")),
        "children": len(leaks.children_of(os.getpid())),
        "memory maps": mappings,
    }


def check_flat(cycle: Callable[[], None], cycles: int = CYCLES) -> None:
    """Nothing is more after the last cycle than it was at most in the five after the warm-up.

    The allocator may map a few areas more for itself, so memory maps may grow by one in ten cycles.
    """
    for _ in range(WARM_UP):
        cycle()
    before = _count()
    for _ in range(WARM_UP):
        cycle()
        before = {name: max(count, before[name]) for name, count in _count().items()}
    for _ in range(cycles - 2 * WARM_UP):
        cycle()
    after = _count()
    spare = {"memory maps": cycles // 10}
    grown = {name: (before[name], after[name]) for name in after if after[name] > before[name] + spare.get(name, 0)}
    assert not grown, f"(before, after): {grown}"


@pytest.mark.slow
@pytest.mark.spawn
def test_fifty_cycles_with_spawned_ranks_leave_all_counts_flat(make_executor: Make) -> None:  # F082
    def cycle() -> None:
        executor = make_executor(HostAgent, start_method="spawn")
        assert executor.collective_rpc("echo", args=(1,)) == [(1, 0), (1, 1)]
        executor.release()

    check_flat(cycle)


def test_fifty_cycles_with_forked_ranks_leave_all_counts_flat(make_executor: Make) -> None:  # F082
    def cycle() -> None:
        executor = make_executor(HostAgent)
        values = executor.collective_rpc("echo", args=(bytes(1 << 20),))  # large enough for the pools
        assert [rank for _, rank in values] == [0, 1]
        executor.release()

    check_flat(cycle)


def test_fifty_cycles_on_event_loops_leave_all_counts_flat(make_executor: Make) -> None:  # F082, F116
    async def life() -> None:
        async with make_executor(HostAgent) as executor:
            waiting = asyncio.ensure_future(executor.wait_tasks())
            assert await executor.collective_rpc_async("echo", args=(1,)) == [(1, 0), (1, 1)]
            await executor.stop_async()
            await waiting

    check_flat(lambda: asyncio.run(life()))


def test_twenty_deaths_leave_all_counts_flat(make_executor: Make) -> None:
    def cycle() -> None:
        executor = make_executor(FaultyAgent, agent_args=(1, "sigkill"))
        with pytest.raises(WorkerDiedError):
            executor.collective_rpc("in_sync_method")
        executor.release()

    check_flat(cycle, 20)


def test_large_values_that_are_dropped_give_their_memory_back(make_executor: Make) -> None:
    executor = make_executor(HostAgent)

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    for _ in range(5):
        executor.collective_rpc("echo", args=(bytes(8 << 20),))
    before = resident()
    for _ in range(40):
        executor.collective_rpc("echo", args=(bytes(8 << 20),))
    assert resident() - before < 64 << 20
