"""Processes that are measured against: they connect to a socket of ours when they are ready, and answer tasks."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.bench import fresh

_START_S = 180.0
_END_S = 20.0
_LINES = 20  # of what a peer has printed last, for an error
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that is ready for tasks."""

    name: str
    connection: Connection
    process: subprocess.Popen[bytes]
    log: Path

    def ask(self, task: Any) -> Any:
        """Send a task, and wait for its answer.

        Raises:
            BenchError: The peer has ended; with what it printed last.
        """
        try:
            self.connection.send(task)
            return self.connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # its launcher has the last word
                self.process.wait(_END_S)
            raise _failed(self.name, "has ended", self.log) from None


@contextlib.contextmanager
def torchrun(peer: str) -> Iterator[Peer]:
    """Start two ranks of `torchrun_peers`, and end them after the block; see `started`."""
    with started(peer, [*_TORCHRUN, "-m", "tests.bench.torchrun_peers", peer]) as ranks:
        yield ranks


@contextlib.contextmanager
def started(name: str, command: list[str]) -> Iterator[Peer]:
    """Start a command, to which the path of the socket is added; blocks until it has connected.

    Raises:
        BenchError: It has ended instead, or it took too long; with what it printed last.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        log = Path(folder, "log")
        door.bind(f"{folder}/socket")
        door.listen()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, f"{folder}/socket"], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**fresh.environment(), "TMPDIR": folder},  # torchrun and the compiler leave folders behind
            )  # fmt: skip
        try:
            with Connection(_accept(name, door, process, log).detach()) as connection:
                yield Peer(name, connection, process, log)  # closing the connection ends the ranks
            process.wait(_END_S)
        finally:
            process.terminate()  # it ends its ranks, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()


def _accept(name: str, door: socket.socket, process: subprocess.Popen[bytes], log: Path) -> socket.socket:
    """The socket to the peer, as soon as it is there."""
    end = os.pidfd_open(process.pid)
    try:
        readable, _, _ = select.select([door.fileno(), end], [], [], _START_S)
    finally:
        os.close(end)
    if door.fileno() in readable:
        return door.accept()[0]
    told = f"ended with exit code {process.wait()}" if readable else f"was not ready after {_START_S:g} s"
    raise _failed(name, told, log)


def _failed(name: str, told: str, log: Path) -> fresh.BenchError:
    before, found, after = log.read_text(errors="replace").partition(" failed (exitcode: ")
    # With that line torchrun begins to tell of its ranks, for forty more lines of which none says more.
    lines = (before + found + after.partition("\n")[0]).strip().splitlines()[-_LINES:]
    return fresh.BenchError("\n".join([f"{name} {told}; the last it printed:", *lines]))
