"""Blocking work of an executor, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_thread(
    work: Callable[[], T],
    *,
    name: str,
    abandoned: Callable[[T], None] | None = None,
    cancel: Callable[[], None] | None = None,
) -> T:
    """Run `work()` in a daemon thread of its own and await its result.

    Unlike `asyncio.to_thread` it leaves no pool behind, and a thread that is stuck keeps nobody from exiting.

    Args:
        work: Blocks for as long as it needs.
        name: Name of the thread.
        abandoned: Called with the result if the await had been cancelled meanwhile.
        cancel: Makes `work` end soon; called when the await is cancelled, which then waits until it has ended.

    Raises:
        BaseException: What `work` raised.
    """
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        over.set()
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
    try:
        return await done
    except asyncio.CancelledError:
        if cancel is not None:
            cancel()
            await over.wait()
        raise
