"""Malformed, oversized and foreign frames, and users, at the door of the RPC."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
import zmq
from hypothesis import strategies
from rpc_pairs import BOUND_S, Sleeper, add, bounded, connected, count, echo, raw_client, serving

from mpexec.mp_engine.frames import (
    CANCELLED,
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
    decode_items,
    encode_arguments,
    encode_requests,
    load_value,
)
from mpexec.mp_engine.rpc_server import AsyncRPCServer
from mpexec.mp_engine.sockets import SocketFolder

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


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
