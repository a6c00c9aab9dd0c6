"""Executors that can be looked at from outside: a unix socket for this user, opened only where it is asked for.

`MPEXEC_INSPECT=1` in the environment asks. Questions and answers are lines of JSON; nothing is ever unpickled, and no
question changes anything. One daemon thread answers for all executors of the process, one question at a time.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import socket
import sys
import threading
import traceback
import weakref
from contextlib import ExitStack
from typing import Any, Protocol

from mpexec.deadline import Deadline
from mpexec.errors import ConfigError
from mpexec.executor.inspection_folder import InspectionFolder, own_place, peer_of
from mpexec.transport import linux

logger = logging.getLogger(__name__)

VARIABLE = "MPEXEC_INSPECT"
_QUESTION_BYTES = 4096
_ANSWER_S = 2.0  # for one question from its first byte to the last one of the answer, the client's slowness included


class Inspectable(Protocol):
    """What is asked of an executor."""

    @property
    def world_size(self) -> int: ...

    def describe(self) -> dict[str, Any]: ...

    def rank_stacks(self) -> dict[int, str]: ...


def offer(executor: Inspectable) -> None:
    """Let an executor be looked at from now on, if the environment asks for it; a folder that is not safe is logged."""
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    with _lock:
        while (server := _serving()) is not None:
            server.executors.add(executor)
            if server is _server:  # else the last one before was released, or collected, amid this
                weakref.finalize(executor, _withdraw_forgotten).atexit = False
                return


def _serving() -> _Server | None:
    """The server, made if there is none that lives; None if none can be. Called with the lock held."""
    global _server
    if _server is None or not _server.is_alive:
        try:
            earlier, _server = _server, _Server()
        except (ConfigError, OSError, RuntimeError) as refused:
            logger.warning("no inspection of this process: %s", refused)
            return None
        if earlier is not None:
            _server.executors.update(earlier.executors)
    return _server


def withdraw(executor: Inspectable) -> None:
    """Nobody looks at the executor any more when this returns, which a look under way holds up for a moment.

    With the last executor the socket goes.
    """
    global _server
    server = _server
    if server is None:
        return
    with _lock:
        server.executors.discard(executor)
        if server.executors or server is not _server:
            return
        _server = None
    server.close()


def _withdraw_forgotten() -> None:
    """Close the socket if no executor is left. Garbage collections run this amid anything, so it waits for nothing."""
    global _server
    if not _lock.acquire(blocking=False):  # an answer is under way, and looks after it
        return
    try:
        server = _server
        if server is None or any(True for _ in server.executors):  # len() would count the one that goes
            return
        _server = None
    finally:
        _lock.release()
    server.post_close()


class _Server:
    """The socket and the thread that answers."""

    def __init__(self) -> None:
        """Open the socket.

        Raises:
            ConfigError: The folder is not this user's alone.
            OSError: It, or the socket, cannot be made.
            RuntimeError: No thread can be started.
        """
        self.executors: weakref.WeakSet[Inspectable] = weakref.WeakSet()
        self._connection: socket.socket | None = None
        with ExitStack() as opened:
            self._folder = InspectionFolder(own_place(), create=True)
            opened.callback(self._folder.close)
            for _ in self._folder.sockets():
                pass  # looking at them removes those of drivers that have ended
            self._socket, self._name = self._folder.listen()
            opened.callback(self._socket.close)
            opened.callback(self._folder.remove, self._name)
            self._bell = linux.OwnedFd(linux.eventfd())  # rung once, to end the thread
            opened.callback(self._bell.close)
            self._thread = threading.Thread(target=self._run, name="mpexec-inspection", daemon=True)
            self._thread.start()
            opened.pop_all()  # the thread closes them

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, as it does where the process has no descriptor left to accept with."""
        return self._thread.is_alive()

    def post_close(self) -> None:
        """Have the thread end and remove the socket."""
        if self.is_alive:
            linux.ring_eventfd(self._bell.fd)

    def close(self) -> None:
        """As `post_close`; waits until that is done, two seconds at most."""
        self.post_close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_ANSWER_S)

    def forget_in_child(self) -> None:
        """A forked child has copies of the descriptors, which would keep a connection open."""
        self._socket.close()
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        try:
            while self._await(self._socket, select.POLLIN, None):
                try:
                    connection, _ = self._socket.accept()
                except (BlockingIOError, ConnectionError):  # the client has gone again
                    continue
                with connection:
                    self._connection = connection
                    self._serve(connection)
                    self._connection = None
                _withdraw_forgotten()
        except OSError as failed:
            logger.warning("no inspection of this process any more: %s", failed)
        finally:
            self._folder.remove(self._name)
            self._socket.close()
            self._folder.close()
            self._bell.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one question. A client that is somebody else, or slow, or gone, is left."""
        pid, uid = peer_of(connection)
        if uid != os.geteuid():
            logger.warning("refused to be inspected by user %d (process %d)", uid, pid)
            return
        deadline = Deadline.after(_ANSWER_S)
        connection.setblocking(False)
        try:
            question = self._receive(connection, deadline)
            if question is not None:
                answer = json.dumps(self._answer(question), default=str, ensure_ascii=False)
                self._send(connection, answer.encode(errors="replace") + b"\n", Deadline.after(_ANSWER_S))
        except OSError:  # the client has gone
            logger.debug("an inspection ended early", exc_info=True)

    def _receive(self, connection: socket.socket, deadline: Deadline) -> bytes | None:
        """A whole line, or None."""
        received = b""
        while len(received) <= _QUESTION_BYTES and self._await(connection, select.POLLIN, deadline):
            piece = connection.recv(_QUESTION_BYTES)
            received += piece
            if received.endswith(b"\n"):
                return received
            if not piece:
                return None
        return None

    def _send(self, connection: socket.socket, data: bytes, deadline: Deadline) -> None:
        view = memoryview(data)
        while view and self._await(connection, select.POLLOUT, deadline):
            view = view[connection.send(view) :]

    def _await(self, sock: socket.socket, event: int, deadline: Deadline | None) -> bool:
        """Wait for a socket; False if the time is over, or the thread is to end."""
        poll = select.poll()
        poll.register(sock, event)
        poll.register(self._bell.fd, select.POLLIN)
        ready = dict(poll.poll(None if deadline is None else (deadline.remaining() or 0.0) * 1000))
        return bool(ready) and self._bell.fd not in ready

    # -- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, question: bytes) -> dict[str, Any]:
        try:
            wanted = json.loads(question)["want"]
        except (ValueError, TypeError, KeyError, RecursionError):
            wanted = None
        if wanted not in ("describe", "stacks"):
            return {"error": 'ask {"want": "describe"} or {"want": "stacks"}'}
        answer: dict[str, Any] = {"pid": os.getpid(), "executors": []}
        if wanted == "stacks":
            answer["threads"] = [row for row in thread_stacks() if row["name"] != self._thread.name]
        with _lock:  # nobody is released meanwhile
            for executor in list(self.executors):
                answer["executors"].append(_look_at(executor, with_stacks=wanted == "stacks"))
        return answer


def _look_at(executor: Inspectable, *, with_stacks: bool) -> dict[str, Any]:
    try:
        facts = {"world_size": executor.world_size, **executor.describe()}
        if with_stacks:
            facts["stacks"] = executor.rank_stacks()
    except Exception as failed:  # an executor that fails to tell is no reason to say nothing of the others
        logger.warning("an executor could not be inspected", exc_info=failed)
        return {"error": f"{type(failed).__name__}: {failed}"}
    return facts


def thread_stacks() -> list[dict[str, Any]]:
    """Every Python thread of this process, with what it is doing right now."""
    frames = sys._current_frames()
    rows = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            stack = "".join(traceback.format_stack(frame)).rstrip()
            rows.append({"name": thread.name, "daemon": thread.daemon, "stack": stack})
    return rows


_server: _Server | None = None
_lock = threading.RLock()  # a finalizer or a signal handler of the user's may release an executor amid an answer


@atexit.register
def _close_at_exit() -> None:
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


def _forget_in_child() -> None:
    global _server, _lock
    server, _server, _lock = _server, None, threading.RLock()
    if server is not None:
        server.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
