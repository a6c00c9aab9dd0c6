"""One side of the RPC ends, fails, or is killed: who hears of it, and what is left."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
import zmq
from rpc_pairs import (
    BOUND_S,
    SERVER,
    OwnError,
    Sleeper,
    add,
    bounded,
    connected,
    count,
    raw_client,
    read_all,
    running_beside,
    serving,
    until,
)

from mpexec.errors import ConfigError, ConnectionLostError, WrongStateError
from mpexec.mp_engine import rpc_server
from mpexec.mp_engine.frames import (
    CLOSED,
    Call,
    Hello,
    box_error,
    dump_value,
    encode_arguments,
    encode_items,
    encode_requests,
)
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.rpc_server import AsyncRPCServer, when_caller_goes
from mpexec.mp_engine.sockets import SocketFolder

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


async def test_a_server_that_stops_ends_every_call_and_says_so(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    server = AsyncRPCServer(folder.address)
    server.register("sleep", sleeper.sleep)
    server.register("doze", sleeper.doze)
    await server.start_async()
    client = AsyncRPCClient(server.address)
    await client.start_async()
    works = [asyncio.ensure_future(client.call("sleep")) for _ in range(4)]
    works += [asyncio.ensure_future(read_all(client.stream("doze", 9, credit=credit))) for credit in (1, 64)]
    watching = asyncio.ensure_future(client.wait_tasks())
    await until(lambda: sleeper.begun == 6)
    await bounded(server.stop_async())
    assert sleeper.ended == 6
    for work in (*works, watching):
        with pytest.raises(ConnectionLostError, match="the server has closed"):
            await bounded(work)
    with pytest.raises(ConnectionLostError, match="the server has closed"):
        await bounded(client.call("sleep"))
    await client.stop_async()


async def test_calls_that_arrive_while_the_server_stops_are_not_begun(folder: SocketFolder) -> None:
    cleaning, go = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await go.wait()

    sleeper = Sleeper()
    server = AsyncRPCServer(folder.address)
    server.register("slow_to_end", slow_to_end)
    server.register("sleep", sleeper.sleep)
    await server.start_async()
    async with raw_client(server.address) as dealer:
        await dealer.send(encode_requests([Call(1, "slow_to_end", encode_arguments((), {}))]))
        await until(lambda: server.open_calls == 1)
        stopping = asyncio.ensure_future(server.stop_async())
        await bounded(cleaning.wait())
        await dealer.send(encode_requests([Call(2, "sleep", encode_arguments((), {})), Hello()]))
        kinds = [(await dealer.item())[0] for _ in range(3)]
        assert kinds == [CLOSED, CLOSED, CLOSED]
        go.set()
        await bounded(stopping)
    assert sleeper.begun == 0
    assert server.open_calls == 0


async def test_a_failure_that_is_told_reaches_every_call_stream_and_watcher_with_its_cause(
    folder: SocketFolder,
) -> None:
    sleeper = Sleeper()
    async with serving(folder, sleeper.sleep, sleeper.doze) as server:
        clients = [AsyncRPCClient(server.address) for _ in range(2)]
        works = []
        for client in clients:
            await client.start_async()
            works.append(asyncio.ensure_future(client.call("sleep")))
            works.append(asyncio.ensure_future(read_all(client.stream("doze", 5, credit=1))))
            works.append(asyncio.ensure_future(client.wait_tasks()))
        await until(lambda: sleeper.begun == 4)
        server.say_closed(OwnError(3, "the engine burns"))
        server.say_closed(KeyError("later"))
        errors = await bounded(asyncio.gather(*works, return_exceptions=True))
        for error in errors:
            assert type(error) is ConnectionLostError
            assert type(error.__cause__) is OwnError
            assert error.__cause__.args == (3, "the engine burns")
        late = AsyncRPCClient(server.address)  # who comes after it hears of it too
        with pytest.raises(ConnectionLostError) as caught:
            await bounded(late.start_async())
        assert type(caught.value.__cause__) is OwnError
        for client in clients:
            await client.stop_async()


async def test_last_words_are_heard_though_the_connection_ends_with_them(folder: SocketFolder) -> None:
    for _ in range(10):
        server = AsyncRPCServer(folder.address)
        await server.start_async()
        client = AsyncRPCClient(server.address)
        await client.start_async()
        server.say_closed(OwnError(1, "why"))
        await server.stop_async()
        with pytest.raises(ConnectionLostError) as caught:
            await bounded(client.wait_tasks())
        assert type(caught.value.__cause__) is OwnError
        await client.stop_async()


async def test_last_words_are_heard_though_the_end_of_the_connection_is_told_first(folder: SocketFolder) -> None:
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.bind(folder.address)
        client = AsyncRPCClient(folder.address)
        client.start()
        await until(lambda: router.poll(0) != 0)
        identity, _ = router.recv_multipart()
        words = dump_value(box_error(OwnError(2, "why")))
        router.send_multipart([identity, *encode_items([(CLOSED, 0, words)])])
        assert client._dealer._socket.poll(BOUND_S * 1000)  # it is there, and this loop has not looked
        client._on_disconnected()
    context.term()
    with pytest.raises(ConnectionLostError) as caught:
        await bounded(client.wait_tasks())
    assert type(caught.value.__cause__) is OwnError
    await client.stop_async()


async def test_a_method_may_hear_that_its_client_has_gone(folder: SocketFolder) -> None:
    gone: list[str] = []

    async def watch(name: str) -> None:
        when_caller_goes(lambda: gone.append(name))

    async with serving(folder, watch) as server, connected(server) as stays:
        await stays.call("watch", "stays")
        async with connected(server) as goes:
            await goes.call("watch", "goes")
        await until(lambda: gone)
        assert gone == ["goes"]


async def test_releasing_a_client_ends_its_calls_and_may_be_done_twice(folder: SocketFolder) -> None:
    async with serving(folder, hold) as server:
        client = AsyncRPCClient(server.address)
        await client.start_async()
        call = asyncio.create_task(client.call("hold"))
        await until(lambda: server.open_calls == 1)
        client.release()
        with pytest.raises(WrongStateError, match="released"):
            await bounded(call)
        client.release()
        await client.stop_async()


async def hold() -> None:
    await asyncio.Event().wait()


async def test_connecting_to_nobody_names_the_address(folder: SocketFolder) -> None:
    client = AsyncRPCClient(folder.address, connect_timeout=0.1)
    began = time.monotonic()
    with pytest.raises(ConnectionLostError, match=str(folder.path)):
        await bounded(client.start_async())
    assert 0.1 <= time.monotonic() - began < 2
    assert not client.running
    with pytest.raises(WrongStateError):
        await client.call("add", 1)


async def test_an_address_that_cannot_work_is_a_config_error(folder: SocketFolder) -> None:
    for address in (f"ipc://{folder.path}/{'x' * 200}", f"ipc://{folder.path}/missing/socket"):
        server = AsyncRPCServer(address)
        with pytest.raises(ConfigError, match="cannot listen"):
            await server.start_async()
        await server.stop_async()
    with pytest.raises(ConfigError, match="cannot connect"):
        await AsyncRPCClient(f"ipc://{folder.path}/{'x' * 200}").start_async()


# -- processes ---------------------------------------------------------------------------------------------------------


CLIENT = """
import asyncio, sys
from mpexec.mp_engine.rpc_client import AsyncRPCClient

