"""Blocking work of an executor, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_thread(work: Callable[[], T], *, name: str, abandoned: Callable[[T], None] | None = None) -> T:
    """Run `work()` in a daemon thread of its own and await its result.

    Unlike `asyncio.to_thread` it leaves no pool behind, and a thread that is stuck keeps nobody from exiting.

    Args:
        work: Blocks for as long as it needs.
        name: Name of the thread.
        abandoned: Called in the thread with the result if the await had been cancelled meanwhile.

    Raises:
        BaseException: What `work` raised.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if not done.done():
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)
        elif error is None and abandoned is not None:
            threading.Thread(target=abandoned, args=(result,), name=f"{name}-undo", daemon=True).start()

    def body() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as failed:
            error = failed
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop was closed meanwhile
            logger.debug("the loop that waited for %s is closed", name)
            if error is None and abandoned is not None:
                abandoned(result)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await done


class CallbackThread:
    """Runs callbacks of users apart from the threads that must not wait; made on first use, ended by `close`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wake(self, work: Callable[[], None]) -> None:
        """Run `work` soon; one after another."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpexec-callbacks", daemon=True)
            self._thread.start()
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("a callback failed")

    def close(self) -> None:
        """End the thread after the work it has; may be called on the thread itself."""
        thread = self._thread
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(1.0)
