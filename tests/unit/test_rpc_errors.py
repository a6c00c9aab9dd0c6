"""What a method of the RPC raises, and what of it arrives where."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from rpc_pairs import OwnError, add, bounded, connected, count, pair, read_all, until

from mpexec.errors import QueueFullError, RemoteError, RemoteTraceback
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.rpc_server import AsyncRPCServer
from mpexec.mp_engine.sockets import SocketFolder

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


class GreedyError(Exception):
    """Demands arguments that its own pickle does not name."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class LockedError(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def _fail(kind: str) -> None:
    if kind == "own":
        error = OwnError(7, "seven")
        error.add_note("a note")
        raise error
    if kind == "chain":
        try:
            raise KeyError("root")
        except KeyError as root:
            raise ValueError("outer") from root
    if kind == "mpexec":
        raise QueueFullError("full", others=None) from LockedError()
    raise {"greedy": GreedyError(1, 2), "locked": LockedError(), "stop": StopAsyncIteration("over")}[kind]


async def _fail_async(kind: str) -> None:
    await asyncio.sleep(0)
    _fail(kind)


async def _fail_stream(kind: str) -> AsyncGenerator[int, None]:
    yield 1
    _fail(kind)


async def _error_of(client: AsyncRPCClient, method: str, *args: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        if method == "_fail_stream":
            async for _ in client.stream(method, *args):
                pass
        else:
            await bounded(client.call(method, *args))
    return caught.value


@pytest.mark.parametrize("method", ["_fail", "_fail_async", "_fail_stream"])
async def test_errors_arrive_as_the_objects_that_they_are(folder: SocketFolder, method: str) -> None:
    async with pair(folder, _fail, _fail_async, _fail_stream) as (_, client):
        own = await _error_of(client, method, "own")
        assert type(own) is OwnError
        assert own.args == (7, "seven")
        assert own.extra == {"code": 7}
        assert own.__notes__ == ["a note"]
        assert isinstance(own.__cause__, RemoteTraceback)
        assert "in _fail\n" in str(own.__cause__)

        outer = await _error_of(client, method, "chain")
        assert type(outer) is ValueError
        assert type(outer.__cause__) is KeyError
        assert outer.__cause__.args == ("root",)
        text = str(outer.__cause__.__cause__)
        assert "raise KeyError" in text
        assert "raise ValueError" in text

        full = await _error_of(client, method, "mpexec")  # of our own class, with a cause that cannot travel
        assert type(full) is QueueFullError
        assert isinstance(full.__cause__, RemoteError)
        assert full.__cause__.type_name == "LockedError"


@pytest.mark.parametrize("method", ["_fail", "_fail_async", "_fail_stream"])
async def test_an_error_that_cannot_travel_is_told_as_text(folder: SocketFolder, method: str) -> None:
    async with pair(folder, _fail, _fail_async, _fail_stream, add) as (_, client):
        for kind, type_name, text in (("greedy", "GreedyError", "1 and 2"), ("locked", "LockedError", "locked")):
            error = await _error_of(client, method, kind)
            assert type(error) is RemoteError
            assert error.type_name == type_name
            assert text in str(error)
            assert "in _fail\n" in str(error.__cause__)
        assert await bounded(client.call("add", 1)) == 2


async def test_two_callers_never_share_an_error(folder: SocketFolder) -> None:
    async with pair(folder, _fail) as (_, client):
        first, second = await _error_of(client, "_fail", "own"), await _error_of(client, "_fail", "own")
        assert first is not second


async def test_an_unknown_method_and_the_wrong_way_to_call_are_told_to_the_caller(folder: SocketFolder) -> None:
    async with pair(folder, add, count) as (_, client):
        with pytest.raises(AttributeError, match="subtract"):
            await bounded(client.call("subtract"))
        with pytest.raises(AttributeError, match="_drop"):
            await bounded(client.call("_drop"))
        with pytest.raises(TypeError, match="stream"):
            await bounded(client.call("count", 1))
        with pytest.raises(TypeError, match="stream"):
            await bounded(anext(client.stream("add", 1)))


async def test_a_method_that_cancels_itself_is_a_failure(folder: SocketFolder) -> None:
    async def cancels() -> None:
        raise asyncio.CancelledError("by itself")

    def cancels_at_once() -> None:
        raise asyncio.CancelledError("by itself")

    async with pair(folder, cancels, cancels_at_once) as (_, client):
        for name in ("cancels", "cancels_at_once"):
            with pytest.raises(RemoteError, match="CancelledError"):
                await bounded(client.call(name))


# -- what is no Exception ----------------------------------------------------------------------------------------------


def leave(code: int) -> None:
    raise SystemExit(code)


async def leave_async(code: int) -> None:
    await asyncio.sleep(0)
    raise SystemExit(code)


async def leave_stream(code: int) -> AsyncGenerator[int, None]:
    yield 1
    raise SystemExit(code)


@pytest.mark.parametrize("method", ["leave", "leave_async", "leave_stream"])
async def test_an_exit_in_a_method_reaches_its_caller_and_the_owner_of_the_server(
    folder: SocketFolder, method: str
) -> None:
    server = AsyncRPCServer(folder.address)
    for function in (leave, leave_async, leave_stream, add):
        server.register(function.__name__, function)
    await server.start_async()
    async with connected(server) as client:
        waiting = asyncio.ensure_future(_exit_of(server.wait_tasks()))
        with pytest.raises(RemoteError, match="SystemExit: 5"):
            if method == "leave_stream":
                await bounded(read_all(client.stream(method, 5)))
            else:
                await bounded(client.call(method, 5))
        assert await bounded(waiting) == 5
        assert await bounded(client.call("add", 1)) == 2  # it serves until its owner ends it
    await server.stop_async()


async def _exit_of(work: Any) -> Any:
    try:
        await work
    except SystemExit as leaving:
        return leaving.code
    return "no exit"


async def test_leaving_the_server_raises_the_exit_of_a_method(folder: SocketFolder) -> None:
    async def scope() -> None:
        async with AsyncRPCServer(folder.address) as server:
            server.register("leave", leave)
            async with connected(server) as client:
                with pytest.raises(RemoteError):
                    await bounded(client.call("leave", 6))
                await until(lambda: server._tasks is not None and server._tasks.failure is not None)

    assert await bounded(_exit_of(scope())) == 6
