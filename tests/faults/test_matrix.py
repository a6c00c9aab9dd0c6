"""How a rank fails x when x which rank: what the caller is told, how soon, and what can still be done afterwards.

The promises are those of `docs/guarantees.md`. `HOLES` lists the cells that cannot happen, each with its reason.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leaks
import pytest
from faults.agents import FaultyAgent, OutputAgent
from faults.early import LateAgent
from faults.misdeeds import EXIT_CODE, TEXT, big_value
from faults.watching import LOAD, ExitWatch, Stopwatch, within

from mpexec import (
    ExecutorBrokenError,
    ExecutorStoppedError,
    RemoteError,
    RemoteTraceback,
    RPCTimeoutError,
    SerializationError,
    StartupError,
    State,
    WorkerDiedError,
)

pytestmark = [pytest.mark.matrix]

WORLD = 2
MANNERS = (
    "raise", "system_exit", "os_exit", "sigkill", "sigsegv", "sigstop", "hang_python", "hang_c",
    "unpicklable_value", "unpicklable_exception", "big_reply",
)  # fmt: skip
MOMENTS = (
    "before_import", "rendezvous", "build", "idle", "sync", "async", "all_reduce", "reply", "wait_tasks", "stop",
)  # fmt: skip
RANKS = (0, WORLD - 1)

_NO_REPLY = "nothing is returned to the driver at this moment"
_NO_OUTPUT = "only rank 0 puts outputs out, and a background task has no other value"
HOLES: dict[tuple[str, str, int], str] = {
    **{
        (manner, moment, rank): _NO_REPLY
        for manner in ("unpicklable_value", "big_reply")
        for moment in ("before_import", "rendezvous", "build", "idle")
        for rank in RANKS
    },
    ("unpicklable_value", "wait_tasks", WORLD - 1): _NO_OUTPUT,
    ("big_reply", "wait_tasks", WORLD - 1): _NO_OUTPUT,
}
SPAWNED = {
    ("raise", "before_import", 1), ("os_exit", "before_import", 0), ("sigkill", "before_import", 1),
    ("raise", "build", 0), ("sigkill", "build", 1), ("hang_c", "build", 1),
    ("sigkill", "idle", 1), ("sigstop", "idle", 0),
    ("raise", "sync", 1), ("sigsegv", "sync", 0), ("hang_c", "sync", 1), ("big_reply", "sync", 0),
    ("system_exit", "async", 0), ("unpicklable_exception", "async", 1),
    ("raise", "all_reduce", 1), ("sigkill", "all_reduce", 0),
    ("unpicklable_value", "reply", 1),
    ("raise", "wait_tasks", 1), ("os_exit", "wait_tasks", 0),
    ("hang_python", "stop", 1),
}  # fmt: skip

ENDS = {
    "system_exit": (EXIT_CODE, None),
    "os_exit": (EXIT_CODE, None),
    "sigkill": (None, "SIGKILL"),
    "sigsegv": (None, "SIGSEGV"),
}
STUCK = ("sigstop", "hang_python", "hang_c")
VALUES = ("unpicklable_value", "big_reply")

DEATH_S = 0.1  # between the end of a process and the caller's error
RAISE_S = 2.0
REAPED_S = 5.0
DEADLINE_S = 0.4
LATE_S = 0.5  # how much later than a deadline its error may come
STARTED_S = 3.0  # a failed start: two ranks started, and both gone again
INIT_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 1.0


def _cells() -> list[tuple[str, str, int, str]]:
    product = [cell for cell in itertools.product(MANNERS, MOMENTS, RANKS) if cell not in HOLES]
    return [(*cell, "forkserver") for cell in product] + [(*cell, "spawn") for cell in product if cell in SPAWNED]


def cells(moment: str, manners: tuple[str, ...] = MANNERS) -> Any:
    """The parameters of a test: all cells of one moment."""
    chosen = [cell for cell in _cells() if cell[1] == moment and cell[0] in manners]
    _tested.extend(chosen)
    return pytest.mark.parametrize(
        "manner, culprit, start_method",
        [
            pytest.param(
                *(manner, rank, method),
                id=f"{manner}-rank{rank}-{method}",
                marks=[pytest.mark.spawn] if method == "spawn" else [],
            )
            for manner, _, rank, method in chosen
        ],
    )


_tested: list[tuple[str, str, int, str]] = []


def test_every_cell_is_run_or_has_a_reason() -> None:
    assert sorted(_tested) == sorted(_cells())
    on_fork_server = [cell for cell in _tested if cell[3] == "forkserver"]
    assert len(on_fork_server) + len(HOLES) == len(MANNERS) * len(MOMENTS) * len(RANKS) == 220
    assert len(on_fork_server) >= 160
    assert len(_tested) - len(on_fork_server) == len(SPAWNED) == 20
    assert all(HOLES.values())


# -- what is promised --------------------------------------------------------------------------------------------------


def check_original(error: BaseException, manner: str, rank: int, method: str) -> None:
    """The exception of the rank itself, or what stands for one that cannot travel."""
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
    pickle.loads(pickle.dumps(error))


def check_died(error: BaseException, manner: str, rank: int, pid: int, method: str | None) -> None:
    """The facts of a process's end."""
    assert type(error) is WorkerDiedError
    assert (error.rank, error.pid) == (rank, pid)
    assert (error.exit_code, error.signal_name) == ENDS[manner]
    assert error.method == method
    assert f"rank {rank} (pid {pid})" in str(error)
    if manner == "sigsegv":  # F008: what C code leaves behind is among the last lines
        assert "Segmentation fault" in "\n".join(error.last_lines)


