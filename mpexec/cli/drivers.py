"""The drivers of this user that can be looked at, and what they answer."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpexec.cli.report import complain, printable
from mpexec.deadline import Deadline
from mpexec.errors import ConfigError
from mpexec.executor.inspection_folder import InspectionFolder, peer_of, usual_places

_ANSWER_S = 5.0  # longer than a driver takes for any question, unless it holds its interpreter in C code
_PIECE = 65536

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Driver:
    """A process with executors, and what it answered."""

    pid: int
    answer: Answer

    @property
    def executors(self) -> list[dict[str, Any]]:
        """Its executors, as they describe themselves."""
        executors: list[dict[str, Any]] = self.answer.get("executors", [])
        return executors

    @property
    def command(self) -> str:
        """What it was started as, on one line."""
        return printable(_read(self.pid, "cmdline").replace("\0", " ")).strip()

    def has_process(self, pid: int) -> bool:
        """True if it is that process, or one of its ranks is."""
        ranks = [rank.get("pid") for executor in self.executors for rank in executor.get("ranks", [])]
        return pid == self.pid or pid in ranks


def find_drivers(want: str = "describe", *, only: int | None = None) -> list[Driver]:
    """Ask every driver that lives, or only that of one process, by process id.

    Those that do not answer in time have `error` in their answer.
    """
    found = {}
    for folder in _folders():
        for name, pid in folder.sockets():
            driver = _ask(folder, name, pid, want, only)
            if driver is not None:
                found[driver.pid] = driver
    return [found[pid] for pid in sorted(found)]


def _folders() -> Iterator[InspectionFolder]:
    """The folders that there are; of one that cannot be trusted the user is told."""
    for path in usual_places():
        try:
            folder = InspectionFolder(path)
        except ConfigError as unsafe:
            complain(str(unsafe))
            continue
        except OSError:  # there is none
            continue
        with folder:
            yield folder


def _ask(folder: InspectionFolder, name: str, pid: int, want: str, only: int | None) -> Driver | None:
    """What the driver behind a name answers; None if it has ended, is not this user's, or not the one that is meant."""
    try:
        with folder.connect(name) as connection:
            seen_as, uid = peer_of(connection)
            pid = seen_as or pid
            if uid != os.geteuid() or only not in (None, pid):
                return None
            return Driver(pid, _exchange(connection, want))
    except (TimeoutError, BlockingIOError):
        return Driver(pid, {"error": f"does not answer within {_ANSWER_S:g} s ({_state_of(pid)})"})
    except (OSError, ValueError):  # it ends in this moment
        return None


def _exchange(connection: socket.socket, want: str) -> Answer:
    deadline = Deadline.after(_ANSWER_S)
    connection.sendall(json.dumps({"want": want}).encode() + b"\n")  # a new connection has room for so little
    received = b""
    while not received.endswith(b"\n"):
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll((deadline.remaining() or 0.0) * 1000):
            raise TimeoutError
        piece = connection.recv(_PIECE)
        if not piece:
            raise ConnectionResetError("the driver has closed the connection")
        received += piece
    answer: Answer = json.loads(received)
    return answer


def _state_of(pid: int) -> str:
    letter = _read(pid, "stat").rpartition(")")[2].split()[:1]
    return {
        "T": "it is stopped: kill -CONT continues it",
        "D": "it waits in the kernel",
        "Z": "it has ended",
    }.get("".join(letter), "its interpreter may be held by C code")


def _read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
