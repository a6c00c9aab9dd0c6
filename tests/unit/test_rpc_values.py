"""What crosses the RPC: arguments, values and news, each as it was, or an error for its own call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
from rpc_pairs import add, add_async, bounded, connected, count, echo, pair, running_beside, serving, until

from mpexec.engine.sampling_params import SamplingParams
from mpexec.errors import ConfigError, RemoteError, SerializationError
from mpexec.mp_engine.frames import MAX_CREDIT, MAX_FRAME_BYTES
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.sockets import SocketFolder

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


async def test_functions_coroutines_and_generators_are_called_alike(folder: SocketFolder) -> None:
    async with pair(folder, add, add_async, count) as (_, client):
        assert await bounded(client.call("add", 2, b=3)) == 5
        assert await bounded(client.call("add_async", 2)) == 3
        assert [item async for item in client.stream("count", 5)] == [0, 1, 2, 3, 4]
        assert [item async for item in client.stream("count", 0)] == []


@dataclass(frozen=True)
class Point:
    x: int
    y: tuple[float, ...] = ()


class Odd:
    """Picklable, but not plain data."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


async def test_arguments_arrive_as_what_the_annotations_say(folder: SocketFolder) -> None:
    def kinds(
        point: Point, params: SamplingParams, *rest: tuple[int, int], data: bytes = b"", **more: Point
    ) -> tuple[Any, ...]:
        return point, params, rest, data, more

    async with pair(folder, kinds) as (_, client):
        point, params = Point(1, (2.0, 3.0)), SamplingParams(max_new_tokens=7, temperature=0.5)
        got = await bounded(client.call("kinds", point, params, [1, 2], [3, 4], data=b"\0\xff", z=Point(2)))
        assert got == (point, params, ((1, 2), (3, 4)), b"\0\xff", {"z": Point(2)})


async def test_arguments_that_do_not_fit_are_a_config_error_for_the_caller_alone(folder: SocketFolder) -> None:
    def take(params: SamplingParams, n: int = 0) -> None: ...

    async with pair(folder, take, add) as (server, client):
        for args, kwargs, why in (
            (({"temperature": -1},), {}, "temperature=-1"),
            (({"temperature": "hot"},), {}, "float"),
            ((SamplingParams(), "many"), {}, "int"),
            ((), {}, "params"),
            ((SamplingParams(),), {"unknown": 1}, "unknown"),
        ):
            with pytest.raises(ConfigError, match=why):
                await bounded(client.call("take", *args, **kwargs))
        assert await bounded(client.call("add", 1)) == 2
        assert server.refused == 0


async def test_arguments_that_are_not_plain_data_never_leave_the_caller(folder: SocketFolder) -> None:
    async with pair(folder, echo) as (server, client):
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        for bad in (Odd(), 1 << 80, deep, "\ud800", bytes(MAX_FRAME_BYTES)):
            with pytest.raises(SerializationError):
                await bounded(client.call("echo", bad))
        while deep:  # taken down by hand: so deep a list takes the stack with it
            deep = deep[0]
        assert await bounded(client.call("echo", 1)) == 1
        assert server.refused == 0


async def test_what_is_at_the_limits_of_a_frame_fails_its_own_call_at_most(folder: SocketFolder) -> None:
    """A timeout beyond all clocks, a name beyond all names, nesting that only one side can follow."""
    async with pair(folder, echo, count) as (server, client):
        assert await bounded(client.call("echo", 1, timeout=1e300)) == 1
        assert await bounded(client.call("echo", 2, timeout=float("inf"))) == 2
        for name in ("x" * 300, "\ud800"):
            with pytest.raises((AttributeError, SerializationError)):
                await bounded(client.call(name))
        for credit in (0, -1, 1.5, MAX_CREDIT + 1):
            with pytest.raises(ConfigError, match="credit"):
                await bounded(anext(client.stream("count", 1, credit=credit)))
        for timeout in (-1, float("nan")):
            with pytest.raises(ConfigError, match="timeout"):
                await bounded(client.call("echo", 1, timeout=timeout))
        other = asyncio.ensure_future(client.call("echo", "neighbour"))
        for depth in range(800, 1100, 7):
            deep: list[Any] = []
            for _ in range(depth):
                deep = [deep]
            with contextlib.suppress(Exception):
                await bounded(client.call("echo", deep))
        with contextlib.suppress(Exception):
            await bounded(client.call("echo", {Point(1): 2}))  # a key that is no key once it has been decoded
        assert await bounded(other) == "neighbour"
        assert await bounded(client.call("echo", 3)) == 3
        assert server._peers


