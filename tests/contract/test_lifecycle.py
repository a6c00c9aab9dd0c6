"""start, wait_tasks, stop, release and run: in every order, in every state, from every place."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from contract.agents import (
    Agent,
    FailsToStart,
    MyError,
    StopsItsStart,
    Stream,
    Tasks,
    block_until_stop_is_asked_for,
)
from contract.conftest import (
    InThread,
    build,
    class_of,
    in_time,
    last_rank,
    only_apart,
    only_uni,
    until,
    until_async,
)
from mpexec import (
    Executor,
    ExecutorStoppedError,
    RemoteTraceback,
    TaskEndedError,
    UniExecutor,
    WrongStateError,
)
from mpexec.executor.base import State

Fresh = Callable[..., Executor]


def end_background(executor: Executor, kind: str = "fail", rank: int | None = None) -> None:
    """Let the background task of a rank, the last one unless given, end in some way."""
    executor.notify("end_background", (kind, (last_rank(executor) if rank is None else rank,)))


def background_runs(executor: Executor) -> bool:
    """True if every rank's background task runs."""
    return bool(executor.collective_rpc("has_background", timeout=20) == [True] * executor.world_size)


# -- verbs in every order --------------------------------------------------------------------------------------------


def test_construction_ends_ready_and_start_runs_the_tasks(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    assert executor.state is State.READY
    executor.start()
    assert executor.state is State.RUNNING
    assert background_runs(executor)


def test_starting_again_changes_nothing(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    executor.start()
    executor.start()
    assert executor.state is State.RUNNING
    assert background_runs(executor)


def test_several_threads_may_start_at_once(fresh: Fresh) -> None:
    for _ in range(5):
        executor = fresh(Tasks)
        together = threading.Barrier(4)

        def start(executor: Executor = executor, together: threading.Barrier = together) -> None:
            together.wait()
            executor.start()

        for thread in [InThread(start) for _ in range(4)]:
            thread.result()
        assert executor.state is State.RUNNING
        assert background_runs(executor)


def test_stop_cancels_the_background_tasks(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    executor.start()
    executor.stop()
    assert executor.state is State.STOPPED
    assert executor.collective_rpc("take_log") == [["background cancelled"]] * executor.world_size


def test_stop_may_come_first_and_again(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    executor.stop()
    executor.stop()
    executor.start()
    executor.stop()
    executor.stop()
    assert executor.state is State.STOPPED


def test_start_and_stop_may_alternate(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    for _ in range(10):
        executor.start()
        assert background_runs(executor)
        executor.stop()
    assert executor.state is State.STOPPED


def test_release_works_in_every_state_and_twice(fresh: Fresh) -> None:
    for verbs in ([], ["start"], ["stop"], ["start", "stop"], ["start", "stop", "start"]):
        executor = fresh(Tasks)
        for verb in verbs:
            getattr(executor, verb)()
        executor.release()
        executor.release()
        executor.stop()
        assert executor.state is State.RELEASED
        with pytest.raises((ExecutorStoppedError, WrongStateError)):
            executor.start()


def test_stop_from_a_thread_ends_a_call_in_flight_at_once(fresh: Fresh, go: Path) -> None:
    executor = fresh()
    executor.start()
    calls = [InThread(lambda: executor.collective_rpc("wait_for_file", (str(go),)))]
    until(lambda: all(row["method"] == "wait_for_file" for row in executor.describe()["ranks"]))
    calls += [
        InThread(lambda: executor.collective_rpc("echo", ("queued",))),
        InThread(lambda: asyncio.run(executor.collective_rpc_async("hold", ("x",)))),
    ]
    submitted = executor.submit_rpc("echo", (1,))
    until(lambda: executor.describe()["calls_in_flight"] == 4)
    stopping = InThread(executor.stop)
    for call in calls:
        with pytest.raises(ExecutorStoppedError):
            call.result()
    assert isinstance(submitted.exception(20), ExecutorStoppedError)
    assert not stopping.done.is_set()  # a rank is still in its method
    go.touch()
    stopping.result()
    assert executor.state is State.STOPPED
    assert executor.collective_rpc("echo", (2,), reply_ranks=0) == 2


def test_calls_that_were_queued_when_stop_came_never_run(fresh: Fresh, go: Path) -> None:
    executor = fresh()
    executor.start()
    executor.notify(block_until_stop_is_asked_for, (str(go),))
    for number in range(10):
        executor.notify("note", (number,))
    stopping = InThread(executor.stop)
    if isinstance(executor, UniExecutor):
        until(lambda: executor._thread.drop_until > 0)
        go.touch()
    stopping.result()
    assert executor.collective_rpc("take_log") == [[]] * executor.world_size


def test_two_threads_may_stop_at_once_and_both_return_when_it_is_done(fresh: Fresh, go: Path) -> None:
    executor = fresh()
    executor.start()
    executor.notify("wait_for_file", (str(go),))
    until(lambda: executor.describe()["ranks"][0]["method"] == "wait_for_file")
    stopping = [InThread(executor.stop) for _ in range(2)]
    until(lambda: executor.describe()["calls_in_flight"] == 0)
    assert not any(one.done.is_set() for one in stopping)
    go.touch()
    for one in stopping:
        one.result()
    assert executor.state is State.STOPPED


# F083
def test_release_closes_no_descriptor_that_somebody_else_opened_since(fresh: Fresh, tmp_path: Path) -> None:
    executor = fresh()
    executor.start()
    executor.release()
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / f"{number}").open("w")) for number in range(60)]
        del executor
        gc.collect()
        for file in files:
            file.write("still open")
            file.flush()


# F076
def test_release_from_a_thread_ends_calls_in_flight(fresh: Fresh) -> None:
    executor = fresh()
    executor.start()
    calls = [
        InThread(lambda: executor.collective_rpc("hold", ("x",))),
        InThread(lambda: asyncio.run(executor.collective_rpc_async("hold", ("y",)))),
    ]
    until(lambda: executor.describe()["calls_in_flight"] == 2)
    executor.release()
    for call in calls:
        with pytest.raises(ExecutorStoppedError):
            call.result()


# F076
def test_release_while_threads_send_ends_each_of_them_with_that_error(fresh: Fresh) -> None:
    executor = fresh()
    executor.start()
    data = bytes(1 << 20)

    def send() -> None:
        while True:
            executor.collective_rpc("echo", (data,), reply_ranks=())

    calls = [InThread(send) for _ in range(3)]
    executor.collective_rpc("echo", (1,))
    executor.release()
    for call in calls:
        with pytest.raises(ExecutorStoppedError):
            call.result()


def test_stop_in_a_callback_of_a_future_works(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    executor.start()
    ended = threading.Event()

    def stop(_: Any) -> None:
        executor.stop()
        ended.set()

    executor.submit_rpc("doze", (0.01,)).add_done_callback(stop)
    assert ended.wait(20)
    until(lambda: executor.state is State.STOPPED)
    executor.start()
    assert background_runs(executor)


def test_release_in_a_callback_of_a_future_works(fresh: Fresh, caplog: pytest.LogCaptureFixture) -> None:
    executor = fresh()
    executor.start()
    ended = threading.Event()

    def release(_: Any) -> None:
        executor.release()
        ended.set()

    executor.submit_rpc("doze", (0.01,)).add_done_callback(release)
    assert ended.wait(20)
    assert executor.state is State.RELEASED
    assert not caplog.records


@only_uni
def test_stop_with_the_thread_stuck_in_a_method_is_bounded_and_breaks_the_executor(fresh: Fresh, go: Path) -> None:
    executor = fresh(stop_timeout=0.4)
    executor.start()
    call = InThread(lambda: executor.collective_rpc("wait_for_file", (str(go),)))
    until(lambda: executor.describe()["ranks"][0]["method"] == "wait_for_file")
    executor.stop()
    with pytest.raises(ExecutorStoppedError):
        call.result()
    assert executor.state is State.BROKEN
    assert executor.describe()["abandoned_thread"]
    executor.release()


@only_apart
def test_stop_with_a_rank_stuck_in_a_method_is_bounded_and_ends_the_ranks(fresh: Fresh, go: Path) -> None:
    executor = fresh(stop_timeout=1.0)
    executor.start()
    call = InThread(lambda: executor.collective_rpc("wait_for_file", (str(go),)))
    until(lambda: executor.describe()["ranks"][0]["method"] == "wait_for_file")
    executor.stop()
    with pytest.raises(ExecutorStoppedError):
        call.result()
    assert executor.state is State.BROKEN
    until(lambda: all(row["exit"] for row in executor.describe()["ranks"]))
    assert all(row["ended_by"] for row in executor.describe()["ranks"])


# -- with, async with, run -------------------------------------------------------------------------------------------


def test_with_starts_and_releases(kind: str) -> None:
    with build(kind, Tasks) as executor:
        assert executor.state is State.RUNNING
        assert background_runs(executor)
    assert executor.state is State.RELEASED


def test_with_raises_a_background_failure_at_its_end(fresh: Fresh) -> None:
    with pytest.raises(MyError, match="background of rank"), fresh(Tasks) as executor:
        end_background(executor)
        until(lambda: executor.state is State.STOPPED)
    assert executor.state is State.RELEASED


def test_an_error_of_the_block_wins_over_a_background_failure(fresh: Fresh) -> None:
    with pytest.raises(ZeroDivisionError), fresh(Tasks) as executor:
        end_background(executor)
        until(lambda: executor.state is State.STOPPED)
        raise ZeroDivisionError
    assert executor.state is State.RELEASED


async def test_async_with_starts_and_releases(kind: str) -> None:
    async with build(kind, Tasks) as executor:
        assert await executor.collective_rpc_async("has_background", reply_ranks=0)
    assert executor.state is State.RELEASED


async def test_async_with_raises_a_background_failure_at_its_end(fresh: Fresh) -> None:
    with pytest.raises(MyError, match="background of rank"):
        async with fresh(Tasks) as executor:
            end_background(executor)
            await until_async(lambda: executor.state is State.STOPPED)
    assert executor.state is State.RELEASED


async def test_run_raises_the_failure_after_everything_has_been_released(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    running = asyncio.ensure_future(executor.run())
    await until_async(lambda: executor.state is State.RUNNING)
    end_background(executor)
    with pytest.raises(MyError, match=f"background of rank {last_rank(executor)}"):
        await in_time(running)
    assert executor.state is State.RELEASED


async def test_run_returns_after_stop(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    running = asyncio.ensure_future(executor.run())
    await until_async(lambda: executor.state is State.RUNNING)
    await executor.collective_rpc_async("echo")
    executor.stop()
    await in_time(running)
    assert executor.state is State.RELEASED


async def test_cancelling_run_releases_everything(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    running = asyncio.ensure_future(executor.run())
    await until_async(lambda: executor.state is State.RUNNING)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await in_time(running)
    assert executor.state is State.RELEASED


def test_a_start_that_fails_raises_the_agents_error_each_time(fresh: Fresh) -> None:
    executor = fresh(FailsToStart)
    for _ in range(2):
        with pytest.raises(MyError, match="cannot start"):
            executor.start()
        assert executor.state is not State.RUNNING
    with pytest.raises(MyError, match="cannot start"):
        asyncio.run(executor.start_async())
    assert executor.collective_rpc("echo", (1,), reply_ranks=0) == 1


def test_a_start_that_raises_stop_iteration_ends(fresh: Fresh) -> None:
    executor = fresh(StopsItsStart)
    with pytest.raises(StopIteration):
        executor.start()
    with pytest.raises(RuntimeError, match="StopIteration"):  # PEP 479: a coroutine cannot raise it
        asyncio.run(in_time(executor.start_async()))


def test_with_releases_what_could_not_start(fresh: Fresh) -> None:
    executor = fresh(FailsToStart)
    with pytest.raises(MyError, match="cannot start"), executor:
        pass
    assert executor.state is State.RELEASED


# -- loops -----------------------------------------------------------------------------------------------------------


# F116
@pytest.mark.parametrize("policy", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_executor_belongs_to_no_loop(fresh: Fresh, policy: Callable[[], asyncio.AbstractEventLoop]) -> None:
    executor = fresh(Tasks)

    def run(work: Any) -> Any:
        with asyncio.Runner(loop_factory=policy) as runner:
            return runner.run(in_time(work))

    run(executor.start_async())
    assert run(executor.collective_rpc_async("echo", (1,), reply_ranks=0)) == 1
    assert run(executor.collective_rpc_async("doze", (0.02, 2), reply_ranks=0)) == 2
    run(executor.stop_async())
    run(executor.start_async())
    assert background_runs(executor)

    async def fail() -> None:
        end_background(executor)
        await executor.wait_tasks()

    with pytest.raises(MyError):
        run(fail())
    run(executor.release_async())


@pytest.mark.parametrize("policy", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_creation_without_blocking_the_loop(kind: str, policy: Callable[[], asyncio.AbstractEventLoop]) -> None:
    cls = class_of(kind)
    options = {"world_size": 1, "device": "cpu", "init_process_group": False, "start_method": "forkserver"}

    async def main() -> list[Any]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        executor = await cls.create_async(Agent, **options)
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
        assert turns > 1 or kind == "uni"
        async with executor:
            return list(await executor.collective_rpc_async("where"))

    with asyncio.Runner(loop_factory=policy) as runner, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert runner.run(in_time(main())) == [0]


# F116, F128
def test_a_loop_that_was_closed_in_the_midst_of_a_call_keeps_nobody_else_waiting(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    executor.start()
    for turns in (1, 2, 5, 80):  # in the spin, and asleep
        loop = asyncio.new_event_loop()
        abandoned = loop.create_task(executor.collective_rpc_async("hold", (f"closed {turns}",)))

        async def turn(turns: int = turns) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        loop.run_until_complete(turn())
        loop.close()
        other = InThread(lambda: asyncio.run(in_time(executor.collective_rpc_async("doze", (0.02, 1), reply_ranks=0))))
        assert other.result() == 1
        assert executor.submit_rpc("doze", (0.02, 2), reply_ranks=0).result(20) == 2
        abandoned._log_destroy_pending = False  # type: ignore[attr-defined]
        del abandoned
        gc.collect()
        assert executor.submit_rpc("doze", (0.02, 3), reply_ranks=0).result(20) == 3
    executor.release()


async def test_stop_on_the_loop_requests_the_stop_and_wait_tasks_ends(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    waiting = asyncio.ensure_future(executor.wait_tasks())
    await asyncio.sleep(0)
    await executor.collective_rpc_async("echo")
    executor.stop()
    await in_time(waiting)


async def test_after_a_stop_on_the_loop_wait_tasks_and_start_may_follow_at_once(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    for _ in range(10):
        executor.stop()
        await in_time(executor.wait_tasks())
        await executor.start_async()
        assert await executor.collective_rpc_async("has_background") == [True] * executor.world_size
    await executor.release_async()


async def test_stop_async_from_several_tasks(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    await in_time(asyncio.gather(*(executor.stop_async() for _ in range(3)), executor.wait_tasks()))
    assert executor.state is State.STOPPED


# -- wait_tasks ------------------------------------------------------------------------------------------------------


async def test_a_background_failure_on_the_last_rank_arrives_with_its_own_type(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    waiting = asyncio.ensure_future(executor.wait_tasks())
    await asyncio.sleep(0)
    calls = [
        asyncio.ensure_future(executor.collective_rpc_async("hold", ("a",))),
        asyncio.wrap_future(executor.submit_rpc("hold", ("b",))),
    ]
    await executor.collective_rpc_async("until_noted", (("held", "b"),))
    end_background(executor)
    with pytest.raises(MyError, match=f"background of rank {last_rank(executor)}") as caught:
        await in_time(waiting)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "_background" in str(caught.value.__cause__)
    for call in calls:  # a call in flight is ended, and told why
        with pytest.raises(ExecutorStoppedError) as ended:
            await in_time(call)
        assert ended.value.__cause__ is caught.value
    assert executor.state is State.STOPPED
    assert executor.check_health()


def test_a_background_failure_needs_no_waiter_to_stop_everything(fresh: Fresh) -> None:
    for how in ("fail", "lost peer"):
        executor = fresh(Tasks)
        executor.start()
        end_background(executor, how)
        until(lambda executor=executor: executor.state is not State.RUNNING)
        assert executor.state is State.STOPPED
        others = executor.collective_rpc("take_log")[:-1]
        assert others == [["background cancelled"]] * (executor.world_size - 1)


# F011
async def test_a_failure_before_anybody_waits_is_still_reported(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    executor.start()
    end_background(executor)
    await until_async(lambda: executor.state is State.STOPPED)
    for _ in range(2):
        with pytest.raises(MyError, match="background"):
            await in_time(executor.wait_tasks())


async def test_two_awaiters_both_get_the_failure(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    waiting = [asyncio.ensure_future(executor.wait_tasks()) for _ in range(2)]
    await asyncio.sleep(0)
    end_background(executor)
    outcomes = await in_time(asyncio.gather(*waiting, return_exceptions=True))
    assert [type(outcome) for outcome in outcomes] == [MyError, MyError]


def test_awaiters_on_two_loops_both_get_the_failure(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    executor.start()
    waiting = [InThread(lambda: asyncio.run(executor.wait_tasks())) for _ in range(2)]
    executor.collective_rpc("echo")
    end_background(executor)
    for one in waiting:
        with pytest.raises(MyError):
            one.result()


async def test_cancelling_one_of_several_awaiters_leaves_the_tasks_alone(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    waiting = [asyncio.ensure_future(executor.wait_tasks()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert executor.state is State.RUNNING
    assert await executor.collective_rpc_async("has_background") == [True] * executor.world_size
    await executor.stop_async()
    await in_time(waiting[1])


async def test_cancelling_the_last_awaiter_stops_the_tasks(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    waiting = asyncio.ensure_future(executor.wait_tasks())
    await asyncio.sleep(0)
    await executor.collective_rpc_async("echo")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await in_time(waiting)
    await until_async(lambda: executor.state is State.STOPPED)
    assert await executor.collective_rpc_async("take_log") == [["background cancelled"]] * executor.world_size
    await executor.start_async()
    assert await executor.collective_rpc_async("has_background") == [True] * executor.world_size


async def test_a_failure_that_follows_from_the_root_cause_does_not_replace_it(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    await executor.collective_rpc_async("end_background", ("fail", (0,)))
    with pytest.raises(MyError):
        await in_time(executor.wait_tasks())
    executor.notify("set_forward_inputs", (1,))  # fails: the agent's tasks have ended
    await executor.collective_rpc_async("echo")
    with pytest.raises(MyError):
        await in_time(executor.wait_tasks())


async def test_wait_tasks_returns_only_after_stop(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    waiting = asyncio.ensure_future(executor.wait_tasks())
    for _ in range(20):
        await executor.collective_rpc_async("echo")
    assert not waiting.done()
    await executor.stop_async()
    await in_time(waiting)
    await in_time(executor.wait_tasks())


@pytest.mark.parametrize("how", ["return", "cancel"])
async def test_a_background_task_that_ends_by_itself_is_a_failure_that_names_it(fresh: Fresh, how: str) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    if how == "return":
        end_background(executor, "return")
    else:
        executor.notify("cancel_background", ((last_rank(executor),),))
    with pytest.raises(TaskEndedError, match="mine"):
        await in_time(executor.wait_tasks())
    assert executor.state is State.STOPPED


async def test_start_may_follow_a_background_failure_at_once(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    for _ in range(10):
        await executor.start_async()
        assert await executor.collective_rpc_async("has_background") == [True] * executor.world_size
        end_background(executor)
        with pytest.raises(MyError):
            await in_time(executor.wait_tasks())


# F016
@pytest.mark.parametrize("method", ["fail", "lost_peer"])
async def test_the_failure_of_a_notified_call_reaches_wait_tasks(fresh: Fresh, method: str) -> None:
    executor = fresh(Stream)
    await executor.start_async()
    executor.notify(method)
    with pytest.raises((MyError, ConnectionResetError)) as caught:
        await in_time(executor.wait_tasks())
    assert type(caught.value) is (MyError if method == "fail" else ConnectionResetError)
    assert executor.state is State.STOPPED


async def test_the_failure_of_a_call_notified_before_start_is_still_reported(fresh: Fresh) -> None:
    executor = fresh(Stream)
    executor.notify("fail")
    await executor.collective_rpc_async("echo", (1,))
    await executor.start_async()
    with pytest.raises(MyError, match="notified"):
        await in_time(executor.wait_tasks())


async def test_a_failing_call_that_somebody_waits_for_is_not_a_background_failure(fresh: Fresh) -> None:
    executor = fresh(Stream)
    await executor.start_async()
    with pytest.raises(MyError):
        await executor.collective_rpc_async("fail")
    assert executor.submit_rpc("fail").exception(20) is not None
    assert executor.state is State.RUNNING
    await executor.stop_async()
    await in_time(executor.wait_tasks())


# F124
async def test_collections_of_garbage_take_no_task_away(fresh: Fresh) -> None:
    executor = fresh(Tasks)
    await executor.start_async()
    call = asyncio.ensure_future(executor.collective_rpc_async("hold", ("gc",), reply_ranks=0))
    for _ in range(10):
        gc.collect()
        await asyncio.sleep(0)
    await executor.collective_rpc_async("let_go", ("gc",))
    assert await in_time(call) == "gc"
    end_background(executor)
    with pytest.raises(MyError):
        await in_time(executor.wait_tasks())
