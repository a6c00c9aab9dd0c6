"""The RPC over TCP: who may connect, and how a lost network is noticed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from rpc_pairs import Sleeper, add, bounded, count, raw_client, read_all, until

from mpexec.errors import ConfigError, ConnectionLostError, WrongStateError
from mpexec.mp_engine import sockets
from mpexec.mp_engine.frames import Call, Hello, encode_arguments, encode_requests
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.rpc_server import AsyncRPCServer
from mpexec.mp_engine.sockets import ClientKeys, make_keys

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


async def test_tcp_without_keys_is_refused_before_anything_is_opened() -> None:
    for make in (AsyncRPCServer, AsyncRPCClient):
        with pytest.raises(ConfigError, match="CURVE"):
            make("tcp://127.0.0.1:0")


async def test_tcp_with_keys_serves_and_ends_like_a_unix_socket() -> None:
    server_keys, client_keys = make_keys()
    sleeper = Sleeper()
    server = AsyncRPCServer("tcp://127.0.0.1:*", keys=server_keys)
    for function in (add, count, sleeper.sleep):
        server.register(function.__name__, function)
    await server.start_async()
    client = AsyncRPCClient(server.address, keys=client_keys)
    await bounded(client.start_async())
    assert await bounded(client.call("add", 1)) == 2
    assert await bounded(read_all(client.stream("count", 1000))) == 1000
    sleeping = asyncio.ensure_future(client.call("sleep"))
    await until(lambda: sleeper.begun == 1)
    await bounded(client.stop_async())
    with pytest.raises(WrongStateError):
        await sleeping
    await until(lambda: server.open_calls == 0)  # the lost connection is noticed
    await bounded(client.start_async())
    waiting = asyncio.ensure_future(client.wait_tasks())
    await bounded(server.stop_async())
    with pytest.raises(ConnectionLostError):
        await bounded(waiting)
    await bounded(client.stop_async())


async def test_both_sides_notice_over_tcp_that_the_network_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_HEARTBEAT_MS", 50)
    monkeypatch.setattr(sockets, "_SILENCE_MS", 300)
    server_keys, client_keys = make_keys()
    sleeper = Sleeper()
    server = AsyncRPCServer("tcp://127.0.0.1:*", keys=server_keys)
    server.register("sleep", sleeper.sleep)
    await server.start_async()
    works: list[asyncio.Task[None]] = []
    silent = False

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                if not silent:
                    writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))
        works.append(asyncio.ensure_future(forward(reader, there[1])))
        works.append(asyncio.ensure_future(forward(there[0], writer)))

    network = await asyncio.start_server(accept, "127.0.0.1", 0)
    client = AsyncRPCClient(f"tcp://127.0.0.1:{network.sockets[0].getsockname()[1]}", keys=client_keys)
    await bounded(client.start_async())
    sleeping = asyncio.ensure_future(client.call("sleep"))
    await until(lambda: sleeper.begun == 1)
    silent = True
    with pytest.raises(ConnectionLostError):
        await bounded(sleeping)
    await until(lambda: server.open_calls == 0)
    assert sleeper.ended == 1
    await client.stop_async()
    await server.stop_async()
    network.close()
    await bounded(asyncio.gather(*works, return_exceptions=True))


async def test_nobody_without_a_known_key_can_call_anything() -> None:
    server_keys, client_keys = make_keys()
    called = []
    server = AsyncRPCServer("tcp://127.0.0.1:*", keys=server_keys)
    server.register("call", lambda: called.append(1))
    await server.start_async()
    _, strange = make_keys()
    unknown = ClientKeys(strange.public, strange.secret, client_keys.server)
    for keys in (unknown, strange):  # one that the server does not know; one who takes it for another server
        client = AsyncRPCClient(server.address, keys=keys, connect_timeout=0.5)
        with pytest.raises(ConnectionLostError):
            await bounded(client.start_async())
        assert not client.running
    async with raw_client(server.address) as dealer:
        await dealer.send(encode_requests([Hello(), Call(1, "call", encode_arguments((), {}))]))
        with pytest.raises(TimeoutError):
            await bounded(dealer.item(), 0.3)
    assert not server._peers
    known = AsyncRPCClient(server.address, keys=client_keys)
    await bounded(known.start_async())
    await bounded(known.call("call"))
    await bounded(known.stop_async())
    await bounded(server.stop_async())
    assert called == [1]


async def test_a_client_does_not_believe_a_server_without_the_secret_key() -> None:
    server_keys, client_keys = make_keys()
    other_keys, _ = make_keys()
    impostor = AsyncRPCServer(
        "tcp://127.0.0.1:*", keys=type(server_keys)(other_keys.public, other_keys.secret, server_keys.clients)
    )
    await impostor.start_async()
    client = AsyncRPCClient(impostor.address, keys=client_keys, connect_timeout=0.5)
    with pytest.raises(ConnectionLostError):
        await bounded(client.start_async())
    await impostor.stop_async()
