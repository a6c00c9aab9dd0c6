"""How a rank fails, which rank, and at what moment: what the caller is told and how soon, on a cluster of one node."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import leaks
from faults.misdeeds import EXIT_CODE, TEXT
from faults.watching import LOAD, within

from mpexec import (
    ExecutorBrokenError,
    RayExecutor,
    RemoteError,
    RemoteTraceback,
    RPCTimeoutError,
    SerializationError,
    State,
    WorkerDiedError,
)
from on_ray.checking import Checks, local_cluster, make
from on_ray.meeting import Meeting, meeting

CHECKS = Checks()
RANKS = (0, 1)
RAISE_S = 2.0
DEATH_S = 2.0  # for one death; see KILL_MEDIAN_S
KILL_MEDIAN_S = 1.0
DEADLINE_S = 0.4
LATE_S = 0.5
STOP_S = 2.0

KILLS: list[float] = []  # seconds from each kill to the error, over all checks


def each(*manners: str) -> list[tuple[Any, ...]]:
    return list(itertools.product(manners, RANKS))


def catch(act: Callable[[], Any]) -> BaseException:
    """What `act` raises."""
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def wait_tasks(executor: RayExecutor, act: Callable[[], Any], seconds: float = 20.0) -> BaseException:
    """What `wait_tasks` raises, when `act` is done while it waits."""

    async def wait() -> None:
        waiting = asyncio.ensure_future(executor.wait_tasks())
        await asyncio.sleep(0)  # its first step: it waits now
        act()
        await asyncio.wait_for(waiting, seconds)

    return catch(lambda: asyncio.run(wait()))


# -- what is promised --------------------------------------------------------------------------------------------------


def check_usable(executor: RayExecutor) -> None:
    assert executor.state in (State.READY, State.RUNNING, State.STOPPED)
    assert executor.collective_rpc("echo", args=("hello",), timeout=10.0) == [("hello", 0), ("hello", 1)]
    assert executor.check_health()


def check_broken(executor: RayExecutor, root: BaseException) -> None:
    """Every later call fails at once and names the root cause; all processes end by themselves."""
    assert executor.state is State.BROKEN
    assert not executor.check_health()
    with within(0.1):
        later = catch(lambda: executor.collective_rpc("echo", args=(0,)))
    assert type(later) is ExecutorBrokenError
    cause = later.__cause__
    assert type(cause) is type(root)
    for fact in ("rank", "pid", "exit_code", "signal_name", "method", "missing_ranks", "node", "reason"):
        assert getattr(cause, fact, None) == getattr(root, fact, None)
    assert type(root).__name__ in executor.describe()["root_cause"]
    assert not leaks.await_gone(executor.pids, 5.0 * LOAD)


def check_original(error: BaseException, manner: str, rank: int, method: str) -> None:
    notes = "".join(error.__notes__)
    assert f"rank {rank} (pid " in notes and repr(method) in notes
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "misdeeds.py" in str(error.__cause__) and TEXT in str(error.__cause__)
    if manner == "raise":
        assert type(error) is ValueError and error.args == (TEXT,)
    else:
        assert type(error) is RemoteError
        assert (error.rank, error.method) == (rank, method)
        assert error.type_name.endswith("Unpicklable") and TEXT in str(error)


def check_died(error: BaseException, rank: int, pid: int, exit_code: int | None, method: str | None) -> None:
    assert type(error) is WorkerDiedError, repr(error)
    assert (error.rank, error.pid) == (rank, pid)
    assert error.method == method
    assert f"rank {rank} (pid {pid})" in str(error)
    assert error.node
    if exit_code is not None:
        assert error.exit_code == exit_code and f"exited with code {exit_code}" in str(error)
    else:
        assert error.reason and error.reason in str(error)


# -- what leaves the executor usable -----------------------------------------------------------------------------------


@CHECKS
def what_cannot_travel_and_what_is_raised_leaves_the_executor_usable() -> Any:
    executor = make()
    for manner, rank in each("raise", "unpicklable_exception", "unpicklable_value"):
        for method in ("act", "act_async"):
            with within(RAISE_S):
                error = catch(lambda: executor.collective_rpc(method, args=(manner, rank)))  # noqa: B023
            if manner == "unpicklable_value":
                assert type(error) is SerializationError
                assert (error.rank, error.type_name) == (rank, "_thread.lock")
                assert f"rank {rank}" in str(error)
            else:
                check_original(error, manner, rank, method)
            assert getattr(error, "others", None) is None
            check_usable(executor)
    with within(RAISE_S):
        error = catch(lambda: executor.collective_rpc("echo", args=(threading.Lock(),)))
    assert type(error) is SerializationError and error.rank is None and "'echo'" in str(error)
    check_usable(executor)


@CHECKS
def what_fails_in_the_forward_loop_reaches_wait_tasks_and_the_executor_starts_again() -> Any:
    executor = make()
    for manner, rank in [*each("raise", "unpicklable_exception"), ("unpicklable_value", 0)]:
        executor.start()
        with within(RAISE_S):
            error = wait_tasks(executor, lambda: asyncio.ensure_future(executor.forward_async((manner, rank))))  # noqa: B023
        if manner == "unpicklable_value":
            assert type(error) is SerializationError and error.type_name == "_thread.lock"
        else:
            check_original(error, manner, rank, "wait_tasks")
        assert executor.state is State.STOPPED
        check_usable(executor)


# -- what ends a rank --------------------------------------------------------------------------------------------------


@CHECKS.over(*each("act", "act_async"), slow=[("act", 1), ("act_async", 0)])
def system_exit_ends_the_rank_after_its_clean_up(method: str, rank: int) -> Any:
    executor = make()
    with within(RAISE_S):
        error = catch(lambda: executor.collective_rpc(method, args=("system_exit", rank)))
    check_died(error, rank, executor.pids[rank], EXIT_CODE, method)
    check_broken(executor, error)


@CHECKS.over(*each("system_exit", "os_exit"), slow=[("system_exit", 0), ("os_exit", 1)])
def the_end_of_a_rank_in_its_forward_loop_reaches_wait_tasks(manner: str, rank: int) -> Any:
    executor = make()
    executor.start()
    with within(RAISE_S):
        error = wait_tasks(executor, lambda: asyncio.ensure_future(executor.forward_async((manner, rank))))
    exit_code = EXIT_CODE if manner == "system_exit" else None
    check_died(error, rank, executor.pids[rank], exit_code, error.method)  # type: ignore[attr-defined]
    check_broken(executor, error)
    return str(error)


@CHECKS.over((0,), (1,), slow=[(0,)])
def os_exit_in_a_call_is_a_death(rank: int) -> Any:
    executor = make()
    with within(DEATH_S):
        error = catch(lambda: executor.collective_rpc("act", args=("os_exit", rank)))
    check_died(error, rank, executor.pids[rank], None, "act")
    check_broken(executor, error)
    return str(error)


# -- SIGKILL -----------------------------------------------------------------------------------------------------------


def kill(executor: RayExecutor, rank: int) -> float:
    moment = time.monotonic()
    os.kill(executor.pids[rank], signal.SIGKILL)
    return moment


def check_killed(executor: RayExecutor, error: BaseException, rank: int, method: str | None, killed_at: float) -> Any:
    seconds = time.monotonic() - killed_at
    check_died(error, rank, executor.pids[rank], None, method)
    assert seconds <= DEATH_S * LOAD, f"took {seconds:.3f} s"
    check_broken(executor, error)
    KILLS.append(seconds)
    executor.release()  # F136
    return {"seconds": round(seconds, 3), "error": str(error)}


@CHECKS.over((0,), (1,), slow=[(0,)])
def a_kill_while_idle_reaches_wait_tasks(rank: int) -> Any:
    executor, moments = make(), []
    executor.start()
    check_usable(executor)
    error = wait_tasks(executor, lambda: moments.append(kill(executor, rank)))
    return check_killed(executor, error, rank, None, moments[0])


def _kill_in_a_call(rank: int, ranks: list[int], manner: str) -> Any:
    """Kill a rank when all of `ranks` are in the call."""
    executor = make()
    with meeting() as place:
        future = executor.submit_rpc("announced", args=(place.path, ranks, manner))
        place.pids(len(ranks))
        moment = kill(executor, rank)
        error = catch(lambda: future.result(20.0))
    return check_killed(executor, error, rank, "announced", moment)


@CHECKS.over((0,), (1,), slow=[(1,)])
def a_kill_in_a_call_reaches_its_caller(rank: int) -> Any:
    return _kill_in_a_call(rank, [rank], "hang_python")


@CHECKS.over(*each("hang_python", "hang_c"), slow=[("hang_python", 0), ("hang_c", 1)])
def a_kill_reaches_the_caller_while_the_other_rank_is_stuck(manner: str, rank: int) -> Any:
    return _kill_in_a_call(rank, [0, 1], manner)


@contextlib.contextmanager
def in_all_reduce(manner: str, rank: int) -> Iterator[tuple[RayExecutor, Meeting, Future[Any]]]:
    """An executor one rank of which sits in an all-reduce, while the other waits for a word to misbehave."""
    executor = make(init_process_group=True)
    assert executor.collective_rpc("add_up", args=(1,)) == [3, 3]
    with meeting() as place:
        future = executor.submit_rpc("act_in_all_reduce", args=(manner, rank, place.path))
        place.pids(2)
        place.await_sleeper()
        yield executor, place, future


@CHECKS.over((0,), (1,), slow=[(0,)])
def a_kill_is_the_root_cause_while_the_other_rank_sits_in_an_all_reduce(rank: int) -> Any:
    with in_all_reduce("", rank) as (executor, _, future):
        moment = kill(executor, rank)
        error = catch(lambda: future.result(20.0))
    return check_killed(executor, error, rank, "act_in_all_reduce", moment)


@CHECKS
def a_kill_is_told_within_a_second_as_a_rule() -> Any:
    assert len(KILLS) >= 5, "the checks before this one count the kills"
    median = statistics.median(KILLS)
    assert median < KILL_MEDIAN_S * LOAD
    return {"kills": len(KILLS), "median": round(median, 3), "slowest": round(max(KILLS), 3)}


@CHECKS.over((0,), (1,), slow=[(1,)])
def an_error_is_the_root_cause_while_the_other_rank_sits_in_an_all_reduce(rank: int) -> Any:
    with in_all_reduce("raise", rank) as (executor, place, future), within(RAISE_S):
        place.go()
        error = catch(lambda: future.result(20.0))
    check_original(error, "raise", rank, "act_in_all_reduce")
    check_broken(executor, error)


# -- what does not answer ----------------------------------------------------------------------------------------------

SHOWN = {"sigstop": "stopped", "hang_python": "hang_in_python", "hang_c": "hang_in_c"}


@CHECKS.over(*each("sigstop", "hang_python", "hang_c"), slow=[("sigstop", 0), ("hang_python", 1), ("hang_c", 0)])
def a_deadline_ends_a_call_and_shows_where_the_rank_is(manner: str, rank: int) -> Any:
    executor = make(stop_timeout=STOP_S)
    executor.start()
    moments: list[float] = []
    error = wait_tasks(executor, lambda: moments.append(_time_out(executor, manner, rank)))
    assert DEADLINE_S <= moments[0] <= DEADLINE_S + LATE_S * LOAD, f"took {moments[0]:.3f} s"
    assert type(error) is RPCTimeoutError  # also for whoever waits for the tasks
    check_broken(executor, error)
    with within(STOP_S + LATE_S):
        executor.release()
    return {"seconds": round(moments[0], 3), "rung": executor.describe()["ranks"][rank]["ended_by"]}


def _time_out(executor: RayExecutor, manner: str, rank: int) -> float:
    began = time.monotonic()
    error = catch(lambda: executor.collective_rpc("act", args=(manner, rank), timeout=DEADLINE_S))
    seconds = time.monotonic() - began
    assert type(error) is RPCTimeoutError, repr(error)
    assert (error.method, error.missing_ranks) == ("act", (rank,))
    assert sorted(error.stacks) == [rank]
    assert SHOWN[manner] in error.stacks[rank], error.stacks[rank]
    return seconds


if __name__ == "__main__":
    CHECKS.run(local_cluster(num_cpus=2))
