"""The engine in a process of its own against the engine in this one, and its RPC against what pyzmq gives by itself."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tests.bench import fresh
from tests.bench.generation import NEW_TOKENS, PROMPTS, take_turns
from tests.bench.pipes import hear_each, spawned
from tests.bench.settings import Settings, in_turn
from tests.bench.stats import Figures, Row, columns, quantile

TOKENS_BAR = 0.9
ITEMS_BAR = 20_000  # a second
ROUND_TRIP_BAR = 1.3

_PEERS = ("zmq", "in process")
_LIMIT_NS = 4_000_000_000  # no series of round trips takes longer than this, however busy the machine is

Piece = tuple[str, tuple[int, ...], str | None]


def run(settings: Settings) -> list[Row]:
    """The whole way, tp=2, and then its RPC alone."""
    return [*_engines(settings), *_stream(settings), *_round_trips(settings)]


def _engines(settings: Settings) -> list[Row]:
    settings.say("zmq, two engines by turns")
    runs = 2 if settings.quick else max(7, settings.repeats)
    figures = fresh.call(drive_engines, runs=runs, new_tokens=NEW_TOKENS, alone=NEW_TOKENS if settings.quick else 150)
    pieces = statistics.median(one["pieces"] for one in figures["zmq"])
    rows = [
        Row(
            f"{len(PROMPTS)} requests at once", *columns(figures, "tokens", "token/s"), TOKENS_BAR, at_least=True,
            note=f"{pieces:.2f} pieces for each token",
        )
    ]  # fmt: skip
    for key in ("p50", "p99"):
        row = Row(f"1 request, from piece to piece {key}", *columns(figures, key, "us"))
        row.note = f"{row.median - (row.comparator_median or 0):+.0f} us"
        rows.append(row)
    return rows


def _stream(settings: Settings) -> list[Row]:
    items = 10_000 if settings.quick else 100_000
    settings.say(f"zmq, a stream of {items} items")
    speeds = [fresh.call(drive_stream, items=items) for _ in range(settings.repeats)]
    return [Row(f"a stream of {items} small items", speeds, "item/s", bar=ITEMS_BAR, kind="value", at_least=True)]


def _round_trips(settings: Settings) -> list[Row]:
    settings.say("zmq, round trips")
    drivers = {"mpexec": drive_mpexec, "pyzmq": drive_pyzmq}
    figures: dict[str, list[Figures]] = {peer: [] for peer in drivers}
    for repeat in range(settings.repeats):
        for peer in in_turn(list(drivers), repeat):
            figures[peer].append(fresh.call(drivers[peer], calls=settings.calls))
    return [
        Row(f"round trip {key}", *columns(figures, key, "us"), bar)
        for key, bar in (("p50", ROUND_TRIP_BAR), ("p99", None))
    ]


# -- two engines in the driver process -----------------------------------------------------------------------------


def drive_engines(runs: int, new_tokens: int, alone: int) -> dict[str, list[Figures]]:
    """The figures of runs by turns: both engines are there all the time, one of them is at work.

    Args:
        runs: For each engine, after a short one that warms it up.
        new_tokens: For each of several prompts at once.
        alone: New tokens for one prompt alone.
    """
    from mpexec import Engine
    from mpexec.mp_engine.zmq_engine import ZMQEngine

    with contextlib.ExitStack() as made:
        engines: dict[str, Any] = {}
        for peer, make in zip(_PEERS, (ZMQEngine, Engine), strict=True):
            engines[peer] = make.from_pretrained(tp=2)
            made.callback(engines[peer].release)
        return asyncio.run(take_turns(engines, runs, new_tokens, alone))


# -- the RPC alone: in the driver processes ------------------------------------------------------------------------


def drive_stream(items: int) -> float:
    """Items a second."""
    with _served_by(serve_mpexec) as address:
        return asyncio.run(_take_stream(address, items))


async def _take_stream(address: str, items: int) -> float:
    from mpexec.mp_engine.rpc_client import AsyncRPCClient

    async with AsyncRPCClient(address) as client:
        for wanted in (items // 10, items):  # the first one warms up
            began = time.perf_counter_ns()
            taken = [item async for item in client.stream("count", wanted)]
            seconds = (time.perf_counter_ns() - began) / 1e9
            if taken != [piece(number) for number in range(wanted)]:
                raise RuntimeError(f"the stream brought {len(taken)} items that are not the {wanted} expected")
    return items / seconds


def drive_mpexec(calls: int) -> Figures:
    """Round trips through the RPC."""
    with _served_by(serve_mpexec) as address:
        return asyncio.run(_call_mpexec(address, calls))


async def _call_mpexec(address: str, calls: int) -> Figures:
    from mpexec.mp_engine.rpc_client import AsyncRPCClient

    async with AsyncRPCClient(address) as client:
        return await _series(partial(client.call, "echo"), list(range(calls)))


def drive_pyzmq(calls: int) -> Figures:
    """Round trips between two sockets of `zmq.asyncio`, with bytes that are there beforehand."""
    with _served_by(serve_pyzmq) as address:
        return asyncio.run(_call_pyzmq(address, calls))


async def _call_pyzmq(address: str, calls: int) -> Figures:
    import zmq.asyncio

    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(address)

        async def call(payload: bytes) -> bytes:
            await dealer.send(payload)
            return await dealer.recv()

        return await _series(call, [number.to_bytes(8, "little") for number in range(calls)])


async def _series(call: Callable[[Any], Awaitable[Any]], arguments: list[Any]) -> Figures:
    """One after the other; each must bring its argument back."""
    for argument in arguments[: len(arguments) // 5]:
        await call(argument)
    samples, answers = [], []
    end = time.perf_counter_ns() + _LIMIT_NS
    for argument in arguments:
        start = time.perf_counter_ns()
        answer = await call(argument)
        now = time.perf_counter_ns()
        samples.append(now - start)
        answers.append(answer)
        if now > end:
            break
    if answers != arguments[: len(answers)]:
        raise RuntimeError("an answer is not that of its call")
    return {"p50": quantile(samples, 0.5) / 1e3, "p99": quantile(samples, 0.99) / 1e3}


# -- the RPC alone: in the server processes ------------------------------------------------------------------------


@contextlib.contextmanager
def _served_by(serve: Callable[[Connection, str], None]) -> Iterator[str]:
    """Spawn a process in which `serve` listens at a unix socket; gives the address once it does."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/socket"
        with spawned(serve, (address,)) as pipes:
            hear_each(pipes)
            yield address


def serve_mpexec(pipe: Connection, address: str) -> None:
    """Serve `echo` and `count`."""
    asyncio.run(_serve_mpexec(pipe, address))


async def _serve_mpexec(pipe: Connection, address: str) -> None:
    from mpexec.mp_engine.rpc_server import AsyncRPCServer

    server = AsyncRPCServer(address)
    server.register("echo", echo)
    server.register("count", count)
    async with server:
        pipe.send(True)
        await server.wait_tasks()


async def echo(value: int) -> int:
    """The value."""
    return value


async def count(items: int) -> AsyncGenerator[Piece, None]:
    """So many pieces, as fast as they are taken."""
    for number in range(items):
        yield piece(number)


def piece(number: int) -> Piece:
    """An item of the size of an engine's: a word, its token, no reason to end."""
    return "word", (number,), None


def serve_pyzmq(pipe: Connection, address: str) -> None:
    """Send every message back."""
    asyncio.run(_serve_pyzmq(pipe, address))


async def _serve_pyzmq(pipe: Connection, address: str) -> None:
    import zmq.asyncio

    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        pipe.send(True)
        while True:
            await router.send_multipart(await router.recv_multipart())
