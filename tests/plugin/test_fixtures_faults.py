"""The fixture `faults`: every kind at every kind of point, as the test that uses it sees it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin.faulty import Agent, LoopAgent, Worker, make_agent

from mpexec import (
    ConfigError,
    MPExecutor,
    RemoteError,
    RPCTimeoutError,
    SerializationError,
    StartupError,
    State,
    WorkerDiedError,
    WorkerSpec,
)
from mpexec.pytest_plugin.faults import Faults

Make = Callable[..., MPExecutor]
TIMEOUT_S = 0.4
PATIENCE_S = 20.0
METHODS = ("echo", "echo_async")
DIES = {"kill": "SIGKILL", "segv": "SIGSEGV"}
# Seen in the stack of a rank that does not answer.
STUCK = {"stop": "stopped", "hang": "hang_in_python", "hang_in_c": "hang_in_c"}


@pytest.fixture
def mp_executor_options(mp_options: dict[str, Any]) -> dict[str, Any]:
    return {**mp_options, "stop_timeout": 1.0}


def check_usable(executor: MPExecutor) -> None:
    assert executor.collective_rpc("echo", args=("hello",), timeout=PATIENCE_S) == [("hello", 0), ("hello", 1)]


def check_dies(executor: MPExecutor, kind: str, method: str) -> None:
    """A call in which rank 1 dies, or has died just before."""
    with pytest.raises(Exception) as caught:
        executor.collective_rpc(method, timeout=PATIENCE_S)
    died = caught.value if isinstance(caught.value, WorkerDiedError) else caught.value.__cause__
    assert isinstance(died, WorkerDiedError) and (died.rank, died.signal_name) == (1, DIES[kind])
    assert executor.state is State.BROKEN


def check_stuck(executor: MPExecutor, kind: str) -> None:
    """A call that rank 1 cannot answer."""
    with pytest.raises(RPCTimeoutError) as late:
        executor.collective_rpc("echo", timeout=TIMEOUT_S)
    assert 1 in late.value.missing_ranks and STUCK[kind] in late.value.stacks[1]
    assert executor.state is State.BROKEN


def _cases() -> Iterator[Any]:
    """Every kind at every kind of point; a quarter of them, which has each pair of them once, is not slow."""
    for (k, kind), (p, point), (m, method), (g, given) in itertools.product(
        enumerate([*DIES, *STUCK]), enumerate(["at", "after"]), enumerate(METHODS), enumerate(["before", "later"])
    ):
        is_slow = m != (k + p) % 2 or g != (k // 2 + p) % 2
        yield pytest.param(kind, point, method, given, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("kind, point, method, given", list(_cases()))
def test_a_rank_dies_or_gets_stuck_at_a_point(
    mp_executor: Make, faults: Faults, kind: str, point: str, method: str, given: str
) -> None:
    executor = mp_executor(Agent) if given == "later" else None
    getattr(faults, kind)(1, **{point: method})
    executor = executor or mp_executor(Agent)
    assert not faults.fired
    if kind in DIES:
        check_dies(executor, kind, method)
        faults.wait(timeout=PATIENCE_S)
        return
    future = executor.submit_rpc(method)
    faults.wait(timeout=PATIENCE_S)
    if kind == "hang" and method == "echo_async":  # it hangs as a coroutine
        check_usable(executor)
    else:
        check_stuck(executor, kind)
    assert not future.done() or future.exception() is not None


@pytest.mark.parametrize("kind", [*DIES, *STUCK])
def test_a_rank_dies_or_gets_stuck_at_once(mp_executor: Make, faults: Faults, kind: str) -> None:
    executor = mp_executor(Agent)
    fault = getattr(faults, kind)(1)
    faults.wait(timeout=PATIENCE_S)
    assert faults.fired == (fault,)
    if kind in DIES:
        check_dies(executor, kind, "echo")
    else:
        check_stuck(executor, kind)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("point", ["at", "after"])
def test_what_a_method_raises_and_returns_is_replaced_and_the_ranks_go_on(
    mp_executor: Make, faults: Faults, point: str, method: str
) -> None:
    executor = mp_executor(Agent)
    fault = faults.raises(1, KeyError("lost"), **{point: method})
    with pytest.raises(KeyError, match="lost") as caught:
        executor.collective_rpc(method, timeout=PATIENCE_S)
    assert any("rank 1" in note for note in caught.value.__notes__)
    faults.unpicklable(1, **{point: method})
    with pytest.raises(RemoteError if point == "at" else SerializationError) as failed:
        executor.collective_rpc(method, timeout=PATIENCE_S)
    assert failed.value.rank == 1
    assert failed.value.type_name.endswith("Unpicklable" if point == "at" else "lock")
    slow = faults.slow(1, 0.2, **{point: method})
    began = time.monotonic()
    assert executor.collective_rpc(method, args=(3,), timeout=PATIENCE_S) == [(3, 0), (3, 1)]
    assert time.monotonic() - began >= 0.2
    faults.wait(fault, slow, timeout=PATIENCE_S)
    check_usable(executor)


def test_a_fault_happens_once_the_nth_time_on_its_rank_only(mp_executor: Make, faults: Faults) -> None:
    faults.raises(0, ValueError("third"), at="echo", nth=3)
    executor = mp_executor(Agent)
    faults.raises(1, ValueError("second"), after="echo", nth=2)
    check_usable(executor)
    with pytest.raises(ValueError, match="second"):
        executor.collective_rpc("echo")
    assert len(faults.fired) == 1
    with pytest.raises(ValueError, match="third"):
        executor.collective_rpc("echo")
    check_usable(executor)


def test_a_method_that_no_caller_reaches_and_one_of_the_worker_are_points_too(
    mp_executor: Make, faults: Faults
) -> None:
    faults.raises(0, ValueError("of worker"), at="of_worker")
    executor = mp_executor(Agent, worker_cls=Worker)
    faults.raises(1, ValueError("inner"), at="_inner")
    with pytest.raises(ValueError, match="inner"):
        executor.collective_rpc("outer")
    with pytest.raises(ValueError, match="of worker"):
        executor.collective_rpc("of_worker")
    faults.raises(1, ValueError("again"), after="of_worker")
    with pytest.raises(ValueError, match="again"):
        executor.collective_rpc("of_worker")
    assert executor.collective_rpc("of_worker") == [0, 1]


@pytest.mark.parametrize("point", ["at", "after"])
def test_a_start_fails_in_build_model(mp_executor: Make, faults: Faults, point: str) -> None:
    faults.raises(1, MemoryError("too large"), **{point: "build_model"})
    with pytest.raises(StartupError) as caught:
        mp_executor(make_agent, agent_args=("a",))
    assert (caught.value.rank, caught.value.phase) == (1, "build model")
    assert isinstance(caught.value.__cause__, MemoryError)
    faults.kill(0, **{point: "build_model"})
    with pytest.raises(StartupError) as killed:
        mp_executor(Agent)
    assert killed.value.rank == 0 and isinstance(killed.value.__cause__, WorkerDiedError)
    check_usable(mp_executor(Agent))


@pytest.mark.parametrize("point", ["at", "after"])
def test_a_start_of_the_tasks_fails(mp_executor: Make, faults: Faults, point: str) -> None:
    executor = mp_executor(LoopAgent)
    faults.raises(1, OSError("no device"), **{point: "start"})
    with pytest.raises(OSError, match="no device"):
        executor.start()
    faults.wait(timeout=PATIENCE_S)


@pytest.mark.parametrize("kind", ["raises", "kill", "unpicklable"])
async def test_the_forward_loop_fails(mp_executor: Make, faults: Faults, kind: str) -> None:
    executor = mp_executor(LoopAgent)
    executor.start()
    error = (ValueError("fourth"),) if kind == "raises" else ()
    getattr(faults, kind)(0, *error, after="forward", nth=2)
    for number in range(3):
        await executor.forward_async(number)
    assert await asyncio.wait_for(executor.get_output_async(), PATIENCE_S) == 0
    await faults.wait_async(timeout=PATIENCE_S)
    with pytest.raises({"raises": ValueError, "kill": WorkerDiedError, "unpicklable": SerializationError}[kind]):
        await asyncio.wait_for(executor.wait_tasks(), PATIENCE_S)


async def test_a_background_failure_can_be_had_at_once(mp_executor: Make, faults: Faults) -> None:
    executor = mp_executor(LoopAgent)
    executor.start()
    faults.raises(1, ValueError("out of the blue"))
    with pytest.raises(ValueError, match="out of the blue"):
        await asyncio.wait_for(executor.wait_tasks(), PATIENCE_S)


def test_a_rank_is_slow_at_once_and_a_stopped_one_goes_on_when_it_is_told_to(mp_executor: Make, faults: Faults) -> None:
    executor = mp_executor(Agent)
    began = time.monotonic()
    faults.slow(1, 0.2)
    check_usable(executor)
    assert time.monotonic() - began >= 0.2
    faults.stop(0, at="echo")
    future = executor.submit_rpc("echo", args=(1,))
    faults.wait(timeout=PATIENCE_S)
    os.kill(executor.pids[0], signal.SIGCONT)
    assert future.result(PATIENCE_S) == [(1, 0), (1, 1)]


async def test_a_coroutine_that_hangs_leaves_its_rank_to_others(mp_executor: Make, faults: Faults) -> None:
    executor = mp_executor(Agent)
    faults.hang(1, at="echo_async")
    hanging = asyncio.ensure_future(executor.collective_rpc_async("echo_async"))
    await faults.wait_async(timeout=PATIENCE_S)
    assert await executor.collective_rpc_async("echo", timeout=PATIENCE_S) == [(None, 0), (None, 1)]
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await executor.collective_rpc_async("echo_async", timeout=PATIENCE_S) == [(None, 0), (None, 1)]


@pytest.mark.spawn
def test_faults_travel_to_spawned_ranks(mp_executor: Make, faults: Faults) -> None:
    faults.raises(1, ValueError("carried"), at="echo")
    executor = mp_executor(Agent, start_method="spawn")
    with pytest.raises(ValueError, match="carried"):
        executor.collective_rpc("echo")
    faults.kill(0, after="echo")
    with pytest.raises(WorkerDiedError):
        executor.collective_rpc("echo")


async def test_a_wait_can_be_cancelled(mp_executor: Make, faults: Faults) -> None:
    executor = mp_executor(Agent)
    faults.raises(1, ValueError("at last"), at="echo")
    waiting = asyncio.ensure_future(faults.wait_async(timeout=PATIENCE_S))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ValueError, match="at last"):
        await executor.collective_rpc_async("echo")
    await faults.wait_async(timeout=PATIENCE_S)


def test_a_spec_and_an_executor_from_elsewhere_will_do(
    mp_executor: Make, faults: Faults, mp_options: dict[str, Any]
) -> None:
    spec = WorkerSpec(agent=Agent, **mp_options)
    faults.raises(1, ValueError("in the spec"), at="echo")
    first = mp_executor(spec)
    with pytest.raises(ValueError, match="in the spec"):
        first.collective_rpc("echo")
    with MPExecutor(spec, _warn=False) as other:
        faults.raises(1, ValueError("elsewhere"), at="echo", executor=other)
        check_usable(first)
        with pytest.raises(ValueError, match="elsewhere"):
            other.collective_rpc("echo")
    assert first.spec.agent is Agent


def test_faults_after_a_release_are_for_the_next_executor(mp_executor: Make, faults: Faults) -> None:
    mp_executor(Agent).release()
    fault = faults.raises(0, ValueError("next"), at="echo")
    executor = mp_executor(Agent)
    with pytest.raises(ValueError, match="next"):
        executor.collective_rpc("echo")
    assert faults.fired == (fault,)


# -- what cannot be meant ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, args, point, said",
    [
        ("kill", (-1,), {"at": "echo"}, "rank=-1"),
        ("kill", (True,), {"at": "echo"}, "rank=True"),
        ("kill", ("1",), {"at": "echo"}, "rank='1'"),
        ("stop", (0,), {"at": ""}, "would happen now, but there is no executor"),
        ("stop", (0,), {"at": "for ward"}, "at='for ward'"),
        ("segv", (0,), {"after": 3}, "after=3"),
        ("hang", (0,), {"at": "echo", "after": "echo"}, "not both"),
        ("hang", (0,), {"at": "echo", "nth": 0}, "nth=0"),
        ("hang_in_c", (0,), {"nth": 2}, "needs a point"),
        ("hang_in_c", (0,), {"at": "echo", "executor": 3}, "executor=3"),
        ("slow", (0, -1.0), {"at": "echo"}, "seconds=-1.0"),
        ("slow", (0, "1"), {"at": "echo"}, "seconds='1'"),
        ("raises", (0, ValueError), {"at": "echo"}, "give an exception"),
        ("unpicklable", (0,), {}, "needs a point"),
    ],
)
def test_bad_values_are_refused_by_name(
    faults: Faults, kind: str, args: tuple[Any, ...], point: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(faults, kind)(*args, **point)
    assert said in str(caught.value)
    assert not faults.fired


def test_ranks_and_points_that_do_not_exist_are_refused(mp_executor: Make, faults: Faults) -> None:
    faults.kill(2, at="echo")
    with pytest.raises(ConfigError, match=r"rank of faults.kill\(2, at='echo'\).*0 to 1"):
        mp_executor(Agent)
    faults.kill(1, at="ecko")
    with pytest.raises(ConfigError, match=r"kill\(1, at='ecko'\): Agent has no method 'ecko'.*echo_async"):
        mp_executor(make_agent, agent_args=("a",))
    executor = mp_executor(Agent)
    with pytest.raises(ConfigError, match="0 to 1"):
        faults.kill(2, at="echo")
    with pytest.raises(ConfigError, match="no method 'ecko'"):
        faults.kill(0, after="ecko")
    with pytest.raises(ConfigError, match="no method 'name'"):
        faults.kill(0, at="name")
    check_usable(executor)


def test_a_fault_that_does_not_come_is_named(mp_executor: Make, faults: Faults) -> None:
    mp_executor(Agent)
    faults.kill(1, at="echo")
    with pytest.raises(TimeoutError, match=r"kill\(1, at='echo'\)"):
        faults.wait(timeout=0.01)


def test_a_rank_that_has_ended_is_sent_no_signal(mp_executor: Make, faults: Faults) -> None:
    executor = mp_executor(Agent)
    faults.kill(1)
    faults.wait(timeout=PATIENCE_S)
    for kind in ("kill", "stop", "segv"):
        with pytest.raises(ConfigError, match=rf"{kind}\(1\): that rank \(pid {executor.pids[1]}\) is gone already"):
            getattr(faults, kind)(1)


@pytest.mark.parametrize("method", METHODS)
def test_a_fault_whose_test_is_over_does_not_happen_and_touches_no_file(
    mp_executor: Make, tmp_path: Path, method: str
) -> None:
    executor, faults = mp_executor(Agent), Faults()
    for kind in ("kill", "hang"):
        getattr(faults, kind)(1, at=method, executor=executor)
    number = faults._write_end.fd
    faults.close()
    path = tmp_path / "data"
    path.write_text("precious")
    with contextlib.ExitStack() as opened:
        while opened.enter_context(path.open()).fileno() != number:  # the lowest free number is given first
            continue
        assert executor.collective_rpc(method, timeout=PATIENCE_S) == [(None, 0), (None, 1)]
    assert executor.collective_rpc(method, timeout=PATIENCE_S) == [(None, 0), (None, 1)]
    assert path.read_text() == "precious"


def test_an_exception_that_cannot_travel_is_refused(mp_executor: Make, faults: Faults) -> None:
    mp_executor(Agent)
    with pytest.raises(SerializationError):
        faults.raises(1, ValueError(iter(()), threading.Lock()), at="echo")
    assert not faults.fired