def check_timed_out(error: BaseException, manner: str, method: str, culprit: int, missing: tuple[int, ...]) -> None:
    """Who did not answer, and where it is."""
    assert type(error) is RPCTimeoutError
    assert (error.method, error.missing_ranks) == (method, missing)
    assert sorted(error.stacks) == list(missing)
    assert all(f"rank {rank} (pid " in str(error) for rank in range(WORLD))  # what each is at
    expected = {"sigstop": "stopped", "hang_python": "hang_in_python", "hang_c": "hang_in_c"}
    if culprit in missing:
        assert expected[manner] in error.stacks[culprit]


def check_value_failed(error: BaseException, rank: int, type_name: str) -> None:
    """A value that cannot travel."""
    assert type(error) is SerializationError
    assert (error.rank, error.type_name) == (rank, type_name)
    assert f"rank {rank}" in str(error)


def check_usable(executor: Any) -> None:
    """The next calls are answered, each with its own value."""
    assert executor.state in (State.READY, State.RUNNING, State.STOPPED)
    assert executor.collective_rpc("echo", args=("hello",), timeout=10.0) == [("hello", 0), ("hello", 1)]
    assert executor.check_health()


def check_broken(executor: Any, root: BaseException) -> None:
    """Every later call fails at once and names the root cause; all processes end by themselves."""
    assert executor.state is State.BROKEN
    assert not executor.check_health()
    with within(0.1), pytest.raises(ExecutorBrokenError) as caught:
        executor.collective_rpc("echo", args=(0,))
    cause = caught.value.__cause__
    assert type(cause) is type(root)
    for fact in ("rank", "pid", "exit_code", "signal_name", "method", "missing_ranks"):
        assert getattr(cause, fact, None) == getattr(root, fact, None)
    assert type(root).__name__ in executor.describe()["root_cause"]
    assert not leaks.await_gone(executor.pids, REAPED_S * LOAD)


Make = Callable[..., Any]


# -- start-up ----------------------------------------------------------------------------------------------------------


def _check_start(make: Callable[[], Any], manner: str, culprit: int, phase: str) -> None:
    watch = Stopwatch()
    with pytest.raises(StartupError) as caught:
        make()
    bound = STARTED_S + (INIT_TIMEOUT_S if manner in STUCK else 0.0)
    assert watch.seconds <= bound * LOAD, f"took {watch.seconds:.3f} s"
    error, cause = caught.value, caught.value.__cause__
    if manner in STUCK:
        assert f"rank {culprit} in phase {phase!r}" in str(error) and "init_timeout" in str(error)
        assert watch.seconds >= INIT_TIMEOUT_S
        return
    assert (error.rank, error.phase) == (culprit, phase)
    assert f"rank {culprit}" in str(error)
    if manner in ("raise", "unpicklable_exception"):
        assert cause is not None
        check_original(cause, manner, culprit, phase)
        assert TEXT in str(error)
    elif manner == "system_exit":
        assert type(cause) is RemoteError
        assert cause.type_name == "SystemExit" and cause.rank == culprit
    else:
        assert type(cause) is WorkerDiedError
        check_died(cause, manner, culprit, cause.pid, phase)
    pickle.loads(pickle.dumps(error))


