"""Steps of the model that do not end: the user hears of it in time, and a command does not wait for them for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from mpexec.cli.report import StalledError, complain
from mpexec.engine.health import Health
from mpexec.tasks import cancel_async_tasks

_LOOK_EVERY_S = 1.0
_TELL_AFTER_S = 10.0  # longer than a step takes, but for a large model on few cores, of which the line says nothing bad


class Watched(Protocol):
    """What is asked of an engine."""

    def health(self) -> Health: ...


@asynccontextmanager
async def watching(engine: Watched, timeout: float, tell: Callable[[str], None] = complain) -> AsyncIterator[None]:
    """Look after the steps of a started engine for as long as the block runs.

    A rank that was stopped, or that waits for ever inside a library, is alive for the kernel: that no step ends is the
    only sign, and a clock the only one who sees it.

    Args:
        engine: Asked for its health only, which waits for no rank.
        timeout: Seconds without a step after which the block is cancelled; 0 for never.
        tell: Takes one line some seconds after the last step, and again if the block is cancelled from elsewhere then.

    Raises:
        StalledError: No step has ended for `timeout` seconds.
    """
    try:
        async with asyncio.timeout(None) as limit:
            watch = asyncio.create_task(_watch(engine, timeout, limit, tell), name="mpexec-stall")
            try:
                yield
            finally:
                await cancel_async_tasks([watch])
    except TimeoutError:
        if not limit.expired():
            raise
        raise StalledError(watch.result()) from None
    except asyncio.CancelledError:
        health = engine.health()
        if _seconds(health) >= _TELL_AFTER_S:
            tell(describe_stall(health))
        raise


async def _watch(engine: Watched, timeout: float, limit: asyncio.Timeout, tell: Callable[[str], None]) -> str:
    """Look until there has been no step for too long, and let the limit pass then; gives what is to be said of it."""
    is_told = False
    while True:
        health = engine.health()
        seconds = _seconds(health)
        if timeout and seconds >= timeout:
            limit.reschedule(asyncio.get_running_loop().time())
            return describe_stall(health)
        if seconds < _TELL_AFTER_S:
            is_told = False
        elif not is_told:
            is_told = True
            tell(describe_stall(health))
        await asyncio.sleep(_LOOK_EVERY_S)


def describe_stall(health: Health) -> str:
    """What there is to say of an engine without steps, for people.

    It names the ranks that do not run, or else all of them; or the engine's process, without whose word nobody knows.
    """
    seconds = _seconds(health)
    if (health.silence or 0.0) > seconds / 2:  # one that runs says something many times a second
        return f"no word from the engine's process for {health.silence:.0f} s"
    culprits = [rank for rank in health.ranks if rank.state != "running"] or health.ranks
    return ": ".join([f"no step for {seconds:.0f} s", *filter(None, ["; ".join(map(str, culprits))])])


def _seconds(health: Health) -> float:
    """Since the last step, while one is under way; or since the last word, while one is due."""
    return max(health.step_age or 0.0, health.silence or 0.0)
