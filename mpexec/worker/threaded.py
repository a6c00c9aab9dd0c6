"""A worker on a thread with an event loop of its own: for ranks that do not own the main thread of their process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from mpexec.messages import Call
from mpexec.transport.durations import Durations
from mpexec.worker.base_worker import BaseWorker
from mpexec.worker.dispatch import Dispatcher, Report

logger = logging.getLogger(__name__)

_TASKS_S = 1.0


class WorkerThread:
    """Builds one worker on a daemon thread, and runs its calls there in the order in which they are posted.

    Args:
        name: Name of the thread.
        report: Called on the thread as `report(call, value, error)`, once a call; see `Dispatcher`.
        dropped: Called on the thread with the id of a call that a stop had dropped, in place of a report.
        on_exit: Called on the thread with the `SystemExit` or `KeyboardInterrupt` that ended the loop: with False, and
            with True when the worker has been stopped and released. It is raised after that. Without `on_exit` these
            are a failure of their call, and the thread goes on.

    Attributes:
        worker: The worker, once `build` has made it.
        drop_until: Calls up to this id are not run any more.
        current: The call whose sync part runs now and since when (monotonic ns), or None.
        forward_since: Monotonic ns since when the agent's forward hook runs; 0 when it does not.
        durations: How long methods took; coroutines, which overlap, are not among them.
    """

    def __init__(
        self,
        name: str,
        report: Report,
        *,
        dropped: Callable[[int], None] = lambda call_id: None,
        on_exit: Callable[[BaseException, bool], None] | None = None,
    ) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.worker: BaseWorker | None = None
        self.drop_until = 0
        self.current: tuple[Call, int] | None = None
        self.forward_since = 0
        self.durations = Durations()
        self._report = report
        self._dropped = dropped
        self._on_exit = on_exit
        self._dispatcher: Dispatcher | None = None
        self._queue: deque[tuple[int, Callable[[], Call | None]]] = deque()
        self._last_begun = 0
        self._abandoned: set[int] = set()  # calls that were cancelled before they had begun
        self._is_running = False
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while True:
                try:
                    self.loop.run_forever()
                    return
                except (SystemExit, KeyboardInterrupt) as leaving:
                    if self._on_exit is None:  # a coroutine's, which the loop lets through: a failure of its call
                        logger.debug("a coroutine ended with %r", leaving)
                        continue
                    self.drop_until = sys.maxsize
                    self._on_exit(leaving, False)
                    self.loop.run_until_complete(self._leave())
                    self._on_exit(leaving, True)
                    raise
        finally:
            self.loop.close()

    def build(self, make: Callable[[], BaseWorker], done: Callable[[BaseException | None], None]) -> None:
        """Make the worker on the thread, model and all; `done` is called there with the error, or None."""

        def body() -> None:
            error: BaseException | None = None
            try:
                worker = make()
                worker.on_forward = self._on_forward
                exits_pass = self._on_exit is not None
                self._dispatcher = Dispatcher(worker, self._report, self.durations.add, exits_pass=exits_pass)
                self.worker = worker
            except BaseException as failed:
                error = failed
            done(error)
            if self._on_exit is not None and isinstance(error, SystemExit | KeyboardInterrupt):
                raise error

        self.loop.call_soon_threadsafe(body)

    def post(self, call_id: int, make_call: Callable[[], Call | None]) -> None:
        """Queue a call.

        Args:
            call_id: Its id.
            make_call: Gives the call, on the thread; None if it has been answered already.

        Raises:
            RuntimeError: The loop is closed.
        """
        self._queue.append((call_id, make_call))
        self.loop.call_soon_threadsafe(self._run_queue)

    def _run_queue(self) -> None:
        if self._queue and not self._is_running:
            self._is_running = True
            self._run_next()

    def _run_next(self) -> None:
        """Run one call, the next one a turn of the loop later: a coroutine's first step comes before it."""
        call_id, make_call = self._queue.popleft()
        self._last_begun = call_id
        try:
            if call_id <= self.drop_until or self._dispatcher is None:
                self._dropped(call_id)
            elif (call := make_call()) is not None:
                since = time.monotonic_ns()
                self.current = (call, since)
                if not self._dispatcher.run(call):
                    self.durations.add(call.name, time.monotonic_ns() - since)
        finally:
            self.current = None
            if call_id in self._abandoned:
                self._abandoned.discard(call_id)
                self.loop.call_soon(self._cancel, call_id)
            if self._queue:
                self.loop.call_soon(self._run_next)
            else:
                self._is_running = False

    def _on_forward(self, begins: bool) -> None:
        """The agent's forward hook begins, or has ended."""
        now = time.monotonic_ns()
        if not begins:
            self.durations.add("forward", now - self.forward_since)
        self.forward_since = now if begins else 0

    def cancel(self, call_id: int) -> None:
        """Cancel the coroutine of an abandoned call, from any thread, also before it has begun.

        It begins all the same, because it has begun on other ranks, and a sync method runs to its end.
        """
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._cancel, call_id)

    def _cancel(self, call_id: int) -> None:
        if call_id > self._last_begun:
            self._abandoned.add(call_id)
        elif self._dispatcher is not None:
            self.loop.call_soon(self._dispatcher.cancel, call_id)  # after its first step, which may be the loop's next

    # -- the end ---------------------------------------------------------------------------------------------------

    def stop(self) -> concurrent.futures.Future[None]:
        """Stop the worker's background tasks and its coroutines; from any thread, without waiting."""
        return asyncio.run_coroutine_threadsafe(self._stop(), self.loop)

    async def _stop(self) -> None:
        assert self.worker is not None
        assert self._dispatcher is not None
        await self.worker.stop_async()
        await self._dispatcher.await_method("wait_tasks", _TASKS_S)
        await self._dispatcher.cancel_all()

    def leave(self) -> concurrent.futures.Future[None] | None:
        """Stop and release the worker and end the thread; from any thread, without waiting. See `join`.

        Returns:
            Done when the worker has been released; None if the thread has ended.
        """
        if self.loop.is_closed():
            return None
        leaving = asyncio.run_coroutine_threadsafe(self._leave(), self.loop)
        leaving.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        return leaving

    async def _leave(self) -> None:
        worker = self.worker
        if worker is None:
            return
        try:
            await self._stop()
            worker.release()
        except Exception:  # the agent's own clean-up must not keep the thread from ending
            logger.exception("releasing the agent failed")

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; False if it goes on. On the thread itself it does not wait."""
        if not self.is_current:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """True on the thread itself."""
        return threading.current_thread() is self._thread

    @property
    def name(self) -> str:
        """Name of the thread."""
        return self._thread.name

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended."""
        return self._thread.is_alive()

    def stack(self) -> str:
        """What the thread is doing right now, as text."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "<the thread has ended>" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
