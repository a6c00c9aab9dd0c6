"""Where client and server meet: folders, addresses, keys; and sockets on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from mpexec.errors import ConfigError
from mpexec.mp_engine.sockets import LoopSocket, ServerKeys, SocketFolder, check_address, make_keys

BOUND_S = 20.0


@contextlib.contextmanager
def made() -> Iterator[SocketFolder]:
    folder = SocketFolder()
    try:
        yield folder
    finally:
        folder.remove()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.001)


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_is_closed_to_others_and_removed_once_and_for_all() -> None:
    with made() as folder:
        facts = folder.path.stat()
        assert stat.S_IMODE(facts.st_mode) == 0o700
        assert facts.st_uid == os.getuid()
        assert folder.path.parent == Path(tempfile.gettempdir())
        assert folder.address == f"ipc://{folder.path}/socket"
        check_address(folder.address, None)
        (folder.path / "socket").touch()
        folder.remove()
        assert not folder.path.exists()
        folder.remove()


def test_every_folder_has_a_path_of_its_own() -> None:
    with made() as one, made() as two:
        assert one.path != two.path
        assert one.path.exists()


@pytest.mark.parametrize("kind", ["too long", "missing", "a file", "read-only", "relative", "empty"])
def test_the_path_is_short_and_absolute_whatever_tmpdir_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tempfile.gettempdir())
    here = Path.cwd() if kind == "relative" else Path("/tmp")
    tmpdir = {
        "too long": str(tmp_path / ("x" * 150)),
        "missing": "/tmp/there-is-no-such-folder",
        "a file": str(tmp_path / "file"),
        "read-only": "/proc",  # no folder can be made there, not by root either
        "relative": ".",
        "empty": "",
    }[kind]
    if kind == "too long":
        Path(tmpdir).mkdir()
    elif kind == "a file":
        Path(tmpdir).touch()
    monkeypatch.setenv("TMPDIR", tmpdir)
    with made() as folder:
        assert folder.path.parent == here
        assert folder.path.is_absolute()
        assert len(os.fsencode(folder.path / "socket")) <= 107
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(folder.address)


def test_where_no_folder_can_be_made_every_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: str) -> str:
        raise PermissionError(f"not in {options['dir']}")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match=r"not in /tmp; not in /dev/shm; not in /var/tmp.*TMPDIR"):
        SocketFolder()


MAKER = """
import sys
from mpexec.mp_engine.sockets import SocketFolder
folder = SocketFolder()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_swept_and_that_of_a_live_one_is_not() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        try:
            assert maker.stdout is not None
            assert select.select([maker.stdout], [], [], BOUND_S)[0]
            path = Path(maker.stdout.readline().strip())
            with made() as mine, made():
                assert path.exists()
                assert mine.path.exists()
                maker.kill()
                maker.wait(BOUND_S)
                assert path.exists()
                with made():
                    assert not path.exists()
                    assert mine.path.exists()
        finally:
            maker.kill()


def test_folders_that_are_made_at_once_never_sweep_each_other() -> None:
    program = "from mpexec.mp_engine.sockets import SocketFolder\nfor _ in range(200):\n" + (
        "    folder = SocketFolder()\n    assert (folder.path / 'lock').exists()\n    folder.remove()\n"
    )
    makers = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(3)]
    for maker in makers:
        _, stderr = maker.communicate(timeout=BOUND_S * 2)
        assert (maker.returncode, stderr) == (0, b"")


def test_what_only_looks_like_a_stale_folder_is_left_alone() -> None:
    parent = Path(tempfile.gettempdir())
    lockless, linked, target = parent / "mpexec-engine-lockless", parent / "mpexec-engine-link", parent / "target"
    lockless.mkdir()
    target.mkdir()
    (target / "file").touch()
    linked.mkdir()
    (linked / "lock").symlink_to(target / "file")
    try:
        with made():
            assert lockless.exists()
            assert linked.exists()
            assert (target / "file").exists()
    finally:
        (linked / "lock").unlink()
        (target / "file").unlink()
        for folder in (lockless, linked, target):
            folder.rmdir()


