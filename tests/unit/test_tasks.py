"""Background tasks with an owner: every ending counts, and no clean-up hides the first error."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

from mpexec import tasks as tasks_module
from mpexec.errors import TaskEndedError
from mpexec.tasks import TaskOwner, TaskSet, cancel_async_tasks, wait_for_async_tasks


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fail(error: BaseException, turns: int = 0) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    raise error


async def back(turns: int = 0) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def start(*works: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(work) for work in works]


async def bounded(work: Any) -> Any:
    async with asyncio.timeout(20):
        return await work


async def failed(tasks: TaskSet | None) -> None:
    """Return once a task of the set has failed."""
    assert tasks is not None
    while tasks.failure is None:
        await asyncio.sleep(0)


# -- cancel_async_tasks ----------------------------------------------------------------------------------------------


async def test_cancelled_tasks_are_gone_when_cancel_returns() -> None:
    cleaned = []

    async def slow_to_clean() -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(1)

    works = start(slow_to_clean(), for_ever(), back())
    await asyncio.sleep(0)
    assert await cancel_async_tasks(works) == []
    assert cleaned == [1]
    assert all(task.done() for task in works)


# F125
async def test_a_task_that_swallows_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "_RECANCEL_S", 0.01)
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 3:
            try:
                await for_ever()
            except asyncio.CancelledError:
                swallowed += 1
        await for_ever()

    [task] = start(stubborn())
    await asyncio.sleep(0)
    assert await bounded(cancel_async_tasks([task])) == []
    assert swallowed == 3
    assert task.cancelled()


async def test_a_task_that_refuses_to_end_is_named_and_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks_module, "_RECANCEL_S", 0.01)
    give_up = asyncio.Event()

    async def refuses() -> None:
        while not give_up.is_set():
            try:
                await give_up.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.get_running_loop().create_task(refuses(), name="mule")
    await asyncio.sleep(0)
    assert await cancel_async_tasks([task], timeout=0.05) == [task]
    assert "mule" in caplog.text
    give_up.set()
    await task


async def test_the_callers_own_cancellation_waits_for_the_tasks_to_end() -> None:
    ended = asyncio.Event()

    async def slow_to_clean() -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0.02)
            ended.set()

    [task] = start(slow_to_clean())
    await asyncio.sleep(0)
    cancelling = asyncio.ensure_future(cancel_async_tasks([task]))
    await asyncio.sleep(0)
    cancelling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelling
    assert ended.is_set()


# F127
async def test_errors_of_tasks_that_end_while_cancelled_are_retrieved() -> None:
    async def fails_in_cleaning() -> None:
        try:
            await for_ever()
        finally:
            raise ValueError("cleaning")

    seen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    works = start(fails_in_cleaning())
    await asyncio.sleep(0)
    await cancel_async_tasks(works)
    works.clear()
    gc.collect()
    assert seen == []


# -- wait_for_async_tasks --------------------------------------------------------------------------------------------


async def test_waiting_returns_when_all_have_returned() -> None:
    await bounded(wait_for_async_tasks(start(back(), back(5))))
    await bounded(wait_for_async_tasks([]))


# F038
async def test_the_first_failure_is_raised_and_the_others_are_gone() -> None:
    works = start(for_ever(), fail(ValueError("first"), 2), fail(KeyError("later"), 50))
    with pytest.raises(ValueError, match="first"):
        await bounded(wait_for_async_tasks(works))
    assert all(task.done() for task in works)


async def test_of_two_failures_in_one_turn_the_task_given_first_counts() -> None:
    for _ in range(20):
        works = start(fail(ValueError("first")), fail(KeyError("second")))
        with pytest.raises(ValueError, match="first"):
            await bounded(wait_for_async_tasks(works))


async def test_a_failure_before_the_wait_is_raised() -> None:
    works = start(fail(ValueError("early")), for_ever())
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="early"):
        await bounded(wait_for_async_tasks(works))


async def test_a_task_cancelled_from_outside_wakes_the_wait() -> None:
    works = start(for_ever(), for_ever())
    waiting = asyncio.ensure_future(wait_for_async_tasks(works))
    await asyncio.sleep(0)
    works[1].cancel()
    with pytest.raises(TaskEndedError, match="cancelled"):
        await bounded(waiting)


# F038
async def test_clean_up_that_fails_or_is_slow_does_not_hide_the_first_error() -> None:
    async def fails_in_cleaning() -> None:
        try:
            await for_ever()
        finally:
            raise KeyError("cleaning")

    with pytest.raises(ValueError, match="root"):
        await bounded(wait_for_async_tasks(start(fails_in_cleaning(), fail(ValueError("root"), 1))))


async def test_a_finally_that_awaits_a_cancelled_task_does_not_replace_the_root_cause() -> None:
    inner = asyncio.ensure_future(for_ever())

    async def owner() -> None:
        try:
            await fail(ValueError("root"), 1)
        finally:
            await cancel_async_tasks([inner])

    with pytest.raises(ValueError, match="root"):
        await bounded(wait_for_async_tasks(start(owner())))
    assert inner.cancelled()


async def test_cancelling_the_wait_cancels_the_tasks_and_waits_for_them() -> None:
    works = start(for_ever(), for_ever())
    waiting = asyncio.ensure_future(wait_for_async_tasks(works))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(waiting)
    assert all(task.cancelled() for task in works)


async def test_the_cause_of_an_error_is_not_erased() -> None:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    with pytest.raises(ValueError) as caught:
        await wait_for_async_tasks(start(fail(error)))
    assert isinstance(caught.value.__cause__, KeyError)
    assert not caught.value.__suppress_context__ or caught.value.__cause__ is not None


# -- TaskSet ---------------------------------------------------------------------------------------------------------


async def test_a_set_reports_a_failure_that_came_before_anybody_waited() -> None:
    tasks = TaskSet("Owner")
    tasks.start(fail(ValueError("early")), name="a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    for _ in range(2):
        with pytest.raises(ValueError, match="early"):
            await bounded(tasks.wait())


async def test_a_failure_cancels_the_other_tasks_at_once() -> None:
    tasks = TaskSet("Owner")
    other = tasks.start(for_ever(), name="other")
    tasks.start(fail(ValueError("x")), name="bad")
    await asyncio.gather(other, return_exceptions=True)
    assert other.cancelled()
    assert isinstance(tasks.failure, ValueError)


@pytest.mark.parametrize("how", ["return", "cancel"])
async def test_a_task_that_returns_or_is_cancelled_is_a_failure_that_names_it(how: str) -> None:
    tasks = TaskSet("Owner")
    task = tasks.start(back() if how == "return" else for_ever(), name="loop")
    await asyncio.sleep(0)
    if how == "cancel":
        task.cancel()
    with pytest.raises(TaskEndedError) as caught:
        await bounded(tasks.wait())
    assert caught.value.task_name == "Owner.loop"


async def test_after_cancel_wait_returns_normally() -> None:
    tasks = TaskSet("Owner")
    tasks.start(for_ever(), name="a")
    waiting = asyncio.ensure_future(tasks.wait())
    await asyncio.sleep(0)
    await tasks.cancel()
    await tasks.cancel()
    await bounded(waiting)
    await bounded(tasks.wait())
    assert len(tasks) == 0


async def test_a_failure_stays_the_outcome_after_cancel() -> None:
    tasks = TaskSet("Owner")
    tasks.start(fail(ValueError("x")), name="a")
    await failed(tasks)
    await tasks.cancel()
    with pytest.raises(ValueError, match="x"):
        await bounded(tasks.wait())


async def test_an_empty_set_waits_until_it_is_cancelled() -> None:
    tasks = TaskSet("Owner")
    waiting = asyncio.ensure_future(tasks.wait())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    tasks.post_cancel()
    await bounded(waiting)


async def test_all_awaiters_get_the_failure() -> None:
    tasks = TaskSet("Owner")
    waiting = start(*(tasks.wait() for _ in range(3)))
    await asyncio.sleep(0)
    tasks.start(fail(ValueError("x")), name="a")
    outcomes = await bounded(asyncio.gather(*waiting, return_exceptions=True))
    assert [type(outcome) for outcome in outcomes] == [ValueError] * 3


async def test_cancelling_one_awaiter_leaves_the_tasks_and_the_last_one_takes_them_along() -> None:
    tasks = TaskSet("Owner")
    task = tasks.start(for_ever(), name="a")
    first, last = start(tasks.wait(), tasks.wait())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not task.done()
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(last)
    assert task.cancelled()


async def test_a_task_started_after_the_end_is_cancelled() -> None:
    tasks = TaskSet("Owner")
    await tasks.cancel()
    late = tasks.start(for_ever(), name="late")
    await asyncio.gather(late, return_exceptions=True)
    assert late.cancelled()


async def test_wait_returns_only_when_every_task_is_gone() -> None:
    tasks = TaskSet("Owner")
    gone = []

    async def slow_to_clean() -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0.02)
            gone.append(1)

    tasks.start(slow_to_clean(), name="slow")
    await asyncio.sleep(0)
    tasks.start(fail(ValueError("x")), name="bad")
    with pytest.raises(ValueError, match="x"):
        await bounded(tasks.wait())
    assert gone == [1]


def test_leaving_passes_through_after_clean_up() -> None:
    """SystemExit and KeyboardInterrupt of a task end the loop; they are neither logged nor dropped."""
    for error in (SystemExit(3), KeyboardInterrupt()):
        cleaned: list[int] = []

        async def other(cleaned: list[int] = cleaned) -> None:
            try:
                await for_ever()
            finally:
                cleaned.append(1)

        async def main(error: BaseException = error, other: Callable[[], Any] = other) -> None:
            tasks = TaskSet("Owner")
            tasks.start(other(), name="other")
            tasks.start(fail(error, 2), name="leaves")
            await tasks.wait()

        with pytest.raises(type(error)):
            asyncio.run(main())
        assert cleaned == [1]


# -- TaskOwner -------------------------------------------------------------------------------------------------------


class Inner(TaskOwner):
    def __init__(self) -> None:
        super().__init__()
        self.trace: list[str] = []

    def _open(self, tasks: TaskSet) -> None:
        self.trace.append("open")
        self.bad = asyncio.Event()
        tasks.start(self._work(), name="work")

    async def _work(self) -> None:
        await self.bad.wait()
        raise ValueError("inner")

    def release(self) -> None:
        self.trace.append("release")


class Outer(TaskOwner):
    """Two levels: the wait on the inner one's tasks is one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def _open(self, tasks: TaskSet) -> None:
        self.inner.start()
        tasks.start(self.inner.wait_tasks(), name="inner")
        tasks.start(for_ever(), name="monitor")

    async def _close(self) -> None:
        await self.inner.stop_async()

    def release(self) -> None:
        self.inner.release()


