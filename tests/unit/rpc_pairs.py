"""Servers, clients and strangers of the RPC, and methods for them, which its tests share."""

from __future__ import annotations

import asyncio
import contextlib
import select
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import zmq

from mpexec.mp_engine.frames import decode_items
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.rpc_server import AsyncRPCServer
from mpexec.mp_engine.sockets import SocketFolder

BOUND_S = 20.0


async def bounded(work: Any, seconds: float = BOUND_S) -> Any:
    async with asyncio.timeout(seconds):
        return await work


async def until(condition: Callable[[], bool], seconds: float = BOUND_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def serving(folder: SocketFolder, *functions: Callable[..., Any]) -> AsyncIterator[AsyncRPCServer]:
    """A server of these functions; whatever a test does, no call is left on it."""
    server = AsyncRPCServer(folder.address)
    for function in functions:
        server.register(function.__name__, function)
    await server.start_async()
    try:
        yield server
        await until(lambda: server.open_calls == 0)
    finally:
        await bounded(server.stop_async())


@contextlib.asynccontextmanager
async def connected(server: AsyncRPCServer) -> AsyncIterator[AsyncRPCClient]:
    client = AsyncRPCClient(server.address)
    await client.start_async()
    try:
        yield client
        assert not client._calls
        await until(lambda: client.unacknowledged == 0)
    finally:
        await bounded(client.stop_async())


@contextlib.asynccontextmanager
async def pair(folder: SocketFolder, *functions: Callable[..., Any]) -> AsyncIterator[Any]:
    async with serving(folder, *functions) as server, connected(server) as client:
        yield server, client


class Raw:
    """A DEALER that says whatever it likes."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._items: list[Any] = []

    async def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts, zmq.NOBLOCK)

    async def item(self) -> Any:
        """The next item that the server sends."""
        async with asyncio.timeout(BOUND_S):
            while not self._items:
                try:
                    payload = self.socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    await asyncio.sleep(0.001)
                else:
                    self._items += decode_items(payload) if payload else []
        return self._items.pop(0)


@contextlib.asynccontextmanager
async def raw_client(address: str) -> AsyncIterator[Raw]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    try:
        yield Raw(socket)
    finally:
        socket.close(0)
        context.term()


SERVER = """
import asyncio, sys
from mpexec.mp_engine.rpc_server import AsyncRPCServer

async def sleep():
    await asyncio.Event().wait()

async def doze(first: int):
    for number in range(first):
        yield number
    await asyncio.Event().wait()

async def main():
    server = AsyncRPCServer(sys.argv[1])
    server.register("sleep", sleep)
    server.register("doze", doze)
    await server.start_async()
    print("ready", flush=True)
    await server.wait_tasks()

asyncio.run(main())
"""


@contextlib.contextmanager
def running(program: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has said that it is ready."""
    process = subprocess.Popen([sys.executable, "-c", program, *args], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], BOUND_S * 2)[0]
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextlib.asynccontextmanager
async def running_beside(program: str, *args: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """As `running`, while this loop goes on."""
    scope = running(program, *args)
    process = await asyncio.to_thread(scope.__enter__)
    try:
        yield process
    finally:
        await asyncio.to_thread(scope.__exit__, None, None, None)
        await asyncio.get_running_loop().shutdown_default_executor()


async def read_all(stream: AsyncGenerator[Any, None]) -> int:
    taken = 0
    async with contextlib.aclosing(stream):
        async for _ in stream:
            taken += 1
            await asyncio.sleep(0)
    return taken


class Sleeper:
    """A method that waits until it is cancelled, and says what became of it."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0

    async def sleep(self) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended += 1

    async def doze(self, first: int = 1) -> AsyncGenerator[int, None]:
        self.begun += 1
        try:
            for number in range(first):
                yield number
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended += 1


async def count(to: int) -> AsyncGenerator[int, None]:
    for number in range(to):
        yield number


def add(a: int, b: int = 1) -> int:
    return a + b


async def add_async(a: int, b: int = 1) -> int:
    await asyncio.sleep(0)
    return a + b


def echo(value: Any) -> Any:
    return value


class OwnError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.extra = {"code": code}
