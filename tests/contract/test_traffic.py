"""MPExecutor under load: more than eight ranks, messages beyond the ring, slow readers, rings full on both sides."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from contract.agents import Agent, pin
from contract.conftest import InThread, build, in_time, until
from mpexec import Executor

RING = 65536
Make = Callable[..., Any]


@pytest.fixture
def small(make_executor: Make) -> Executor:
    """An executor whose rings are as small as they may be."""
    executor: Executor = make_executor(Agent, ring_bytes=RING)
    executor.start()
    return executor


# F062
@pytest.mark.parametrize("world_size", [1, 4, 8, 9, 16])
def test_every_rank_hears_every_call_in_worlds_of_any_size(world_size: int) -> None:
    with build("mp", world_size=world_size, start_method="spawn" if world_size == 9 else "forkserver") as executor:
        ranks = list(range(world_size))
        assert executor.collective_rpc("where") == ranks
        for number in range(50):
            executor.notify("note", (number,))
        assert executor.collective_rpc("take_log") == [list(range(50))] * world_size
        assert executor.collective_rpc("where", ranks=ranks[-1]) == ranks[-1:]
        parts = [(rank,) for rank in ranks]
        assert executor.collective_rpc("echo", args_per_rank=parts) == ranks
        assert len(executor.pids) == len(set(executor.pids)) == world_size
        array = np.arange(50_000)
        assert executor.collective_rpc("checksum", (array,)) == [zlib.crc32(array)] * world_size


# F043
def test_ten_thousand_calls_of_random_sizes_arrive_in_order_and_whole_at_a_slow_rank(small: Executor) -> None:
    random_ = random.Random(43)
    stock = random_.randbytes(4 * RING)
    for index in range(10_000):
        size = int(2 ** random_.uniform(0, 17.58))  # one byte to three times the ring, small ones more often
        start = random_.randrange(RING)
        data = stock[start : start + size]
        small.notify("keep_checksum", (index, data, zlib.crc32(data)))
    assert small.collective_rpc("take_log", timeout=60) == [list(range(10_000))] * 2


def test_messages_larger_than_the_ring_go_both_ways(small: Executor) -> None:
    for size in (RING // 4 - 100, RING // 4, RING, 3 * RING, 100 * RING):
        data = random.Random(size).randbytes(size)
        assert small.collective_rpc("echo", (data,)) == [data, data]


def test_a_rank_that_sleeps_for_long_does_not_keep_the_driver_from_handing_over_calls(
    small: Executor, go: Path
) -> None:
    small.notify("wait_for_file", (str(go),))
    data = bytes(13_000)  # each one needs a slot
    for index in range(9_000):
        small.notify("keep_checksum", (index + 1, data, zlib.crc32(data)))
    go.touch()
    assert small.collective_rpc("take_log", timeout=60, reply_ranks=0)[1:] == list(range(1, 9_001))


def test_a_full_call_ring_and_full_reply_rings_do_not_deadlock(small: Executor) -> None:
    """Calls in flight fill the call ring, their replies fill the reply rings, and everybody waits for room."""
    data = bytes(12_000)
    futures = [small.submit_rpc("echo", (data,)) for _ in range(300)]
    threads = [InThread(lambda: [small.collective_rpc("echo", (data,)) for _ in range(50)]) for _ in range(3)]

    async def tasks() -> None:
        await asyncio.gather(*(small.collective_rpc_async("echo", (data,)) for _ in range(100)))

    threads.append(InThread(lambda: asyncio.run(tasks())))
    for future in futures:
        assert future.result(60) == [data, data]
    for thread in threads:
        thread.result(60)


def test_replies_of_a_rank_that_answers_faster_than_anybody_listens_are_kept_in_order(small: Executor) -> None:
    async def main() -> list[Any]:
        calls = [asyncio.ensure_future(small.collective_rpc_async("big", (20_000, n % 256))) for n in range(200)]
        await asyncio.sleep(0)
        blocked = small.submit_rpc("doze", (0.2,))
        blocked.result(20)  # blocks the loop, on purpose
        return list(await asyncio.gather(*calls))

    for number, values in enumerate(asyncio.run(in_time(main(), 60))):
        assert values == [bytes([number % 256]) * 20_000] * 2


def test_a_loop_that_is_held_up_keeps_nobody_else_waiting(small: Executor) -> None:
    """It is held up at every stage of its own call: before, while it looks for the reply, and asleep."""
    others: list[Callable[[], Any]] = [
        lambda: small.submit_rpc("doze", (0.02, 1), reply_ranks=0).result(20),
        lambda: asyncio.run(small.collective_rpc_async("doze", (0.02, 1), reply_ranks=0)),
        lambda: small.collective_rpc("doze", (0.02, 1), reply_ranks=0),
    ]
    for number, turns in enumerate((0, 1, 3, 30, 100)):
        for kind, other in enumerate(others):
            name = f"{number} {kind}"

            async def main(turns: int = turns, name: str = name, other: Callable[[], Any] = other) -> Any:
                call = asyncio.ensure_future(small.collective_rpc_async("hold", (name,)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                value = InThread(other).result()  # blocks this loop, on purpose
                await small.collective_rpc_async("let_go", (name,))
                await call
                return value

            assert asyncio.run(main()) == 1


@pytest.mark.parametrize("policy", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_thousands_of_calls_from_one_loop(small: Executor, policy: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        for batch in range(20):
            numbers = range(batch * 100, batch * 100 + 100)
            calls = (small.collective_rpc_async("echo", (number,), reply_ranks=1) for number in numbers)
            assert await asyncio.gather(*calls) == list(numbers)

    with asyncio.Runner(loop_factory=policy) as runner:
        runner.run(in_time(main(), 60))


def test_a_call_after_an_idle_while_finds_the_ranks(small: Executor) -> None:
    until(lambda: small.describe()["ranks"][0]["method"] is None)
    for pause in (0.0, 0.001, 0.02, 0.3):
        small.collective_rpc("doze", (pause,))
        assert small.collective_rpc("where", timeout=20) == [0, 1]
        small.submit_rpc("doze", (pause,)).result(20)
        assert asyncio.run(small.collective_rpc_async("where", timeout=20)) == [0, 1]


# F061
def test_more_ranks_than_cores_make_progress(make_executor: Make) -> None:
    executor = make_executor(Agent, world_size=4)
    cores = os.sched_getaffinity(0)
    core = min(cores)
    executor.collective_rpc(pin, (core,))
    try:
        os.sched_setaffinity(0, {core})
        payload = bytes(1024)
        for number in range(1000):
            assert executor.collective_rpc("echo", ((number, payload),), timeout=30) == [(number, payload)] * 4
    finally:
        os.sched_setaffinity(0, cores)


def test_two_executors_at_once_keep_their_calls_apart(make_executor: Make) -> None:
    first, second = make_executor(Agent), make_executor(Agent, world_size=3)

    async def main() -> None:
        calls = []
        for number in range(100):
            calls += [first.collective_rpc_async("echo", (number,)), second.collective_rpc_async("echo", (-number,))]
        values = await asyncio.gather(*calls)
        assert values == [v for n in range(100) for v in ([n] * 2, [-n] * 3)]

    asyncio.run(main())
    assert set(first.pids).isdisjoint(second.pids)
    first.release()
    assert second.collective_rpc("where") == [0, 1, 2]


# F124
def test_an_executor_that_nobody_refers_to_is_released() -> None:
    executor = build("mp", start_method="forkserver")
    pids = executor.pids
    executor.collective_rpc("where")
    del executor
    gc.collect()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the end of the forgotten ranks")
