"""The call surface: who runs a call, whose values return, in which order, and what is refused before it is sent."""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.agents import Agent, MyError, Worker, add_to_rank, whoami
from contract.conftest import InThread, in_time, last_rank, settle, until
from mpexec import ConfigError, Executor, ExecutorStoppedError
from mpexec.executor.base import State


def values(executor: Executor, make: Callable[[int], Any]) -> list[Any]:
    """What `make` gives for each rank, in order."""
    return [make(rank) for rank in range(executor.world_size)]


# -- values and ranks ------------------------------------------------------------------------------------------------


def test_values_come_back_ordered_by_rank(executor: Executor) -> None:
    assert executor.collective_rpc("where") == values(executor, lambda rank: rank)


def test_arguments_and_keywords_reach_the_method(executor: Executor) -> None:
    got = executor.collective_rpc("rank_and", (1, "two"), {"three": [3]})
    assert got == values(executor, lambda rank: (rank, (1, "two"), {"three": [3]}))


def test_only_the_ranks_asked_run_a_call(executor: Executor) -> None:
    rank = last_rank(executor)
    assert executor.collective_rpc("note", (1,), ranks=[rank]) == [1]
    logs = executor.collective_rpc("take_log")
    assert logs == values(executor, lambda r: [1] if r == rank else [])


@pytest.mark.parametrize("ranks", [lambda n: n - 1, lambda n: (n - 1,), lambda n: [n - 1], lambda n: range(n - 1, n)])
def test_ranks_may_be_an_integer_a_tuple_a_list_or_a_range(executor: Executor, ranks: Any) -> None:
    assert executor.collective_rpc("where", ranks=ranks(executor.world_size)) == [last_rank(executor)]


def test_a_list_of_reply_ranks_gives_their_values_ordered_by_rank(executor: Executor) -> None:
    everyone = list(reversed(range(executor.world_size)))
    assert executor.collective_rpc("where", reply_ranks=everyone) == sorted(everyone)
    assert executor.collective_rpc("where", reply_ranks=[last_rank(executor)]) == [last_rank(executor)]


def test_an_integer_reply_rank_gives_the_bare_value(executor: Executor) -> None:
    assert executor.collective_rpc("where", reply_ranks=last_rank(executor)) == last_rank(executor)


def test_no_reply_ranks_gives_no_values_though_all_ranks_have_run_the_call(executor: Executor) -> None:
    assert executor.collective_rpc("note", (5,), reply_ranks=()) == []
    assert executor.collective_rpc("take_log") == values(executor, lambda _: [5])


class Name(enum.StrEnum):
    """Names that are texts of another class."""

    THREE = "three"


class Role(enum.IntEnum):
    """Ranks that are integers of another class."""

    HEAD = 0


@pytest.mark.parametrize(
    "value", [None, True, 0, -1, 1 << 4000, 1.5, float("inf"), "", "\ud800", "x" * 3_000_000, Role.HEAD, Name.THREE]
)
def test_plain_values_and_their_subclasses_arrive_as_they_are(executor: Executor, value: Any) -> None:
    for got in executor.collective_rpc("echo", (value,)):
        assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize("name", [Name.THREE, np.str_("three")])
def test_keyword_names_may_be_of_any_class_of_text(executor: Executor, name: Any) -> None:
    got = executor.collective_rpc("rank_and", (1,), {name: 3}, reply_ranks=Role.HEAD)
    assert got == (0, (1,), {"three": 3})


# F019
def test_a_failure_on_a_rank_that_was_not_asked_to_reply_fails_the_call_and_no_other(executor: Executor) -> None:
    rank = last_rank(executor)
    for reply_ranks in (0, (), [0]):
        with pytest.raises(MyError):
            executor.collective_rpc("fail", ("MyError", (rank,)), reply_ranks=reply_ranks)
        assert executor.collective_rpc("echo", ("next",)) == values(executor, lambda _: "next")


def test_every_rank_receives_its_own_part_only(executor: Executor) -> None:
    parts = values(executor, lambda rank: (f"part {rank}",))
    got = executor.collective_rpc("rank_and", args_per_rank=parts, kwargs={"all": 1})
    assert got == values(executor, lambda rank: (rank, (f"part {rank}",), {"all": 1}))


