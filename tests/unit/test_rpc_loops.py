"""The RPC on event loops: which one serves, what a stop leaves, and that none is ever blocked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import zmq
from rpc_pairs import (
    SERVER,
    Sleeper,
    add,
    bounded,
    connected,
    count,
    echo,
    pair,
    raw_client,
    read_all,
    running,
    serving,
    until,
)

from mpexec.errors import ConnectionLostError, TaskEndedError, WrongStateError
from mpexec.mp_engine.frames import Call, encode_arguments, encode_requests
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.rpc_server import AsyncRPCServer
from mpexec.mp_engine.sockets import SocketFolder

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


async def test_starting_and_stopping_leaves_nothing(folder: SocketFolder) -> None:
    async def cycle() -> None:
        sleeper = Sleeper()
        server = AsyncRPCServer(folder.address)
        server.register("sleep", sleeper.sleep)
        server.register("count", count)
        await server.start_async()
        client = AsyncRPCClient(folder.address)
        await client.start_async()
        sleeping = asyncio.ensure_future(client.call("sleep"))
        stream = client.stream("count", 100, credit=2)
        await bounded(anext(stream))
        await bounded(client.stop_async())
        with pytest.raises(WrongStateError, match="stopped"):
            await sleeping
        with pytest.raises(WrongStateError, match="stopped"):
            await read_all(stream)
        await bounded(server.stop_async())
        assert server.open_calls == 0
        assert sleeper.begun == sleeper.ended

    await cycle()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(30):
        await cycle()
    gc.collect()
    # A thread of libzmq that has been joined may stay in the list for a moment.
    await until(lambda: (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) <= before)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_both_event_loops_serve(folder: SocketFolder, kind: str) -> None:
    factory = pytest.importorskip("uvloop").new_event_loop if kind == "uvloop" else asyncio.new_event_loop
    sleeper = Sleeper()

    async def scenario() -> None:
        async with serving(folder, add, count, sleeper.sleep, echo) as server:
            async with connected(server) as client:
                assert await bounded(client.call("add", 1)) == 2
                assert await read_all(client.stream("count", 3000)) == 3000
                assert await bounded(client.call("echo", bytes(3_000_000))) == bytes(3_000_000)
                calling = asyncio.ensure_future(client.call("sleep"))
                await until(lambda: sleeper.begun > sleeper.ended)
                calling.cancel()
                await asyncio.gather(calling, return_exceptions=True)
                await until(lambda: client.unacknowledged == 0)
                watching = asyncio.ensure_future(client.wait_tasks())
                server.say_closed(ValueError("over"))
                with pytest.raises(ConnectionLostError, match="over"):
                    await bounded(watching)
        assert sleeper.begun == sleeper.ended

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(scenario())
        runner.run(scenario())


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "loop closed under it"])
def test_server_and_client_start_again_on_another_loop(folder: SocketFolder, stopped: bool) -> None:
    server, client = AsyncRPCServer(folder.address), AsyncRPCClient(folder.address)
    server.register("add", add)

    async def scenario() -> None:
        await server.start_async()
        await client.start_async()
        assert await bounded(client.call("add", 1)) == 2
        server.publish("something that is still to be sent when the loop ends")
        if stopped:
            await client.stop_async()
            await server.stop_async()

    for _ in range(3):
        asyncio.run(scenario())

    async def end() -> None:
        await client.start_async() if stopped else client.start()
        await client.stop_async()
        server.start()
        await server.stop_async()

    if not stopped:
        asyncio.run(end())


async def test_a_client_is_used_on_the_loop_on_which_it_was_started(folder: SocketFolder) -> None:
    async with pair(folder, add) as (_, client):
        errors = []

        def elsewhere() -> None:
            try:
                asyncio.run(client.call("add", 1))
            except WrongStateError as error:
                errors.append(error)

        await asyncio.to_thread(elsewhere)
        assert "call from there" in str(errors[0])
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_task_cancelled_from_outside_is_reported(folder: SocketFolder) -> None:
    async with serving(folder, add) as server:
        waiting = asyncio.ensure_future(server.wait_tasks())
        await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            if task.get_name() == "AsyncRPCServer.serve":
                task.cancel()
        with pytest.raises(TaskEndedError):
            await bounded(waiting)


# -- no loop is ever blocked -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def ticking(most: float) -> AsyncIterator[None]:
    """The loop takes a turn at least every `most` seconds of this block."""
    longest = 0.0
    last = time.monotonic()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.002)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    ticker = asyncio.ensure_future(tick())
    try:
        yield
        longest = max(longest, time.monotonic() - last)
    finally:
        ticker.cancel()
        await asyncio.wait({ticker})
    assert longest < most, f"the loop stood still for {longest:.3f} s"


async def test_closing_with_words_that_nobody_reads_blocks_no_loop(folder: SocketFolder) -> None:
    async def flood() -> AsyncGenerator[bytes, None]:
        while True:
            yield bytes(100_000)

    server = AsyncRPCServer(folder.address)
    server.register("flood", flood)
    await server.start_async()
    async with raw_client(server.address) as dealer:
        dealer.socket.setsockopt(zmq.RCVHWM, 1)
        await dealer.send(encode_requests([Call(1, "flood", encode_arguments((), {}), None, 500)]))
        await until(lambda: any(call.credit == 0 for call in server._calls))
        began = time.monotonic()
        async with ticking(0.4):  # the last words have half a second
            await bounded(server.stop_async())
        assert time.monotonic() - began < 3
        assert server.open_calls == 0


async def test_stopping_a_client_with_unsent_words_blocks_no_loop(folder: SocketFolder) -> None:
    with running(SERVER, folder.address) as process:
        client = AsyncRPCClient(folder.address)
        await client.start_async()
        process.send_signal(signal.SIGSTOP)
        works = [asyncio.ensure_future(client.call("sleep", bytes(1_000_000))) for _ in range(20)]
        await until(lambda: len(client._calls) == 20)
        async with ticking(0.4):
            works[0].cancel()
            await asyncio.wait(works[:1])
            await bounded(client.stop_async())
            for work in works[1:]:
                with pytest.raises(WrongStateError):
                    await work
        process.send_signal(signal.SIGCONT)


async def test_starting_stopping_and_failing_block_no_loop(folder: SocketFolder) -> None:
    async with ticking(0.4):
        async with pair(folder, add, count) as (server, client):
            assert await bounded(client.call("add", 1)) == 2
            await read_all(client.stream("count", 5000))
            server.say_closed(ValueError("x"))
            with pytest.raises(ConnectionLostError):
                await bounded(client.wait_tasks())
        with pytest.raises(ConnectionLostError):
            await AsyncRPCClient(folder.address, connect_timeout=0.05).start_async()