async def test_calls_of_one_turn_that_are_too_large_for_one_frame_travel_in_several(folder: SocketFolder) -> None:
    def size(data: bytes) -> int:
        return len(data)

    async with pair(folder, size) as (server, client):
        data = bytes(MAX_FRAME_BYTES // 2)
        assert await bounded(asyncio.gather(*(client.call("size", data) for _ in range(3)))) == [len(data)] * 3
        assert server.refused == 0


async def test_arguments_are_taken_as_they_are_at_the_call(folder: SocketFolder) -> None:
    async with pair(folder, echo) as (_, client):
        value = [1]
        calling = asyncio.ensure_future(client.call("echo", value))
        await asyncio.sleep(0)
        value.append(2)
        assert await bounded(calling) == [1]


async def test_items_are_taken_as_they_are_when_they_are_yielded(folder: SocketFolder) -> None:
    async def grow() -> AsyncGenerator[list[int], None]:
        row: list[int] = []
        for number in range(4):
            row.append(number)
            yield row

    async with pair(folder, grow) as (_, client):
        items = [item async for item in client.stream("grow")]
        assert items == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


async def test_values_of_any_picklable_kind_return(folder: SocketFolder) -> None:
    values = [None, 1 << 200, "é", b"\0" * 100_000, {1: (2, {3})}, Odd(), Point(1), float("inf"), len]

    def pick(index: int) -> Any:
        return values[index]

    async with pair(folder, pick) as (_, client):
        for index, value in enumerate(values):
            got = await bounded(client.call("pick", index))
            assert got == value


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay")


class Unloadable:
    def __reduce__(self) -> Any:
        return _raise, (LookupError("cannot be rebuilt"),)


def _raise(error: BaseException) -> None:
    raise error


async def test_values_that_cannot_be_pickled_or_rebuilt_fail_their_own_call(folder: SocketFolder) -> None:
    closed = []

    async def items(bad: int) -> AsyncGenerator[Any, None]:
        try:
            yield 1
            yield Unpicklable() if bad else Unloadable()
            yield 2
            await asyncio.Event().wait()
        finally:
            closed.append(bad)

    async def value_async(bad: int) -> Any:
        return Unpicklable() if bad else Unloadable()

    def value(bad: int) -> Any:
        return Unpicklable() if bad else Unloadable()

    async with pair(folder, items, value, value_async, count) as (server, client):
        other = client.stream("count", 10_000, credit=2)
        assert await bounded(anext(other)) == 0
        for bad, why in ((1, "I stay"), (0, "cannot be rebuilt")):
            for name in ("value", "value_async"):
                with pytest.raises(SerializationError, match=why):
                    await bounded(client.call(name, bad))
            got = []
            with pytest.raises(SerializationError, match=why):
                async for item in client.stream("items", bad):
                    got.append(item)
            assert got == [1]
        await until(lambda: server.open_calls == 1)
        assert closed == [1, 0]
        assert await bounded(anext(other)) == 1
        await other.aclose()
        assert client.late in {0, 1}  # the 2 that followed what could not be rebuilt


async def test_news_reach_every_client_also_past_a_listener_that_raises(
    folder: SocketFolder, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(folder, add) as server, connected(server) as one, connected(server) as two:
        heard: list[Any] = []

        def refuse(news: Any) -> None:
            raise ValueError("bad news")

        one.on_news, two.on_news = refuse, heard.append
        server.publish({"requests": 1})
        server.publish(Unloadable())
        with pytest.raises(SerializationError):
            server.publish(Unpicklable())
        server.publish(2)
        await until(lambda: len(heard) == 2)
        assert heard == [{"requests": 1}, 2]
        assert await bounded(one.call("add", 1)) == 2
        assert "bad news" in caplog.text


MISSING = """
import asyncio, sys, types
from mpexec.mp_engine.rpc_server import AsyncRPCServer

module = types.ModuleType("only_there")
exec("class Thing: pass\\nclass ThingError(Exception): pass", module.__dict__)
sys.modules["only_there"] = module

def thing():
    return module.Thing()

def fail():
    raise module.ThingError("as text")

async def things():
    yield 1
    yield module.Thing()
    await asyncio.Event().wait()

def add(a: int, b: int):
    return a + b

async def main():
    server = AsyncRPCServer(sys.argv[1])
    for function in (thing, fail, things, add):
        server.register(function.__name__, function)
    await server.start_async()
    print("ready", flush=True)
    await server.wait_tasks()

asyncio.run(main())
"""


async def test_a_class_that_is_missing_here_fails_its_own_call(folder: SocketFolder) -> None:
    async with running_beside(MISSING, folder.address):
        client = AsyncRPCClient(folder.address)
        await client.start_async()
        adding = asyncio.ensure_future(client.call("add", 1, 2))  # travels in one frame with the next
        with pytest.raises(SerializationError, match="only_there"):
            await bounded(client.call("thing"))
        assert await bounded(adding) == 3
        with pytest.raises(RemoteError, match="as text") as caught:
            await bounded(client.call("fail"))
        assert caught.value.type_name == "ThingError"
        got = []
        with pytest.raises(SerializationError, match="only_there"):
            async for item in client.stream("things"):
                got.append(item)
        assert got == [1]
        await until(lambda: client.unacknowledged == 0)
        await client.stop_async()