async def main():
    client = AsyncRPCClient(sys.argv[1])
    await client.start_async()
    streams = [client.stream("doze", first, credit=2) for first in (1, 1000) for _ in range(8)]
    for stream in streams:
        await anext(stream)
    print("ready", flush=True)
    if sys.argv[2] == "read":
        async def read(stream):
            async for _ in stream:
                await asyncio.sleep(0)
        await asyncio.gather(*(read(client.stream("count", 10**9, credit=2)) for _ in range(8)))
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["idle", "read"])
async def test_the_streams_of_a_client_that_is_killed_end_within_a_second(folder: SocketFolder, what: str) -> None:
    sleeper = Sleeper()
    async with serving(folder, sleeper.doze, count, add) as server, connected(server) as bystander:
        async with running_beside(CLIENT, server.address, what) as process:
            await until(lambda: server.open_calls == (24 if what == "read" else 16))
            process.send_signal(signal.SIGKILL)
            await until(lambda: server.open_calls == 0, 1.0)
            assert sleeper.begun == sleeper.ended == 16
        assert await bounded(bystander.call("add", 1)) == 2
        async with connected(server) as client:
            assert await bounded(client.call("add", 2)) == 3


async def test_a_client_knows_for_how_long_the_server_has_left_it_without_a_word(folder: SocketFolder) -> None:
    go = asyncio.Event()

    async def hold_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await go.wait()

    async with serving(folder, add, hold_on) as server, connected(server) as client:
        assert client.silence is None
        call = asyncio.ensure_future(client.call("hold_on"))
        await until(lambda: server.open_calls == 1)
        await until(lambda: (client.silence or 0) > 0.02)
        call.cancel()
        await asyncio.wait([call])
        assert client.silence is not None, "a call that was given up waits for an answer, too"
        assert client.silence > 0.02
        since = time.monotonic()
        assert await bounded(client.call("add", 1)) == 2
        assert client.silence is not None
        assert client.silence <= time.monotonic() - since
        go.set()
        await until(lambda: client.silence is None)