# F085
async def test_an_error_climbs_through_the_levels_past_perpetual_tasks() -> None:
    outer = Outer()
    outer.start()
    outer.inner.bad.set()
    with pytest.raises(ValueError, match="inner"):
        await bounded(outer.wait_tasks())
    await outer.stop_async()
    assert not outer.running


async def test_start_twice_changes_nothing_and_restart_begins_anew() -> None:
    outer = Outer()
    outer.start()
    outer.start()
    assert outer.inner.trace == ["open"]
    await outer.stop_async()
    await outer.stop_async()
    outer.start()
    assert outer.inner.trace == ["open", "open"]
    outer.inner.bad.set()
    with pytest.raises(ValueError, match="inner"):
        await bounded(outer.wait_tasks())
    await outer.stop_async()


async def test_a_requested_stop_ends_the_wait_and_start_may_follow() -> None:
    outer = Outer()
    for _ in range(3):
        outer.start()
        outer.stop()
        await bounded(outer.wait_tasks())
    assert outer.inner.trace == ["open"] * 3
    await outer.stop_async()


async def test_a_start_right_behind_a_requested_stop_starts_anew() -> None:
    outer = Outer()
    await outer.start_async()
    outer.stop()
    await outer.start_async()
    await asyncio.sleep(0)
    waiting = asyncio.create_task(outer.wait_tasks())
    outer.inner.bad.set()
    with pytest.raises(ValueError, match="inner"):
        await bounded(waiting)
    await outer.stop_async()


