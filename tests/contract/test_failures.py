"""What a caller gets when a method raises, a value cannot travel, or the deadline passes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.agents import ORDINARY, UNREBUILDABLE, Agent, BuildsForLong, FailsToBuild, MyError
from contract.conftest import InThread, class_of, in_time, last_rank, only_apart, only_mp, only_uni, until
from mpexec import (
    ConfigError,
    Executor,
    ExecutorBrokenError,
    RemoteError,
    RemoteTraceback,
    RPCTimeoutError,
    SerializationError,
    StartupError,
)
from mpexec.executor.base import State
from mpexec.executor.pending import PendingCall


def usable(executor: Executor) -> bool:
    """True if the executor still answers."""
    return bool(executor.collective_rpc("where", timeout=20) == list(range(executor.world_size)))


# -- the original exception ------------------------------------------------------------------------------------------


# F034
@pytest.mark.parametrize("method", ["fail", "fail_async"])
@pytest.mark.parametrize("name", [name for name in ORDINARY if name != "StopIteration"])
def test_an_exception_arrives_with_its_own_type_and_arguments(executor: Executor, name: str, method: str) -> None:
    expected = ORDINARY[name]()
    with pytest.raises(type(expected)) as caught:
        executor.collective_rpc(method, (name, (last_rank(executor),)))
    assert type(caught.value) is type(expected)
    if name != "ExceptionGroup":
        assert caught.value.args == expected.args
    assert usable(executor)


# F034
def test_stop_iteration_ends_no_loop_of_the_callers_by_mistake(executor: Executor) -> None:
    with pytest.raises(StopIteration) as caught:
        executor.collective_rpc("fail", ("StopIteration",))
    assert caught.value.value == 7
    assert type(executor.submit_rpc("fail", ("StopIteration",)).exception(10)) is StopIteration

    async def call() -> None:
        await executor.collective_rpc_async("fail", ("StopIteration",))

    with pytest.raises(RuntimeError, match="StopIteration") as turned:  # PEP 479: a coroutine cannot raise it
        asyncio.run(call())
    assert isinstance(turned.value.__cause__, StopIteration)


def test_the_remote_traceback_is_the_cause_and_names_the_users_line(executor: Executor) -> None:
    with pytest.raises(MyError) as caught:
        executor.collective_rpc("fail", ("MyError",))
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "agents.py" in str(cause)
    assert "in fail" in str(cause)
    assert "MyError: mine" in str(cause)


def test_the_notes_name_rank_process_method_and_call(executor: Executor) -> None:
    rank = last_rank(executor)
    with pytest.raises(MyError) as caught:
        executor.collective_rpc("fail", ("MyError", (rank,)))
    notes = "\n".join(caught.value.__notes__)
    for fact in (f"rank {rank}", f"pid {executor.pids[rank]}", "'fail'", "call "):
        assert fact in notes


def test_a_note_of_the_users_stays(executor: Executor) -> None:
    with pytest.raises(MyError) as caught:
        executor.collective_rpc("fail_with_note")
    assert "a note of the user's" in caught.value.__notes__


def test_the_cause_that_the_user_gave_is_in_the_remote_traceback(executor: Executor) -> None:
    with pytest.raises(MyError) as caught:
        executor.collective_rpc("fail_with_cause")
    assert "inner key" in str(caught.value.__cause__)
    assert "direct cause" in str(caught.value.__cause__)


def test_failures_of_other_ranks_are_in_others(executor: Executor) -> None:
    with pytest.raises(MyError) as caught:
        executor.collective_rpc("fail_with_rank")
    others: ExceptionGroup | None = getattr(caught.value, "others", None)
    texts = {str(caught.value), *(str(other) for other in (others.exceptions if others else ()))}
    assert texts == {f"rank {rank}" for rank in range(executor.world_size)}
    assert (others is None) == (executor.world_size == 1)


async def test_a_failure_is_the_same_through_a_coroutine(executor: Executor) -> None:
    with pytest.raises(MyError) as caught:
        await executor.collective_rpc_async("fail", ("MyError",))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert await executor.collective_rpc_async("echo", (1,), reply_ranks=0) == 1


def test_one_failing_call_does_not_disturb_those_beside_it(executor: Executor) -> None:
    good = [executor.submit_rpc("doze", (0.01, number), reply_ranks=0) for number in range(20)]
    bad = [executor.submit_rpc("fail_async", ("MyError", (last_rank(executor),))) for _ in range(20)]
    concurrent.futures.wait([*good, *bad], timeout=20)
    assert [future.result(0) for future in good] == list(range(20))
    assert [type(future.exception(0)) for future in bad] == [MyError] * 20


CATCH = """
import warnings
warnings.simplefilter("ignore")
from mpexec import MPExecutor, ModelAgent