@pytest.mark.parametrize("probes", [(), rpc_server._PROBE_AGAIN_S], ids=["told before", "told after"])
async def test_what_a_client_sent_before_it_went_is_not_left_running(
    folder: SocketFolder, monkeypatch: pytest.MonkeyPatch, probes: tuple[float, ...]
) -> None:
    """Its frames wait in the socket when the connection is already lost, and perhaps known to be."""
    monkeypatch.setattr(rpc_server, "_PROBE_AGAIN_S", probes)
    sleeper = Sleeper()
    async with serving(folder, sleeper.sleep, sleeper.doze) as server:
        for _ in range(5):
            context = zmq.Context()
            dealer = context.socket(zmq.DEALER)
            dealer.connect(server.address)
            for number in range(1, 400):
                method, args, credit = ("doze", (0,), 1) if number % 2 else ("sleep", (), None)
                dealer.send(encode_requests([Call(number, method, encode_arguments(args, {}), None, credit)]))
            dealer.close(1000)
            context.term()  # all is written, the connection is closed, and the server's loop has not run meanwhile
            if not probes:
                told, router = server._sockets._sockets[0], server._router._socket
                assert told._socket.poll(BOUND_S * 1000)
                told.read()
                first = router.recv_multipart()
                end = time.monotonic() + BOUND_S
                with pytest.raises(zmq.ZMQError, match="unreachable"):  # told just before the connection is taken down
                    while time.monotonic() < end:  # and this loop must not read on before it is
                        router.send_multipart([first[0], b""])
                server._on_message(first)
            for _ in range(50):  # all of it is read
                await asyncio.sleep(0)
            await until(lambda: server.open_calls == 0 and not server._peers, 2.0)
        assert sleeper.begun == sleeper.ended


async def test_all_hear_at_once_that_the_server_was_killed(folder: SocketFolder) -> None:
    async with running_beside(SERVER, folder.address) as process:
        client = AsyncRPCClient(folder.address)
        await client.start_async()
        streams = [client.stream("doze", first, credit=2) for first in (1, 1000) for _ in range(4)]
        for stream in streams:
            await bounded(anext(stream))
        works = [asyncio.ensure_future(client.call("sleep")) for _ in range(8)]
        works += [asyncio.ensure_future(read_all(stream)) for stream in streams[:4]]
        works.append(asyncio.ensure_future(client.wait_tasks()))
        await until(lambda: len(client._calls) == 16)
        process.send_signal(signal.SIGKILL)
        errors = await bounded(asyncio.gather(*works, return_exceptions=True), 1.0)
        errors += await bounded(asyncio.gather(*(read_all(s) for s in streams[4:]), return_exceptions=True), 1.0)
        assert [type(error) for error in errors] == [ConnectionLostError] * 17
        assert len({id(error) for error in errors}) == 17
        with pytest.raises(ConnectionLostError):
            await client.call("sleep")
        await bounded(client.stop_async())
