"""Background tasks that are owned by somebody: started, waited for, cancelled, and never lost.

The verb set start / wait_tasks / stop and the rule "cancel the siblings and wait for them" come from lmdeploy's
engine; what is added here is that every ending counts (an error, a quiet return, a cancellation from outside, a
failure before anybody waits) and that nothing which happens during the clean-up can hide the first error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Self

from mpexec.errors import TaskEndedError

logger = logging.getLogger(__name__)

_RECANCEL_S = 0.5  # a task that swallowed one CancelledError is asked again this often
_REFUSAL_S = 5.0  # after this long it is reported by name and left

AnyTask = asyncio.Task[Any]


async def cancel_async_tasks(tasks: Iterable[AnyTask], *, timeout: float = _REFUSAL_S) -> list[AnyTask]:
    """Cancel tasks and wait until they are gone.

    A task that swallows the cancellation is cancelled again every half second. The caller's own cancellation is
    honoured only after the tasks have ended, so that none of them outlives its owner.

    Args:
        tasks: Tasks of the running loop; finished ones are ignored. The current task is never cancelled.
        timeout: Seconds after which tasks that refuse to end are logged with their names and given back.

    Returns:
        The tasks that still run; normally empty. Errors that tasks raise while they end are retrieved and logged.
    """
    loop = asyncio.get_running_loop()
    pending = {task for task in tasks if task is not asyncio.current_task()}
    for task in pending:
        if not task.cancelling():  # one that was cancelled already is at its clean-up, which is not to be cut short
            task.cancel()
    give_up, cancel_again = loop.time() + timeout, loop.time() + _RECANCEL_S
    interrupted: asyncio.CancelledError | None = None
    while running := {task for task in pending if not task.done()}:
        now = loop.time()
        if now >= give_up:
            logger.error("tasks refuse to end: %s", ", ".join(sorted(task.get_name() for task in running)))
            break
        if now >= cancel_again:
            cancel_again = now + _RECANCEL_S
            for task in running:
                task.cancel()
        try:
            await asyncio.wait(running, timeout=min(give_up, cancel_again) - now)
        except asyncio.CancelledError as cancelled:
            interrupted = cancelled
    for task in pending:
        error = None if not task.done() or task.cancelled() else task.exception()
        if error is not None:
            logger.debug("task ended with an error while it was cancelled: name=%s error=%r", task.get_name(), error)
    if interrupted is not None:
        raise interrupted
    return [task for task in pending if not task.done()]


def ending_of(task: AnyTask) -> BaseException | None:
    """Why a finished task ended: its error, a `TaskEndedError` if it was cancelled, None if it returned."""
    if task.cancelled():
        return TaskEndedError(f"task {task.get_name()!r} was cancelled from outside", task_name=task.get_name())
    return task.exception()


async def wait_for_async_tasks(tasks: Iterable[AnyTask]) -> None:
    """Wait until all tasks have returned, or until the first one fails or is cancelled.

    Then, and also when the wait itself is cancelled, the others are cancelled and waited for.

    Raises:
        BaseException: The first failure; of several in one turn of the loop, the one of the task given first.
        TaskEndedError: A task was cancelled from outside.
    """
    ordered = list(tasks)
    waiting = set(ordered)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failures = [ending_of(task) for task in ordered if task in done]  # asks every one, so that none is unheard
            for failure in failures:
                if failure is not None:
                    raise failure
    finally:
        await cancel_async_tasks(waiting)


class TaskSet:
    """The background tasks of one module, on one event loop.

    The first ending of any task, while `cancel` has not been called, is a failure: it is kept until somebody waits,
    and the other tasks are cancelled at once.

    Args:
        owner: Name of the module, shown in errors and logs.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[AnyTask] = set()
        self._failure: BaseException | None = None
        self._asked = False
        self._cancelling = False
        self._wakers: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def over(self) -> bool:
        """True once `cancel` was called and all tasks are gone: the module may be started anew."""
        return self._cancelling and not self._tasks

    @property
    def ending(self) -> bool:
        """True from the first request to end on, until the set is over."""
        return self._asked and not self.over

    @property
    def failure(self) -> BaseException | None:
        """The first failure, or None."""
        return self._failure

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> AnyTask:
        """Run `work` as a task of the running loop, held until it ends."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        if self._cancelling or self._failure is not None:
            task.cancel()
        return task

    def _on_done(self, task: AnyTask) -> None:
        self._tasks.discard(task)
        failure = ending_of(task)
        if not self._cancelling and self._failure is None:
            self._failure = failure or TaskEndedError(
                f"task {task.get_name()!r} returned though nobody had called stop", task_name=task.get_name()
            )
            for other in self._tasks:
                other.cancel()
        elif failure is not None and not task.cancelled():
            logger.debug("task failed after the first failure: name=%s error=%r", task.get_name(), failure)
        for waker in self._wakers:
            if not waker.done():
                waker.set_result(None)

    async def _change(self) -> None:
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wakers.append(waker)
        try:
            await waker
        finally:
            self._wakers.remove(waker)

    async def wait(self) -> None:
        """Wait until a task ends or `cancel` is called; then until all tasks are gone. A set without tasks waits too.

        Any number of awaiters get the same outcome. Cancelling one of several leaves the tasks alone; cancelling the
        last one cancels the tasks, waits for them and re-raises.

        Raises:
            BaseException: The first failure.
        """
        try:
            while self._failure is None and not self._cancelling:
                await self._change()
        except asyncio.CancelledError:
            if not self._wakers:
                await self.cancel()
            raise
        await cancel_async_tasks(self._tasks)
        if self._failure is not None:
            raise self._failure

    def post_cancel_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the tasks' loop call `post_cancel`; from any thread."""
        self._asked = True
        loop.call_soon_threadsafe(self.post_cancel)

    def post_cancel(self) -> None:
        """Ask every task to end and return at once. `wait` then returns normally, unless a task had failed before."""
        self._asked = self._cancelling = True
        for task in self._tasks:
            task.cancel()
        for waker in self._wakers:
            if not waker.done():
                waker.set_result(None)

    async def cancel(self) -> None:
        """End every task and wait until they are gone. Calling it again changes nothing."""
        self.post_cancel()
        await cancel_async_tasks(self._tasks)


