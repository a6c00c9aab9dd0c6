"""The side thread of a rank: it answers the driver while the main thread is busy, and ends the rank with its driver."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import threading
import time
from typing import Any, Protocol

from mpexec.deadline import Deadline
from mpexec.errors import MpexecError, TransportError
from mpexec.tasks import AnyTask
from mpexec.transport.lane import ControlLane
from mpexec.worker.rendezvous import abort_process_groups
from mpexec.worker.serving import RankServer

logger = logging.getLogger(__name__)

EXIT_ABORTED = 70  # a rank that ended itself because its main thread would not


class Loopish(Protocol):
    """What the side thread needs of an event loop."""

    def call_soon_threadsafe(self, callback: Any, *args: Any) -> Any:
        """Run `callback` on the loop's thread."""


class ControlThread:
    """Serves the control lane in a daemon thread.

    Messages of the driver: ("stop", token, last call id), ("exit", seconds), ("ping", token). Answers: ("stopped",
    token, error text or None), ("pong", token, progress). The end of the lane, or of the driver, ends this rank and its
    process group.

    Args:
        lane: The control lane.
        driver_pidfd: Becomes readable when the driver ends. A process that the user's program forked may hold the
            lane's other end open, so that its end alone is not enough.
        server: The rank's server.
        attached: A launcher has started this process, perhaps in one group with itself: only this process is ended with
            the driver, and one that the driver has asked to exit has done nothing that its launcher calls a failure.
    """

    def __init__(self, lane: ControlLane, driver_pidfd: int, server: RankServer, *, attached: bool = False) -> None:
        self._lane = lane
        self._driver_pidfd = driver_pidfd
        self._server = server
        self._attached = attached
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._early: list[Any] = []
        self._leaving = threading.Event()
        self._tasks: set[AnyTask] = set()
        self.exit_asked = False

    def start(self) -> None:
        """Start the thread; from now on the driver's end ends this process."""
        threading.Thread(target=self._serve, name="mpexec-control", daemon=True).start()

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """The rank is ready: stop and exit go through this loop from now on, those that came before included."""
        with self._lock:
            self._loop = loop
            early, self._early = self._early, []
        for callback in early:
            loop.call_soon(callback)

    def left_cleanly(self) -> None:
        """The main thread is about to end the process by itself."""
        self._leaving.set()

    def bound_exit(self, code: int, seconds: float) -> None:
        """End the process with `code` after `seconds`, should its orderly exit get stuck.

        An attached rank that was asked to exit goes back to its launcher, and the driver sees to it until then.
        """
        if self._attached and self.exit_asked:
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)  # the last resort, which needs no GIL

        def watch() -> None:
            time.sleep(seconds)
            os._exit(code)

        threading.Thread(target=watch, name="mpexec-exit", daemon=True).start()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._lane.fileno(), select.POLLIN)
        poll.register(self._driver_pidfd, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poll.poll()}
                if self._driver_pidfd in ready:
                    break
                message, _ = self._lane.recv(Deadline.after(5.0))
                self._handle(message)
        except (TransportError, OSError) as error:
            logger.debug("control lane ended: %s", error)
        if not self._leaving.is_set():
            if self._attached:
                os.kill(os.getpid(), signal.SIGKILL)
            os.killpg(0, signal.SIGKILL)

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "ping":
            self._lane.send(("pong", rest[0], self._server.progress()))
        elif kind == "stop":
            token, self._server.drop_until = rest
            self._on_loop(lambda: self._hold(self._stop(token), "stop"))
        elif kind == "exit":
            self.exit_asked = True
            self._on_loop(self._post_exit)
            threading.Thread(target=self._insist, args=(rest[0],), name="mpexec-insist", daemon=True).start()
        else:
            logger.warning("unknown control message: %r", kind)

    def _on_loop(self, callback: Any) -> None:
        with self._lock:
            loop = self._loop
            if loop is None:
                self._early.append(callback)
                return
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback)

    def _hold(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"control.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self, token: int) -> None:
        error: str | None = None
        try:
            await self._server.stop()
        except Exception as failed:  # the agent's own clean-up; the driver logs it and goes on
            error = f"{type(failed).__name__}: {failed}"
        self._lane.send(("stopped", token, error))

    def _post_exit(self) -> None:
        asyncio.get_running_loop().stop()

    def _insist(self, seconds: float) -> None:
        """End the process from here if its main thread does not leave: it sits in a collective or in C."""
        if self._leaving.wait(seconds * 0.5):
            return
        try:
            abort_process_groups()
        except (RuntimeError, MpexecError) as error:
            logger.debug("process groups could not be aborted: %s", error)
        if not self._leaving.wait(seconds * 0.5):
            os._exit(0 if self._attached else EXIT_ABORTED)