def test_parts_belong_to_the_ranks_that_run_the_call(executor: Executor) -> None:
    rank = last_rank(executor)
    got = executor.collective_rpc("rank_and", args_per_rank=[("only", 1)], ranks=[rank])
    assert got == [(rank, ("only", 1), {})]


def test_a_callable_takes_the_worker_in_place_of_a_name(executor: Executor) -> None:
    assert executor.collective_rpc(whoami) == values(executor, lambda rank: (rank, executor.world_size))
    assert executor.collective_rpc(add_to_rank, (10,), {"times": 2}) == values(executor, lambda r: (r + 10) * 2)


def test_a_lambda_and_a_closure_travel_too(executor: Executor) -> None:
    offset = 100
    assert executor.collective_rpc(lambda worker: worker.rank + offset) == values(executor, lambda rank: rank + 100)


def test_methods_bound_to_the_class_or_to_nothing_can_be_called_by_name(executor: Executor) -> None:
    assert executor.collective_rpc("three", reply_ranks=0) == 3
    assert executor.collective_rpc("made_in_instance", reply_ranks=0) == "instance"
    assert executor.collective_rpc("name_of_class", reply_ranks=0) == "Agent"


def test_names_of_the_worker_win_over_those_of_the_agent(fresh: Any) -> None:
    executor = fresh(worker_cls=Worker)
    assert executor.collective_rpc("where") == values(executor, lambda rank: f"worker {rank}")
    assert executor.collective_rpc("only_here") == values(executor, lambda rank: rank)


def test_the_four_ways_to_call_agree(executor: Executor) -> None:
    async def call() -> Any:
        return await executor.collective_rpc_async("where")

    expected = executor.collective_rpc("where")
    assert executor.submit_rpc("where").result(10) == expected
    assert asyncio.run(call()) == expected
    executor.notify("note", ("noted",))
    assert executor.collective_rpc("take_log") == values(executor, lambda _: ["noted"])


# -- refused before anything is sent ---------------------------------------------------------------------------------


def nothing_was_sent(executor: Executor) -> bool:
    """True if no rank has run anything since its log was emptied."""
    return bool(executor.collective_rpc("take_log") == values(executor, lambda _: []))


@pytest.mark.parametrize("name", ["no_such_method", "_private", "__init__", "not_a_method", ""])
def test_a_name_that_no_rank_has_is_refused_in_the_caller(executor: Executor, name: str) -> None:
    settle(executor)
    replies = [row.get("replies") for row in executor.describe()["ranks"]]
    for call in (executor.collective_rpc, executor.submit_rpc, executor.notify):
        with pytest.raises(AttributeError, match=f"{name!r}"):
            call(name)
    assert [row.get("replies") for row in executor.describe()["ranks"]] == replies
    assert nothing_was_sent(executor)


async def test_a_coroutine_call_refuses_unknown_names_alike(executor: Executor) -> None:
    with pytest.raises(AttributeError, match="no_such_method"):
        await executor.collective_rpc_async("no_such_method")


@pytest.mark.parametrize("method", [5, None, b"note", ["note"]])
def test_what_is_neither_a_name_nor_callable_is_refused(executor: Executor, method: Any) -> None:
    with pytest.raises(ConfigError):
        executor.collective_rpc(method)


@pytest.mark.parametrize("ranks", [-1, 99, [0, 99], [], (), "x", 1.5, [0.5], True, object(), [[0]]])
def test_bad_ranks_are_refused(executor: Executor, ranks: Any) -> None:
    with pytest.raises(ConfigError, match="ranks"):
        executor.collective_rpc("note", (1,), ranks=ranks)
    assert nothing_was_sent(executor)


@pytest.mark.parametrize("ranks", [-1, 99, [0, 99], "x", 1.5, [0.5], True, object(), [[0]]])
def test_bad_reply_ranks_are_refused(executor: Executor, ranks: Any) -> None:
    with pytest.raises(ConfigError, match="reply_ranks"):
        executor.collective_rpc("note", (1,), reply_ranks=ranks)
    assert nothing_was_sent(executor)


def test_a_reply_rank_that_does_not_run_the_call_is_refused() -> None:
    from contract.conftest import build

    with build("mp", start_method="forkserver") as executor, pytest.raises(ConfigError, match="do not run"):
        executor.collective_rpc("where", ranks=[0], reply_ranks=[1])


