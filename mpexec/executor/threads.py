"""Blocking work of an executor, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

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
    outcome: list[T] = []
    errors: list[BaseException] = []
    left = False

    def deliver() -> None:
        over.set()
        if left and abandoned is not None and outcome:
            threading.Thread(target=abandoned, args=(outcome[0],), name=f"{name}-undo", daemon=True).start()

    def body() -> None:
        try:
            outcome.append(work())
        except BaseException as failed:
            errors.append(failed)
        try:
            loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop was closed meanwhile
            logger.debug("the loop that waited for %s is closed", name)
            if outcome and abandoned is not None:
                abandoned(outcome[0])

    threading.Thread(target=body, name=name, daemon=True).start()
    try:
        await over.wait()
    except asyncio.CancelledError:
        left = True
        if cancel is not None:
            cancel()
            await over.wait()
        raise
    if errors:
        raise errors[0]
    return outcome[0]
