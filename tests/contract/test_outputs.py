"""forward_async and get_output_async: in order, bounded, and ended by a failure or a stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from contract.agents import Agent, MyError, Stream
from contract.conftest import in_time, last_rank, only_apart, until_async
from mpexec import Executor, ExecutorStoppedError, SerializationError
from mpexec.executor.base import State

Fresh = Callable[..., Executor]


async def started(fresh: Fresh, **options: Any) -> Executor:
    executor = fresh(Stream, **options)
    await executor.start_async()
    return executor


async def test_outputs_come_in_the_order_of_the_inputs(fresh: Fresh) -> None:
    executor = await started(fresh)

    async def send() -> None:
        for number in range(200):
            await executor.forward_async(number)

    sending = asyncio.ensure_future(send())
    assert [await in_time(executor.get_output_async()) for _ in range(200)] == list(range(200))
    await sending
    seen = await executor.collective_rpc_async("inputs_seen", (200,), timeout=20)
    assert seen == [list(range(200))] * executor.world_size


async def test_several_waiters_take_outputs_in_the_order_in_which_they_asked(fresh: Fresh) -> None:
    executor = await started(fresh)
    takers = [asyncio.ensure_future(executor.get_output_async()) for _ in range(20)]
    await asyncio.sleep(0)
    for number in range(20):
        await executor.forward_async(number)
    assert await in_time(asyncio.gather(*takers)) == list(range(20))


async def test_none_is_an_output_like_any_other(fresh: Fresh) -> None:
    executor = await started(fresh)
    for value in (None, 1, None):
        await executor.forward_async(value)
    assert [await in_time(executor.get_output_async()) for _ in range(3)] == [None, 1, None]


async def test_an_input_that_is_sent_by_a_call_is_answered_though_no_output_follows(fresh: Fresh) -> None:
    executor = await started(fresh)
    nothing = [None] * executor.world_size
    began = time.monotonic()
    for _ in range(3):  # each wakes a caller that sleeps: the forward of the first never ends
        assert await executor.collective_rpc_async("set_forward_inputs", ("hold",), timeout=20) == nothing
        assert await asyncio.to_thread(executor.collective_rpc, "set_forward_inputs", (1,), timeout=20) == nothing
    assert time.monotonic() - began < 15.0, "the deadline woke a caller, not the answer"


async def test_inputs_wait_when_too_many_are_in_flight(fresh: Fresh) -> None:
    executor = await started(fresh, max_outputs=3)
    for number in range(3):
        await in_time(executor.forward_async(number))
    fourth = asyncio.ensure_future(executor.forward_async(3))
    await asyncio.sleep(0)
    await executor.collective_rpc_async("echo", (1,))
    assert not fourth.done()
    assert await in_time(executor.get_output_async()) == 0
    await in_time(fourth)
    assert [await in_time(executor.get_output_async()) for _ in range(3)] == [1, 2, 3]


async def test_a_cancelled_sender_gives_its_room_back(fresh: Fresh) -> None:
    executor = await started(fresh, max_outputs=1)
    await executor.forward_async(0)
    for turns in range(30):
        waiting = asyncio.ensure_future(executor.forward_async("cancelled"))
        await asyncio.sleep(0)
        taken = asyncio.ensure_future(executor.get_output_async())
        for _ in range(turns):
            await asyncio.sleep(0)
        sent = not waiting.cancel()
        try:
            await waiting
            sent = True
        except asyncio.CancelledError:
            pass
        await in_time(taken)
        if not sent:
            await in_time(executor.forward_async(turns))
    assert await in_time(executor.get_output_async()) is not None


async def test_a_cancelled_taker_loses_no_output(fresh: Fresh) -> None:
    executor = await started(fresh)
    got: list[int] = []
    for number in range(100):
        first = asyncio.ensure_future(executor.get_output_async())
        second = asyncio.ensure_future(executor.get_output_async())
        await asyncio.sleep(0)
        await executor.forward_async(number)
        for _ in range(number % 30):
            await asyncio.sleep(0)
        first.cancel()
        outcome = (await asyncio.gather(first, return_exceptions=True))[0]
        if not isinstance(outcome, asyncio.CancelledError):
            got.append(outcome)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            if not second.cancelled():
                got.append(second.result())
        else:
            got.append(await in_time(second))
    assert got == list(range(100))


async def test_a_failure_in_forward_ends_every_wait_with_that_error(fresh: Fresh) -> None:
    for rank in {0, last_rank(executor := await started(fresh, max_outputs=2))}:
        if executor.state is not State.RUNNING:
            executor = await started(fresh, max_outputs=2)
        takers = [asyncio.ensure_future(executor.get_output_async()) for _ in range(2)]
        await executor.forward_async(("fail", rank))
        outcomes = await in_time(asyncio.gather(*takers, executor.wait_tasks(), return_exceptions=True))
        kept = [outcome for outcome in outcomes if outcome != ("fail", rank)]  # rank 0 may have got through
        assert len(kept) >= 2
        assert all(type(outcome) is MyError and str(outcome) == f"forward on rank {rank}" for outcome in kept)
        with pytest.raises(MyError):
            await in_time(executor.get_output_async())
        with pytest.raises(MyError):
            await in_time(executor.forward_async(1))
        assert executor.state is State.STOPPED
        await executor.start_async()
        await executor.forward_async("again")
        assert await in_time(executor.get_output_async()) == "again"
        await executor.release_async()


async def test_stop_ends_every_wait(fresh: Fresh) -> None:
    executor = await started(fresh, max_outputs=1)
    await executor.forward_async("hold")
    sender = asyncio.ensure_future(executor.forward_async(1))
    taker = asyncio.ensure_future(executor.get_output_async())
    await asyncio.sleep(0)
    await executor.collective_rpc_async("echo", (1,))
    await executor.stop_async()
    for waiting in (sender, taker):
        with pytest.raises(ExecutorStoppedError):
            await in_time(waiting)
    with pytest.raises(ExecutorStoppedError):
        await in_time(executor.get_output_async())


async def test_after_a_stop_and_a_start_the_stream_begins_anew(fresh: Fresh) -> None:
    executor = await started(fresh, max_outputs=2)
    for _ in range(2):
        await executor.forward_async("old")
    await executor.stop_async()
    await executor.start_async()
    for number in range(2):
        await in_time(executor.forward_async(number))
    assert [await in_time(executor.get_output_async()) for _ in range(2)] == [0, 1]


async def test_outputs_reach_a_waiter_on_another_loop(fresh: Fresh) -> None:
    executor = await started(fresh)
    got: list[Any] = []

    async def take() -> None:
        for _ in range(50):
            got.append(await executor.get_output_async())

    thread = threading.Thread(target=lambda: asyncio.run(take()))
    thread.start()
    for number in range(50):
        await executor.forward_async(number)
    await asyncio.to_thread(thread.join, 20)
    assert got == list(range(50))


async def test_large_outputs_arrive_whole(fresh: Fresh) -> None:
    executor = await started(fresh, ring_bytes=65536)
    for number in range(5):
        await executor.forward_async(bytes([number]) * 300_000)
    for number in range(5):
        assert await in_time(executor.get_output_async()) == bytes([number]) * 300_000


async def test_an_agent_without_forward_fails_as_a_background_task(fresh: Fresh) -> None:
    executor = fresh(Agent)
    await executor.start_async()
    await executor.forward_async(1)
    with pytest.raises(RuntimeError, match="override forward"):
        await in_time(executor.wait_tasks())


@only_apart
async def test_an_input_that_cannot_be_pickled_keeps_no_room(fresh: Fresh) -> None:
    executor = await started(fresh, max_outputs=2)
    for _ in range(5):
        with pytest.raises(SerializationError):
            await in_time(executor.forward_async(threading.Lock()))
    await in_time(executor.forward_async(1))
    assert await in_time(executor.get_output_async()) == 1
    assert executor.state is State.RUNNING


@only_apart
async def test_an_output_that_cannot_be_pickled_is_a_background_failure(fresh: Fresh) -> None:
    executor = await started(fresh)
    await executor.forward_async("unpicklable")
    with pytest.raises(SerializationError, match="output"):
        await in_time(executor.get_output_async())
    with pytest.raises(SerializationError, match="output"):
        await in_time(executor.wait_tasks())
    await until_async(lambda: executor.state is State.STOPPED)