@pytest.mark.parametrize("args", [1, "x", [1], None, {"a": 1}])
def test_arguments_that_are_no_tuple_are_refused_with_the_remedy(executor: Executor, args: Any) -> None:
    with pytest.raises(ConfigError, match="tuple"):
        executor.collective_rpc("note", args)
    assert nothing_was_sent(executor)


@pytest.mark.parametrize("kwargs", [1, [1], {1: 2}, "x"])
def test_keywords_that_are_no_mapping_of_names_are_refused(executor: Executor, kwargs: Any) -> None:
    with pytest.raises(ConfigError, match="kwargs"):
        executor.collective_rpc("rank_and", (), kwargs)


@pytest.mark.parametrize("parts", [1, [1], [], [()] * 99, ["a"]])
def test_parts_that_do_not_fit_the_ranks_are_refused(executor: Executor, parts: Any) -> None:
    with pytest.raises(ConfigError, match="args_per_rank"):
        executor.collective_rpc("note", args_per_rank=parts)
    assert nothing_was_sent(executor)


def test_parts_and_common_arguments_exclude_each_other(executor: Executor) -> None:
    with pytest.raises(ConfigError, match="not both"):
        executor.collective_rpc("note", (1,), args_per_rank=values(executor, lambda _: (1,)))


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "5", [], object()])
def test_bad_timeouts_are_refused(executor: Executor, timeout: Any) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        executor.collective_rpc("note", (1,), timeout=timeout)
    assert nothing_was_sent(executor)


@pytest.mark.parametrize("timeout", [1e9, 1e30, float("inf")])
def test_a_timeout_beyond_every_clock_is_as_good_as_none(executor: Executor, timeout: float) -> None:
    expected = executor.collective_rpc("where")
    assert executor.collective_rpc("where", timeout=timeout) == expected
    assert executor.submit_rpc("where", timeout=timeout).result(10) == expected
    assert asyncio.run(executor.collective_rpc_async("where", timeout=timeout)) == expected
    assert executor.submit_rpc("where").result(10) == expected


# -- submit and notify -----------------------------------------------------------------------------------------------


def test_submit_returns_before_the_call_has_ended(executor: Executor) -> None:
    future = executor.submit_rpc("hold", ("a",), reply_ranks=0)
    assert not future.done()
    executor.collective_rpc("let_go", ("a",))
    assert future.result(10) == "a"


def test_a_failure_arrives_in_the_future(executor: Executor) -> None:
    error = executor.submit_rpc("fail", ("ValueError",)).exception(10)
    assert type(error) is ValueError
    assert error.args == ("v", 1)


def test_a_lost_peer_error_arrives_in_a_future_that_nobody_waits_for(executor: Executor) -> None:
    ended = threading.Event()
    future = executor.submit_rpc("lost_peer")
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(10)
    assert type(future.exception()) is ConnectionResetError


def test_cancelling_a_future_abandons_the_call_and_cancels_its_coroutines(executor: Executor) -> None:
    future = executor.submit_rpc("hold", ("b",))
    executor.collective_rpc("until_noted", (("held", "b"),))
    assert future.cancel()
    executor.collective_rpc("until_noted", (("cancelled", "b"),), timeout=10)
    assert future.cancelled()
    assert executor.describe()["calls_in_flight"] == 0


def test_a_coroutine_that_was_abandoned_before_it_began_is_cancelled_all_the_same(executor: Executor, go: Path) -> None:
    """It begins, because it may have begun on another rank; a sync method runs to its end."""
    first = executor.submit_rpc("wait_for_file", (str(go),))
    futures = [executor.submit_rpc("hold", ("early",)), executor.submit_rpc("note", ("kept",))]
    assert all(future.cancel() for future in futures)
    go.touch()
    first.result(20)
    executor.collective_rpc("until_noted", (("cancelled", "early"),), timeout=10)
    assert all("kept" in log for log in executor.collective_rpc("take_log"))