async def test_stop_may_come_from_a_thread() -> None:
    outer = Outer()
    outer.start()
    waiting = asyncio.ensure_future(outer.wait_tasks())
    await asyncio.sleep(0)
    await asyncio.to_thread(outer.stop)
    await bounded(waiting)
    await outer.stop_async()


def test_stop_before_start_and_after_the_loop_has_gone_is_harmless() -> None:
    outer = Outer()
    outer.stop()
    asyncio.run(outer.stop_async())

    async def begin() -> None:
        outer.start()

    asyncio.run(begin())
    outer.stop()
    asyncio.run(outer.stop_async())

    async def again() -> None:
        outer.start()
        assert outer.inner.trace == ["open", "open"]
        await outer.stop_async()

    asyncio.run(again())


def test_start_works_on_a_new_loop_after_the_old_one_was_closed() -> None:
    outer = Outer()

    async def begin() -> None:
        outer.start()

    asyncio.run(begin())

    async def again() -> None:
        outer.start()
        outer.inner.bad.set()
        with pytest.raises(ValueError, match="inner"):
            await bounded(outer.wait_tasks())
        await outer.stop_async()

    asyncio.run(again())


async def test_run_raises_after_stop_and_release() -> None:
    outer = Outer()
    running = asyncio.ensure_future(outer.run())
    await asyncio.sleep(0)
    outer.inner.bad.set()
    with pytest.raises(ValueError, match="inner"):
        await bounded(running)
    assert outer.inner.trace == ["open", "release"]
    assert not outer.running


async def test_async_with_raises_a_background_failure_unless_the_block_raised() -> None:
    with pytest.raises(ValueError, match="inner"):
        async with Outer() as outer:
            outer.inner.bad.set()
            await failed(outer._tasks)
    with pytest.raises(ZeroDivisionError):
        async with Outer() as outer:
            outer.inner.bad.set()
            await failed(outer._tasks)
            raise ZeroDivisionError
    async with Outer() as outer:
        await asyncio.sleep(0)
    assert outer.inner.trace == ["open", "release"]


async def test_a_start_that_fails_can_be_tried_again() -> None:
    class FailsOnce(TaskOwner):
        def __init__(self) -> None:
            super().__init__()
            self.tries = 0

        def _open(self, tasks: TaskSet) -> None:
            self.tries += 1
            tasks.start(for_ever(), name="begun")
            if self.tries == 1:
                raise ValueError("not yet")

    owner = FailsOnce()
    with pytest.raises(ValueError, match="not yet"):
        owner.start()
    owner.start()
    assert owner.tries == 2
    await owner.stop_async()


# F127
async def test_nothing_is_said_about_tasks_that_failed_after_the_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tasks = TaskSet("Owner")
        for number in range(3):
            tasks.start(fail(ValueError(str(number)), number), name=str(number))
        with pytest.raises(ValueError, match="0"):
            await bounded(tasks.wait())
        del tasks
        gc.collect()
    assert not caplog.records
