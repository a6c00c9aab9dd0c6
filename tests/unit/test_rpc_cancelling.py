"""Calls and streams of the RPC that end before they are done: by deadline, by cancellation."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest
import zmq
from rpc_pairs import Sleeper, add_async, bounded, count, pair, raw_client, read_all, serving, until

from mpexec.errors import RPCTimeoutError
from mpexec.mp_engine.frames import (
    CANCELLED,
    FAILED,
    REPLY,
    Call,
    Cancel,
    Hello,
    decode_requests,
    dump_value,
    encode_arguments,
    encode_items,
    encode_requests,
    load_value,
)
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.sockets import SocketFolder

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


async def test_a_deadline_ends_the_call_on_both_sides(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    async with pair(folder, sleeper.sleep, sleeper.doze) as (server, client):
        with pytest.raises(RPCTimeoutError, match=r"'sleep' was not done within 0\.05 s") as caught:
            await bounded(client.call("sleep", timeout=0.05))
        assert caught.value.method == "sleep"
        got = []
        with pytest.raises(RPCTimeoutError, match="'doze'"):
            async for item in client.stream("doze", 2, timeout=0.05):
                got.append(item)
        assert got == [0, 1]
        await until(lambda: server.open_calls == 0 and client.unacknowledged == 0)
        assert (sleeper.begun, sleeper.ended) == (2, 2)


@pytest.mark.parametrize("first", ["deadline", "cancel"])
async def test_a_clean_up_is_cut_short_neither_by_nor_after_the_deadline(folder: SocketFolder, first: str) -> None:
    begun, cleaning, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    cleaned = 0

    async def work() -> None:
        nonlocal cleaned
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await go_on.wait()
            cleaned += 1

    async with serving(folder, work) as server, raw_client(server.address) as dealer:
        await dealer.send(encode_requests([Call(1, "work", encode_arguments((), {}), timeout=0.05)]))
        await bounded(begun.wait())
        if first == "cancel":
            await dealer.send(encode_requests([Cancel(1)]))
        await bounded(cleaning.wait())
        if first == "deadline":
            await dealer.send(encode_requests([Cancel(1)]))
            (call,) = server._calls
            await until(lambda: call.cancelled)
        else:
            await asyncio.sleep(0.1)  # time itself is what must not matter: the deadline passes meanwhile
        go_on.set()
        kind, call_id = 0, 0
        while call_id != 1:
            kind, call_id, _ = await dealer.item()
        assert (kind, cleaned) == (CANCELLED, 1)


async def test_the_server_keeps_the_deadline_also_of_a_client_that_does_not(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    async with serving(folder, sleeper.sleep, sleeper.doze) as server, raw_client(server.address) as dealer:
        calls = [
            Call(1, "sleep", encode_arguments((), {}), timeout=0.02),
            Call(2, "doze", encode_arguments((9,), {}), timeout=0.02, credit=3),
        ]
        await dealer.send(encode_requests(calls))
        last = {}
        while len(last) < 2:
            kind, call_id, payload = await dealer.item()
            if kind == FAILED:
                last[call_id] = load_value(payload).type_name
        assert last == {1: "RPCTimeoutError", 2: "RPCTimeoutError"}
        assert sleeper.ended == 2
        assert server.open_calls == 0


async def test_a_timeout_of_the_method_itself_is_no_deadline(folder: SocketFolder) -> None:
    async def impatient() -> None:
        raise TimeoutError("mine")

    async with pair(folder, impatient) as (_, client):
        with pytest.raises(TimeoutError, match="mine") as caught:
            await bounded(client.call("impatient", timeout=10))
        assert type(caught.value) is TimeoutError


async def test_cancelling_the_await_cancels_the_task_and_is_acknowledged(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    async with pair(folder, sleeper.sleep) as (server, client):
        calling = asyncio.ensure_future(client.call("sleep"))
        await until(lambda: sleeper.begun == 1)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert client.unacknowledged == 1
        await until(lambda: client.unacknowledged == 0)
        assert sleeper.ended == 1  # its clean-up has run
        assert server.open_calls == 0
        assert client.late == 0


async def test_a_call_that_is_cancelled_before_it_has_begun_leaves_nothing(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    async with pair(folder, sleeper.sleep, sleeper.doze) as (server, client):
        for turns in range(4):
            calling = asyncio.ensure_future(client.call("sleep"))
            streaming = asyncio.ensure_future(anext(client.stream("doze", 0)))
            for _ in range(turns):
                await asyncio.sleep(0)
            calling.cancel()
            streaming.cancel()
            await asyncio.gather(calling, streaming, return_exceptions=True)
            await until(lambda: client.unacknowledged == 0)
            assert server.open_calls == 0
            assert sleeper.begun == sleeper.ended
        gc.collect()  # would tell of coroutines that were never awaited


async def test_a_method_that_turns_its_cancellation_into_a_value_is_acknowledged(folder: SocketFolder) -> None:
    begun = asyncio.Event()

    async def stubborn() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "nevertheless"
        raise AssertionError

    async with pair(folder, stubborn) as (_, client):
        calling = asyncio.ensure_future(client.call("stubborn"))
        await bounded(begun.wait())
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await until(lambda: client.unacknowledged == 0)
        assert client.late == 0


async def test_an_answer_that_nobody_waits_for_is_counted_and_acknowledges_nothing(folder: SocketFolder) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(folder.address)

        async def heard() -> Any:
            await until(lambda: router.poll(0) != 0)
            return router.recv_multipart()

        client = AsyncRPCClient(folder.address)
        client.start()
        calling = asyncio.ensure_future(client.call("answer"))
        identity, frame = await heard()
        assert decode_requests(frame) == [Hello()]
        assert decode_requests((await heard())[1]) == [Call(1, "answer", encode_arguments((), {}))]
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert decode_requests((await heard())[1]) == [Cancel(1)]
        router.send_multipart([identity, *encode_items([(REPLY, 1, dump_value(5))])])
        await until(lambda: client.late == 1)
        assert client.unacknowledged == 1
        router.send_multipart([identity, *encode_items([(CANCELLED, 1, b"")])])
        await until(lambda: client.unacknowledged == 0)
        assert client.late == 1
        await client.stop_async()


@pytest.mark.parametrize("way", ["closed", "left", "collected", "cancelled"])
async def test_a_stream_that_nobody_reads_any_more_ends_on_the_server(folder: SocketFolder, way: str) -> None:
    sleeper = Sleeper()
    async with pair(folder, sleeper.doze) as (server, client):
        for first, credit in ((3, 64), (1000, 2)):  # one waits in the method, one for credit
            stream = client.stream("doze", first, credit=credit)
            if way == "left":
                async for _ in stream:
                    break
            elif way == "cancelled":
                reading = asyncio.ensure_future(read_all(stream))
                await until(lambda: sleeper.begun > sleeper.ended)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            else:
                await bounded(anext(stream))
                if way == "closed":
                    await stream.aclose()
            del stream
            gc.collect()
            await until(lambda: server.open_calls == 0 and client.unacknowledged == 0)
            assert sleeper.begun == sleeper.ended
            assert not client._calls


async def test_cancelling_at_any_moment_leaves_nothing(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    dice = random.Random(11)
    async with pair(folder, sleeper.sleep, sleeper.doze, count, add_async) as (server, client):
        for _ in range(50):
            works = [
                asyncio.ensure_future(client.call("sleep", timeout=dice.choice([None, 5.0]))),
                asyncio.ensure_future(client.call("add_async", 1)),
                asyncio.ensure_future(read_all(client.stream("count", 200, credit=dice.choice([1, 3, 64])))),
                asyncio.ensure_future(read_all(client.stream("doze", 20, credit=dice.choice([1, 3, 64])))),
            ]
            if dice.random() < 0.5:
                for _ in range(dice.randrange(60)):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(dice.random() * 0.004)
            for work in dice.sample(works, 4):
                work.cancel()
            await bounded(asyncio.wait(works))
        await until(lambda: server.open_calls == 0 and client.unacknowledged == 0)
        assert sleeper.begun == sleeper.ended
        assert not client._calls
        assert not next(iter(server._peers.values())).calls