def test_a_callback_of_a_future_may_call_the_executor(executor: Executor) -> None:
    got: list[Any] = []
    ended = threading.Event()

    def call(_: Any) -> None:
        got.append(executor.collective_rpc("where", timeout=10))
        ended.set()

    executor.submit_rpc("doze", (0.01,)).add_done_callback(call)
    assert ended.wait(10)
    assert got == [values(executor, lambda rank: rank)]


def test_many_futures_end_each_with_its_own_value(executor: Executor) -> None:
    futures = [executor.submit_rpc("echo", (number,), reply_ranks=0) for number in range(500)]
    assert not concurrent.futures.wait(futures, timeout=30).not_done
    assert [future.result() for future in futures] == list(range(500))


def test_notified_calls_keep_their_place_among_the_others(executor: Executor) -> None:
    for number in range(100):
        executor.notify("note", (number,))
        if number % 10 == 0:
            assert executor.collective_rpc("note", (-number,), reply_ranks=0) == -number
    expected = [step for number in range(100) for step in ((number, -number) if number % 10 == 0 else (number,))]
    assert executor.collective_rpc("take_log") == values(executor, lambda _: expected)


# -- many callers ----------------------------------------------------------------------------------------------------


# F065
async def test_concurrent_calls_get_their_own_results_and_all_ranks_run_them_in_one_order(executor: Executor) -> None:
    stop = threading.Event()
    wrong: list[Any] = []

    def calls(caller: int) -> None:
        for number in range(60):
            value = (caller, number)
            if executor.collective_rpc("note", (value,)) != values(executor, lambda _, value=value: value):
                wrong.append(value)
        stop.set()

    threads = [InThread(lambda caller=caller: calls(caller)) for caller in range(8)]

    async def one(number: int) -> None:
        value = ("task", number)
        if await executor.collective_rpc_async("note", (value,)) != values(executor, lambda _: value):
            wrong.append(value)

    await in_time(asyncio.gather(*(one(number) for number in range(200))), 60)
    for thread in threads:
        await asyncio.to_thread(thread.result, 60)
    assert not wrong
    logs = executor.collective_rpc("take_log")
    assert len(logs[0]) == 8 * 60 + 200
    assert all(log == logs[0] for log in logs)
    for caller in range(8):  # each caller's own calls also keep the order in which it made them
        assert [n for who, n in logs[0] if who == caller] == list(range(60))


def test_several_loops_and_threads_wait_at_once(executor: Executor) -> None:
    async def many(loop_number: int) -> list[Any]:
        calls = (executor.collective_rpc_async("echo", ((loop_number, n),), reply_ranks=0) for n in range(50))
        return list(await asyncio.gather(*calls))

    loops = [InThread(lambda number=number: asyncio.run(many(number))) for number in range(4)]
    for number, running in enumerate(loops):
        assert running.result(60) == [(number, n) for n in range(50)]


async def test_coroutines_start_in_call_order_and_overlap(executor: Executor) -> None:
    names = [f"n{number}" for number in range(5)]
    held = [asyncio.ensure_future(executor.collective_rpc_async("hold", (name,), reply_ranks=0)) for name in names]
    await executor.collective_rpc_async("until_noted", (("held", "n4"),), timeout=10)
    logs = await executor.collective_rpc_async("take_log")
    assert logs == values(executor, lambda _: [("held", name) for name in names])
    for name in reversed(names):
        await executor.collective_rpc_async("let_go", (name,))
    assert await in_time(asyncio.gather(*held)) == names


async def test_a_sync_method_runs_while_coroutines_wait(executor: Executor) -> None:
    held = asyncio.ensure_future(executor.collective_rpc_async("hold", ("long",), reply_ranks=0))
    await executor.collective_rpc_async("until_noted", (("held", "long"),))
    assert await executor.collective_rpc_async("echo", (1,), reply_ranks=0) == 1
    assert not held.done()
    await executor.collective_rpc_async("let_go", ("long",))
    assert await in_time(held) == "long"


async def test_the_loop_keeps_turning_while_a_call_waits(executor: Executor, go: Path) -> None:
    call = asyncio.ensure_future(executor.collective_rpc_async("wait_for_file", (str(go), "value"), reply_ranks=0))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not call.done()
    go.touch()
    assert await in_time(call) == "value"


# -- the executor and its callers ------------------------------------------------------------------------------------