# -- addresses and keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["ipc://relative", "ipc://@abstract", "ipc://*", "inproc://x", "udp://1.2.3.4:5", "/tmp/socket", ""]
)
def test_an_address_that_is_neither_a_unix_socket_nor_tcp_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="ipc:///absolute/path"):
        check_address(address, make_keys()[0])


def test_tcp_is_accepted_with_keys_only() -> None:
    server, client = make_keys()
    for address in ("tcp://127.0.0.1:5555", "tcp://*:1"):
        for keys in (server, client):
            check_address(address, keys)
        with pytest.raises(ConfigError, match="CURVE"):
            check_address(address, None)


def test_keys_belong_together_and_secrets_are_not_shown() -> None:
    server, client = make_keys()
    assert isinstance(server, ServerKeys)
    assert server.clients == {client.public}
    assert client.server == server.public
    assert len({server.public, server.secret, client.public, client.secret}) == 4
    assert server.secret.decode() not in repr(server)
    assert client.secret.decode() not in repr(client)


# -- sockets on a loop -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        one, two = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket in (one, two):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        one.bind("inproc://x")
        two.connect("inproc://x")
        try:
            yield one, two
        finally:
            one.close(0)
            two.close(0)


async def test_no_message_is_overlooked_between_sending_and_receiving() -> None:
    """Both sides answer each message at once: a lost edge would stop them for ever."""
    with two_sockets() as (one, two):
        seen = [0, 0]

        def on(side: int) -> Callable[[list[bytes]], None]:
            def receive(parts: list[bytes]) -> None:
                seen[side] += 1
                if seen[side] < 5000:
                    for _ in range(1 + seen[side] % 2):
                        sockets[side].send(parts)

            return receive

        sockets = [LoopSocket(one, on(0)), LoopSocket(two, on(1))]
        sockets[0].send([b"go", b"on"])
        await until(lambda: min(seen) >= 5000)
        for socket in sockets:
            socket.close()


async def test_a_message_whose_edge_is_used_up_by_sending_is_read() -> None:
    with two_sockets() as (one, two):
        got: list[bytes] = []
        socket = LoopSocket(one, lambda parts: got.append(parts[0]))
        for number in range(20):
            await asyncio.sleep(0.002)
            two.send(b"x")
            time.sleep(0.005)  # noqa: ASYNC251  # libzmq looks for commands only so often
            socket.send([b"y"])
            await until(lambda number=number: len(got) == number + 1)
        socket.close()


async def test_a_listener_that_raises_costs_one_message() -> None:
    with two_sockets() as (one, two):
        got: list[bytes] = []
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))

        def receive(parts: list[bytes]) -> None:
            if parts[0] == b"bad":
                raise ValueError("bad")
            got.append(parts[0])

        for word in (b"bad", b"1", b"bad", b"bad", b"2"):
            two.send(word)
        socket = LoopSocket(one, receive)
        await until(lambda: len(got) == 2)
        assert got == [b"1", b"2"]
        assert [str(error) for error in told] == ["bad"] * 3
        socket.close()


async def test_a_flood_leaves_turns_to_the_others() -> None:
    with two_sockets() as (one, two):
        got = 0

        def receive(parts: list[bytes]) -> None:
            nonlocal got
            got += 1

        for _ in range(2000):
            two.send(b"x")
        socket = LoopSocket(one, receive)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert got < 500
        await until(lambda: got == 2000)
        socket.close()


async def test_a_closed_socket_neither_hears_nor_speaks() -> None:
    with two_sockets() as (one, two):
        got: list[list[bytes]] = []

        def receive(parts: list[bytes]) -> None:
            got.append(parts)
            socket.close()  # in the middle of what has arrived

        socket = LoopSocket(one, receive)
        for _ in range(5):
            two.send(b"x")
        await until(lambda: bool(got))
        socket.close()
        socket.send([b"y"])
        assert not socket.read()
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(got) == 1