class MyError(Exception):
    pass

class Failing(ModelAgent):
    def fail(self):
        raise MyError("mine", self.rank)

if __name__ == "__main__":
    with MPExecutor(Failing, world_size=2, device="cpu", init_process_group=False) as executor:
        try:
            executor.collective_rpc("fail", ranks=[1])
        except MyError as error:
            print("caught", error.args, type(error.__cause__).__name__)
"""


@pytest.mark.parametrize("way", ["file", "stdin", "-c"])
def test_a_class_of_the_programs_own_main_is_caught_by_its_name(tmp_path: Path, way: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(CATCH)
    arguments = {"file": [str(script)], "stdin": ["-"], "-c": ["-c", CATCH]}[way]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=CATCH if way == "stdin" else None, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("caught ('mine', 1) RemoteTraceback\n", "")


# -- exceptions that cannot be rebuilt -------------------------------------------------------------------------------


# F031
@pytest.mark.parametrize("method", ["fail", "fail_async"])
@pytest.mark.parametrize("name", [*UNREBUILDABLE, "str raises"])
def test_an_exception_that_cannot_be_rebuilt_becomes_a_remote_error(executor: Executor, name: str, method: str) -> None:
    rank = last_rank(executor)
    with pytest.raises(Exception) as caught:
        executor.collective_rpc(method, (name, (rank,)), timeout=20)
    error = caught.value
    if executor.describe()["kind"] != "uni":
        assert isinstance(error, RemoteError)
        assert isinstance(error, SerializationError)
        assert (error.rank, error.method) == (rank, method)
        assert error.type_name.startswith("contract.agents.")
        assert error.type_name.rpartition(".")[2] in str(error)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in fail" in str(error.__cause__)
    assert usable(executor)


# F016
@pytest.mark.parametrize("method", ["fail_below_exception", "fail_below_exception_async", "fail_cancelled"])
def test_an_exception_below_exception_is_a_failure_of_its_call(executor: Executor, method: str) -> None:
    with pytest.raises(RemoteError) as caught:
        executor.collective_rpc(method, timeout=20)
    assert caught.value.type_name.rpartition(".")[2] in ("RootError", "CancelledError")
    assert usable(executor)


@only_uni  # in a process of its own it ends the rank
@pytest.mark.parametrize("method", ["exit_in_method", "exit_in_coroutine"])
def test_system_exit_in_process_is_a_failure_of_its_call(executor: Executor, method: str) -> None:
    with pytest.raises(RemoteError, match="SystemExit"):
        executor.collective_rpc(method, timeout=20)
    assert usable(executor)


# -- values and arguments that cannot travel: in process they pass by reference, a difference that the design names --


# F040
@only_apart
def test_a_value_that_cannot_be_pickled_names_its_rank_and_type(executor: Executor) -> None:
    with pytest.raises(SerializationError) as caught:
        executor.collective_rpc("lock", ((1,),))
    assert (caught.value.rank, caught.value.type_name) == (1, "_thread.lock")
    assert "'lock'" in str(caught.value)
    assert usable(executor)


@only_apart
def test_an_argument_that_cannot_be_pickled_is_refused_before_it_is_sent(executor: Executor) -> None:
    for bad in (threading.Lock(), [threading.Lock()], (i for i in ())):
        with pytest.raises(SerializationError, match="'echo'") as caught:
            executor.collective_rpc("echo", (bad,))
        assert caught.value.rank is None
    with pytest.raises(SerializationError):
        executor.collective_rpc("rank_and", args_per_rank=[(1,), (threading.Lock(),)])
    assert executor.collective_rpc("take_log", reply_ranks=0) == []
    assert usable(executor)


@only_apart
def test_a_value_that_cannot_be_rebuilt_here_is_a_serialization_error(executor: Executor) -> None:
    with pytest.raises(SerializationError, match="cannot be rebuilt"):
        executor.collective_rpc("refuses_unpickling")
    assert usable(executor)


@only_apart
def test_an_argument_that_cannot_be_rebuilt_there_fails_the_call_with_that_error(executor: Executor) -> None:
    from contract.agents import RefusesUnpickling

    with pytest.raises(MyError, match="not in this process"):
        executor.collective_rpc("echo", (RefusesUnpickling(),))
    assert usable(executor)


# F041
@only_apart
def test_an_instance_of_a_class_that_was_made_anew_meanwhile_travels_by_value(executor: Executor) -> None:
    module = types.ModuleType("made_at_run_time")
    sys.modules[module.__name__] = module
    try:
        exec("class Config: pass", module.__dict__)
        old = module.Config()
        exec("class Config: pass", module.__dict__)
        assert type(executor.collective_rpc("echo", (old,), reply_ranks=0)).__name__ == "Config"
    finally:
        del sys.modules[module.__name__]
    assert usable(executor)


# F055
def test_an_error_that_is_kept_does_not_keep_release_from_working(fresh: Callable[..., Executor]) -> None:
    executor = fresh()
    kept = []
    for method in ("refuses_unpickling", "lock", "fail_with_cause"):
        try:
            executor.collective_rpc(method)
        except Exception as error:
            kept.append(error)
    executor.release()
    assert executor.state is State.RELEASED


def test_outcomes_that_reach_the_caller_can_be_pickled_on(executor: Executor) -> None:
    for name in ("MyError", *UNREBUILDABLE):
        if executor.describe()["kind"] == "uni" and name != "MyError":
            continue
        with pytest.raises(Exception) as caught:
            executor.collective_rpc("fail", (name,))
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is type(caught.value)
        assert again.__notes__ == caught.value.__notes__


# -- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["wait_for_file", "hold"])
def test_a_deadline_raises_with_missing_ranks_and_stacks_and_breaks_the_executor(
    fresh: Callable[..., Executor], method: str, go: Path
) -> None:
    executor = fresh()
    with pytest.raises(RPCTimeoutError) as caught:
        executor.collective_rpc(method, (str(go),), timeout=0.2)
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert error.missing_ranks == tuple(range(executor.world_size))
    assert error.method == method
    assert set(error.stacks) == set(error.missing_ranks)
    if method == "wait_for_file":
        assert all("in wait_for_file" in stack for stack in error.stacks.values())
    assert executor.state is State.BROKEN
    with pytest.raises(ExecutorBrokenError) as later:
        executor.collective_rpc("where")
    assert later.value.__cause__ is error
    for refused in (executor.submit_rpc, executor.notify):
        with pytest.raises(ExecutorBrokenError):
            refused("where")
    with pytest.raises(ExecutorBrokenError):
        executor.start()
    assert not executor.check_health()
    executor.stop()
    executor.release()


def test_only_the_ranks_that_have_not_answered_are_missing(fresh: Callable[..., Executor], go: Path) -> None:
    executor = fresh()
    rank = last_rank(executor)
    parts = [("/" if other != rank else str(go),) for other in range(executor.world_size)]
    with pytest.raises(RPCTimeoutError) as caught:
        executor.collective_rpc("wait_for_file", args_per_rank=parts, timeout=0.3)
    assert caught.value.missing_ranks == (rank,)
    assert set(caught.value.stacks) == {rank}


def test_the_deadline_of_a_future_passes_though_nobody_waits(fresh: Callable[..., Executor], go: Path) -> None:
    executor = fresh()
    ended = threading.Event()
    future = executor.submit_rpc("wait_for_file", (str(go),), timeout=0.1)
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(20)
    assert isinstance(future.exception(), RPCTimeoutError)


async def test_a_deadline_passes_in_a_coroutine_and_the_loop_keeps_turning(
    fresh: Callable[..., Executor], go: Path
) -> None:
    executor = fresh()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.005)

    counting = asyncio.ensure_future(count())
    with pytest.raises(RPCTimeoutError):
        await executor.collective_rpc_async("wait_for_file", (str(go),), timeout=0.2)
    assert turns > 3
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)
    await executor.release_async()


# F064
def test_a_late_reply_never_reaches_a_later_call(fresh: Callable[..., Executor], go: Path) -> None:
    executor = fresh()
    futures = [executor.submit_rpc("wait_for_file", (str(go), f"stale {n}")) for n in range(3)]
    until(lambda: executor.describe()["calls_in_flight"] >= 3)
    for future in futures:
        assert future.cancel()
    go.touch()
    for number in range(100):
        assert executor.collective_rpc("echo", (number,), reply_ranks=0) == number
    assert executor.describe()["late_replies"] == 3 * executor.world_size


# F067
def test_a_timeout_covers_the_time_in_the_queue(fresh: Callable[..., Executor], go: Path) -> None:
    executor = fresh()
    first = executor.submit_rpc("wait_for_file", (str(go),))
    until(lambda: executor.describe()["ranks"][0]["method"] == "wait_for_file")
    began = time.monotonic()
    with pytest.raises(RPCTimeoutError) as caught:
        executor.collective_rpc("echo", (1,), timeout=0.3)
    assert time.monotonic() - began >= 0.3
    assert caught.value.method == "echo"
    assert 0 in caught.value.missing_ranks
    assert isinstance(first.exception(20), ExecutorBrokenError)


# F067
def test_a_jump_of_the_wall_clock_does_not_matter(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert executor.collective_rpc("echo", (1,), timeout=20, reply_ranks=0) == 1


# F068, F071
def test_a_long_call_without_a_timeout_is_reported_and_goes_on(
    executor: Executor, go: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PendingCall, "_step_ns", 30_000_000)
    with caplog.at_level(logging.WARNING, "mpexec"):
        call = InThread(lambda: executor.collective_rpc("wait_for_file", (str(go), "done"), reply_ranks=0))
        until(lambda: [r for r in caplog.records if "wait_for_file" in r.getMessage()], "a report of the long call")
        assert not call.done.is_set()
        go.touch()
        assert call.result() == "done"


# F071
async def test_waiting_for_the_tasks_of_a_healthy_executor_is_not_reported(
    fresh: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = fresh()
    await executor.start_async()
    monkeypatch.setattr(PendingCall, "_step_ns", 10_000_000)
    with caplog.at_level(logging.WARNING, "mpexec"):
        waiting = asyncio.ensure_future(executor.wait_tasks())
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        assert not [record for record in caplog.records if "wait_tasks" in record.getMessage()]
        await executor.stop_async()
        await in_time(waiting)


# section 3: a failed call ends when the grace is over, whoever else drains
@only_apart
def test_the_grace_after_a_failure_ends_a_call_beside_a_longer_one(fresh: Callable[..., Executor], go: Path) -> None:
    executor = fresh(failure_grace=0.2)
    long = InThread(lambda: executor.collective_rpc("wait_for_file", (str(go),), ranks=[0]))
    until(lambda: executor.describe()["ranks"][0]["method"] == "wait_for_file")
    failing = InThread(lambda: executor.collective_rpc("fail", ("MyError", (1,))))
    with pytest.raises(MyError):
        failing.result()
    assert executor.state is State.BROKEN
    with pytest.raises(ExecutorBrokenError):
        long.result()


@only_apart
def test_without_a_grace_a_failed_call_waits_for_every_rank(fresh: Callable[..., Executor], go: Path) -> None:
    executor = fresh(failure_grace=None)
    long = executor.submit_rpc("wait_for_file", (str(go),), ranks=[0])
    failing = executor.submit_rpc("fail", ("MyError", (1,)))
    executor.collective_rpc("where", ranks=[1])
    assert not failing.done()
    go.touch()
    assert isinstance(failing.exception(20), MyError)
    assert long.result(20) == [None]
    assert usable(executor)


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_abandons_the_call_and_leaves_the_executor_usable(executor: Executor) -> None:
    def interrupt() -> None:
        executor.collective_rpc("until_noted", (("held", "ctrl-c"),))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting = InThread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        executor.collective_rpc("hold", ("ctrl-c",), timeout=20)
    interrupting.result()
    executor.collective_rpc("until_noted", (("cancelled", "ctrl-c"),), timeout=20)
    assert executor.state is State.RUNNING
    assert usable(executor)


def test_ctrl_c_at_any_moment_of_many_calls_loses_no_reply(executor: Executor) -> None:
    """The signal comes wherever the call happens to be: packing, sending, spinning, parked, draining."""
    main = threading.main_thread().ident or 0
    stop = threading.Event()
    armed = False

    def on_signal(*_: Any) -> None:
        nonlocal armed
        if armed:  # never outside of the `try` below
            armed = False
            raise KeyboardInterrupt

    def interrupt() -> None:
        number = 0
        while not stop.wait(0.0005 + number % 7 * 0.0003):
            number += 1
            signal.pthread_kill(main, signal.SIGINT)

    interrupted = number = 0
    previous = signal.signal(signal.SIGINT, on_signal)
    gc.disable()  # what is raised inside a callback of the collector, such as hypothesis's, is lost
    interrupting = InThread(interrupt)
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            number += 1
            try:
                armed = True
                value = executor.collective_rpc("echo", (number,))
                armed = False
            except KeyboardInterrupt:
                interrupted += 1
            else:
                assert value == [number] * executor.world_size, "the answer to another call"
    finally:
        armed = False
        stop.set()
        interrupting.result()
        gc.enable()
        signal.signal(signal.SIGINT, previous)
    assert interrupted > 10
    assert executor.state is State.RUNNING
    assert usable(executor)
    assert InThread(lambda: asyncio.run(executor.collective_rpc_async("echo", (1,), reply_ranks=0))).result() == 1
    assert executor.submit_rpc("echo", (2,), reply_ranks=0).result(20) == 2


# -- start-up --------------------------------------------------------------------------------------------------------


# F022
def test_a_failing_build_names_rank_and_phase_and_keeps_its_cause(kind: str) -> None:
    from contract.conftest import build

    with pytest.raises(StartupError, match="cannot build") as caught:
        build(kind, FailsToBuild)
    assert caught.value.rank in (0, 1)
    assert caught.value.phase == "build model"
    cause = caught.value.__cause__
    assert type(cause) is MyError
    assert cause.args == ("cannot build",)


@pytest.mark.slow
@only_mp
def test_a_build_that_reports_progress_may_take_longer_than_init_timeout(fresh: Callable[..., Executor]) -> None:
    assert usable(fresh(BuildsForLong, init_timeout=2.0))


@pytest.mark.parametrize(
    "options",
    [
        {"world_size": 0}, {"world_size": -1}, {"world_size": "2"}, {"stop_timeout": 0}, {"init_timeout": -1},
        {"failure_grace": -1}, {"ring_bytes": 1000}, {"device": "tpu"}, {"start_method": "thread"}, {"threads": 0},
        {"max_outputs": 0}, {"env": {"A=B": "x"}}, {"no_such_option": 1}, {"agent": 5},
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(kind: str, options: dict[str, Any]) -> None:
    options = {"world_size": 1, "agent": Agent, **options}
    make = class_of(kind)
    with warnings.catch_warnings(), pytest.raises(ConfigError):
        warnings.simplefilter("ignore", DeprecationWarning)
        make(options.pop("agent"), **options)