async def test_cancelling_an_await_cancels_the_coroutines_and_leaves_the_executor_usable(executor: Executor) -> None:
    task = asyncio.ensure_future(executor.collective_rpc_async("hold", ("c",)))
    await executor.collective_rpc_async("until_noted", (("held", "c"),))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await executor.collective_rpc_async("until_noted", (("cancelled", "c"),), timeout=10)
    assert executor.state is State.RUNNING
    assert await executor.collective_rpc_async("echo", (1,), reply_ranks=0) == 1


async def test_a_sync_method_of_a_cancelled_await_runs_to_its_end_and_its_reply_is_dropped(
    executor: Executor, go: Path
) -> None:
    task = asyncio.ensure_future(executor.collective_rpc_async("wait_for_file", (str(go), "stale")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    late = executor.describe()["late_replies"]
    following = asyncio.ensure_future(executor.collective_rpc_async("echo", ("mine",)))
    go.touch()
    assert await in_time(following) == values(executor, lambda _: "mine")
    assert (await executor.collective_rpc_async("take_log"))[0] == [("waits", "stale")]
    assert executor.describe()["late_replies"] == late + executor.world_size


# F125
@pytest.mark.parametrize("method", ["echo", "note_async"])
async def test_cancelling_in_the_tick_of_the_reply_ends_as_result_or_as_cancellation(
    executor: Executor, method: str
) -> None:
    ended = {"value": 0, "cancelled": 0}
    rounds = 500 if executor.describe()["kind"] == "ray" else 2500
    for number in range(rounds):
        task = asyncio.ensure_future(executor.collective_rpc_async(method, (number,), reply_ranks=0))
        for _ in range(number % 40):
            await asyncio.sleep(0)
        asked = task.cancel()
        try:
            value = await task
        except asyncio.CancelledError:
            assert task.cancelled()
            ended["cancelled"] += 1
        else:
            assert value == number
            assert not asked or task.cancelling()
            ended["value"] += 1
    assert ended["cancelled"] > 0
    assert sum(ended.values()) == rounds
    assert await in_time(executor.collective_rpc_async("echo", ("after",), reply_ranks=0)) == "after"


async def test_calls_of_a_task_group_that_fails_are_abandoned(executor: Executor) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(executor.collective_rpc_async("hold", ("g",)))
            group.create_task(executor.collective_rpc_async("fail", ("MyError",)))
    assert caught.group_contains(MyError)
    assert await in_time(executor.collective_rpc_async("echo", (1,), reply_ranks=0)) == 1


def test_calls_work_before_start_and_after_stop(fresh: Any) -> None:
    executor = fresh()
    assert executor.state is State.READY
    assert executor.collective_rpc("echo", (1,), reply_ranks=0) == 1
    executor.start()
    executor.stop()
    assert executor.state is State.STOPPED
    assert executor.collective_rpc("echo", (2,), reply_ranks=0) == 2


def test_calls_of_a_released_executor_are_refused(fresh: Any) -> None:
    executor = fresh()
    executor.release()
    for call in (executor.collective_rpc, executor.submit_rpc, executor.notify):
        with pytest.raises(ExecutorStoppedError):
            call("where")
    with pytest.raises(ExecutorStoppedError):
        asyncio.run(executor.collective_rpc_async("where"))


def test_an_agent_is_built_once_with_its_own_arguments(fresh: Any) -> None:
    executor = fresh(agent_args=("a", 1))
    assert executor.collective_rpc("where") == values(executor, lambda rank: rank)
    assert isinstance(executor.spec.agent, type)
    assert executor.spec.agent is Agent


def test_a_call_that_ends_while_another_thread_waits_wakes_that_thread(executor: Executor) -> None:
    first = InThread(lambda: executor.collective_rpc("hold", ("w1",), reply_ranks=0))
    second = InThread(lambda: executor.collective_rpc("hold", ("w2",), reply_ranks=0))
    until(lambda: executor.describe()["calls_in_flight"] >= 2)
    executor.collective_rpc("until_noted", (("held", "w1"),))
    executor.collective_rpc("until_noted", (("held", "w2"),))
    executor.collective_rpc("let_go", ("w2",))
    assert second.result() == "w2"
    assert not first.done.is_set()
    executor.collective_rpc("let_go", ("w1",))
    assert first.result() == "w1"