def _early(moment: str, manner: str, culprit: int) -> dict[str, str]:
    return {"MPEXEC_FAULT_MOMENT": moment, "MPEXEC_FAULT_MANNER": manner, "MPEXEC_FAULT_RANK": str(culprit)}


@cells("before_import")
def test_a_fault_at_the_import_of_the_agents_module_fails_the_start(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:
    env = _early("before_import", manner, culprit)
    _check_start(
        lambda: make_executor(LateAgent, start_method=start_method, env=env, init_timeout=_patience(manner)),
        manner, culprit, "unpickle spec",
    )  # fmt: skip


@cells("rendezvous")
def test_a_fault_in_the_rendezvous_fails_the_start(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:  # F026
    env = _early("rendezvous", manner, culprit)
    _check_start(
        lambda: make_executor(
            LateAgent, start_method=start_method, env=env, init_timeout=_patience(manner), init_process_group=True
        ),
        manner, culprit, "rendezvous",
    )  # fmt: skip


@cells("build")
def test_a_fault_in_build_model_fails_the_start(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:  # F001, F022
    _check_start(
        lambda: make_executor(
            FaultyAgent,
            agent_args=(culprit, manner, "build"),
            start_method=start_method,
            init_timeout=_patience(manner),
        ),
        manner, culprit, "build model",
    )  # fmt: skip


def _patience(manner: str) -> float:
    return INIT_TIMEOUT_S if manner in STUCK else 60.0


# -- while it runs -----------------------------------------------------------------------------------------------------


@cells("idle")
async def test_a_fault_of_an_idle_rank_is_seen_without_a_call(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:  # F002
    executor = make_executor(FaultyAgent, agent_args=(culprit, manner), start_method=start_method)
    executor.start()
    check_usable(executor)  # behind it, the ranks have begun all that `start` asked for, and are idle
    pid = executor.pids[culprit]
    if manner in ("sigkill", "sigstop"):
        watch = ExitWatch(pid) if manner == "sigkill" else None
        os.kill(pid, getattr(signal, manner.upper()))
    else:
        watch = ExitWatch(pid) if manner in ENDS else None
        executor.notify("later")
    if watch is not None:
        with pytest.raises(WorkerDiedError) as caught:
            await asyncio.wait_for(executor.wait_tasks(), 10.0)
        assert watch.seconds_since(time.monotonic()) <= DEATH_S * LOAD
        # The method that was notified of may not have been answered when the process ended.
        check_died(caught.value, manner, culprit, pid, caught.value.method)
        assert manner != "sigkill" or caught.value.method is None
        check_broken(executor, caught.value)
    elif manner in STUCK:
        with pytest.raises(RPCTimeoutError) as timed_out:
            while True:  # the first calls may still overtake the misdeed
                watch_call = Stopwatch()
                executor.collective_rpc("echo", args=(0,), timeout=DEADLINE_S)
        assert watch_call.seconds <= DEADLINE_S + LATE_S * LOAD
        check_timed_out(timed_out.value, manner, "echo", culprit, (culprit,))
        check_broken(executor, timed_out.value)
    else:
        for _ in range(100):
            if executor.collective_rpc("count_misdeeds")[culprit]:
                break
        assert executor.collective_rpc("count_misdeeds")[culprit] == 1
        check_usable(executor)


def _check_call_times_out(
    executor: Any,
    method: str,
    args: tuple[Any, ...],
    manner: str,
    culprit: int,
    missing: tuple[int, ...],
    deadline: float = DEADLINE_S,
) -> None:
    watch = Stopwatch()
    with pytest.raises(RPCTimeoutError) as caught:
        executor.collective_rpc(method, args=args, timeout=deadline)
    assert deadline <= watch.seconds <= deadline + LATE_S * LOAD, f"took {watch.seconds:.3f} s"
    check_timed_out(caught.value, manner, method, culprit, missing)
    check_broken(executor, caught.value)


def _check_call(executor: Any, method: str, manner: str, culprit: int, type_name: str) -> None:
    """One call in which one rank misbehaves and the other answers at once."""
    if manner in STUCK:
        _check_call_times_out(executor, method, (), manner, culprit, (culprit,))
        return
    if manner == "big_reply":
        values = executor.collective_rpc(method, timeout=60.0)
        assert values[culprit] == big_value() and values[1 - culprit] == 1 - culprit
        check_usable(executor)
        return
    watch, pid = Stopwatch(), executor.pids[culprit]
    end = ExitWatch(pid) if manner in ENDS else None
    with pytest.raises(Exception) as caught:
        executor.collective_rpc(method)
    told = time.monotonic()
    assert watch.seconds <= RAISE_S * LOAD
    if end is not None:
        assert end.seconds_since(told) <= DEATH_S * LOAD, f"told {end.seconds_since(told):.3f} s after the end"
        check_died(caught.value, manner, culprit, pid, method)
        check_broken(executor, caught.value)
        return
    if type_name:
        check_value_failed(caught.value, culprit, type_name)
    else:
        check_original(caught.value, manner, culprit, method)
    assert getattr(caught.value, "others", None) is None
    check_usable(executor)


@cells("sync")
def test_a_fault_in_a_sync_method_reaches_the_caller(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:  # F005, F008, F031, F034, F040
    executor = make_executor(
        FaultyAgent, agent_args=(culprit, manner), start_method=start_method, stop_timeout=STOP_TIMEOUT_S
    )
    _check_call(executor, "in_sync_method", manner, culprit, "_thread.lock" if manner == "unpicklable_value" else "")


@cells("async")
def test_a_fault_in_an_async_method_reaches_the_caller(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:
    executor = make_executor(
        FaultyAgent, agent_args=(culprit, manner), start_method=start_method, stop_timeout=STOP_TIMEOUT_S
    )
    _check_call(executor, "in_async_method", manner, culprit, "_thread.lock" if manner == "unpicklable_value" else "")


@cells("reply")
def test_a_fault_while_a_reply_is_written_reaches_the_caller(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:  # F040
    executor = make_executor(
        FaultyAgent, agent_args=(culprit, manner), start_method=start_method, stop_timeout=STOP_TIMEOUT_S
    )
    if manner in ("raise", "unpicklable_exception", "unpicklable_value"):
        with within(RAISE_S), pytest.raises(SerializationError) as caught:
            executor.collective_rpc("in_reply")
        assert caught.value.rank == culprit and f"rank {culprit}" in str(caught.value)
        assert "'in_reply'" in str(caught.value)
        assert manner == "unpicklable_value" or TEXT in str(caught.value)
        check_usable(executor)
    else:
        _check_call(executor, "in_reply", manner, culprit, "")


@cells("all_reduce")
def test_a_fault_with_peers_in_an_all_reduce_reaches_the_caller_and_ends_the_peers(
    make_executor: Make, tmp_path: Path, manner: str, culprit: int, start_method: str
) -> None:  # F013, F017
    executor = make_executor(
        FaultyAgent,
        agent_args=(culprit, manner),
        start_method=start_method,
        init_process_group=True,
        stop_timeout=STOP_TIMEOUT_S,
    )
    assert executor.collective_rpc("add_up", args=(1,)) == [3, 3]
    args, peer, pid = (str(tmp_path / "announced"),), 1 - culprit, executor.pids[culprit]
    if manner in STUCK:
        _check_call_times_out(executor, "in_all_reduce", args, manner, culprit, (0, 1))
        return
    if manner == "big_reply":
        _check_call_times_out(executor, "in_all_reduce", args, manner, culprit, (peer,), deadline=1.5 * LOAD)
        return
    end = ExitWatch(pid) if manner in ENDS else None
    watch = Stopwatch()
    with pytest.raises(Exception) as caught:
        executor.collective_rpc("in_all_reduce", args=args)
    told = time.monotonic()
    assert watch.seconds <= RAISE_S * LOAD
    if end is not None:
        assert end.seconds_since(told) <= DEATH_S * LOAD, f"told {end.seconds_since(told):.3f} s after the end"
        check_died(caught.value, manner, culprit, pid, "in_all_reduce")
    elif manner == "unpicklable_value":
        check_value_failed(caught.value, culprit, "_thread.lock")
    else:
        check_original(caught.value, manner, culprit, "in_all_reduce")
    check_broken(executor, caught.value)


# -- background tasks and stop -----------------------------------------------------------------------------------------


@cells("wait_tasks", tuple(manner for manner in MANNERS if manner not in VALUES))
async def test_a_fault_of_a_background_task_reaches_whoever_waits_for_the_tasks(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:  # F016
    executor = make_executor(
        FaultyAgent, agent_args=(culprit, manner), start_method=start_method, stop_timeout=STOP_TIMEOUT_S
    )
    executor.start()
    waiting = asyncio.ensure_future(executor.wait_tasks())
    pid = executor.pids[culprit]
    end = ExitWatch(pid) if manner in ENDS else None
    watch = Stopwatch()
    executor.notify("go")
    if manner in STUCK:
        # Not a failure by itself; the call that meets it has a deadline, and whoever waits hears of that.
        with pytest.raises(RPCTimeoutError) as timed_out:
            for _ in range(100):
                await executor.collective_rpc_async("echo", args=(0,), timeout=DEADLINE_S)
        check_timed_out(timed_out.value, manner, "echo", culprit, (culprit,))
        with within(RAISE_S), pytest.raises(RPCTimeoutError) as caught:
            await waiting
        assert caught.value is timed_out.value
        check_broken(executor, caught.value)
        return
    with pytest.raises(Exception) as failed:
        await asyncio.wait_for(waiting, 10.0)
    told = time.monotonic()
    assert watch.seconds <= RAISE_S * LOAD
    if end is not None:
        assert end.seconds_since(told) <= DEATH_S * LOAD
        check_died(failed.value, manner, culprit, pid, failed.value.method)  # type: ignore[attr-defined]
        check_broken(executor, failed.value)
        return
    check_original(failed.value, manner, culprit, "wait_tasks")
    assert executor.state is State.STOPPED
    with pytest.raises(type(failed.value)):  # F011: also for who asks after it has happened
        await executor.wait_tasks()
    check_usable(executor)
    executor.start()
    assert executor.state is State.RUNNING
    check_usable(executor)


@cells("wait_tasks", VALUES)
async def test_an_output_that_cannot_travel_fails_the_wait_and_a_large_one_arrives_whole(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:
    executor = make_executor(OutputAgent, start_method=start_method)
    executor.start()
    waiting = asyncio.ensure_future(executor.wait_tasks())
    await executor.forward_async(manner)
    if manner == "big_reply":
        assert await asyncio.wait_for(executor.get_output_async(), 60.0) == big_value()
        await executor.stop_async()
        with within(RAISE_S):
            await waiting
    else:
        with within(RAISE_S), pytest.raises(SerializationError) as caught:
            await waiting
        assert caught.value.type_name == "_thread.lock"
    assert executor.state is State.STOPPED


@cells("stop", tuple(manner for manner in MANNERS if manner not in VALUES))
def test_a_fault_while_it_stops_cannot_hold_the_stop(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:  # F080
    executor = make_executor(
        FaultyAgent, agent_args=(culprit, manner, "stop"), start_method=start_method, stop_timeout=STOP_TIMEOUT_S
    )
    executor.start()
    pid = executor.pids[culprit]
    with within(STOP_TIMEOUT_S + LATE_S):
        executor.stop()
    if manner not in ENDS and manner not in STUCK:
        assert executor.state is State.STOPPED
        check_usable(executor)
        return
    assert executor.state is State.BROKEN
    with pytest.raises(ExecutorBrokenError) as caught:
        executor.collective_rpc("echo", args=(0,))
    root = caught.value.__cause__
    assert root is not None
    if manner in ENDS:
        check_died(root, manner, culprit, pid, None)
    else:
        assert type(root) is ExecutorStoppedError and f"[{culprit}]" in str(root)
    with within(STOP_TIMEOUT_S + LATE_S):
        executor.release()
    rung = executor.describe()["ranks"][culprit]["ended_by"]
    assert rung in {"sigstop": ("KILL",), "hang_c": ("TERM", "KILL"), "hang_python": ("asked", "TERM")}.get(
        manner, ("exited",)
    )
    assert not leaks.await_gone(executor.pids, 0.0)


@cells("stop", VALUES)
def test_a_reply_on_its_way_while_it_stops_disturbs_nothing(
    make_executor: Make, manner: str, culprit: int, start_method: str
) -> None:  # F076
    executor = make_executor(FaultyAgent, agent_args=(culprit, manner), start_method=start_method)
    executor.start()
    future = executor.submit_rpc("reply_when_stopped")
    with within(RAISE_S):
        executor.stop()
    with pytest.raises(ExecutorStoppedError):
        future.result(timeout=RAISE_S * LOAD)
    assert executor.state is State.STOPPED
    check_usable(executor)