class TaskOwner:
    """The verbs of a module whose background tasks live on one event loop.

    A subclass overrides `_open` (start submodules and own tasks with `self._tasks.start`), `_close` (stop submodules)
    and `release`. `wait_tasks` of a submodule is itself one of the background tasks, so that an error climbs.
    """

    def __init__(self) -> None:
        self._tasks: TaskSet | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> bool:
        """True between `start` and `stop`, also after a background task has failed."""
        return self._tasks is not None

    def _open(self, tasks: TaskSet) -> None:
        """Start submodules, then own background tasks."""

    async def _close(self) -> None:
        """Stop submodules; called after the own tasks have been cancelled."""

    def start(self) -> None:
        """Start the background tasks on the running loop and return. Calling it while running changes nothing."""
        stale = self._loop is not None and self._loop.is_closed()
        if self._tasks is not None and not self._tasks.over and not stale:
            return
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskSet(type(self).__name__)
        try:
            self._open(self._tasks)
        except BaseException:
            self._tasks.post_cancel()
            self._tasks = None
            raise

    async def start_async(self) -> None:
        """As `start`; a stop that was requested before, and is not over, ends first."""
        await self._settle()
        self.start()

    async def _settle(self) -> None:
        """Wait until a stop that was requested on this loop is over."""
        if self._tasks is not None and self._tasks.ending and self._loop is asyncio.get_running_loop():
            await self.stop_async()

    async def wait_tasks(self) -> None:
        """Wait until a background task fails, end the others, and raise its error; return only after `stop`.

        Raises:
            BaseException: The first failure of a background task of this module or one beneath it.
        """
        if self._tasks is not None:
            await self._tasks.wait()

    def stop(self) -> None:
        """Request the end of the background tasks and return; may be called from any thread, in any state."""
        loop, tasks = self._loop, self._tasks
        if tasks is None or loop is None or loop.is_closed():
            return
        tasks.post_cancel_in(loop)

    def _stop_within(self, seconds: float) -> None:
        """Request the stop, on the loop's own thread or where the loop has ended; elsewhere block until it is done.

        Raises:
            TimeoutError: The loop did not get to it.
        """
        loop = self._loop
        if loop is None or not loop.is_running() or _runs_here(loop):
            TaskOwner.stop(self)
        else:
            asyncio.run_coroutine_threadsafe(self.stop_async(), loop).result(seconds)

    async def stop_async(self) -> None:
        """End the background tasks and those of the submodules, and wait until they are gone."""
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            try:
                await tasks.cancel()
            finally:
                await self._close()

    def release(self) -> None:
        """Free what the module holds. Works in any state, twice, and after a failure."""

    async def release_async(self) -> None:
        """As `release`."""
        self.release()

    async def run(self) -> None:
        """start, wait_tasks, stop, release in one coroutine.

        Raises:
            BaseException: The first failure; clean-up has been done.
        """
        try:
            await self.start_async()
            await self.wait_tasks()
        finally:
            try:
                await self.stop_async()
            finally:
                await self.release_async()

    async def __aenter__(self) -> Self:
        await self.start_async()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failure = self._tasks.failure if self._tasks is not None else None
        try:
            await self.stop_async()
        finally:
            await self.release_async()
        if failure is not None and error is None:
            raise failure


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
