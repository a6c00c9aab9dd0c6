"""RPC over ZMQ: what crosses, what ends a call, and what is left when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
import zmq
from hypothesis import strategies

from mpexec.engine.sampling_params import SamplingParams
from mpexec.errors import (
    ConfigError,
    ConnectionLostError,
    QueueFullError,
    RemoteError,
    RemoteTraceback,
    RPCTimeoutError,
    SerializationError,
    TaskEndedError,
    WrongStateError,
)
from mpexec.mp_engine import rpc_server, sockets
from mpexec.mp_engine.frames import (
    CANCELLED,
    CLOSED,
    FAILED,
    ITEM,
    MAX_CREDIT,
    MAX_FRAME_BYTES,
    REPLY,
    WELCOME,
    Call,
    Cancel,
    Hello,
    More,
    box_error,
    decode_items,
    decode_requests,
    dump_value,
    encode_arguments,
    encode_items,
    encode_requests,
    load_value,
)
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.rpc_server import AsyncRPCServer, when_caller_goes
from mpexec.mp_engine.sockets import ClientKeys, SocketFolder, make_keys

BOUND_S = 20.0
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


@pytest.fixture
def folder() -> Iterator[SocketFolder]:
    made = SocketFolder()
    yield made
    made.remove()


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


# -- what crosses ------------------------------------------------------------------------------------------------------


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


# -- errors ------------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.extra = {"code": code}


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


# -- many at once ------------------------------------------------------------------------------------------------------


async def test_calls_in_flight_get_their_own_answers(folder: SocketFolder) -> None:
    async def turns(number: int, turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return number

    async with pair(folder, turns) as (server, client):
        dice = random.Random(3)
        works = [client.call("turns", number, dice.randrange(20)) for number in range(1000)]
        assert await bounded(asyncio.gather(*works)) == list(range(1000))
        assert client.late == 0
        assert server.open_calls == 0


# F046
async def test_replies_of_all_sizes_arrive_whole_while_the_client_reads_slowly(folder: SocketFolder) -> None:
    sizes = (10, 70_000, 5_000_000)
    dice = random.Random(5)
    blobs = [dice.randbytes(sizes[number % 3]) for number in range(3 * 4)]
    checksums = [zlib.crc32(blob) for blob in blobs]

    def blob(number: int) -> tuple[int, int, bytes]:
        return number, checksums[number % 12], blobs[number % 12]

    async with pair(folder, blob) as (_, client):
        numbers = iter(range(2000))

        async def read() -> None:
            for number in numbers:
                got, checksum, data = await client.call("blob", number)
                assert got == number
                assert checksum == checksums[number % 12]
                assert data == blobs[number % 12] if number % 9 else zlib.crc32(data) == checksum
                if number % 100 == 0:
                    time.sleep(0.01)  # noqa: ASYNC251  # this loop reads nothing meanwhile

        await bounded(asyncio.gather(*(read() for _ in range(6))), 60)
        assert client.late == 0


@pytest.mark.parametrize("credit", [1, 2, 64])
@pytest.mark.parametrize("slow", ["reader", "producer", "neither"])
async def test_a_stream_loses_joins_and_reorders_nothing(folder: SocketFolder, credit: int, slow: str) -> None:
    produced = 0

    async def produce(to: int) -> AsyncGenerator[int, None]:
        nonlocal produced
        for number in range(to):
            produced = number + 1
            yield number
            if slow == "producer" and number % 3 == 0:
                await asyncio.sleep(0.0001)

    async with pair(folder, produce) as (_, client):
        taken = ahead = 0
        async for number in client.stream("produce", 500, credit=credit):
            assert number == taken
            taken += 1
            if slow == "reader":
                for _ in range(3):
                    await asyncio.sleep(0)
            ahead = max(ahead, produced - taken)
        assert taken == 500
        assert ahead <= credit


async def test_nobody_produces_ahead_of_the_credit_however_long_the_reader_waits(folder: SocketFolder) -> None:
    produced: dict[int, int] = {}

    async def produce(credit: int) -> AsyncGenerator[bytes, None]:
        while True:
            produced[credit] = produced.get(credit, 0) + 1
            yield bytes(10_000)

    async with pair(folder, produce, add_async) as (_, client):
        streams = {credit: client.stream("produce", credit, credit=credit) for credit in (1, 2, 64)}
        for stream in streams.values():
            await bounded(anext(stream))
        for _ in range(300):  # each is a round trip in which the generators could go on
            await bounded(client.call("add_async", 1))
        for credit, stream in streams.items():
            assert produced[credit] <= credit + 1
            await stream.aclose()


async def test_a_hundred_thousand_small_items_arrive(folder: SocketFolder) -> None:
    async with pair(folder, count) as (_, client):
        expected = 0
        async for number in client.stream("count", 100_000):
            assert number == expected
            expected += 1
        assert expected == 100_000
        assert client.late == 0


async def test_a_stream_with_boundless_credit_leaves_turns_to_the_others(folder: SocketFolder) -> None:
    async with pair(folder, count, add) as (_, client):
        stream = client.stream("count", 1_000_000, credit=MAX_CREDIT)
        assert await bounded(anext(stream)) == 0
        assert await bounded(client.call("add", 1)) == 2
        assert len(client._calls[1].items) < 500_000
        await stream.aclose()


# -- deadlines and cancellation ----------------------------------------------------------------------------------------


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


async def test_a_client_has_so_many_calls_in_flight_at_most(
    folder: SocketFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "_MAX_CALLS", 3)
    sleeper = Sleeper()
    async with pair(folder, sleeper.sleep) as (server, client):
        works = [asyncio.ensure_future(client.call("sleep")) for _ in range(4)]
        with pytest.raises(WrongStateError, match="3 calls in flight"):
            await bounded(works.pop())
        async with connected(server) as other:
            works.append(asyncio.ensure_future(other.call("sleep")))
            await until(lambda: sleeper.begun == 4)
            for work in works:
                work.cancel()
            await asyncio.wait(works)


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
                reading = asyncio.ensure_future(_read_all(stream))
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


async def _read_all(stream: AsyncGenerator[Any, None]) -> int:
    taken = 0
    async with contextlib.aclosing(stream):
        async for _ in stream:
            taken += 1
            await asyncio.sleep(0)
    return taken


async def test_cancelling_at_any_moment_leaves_nothing(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    dice = random.Random(11)
    async with pair(folder, sleeper.sleep, sleeper.doze, count, add_async) as (server, client):
        for _ in range(50):
            works = [
                asyncio.ensure_future(client.call("sleep", timeout=dice.choice([None, 5.0]))),
                asyncio.ensure_future(client.call("add_async", 1)),
                asyncio.ensure_future(_read_all(client.stream("count", 200, credit=dice.choice([1, 3, 64])))),
                asyncio.ensure_future(_read_all(client.stream("doze", 20, credit=dice.choice([1, 3, 64])))),
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


# -- one side ends -----------------------------------------------------------------------------------------------------


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
            await _read_all(stream)
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


async def test_a_server_that_stops_ends_every_call_and_says_so(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    server = AsyncRPCServer(folder.address)
    server.register("sleep", sleeper.sleep)
    server.register("doze", sleeper.doze)
    await server.start_async()
    client = AsyncRPCClient(server.address)
    await client.start_async()
    works = [asyncio.ensure_future(client.call("sleep")) for _ in range(4)]
    works += [asyncio.ensure_future(_read_all(client.stream("doze", 9, credit=credit))) for credit in (1, 64)]
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
            works.append(asyncio.ensure_future(_read_all(client.stream("doze", 5, credit=1))))
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


async def test_two_clients_do_not_hear_of_each_other(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    async with serving(folder, sleeper.sleep, count, echo) as server, connected(server) as one:
        async with connected(server) as two:
            reading = asyncio.ensure_future(_read_all(one.stream("count", 2000, credit=2)))
            values = await bounded(
                asyncio.gather(*(c.call("echo", (i, c is one)) for i in range(50) for c in (one, two)))
            )
            assert values == [[i, mine] for i in range(50) for mine in (True, False)]
            sleeping = asyncio.ensure_future(two.call("sleep"))
            await until(lambda: sleeper.begun == 1)
            sleeping.cancel()
            await asyncio.gather(sleeping, return_exceptions=True)
        assert await bounded(reading) == 2000


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_both_event_loops_serve(folder: SocketFolder, kind: str) -> None:
    factory = pytest.importorskip("uvloop").new_event_loop if kind == "uvloop" else asyncio.new_event_loop
    sleeper = Sleeper()

    async def scenario() -> None:
        async with serving(folder, add, count, sleeper.sleep, echo) as server:
            async with connected(server) as client:
                assert await bounded(client.call("add", 1)) == 2
                assert await _read_all(client.stream("count", 3000)) == 3000
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
                await bounded(_read_all(client.stream(method, 5)))
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
        works += [asyncio.ensure_future(_read_all(stream)) for stream in streams[:4]]
        works.append(asyncio.ensure_future(client.wait_tasks()))
        await until(lambda: len(client._calls) == 16)
        process.send_signal(signal.SIGKILL)
        errors = await bounded(asyncio.gather(*works, return_exceptions=True), 1.0)
        errors += await bounded(asyncio.gather(*(_read_all(s) for s in streams[4:]), return_exceptions=True), 1.0)
        assert [type(error) for error in errors] == [ConnectionLostError] * 17
        assert len({id(error) for error in errors}) == 17
        with pytest.raises(ConnectionLostError):
            await client.call("sleep")
        await bounded(client.stop_async())


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


# -- strangers ---------------------------------------------------------------------------------------------------------


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


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


async def test_what_a_client_sends_is_never_unpickled(folder: SocketFolder, tmp_path: Path) -> None:
    proof = tmp_path / "unpickled"
    bomb = pickle.dumps(Bomb(proof))
    pickle.loads(bomb)
    assert proof.exists()  # it would work
    proof.unlink()
    async with serving(folder, echo, count) as server, raw_client(server.address) as dealer:
        await dealer.send(bomb)
        await dealer.send(pickle.dumps([(1, 1, Bomb(proof))]))
        await dealer.send(encode_requests([Call(1, "echo", bomb)]))
        await dealer.send(encode_requests([Call(2, "echo", encode_arguments((bomb,), {}))]))
        await dealer.send(encode_requests([Call(3, "count", encode_arguments((bomb,), {}), None, 1)]))
        answers = [await dealer.item() for _ in range(5)]
        assert [(kind, call_id) for kind, call_id, _ in answers] == [
            (FAILED, 0),
            (FAILED, 0),
            (FAILED, 1),
            (REPLY, 2),
            (FAILED, 3),
        ]
        assert load_value(answers[3][2]) == bomb
        assert server.refused == 3
    assert not proof.exists()


async def test_frames_that_are_none_are_refused_with_an_answer(folder: SocketFolder) -> None:
    async with serving(folder, add) as server, raw_client(server.address) as dealer:
        deep = b"\x91" * 100_000 + b"\xc0"
        frames: list[tuple[bytes, ...]] = [
            (b"",),
            (b"\xc1",),
            (b"a", b"b"),
            (encode_requests([Hello()]), b""),
            (bytes(MAX_FRAME_BYTES + 1),),
            (deep,),
            (msgspec.msgpack.encode([[1, 1, "add", b"", None, None, "more"]]),),
            (msgspec.msgpack.encode([[1, 0, "add", b""]]),),
            (msgspec.msgpack.encode([[1, 1 << 63, "add", b""]]),),
            (msgspec.msgpack.encode([[1, 1, "x" * 201, b""]]),),
            (msgspec.msgpack.encode([[1, 1, "add", b"", -1.0]]),),
            (msgspec.msgpack.encode([[1, 1, "add", b"", float("nan")]]),),
            (msgspec.msgpack.encode([[3, 1, MAX_CREDIT + 1]]),),
            (msgspec.msgpack.encode([[9, 1]]),),
            (msgspec.msgpack.encode({"tag": 0}),),
        ]
        for number, parts in enumerate(frames, 1):
            await dealer.send(*parts)
            kind, call_id, payload = await dealer.item()
            assert (kind, call_id) == (FAILED, 0)
            assert load_value(payload).type_name == "TransportError"
            assert server.refused == number
        for arguments in (deep, b"", b"\xc0", msgspec.msgpack.encode([[1], {2: 3}])):
            await dealer.send(encode_requests([Call(7, "add", arguments)]))
            kind, call_id, payload = await dealer.item()
            assert (kind, call_id) == (FAILED, 7)
        await dealer.send(encode_requests([Call(8, "add", encode_arguments((2,), {}))]))
        kind, call_id, payload = await dealer.item()
        assert (kind, call_id, load_value(payload)) == (REPLY, 8, 3)


async def test_odd_but_legal_requests_harm_nobody(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    async with serving(folder, sleeper.sleep, sleeper.doze, add) as server, raw_client(server.address) as dealer:
        nothing = encode_arguments((), {})
        await dealer.send(encode_requests([Call(1, "sleep", nothing), Call(1, "sleep", nothing)]))
        kind, call_id, payload = await dealer.item()
        assert (kind, call_id) == (FAILED, 1)
        assert "runs already" in load_value(payload).text
        await dealer.send(encode_requests([More(1, 5), More(77, 5), Cancel(1), Cancel(1)]))
        assert (await dealer.item())[:2] == (CANCELLED, 1)
        await dealer.send(encode_requests([Cancel(77)]))
        assert (await dealer.item())[:2] == (CANCELLED, 77)
        await dealer.send(encode_requests([Call(1, "add", encode_arguments((1,), {}))]))  # the id is free again
        assert (await dealer.item())[:2] == (REPLY, 1)
        await dealer.send(encode_requests([Call(2, "doze", nothing, None, 1), *[More(2, MAX_CREDIT)] * 50]))
        assert (await dealer.item())[:2] == (ITEM, 2)
        assert max(call.credit for call in server._calls) <= MAX_CREDIT
        await dealer.send(encode_requests([Cancel(2), Call(3, "sleep", nothing), Cancel(3)]))
        assert sorted([(await dealer.item())[:2], (await dealer.item())[:2]]) == [(CANCELLED, 2), (CANCELLED, 3)]
        await dealer.send(encode_requests([Hello(), Hello()]))
        assert [(await dealer.item())[0] for _ in range(2)] == [WELCOME, WELCOME]
        assert sleeper.begun == sleeper.ended
        assert server.refused == 0


@contextlib.contextmanager
def serving_in_a_thread(folder: SocketFolder, *functions: Callable[..., Any]) -> Iterator[AsyncRPCServer]:
    """A server on a loop of its own, for clients that block."""
    server = AsyncRPCServer(folder.address)
    for function in functions:
        server.register(function.__name__, function)
    ready, failures = threading.Event(), []

    async def serve() -> None:
        await server.start_async()
        ready.set()
        await server.wait_tasks()

    def body() -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(_and_stop(serve(), server))
        except BaseException as error:
            failures.append(error)
        ready.set()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        assert ready.wait(BOUND_S)
        yield server
    finally:
        server.stop()
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert not failures


async def _and_stop(work: Any, server: AsyncRPCServer) -> None:
    try:
        await work
    finally:
        await server.stop_async()


def _mutated(dice: random.Random, valid: list[bytes]) -> list[bytes]:
    """A message that may once have been a frame."""
    frame = bytearray(dice.choice(valid))
    for _ in range(dice.choice([1, 1, 2, 5])):
        at = dice.randrange(len(frame) + 1)
        match dice.randrange(6):
            case 0 if at < len(frame):
                frame[at] ^= 1 << dice.randrange(8)
            case 1 if at < len(frame):
                frame[at] = dice.choice(
                    b"\x00\x7f\x80\x8f\x90\x9f\xa0\xc0\xc1\xc4\xc6\xc7\xca\xcf\xd9\xdb\xdc\xdd\xdf\xff"
                )
            case 2:
                del frame[at:]
            case 3:
                frame[at:at] = dice.randbytes(dice.randrange(1, 9))
            case 4:
                frame[at:at] = frame[: dice.randrange(len(frame) + 1)]
            case _:
                frame += dice.choice(valid)
    parts = [bytes(frame)]
    if dice.random() < 0.05:
        parts += [dice.choice(valid)] * dice.randrange(1, 4)
    return parts


def test_ten_thousand_mutated_frames_do_no_harm(folder: SocketFolder, tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    sleeper = Sleeper()

    async def touch() -> None:
        proof.touch()

    bomb = pickle.dumps(Bomb(proof))
    nothing = encode_arguments((), {})
    valid = [
        bomb,
        encode_requests([Hello(), Cancel(3), More(4, 1000)]),
        encode_requests([Call(1, "sleep", nothing, 0.5), Call(2, "doze", encode_arguments((5,), {}), None, 2)]),
        encode_requests([Call(3, "add", encode_arguments((1, 2), {})), Call(3, "add", encode_arguments((), {"a": 1}))]),
        encode_requests([Call(4, "_touch", nothing), Call(5, "__init__", nothing), Call(6, "touc", bomb)]),
        encode_requests([Call(7, "echo", encode_arguments(([[[{"a": [1.5, None, "x", b"y"]}]]],), {}), 3.0)]),
        b"\x91" * 2000,
    ]
    context = zmq.Context()
    functions = (sleeper.sleep, sleeper.doze, add, echo, touch)
    with serving_in_a_thread(folder, *functions) as server, contextlib.closing(context.socket(zmq.DEALER)) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(server.address)
        answers = refusals = 0

        @hypothesis.settings(
            max_examples=100, deadline=None, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
        )
        @hypothesis.given(seed=strategies.integers(0, 2**64), blobs=strategies.lists(strategies.binary(), max_size=5))
        def send_a_hundred(seed: int, blobs: list[bytes]) -> None:
            nonlocal answers, refusals
            dice = random.Random(seed)
            for blob in blobs:
                dealer.send(blob)
            for _ in range(100):
                dealer.send_multipart(_mutated(dice, valid))
            dealer.send(encode_requests([Hello()]))
            dealer.send(encode_requests([Call(99, "add", encode_arguments((98,), {}))]))
            while True:
                assert dealer.poll(BOUND_S * 1000), "the server does not answer any more"
                payload = dealer.recv()
                items = decode_items(payload) if payload else []
                answers += len(items)
                refusals += sum((kind, call_id) == (FAILED, 0) for kind, call_id, _ in items)
                if any(kind == REPLY and call_id == 99 and load_value(value) == 99 for kind, call_id, value in items):
                    return

        send_a_hundred()
        assert server.refused >= refusals > 1000  # the rest were arguments, answered under the id of their call
        assert answers > refusals
        dealer.close()
        end = time.monotonic() + BOUND_S
        while server.open_calls or server._peers:
            assert time.monotonic() < end
            time.sleep(0.005)
    context.term()
    assert sleeper.begun == sleeper.ended
    assert not proof.exists()


def test_a_frame_too_large_for_memory_costs_its_sender_the_connection(folder: SocketFolder) -> None:
    with serving_in_a_thread(folder, add) as server:
        context = zmq.Context()
        with contextlib.closing(context.socket(zmq.DEALER)) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.connect(server.address)
            dealer.send(bytes(2 * MAX_FRAME_BYTES + 1))
            assert monitor.poll(BOUND_S * 1000)
            monitor.close()
        context.term()

        async def ask() -> Any:
            async with connected(server) as client:
                return await bounded(client.call("add", 1))

        assert asyncio.run(ask()) == 2


SWITCH = shutil.which("setpriv") or shutil.which("runuser")


@pytest.mark.skipif(
    os.geteuid() != 0 or SWITCH is None, reason="only root can become another user, with setpriv or runuser"
)
async def test_another_user_cannot_connect(folder: SocketFolder) -> None:
    assert SWITCH is not None
    program = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    become = (
        ["--reuid=65534", "--regid=65534", "--clear-groups"] if SWITCH.endswith("setpriv") else ["-u", "nobody", "--"]
    )
    path = folder.address.removeprefix("ipc://")

    def attempt() -> subprocess.CompletedProcess[str]:
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin") or sys.executable
        return subprocess.run(
            [SWITCH, *become, python, "-c", program, path],
            capture_output=True,
            check=False,
            cwd="/",
            text=True,
            timeout=BOUND_S,
        )

    async with serving(folder, add) as server:
        refused = await asyncio.to_thread(attempt)
        assert "PermissionError" in refused.stderr
        os.chmod(folder.path, 0o755)  # the socket itself is closed to others, too
        refused = await asyncio.to_thread(attempt)
        assert "PermissionError" in refused.stderr
        assert not server._peers
        await asyncio.get_running_loop().shutdown_default_executor()


# -- TCP ---------------------------------------------------------------------------------------------------------------


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
    assert await bounded(_read_all(client.stream("count", 1000))) == 1000
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
            await _read_all(client.stream("count", 5000))
            server.say_closed(ValueError("x"))
            with pytest.raises(ConnectionLostError):
                await bounded(client.wait_tasks())
        with pytest.raises(ConnectionLostError):
            await AsyncRPCClient(folder.address, connect_timeout=0.05).start_async()


async def test_a_task_cancelled_from_outside_is_reported(folder: SocketFolder) -> None:
    async with serving(folder, add) as server:
        waiting = asyncio.ensure_future(server.wait_tasks())
        await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            if task.get_name() == "AsyncRPCServer.serve":
                task.cancel()
        with pytest.raises(TaskEndedError):
            await bounded(waiting)


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
