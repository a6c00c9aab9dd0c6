"""Deaths, stops and calls at the same time: every caller hears of the end, whoever it is and wherever it waits."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.agents import HostAgent
from faults.drivers import Pipe
from faults.watching import LOAD, ExitWatch, within

from mpexec import ExecutorBrokenError, ExecutorStoppedError, MpexecError, State, WorkerDiedError
from mpexec.pytest_plugin.faults import Faults

DEATH_S = 0.1
RAISE_S = 2.0
Make = Callable[..., Any]


class Callers:
    """Threads that call without pause until an error ends them; `endings` has one error for each."""

    def __init__(self, executor: Any, count: int) -> None:
        self._executor = executor
        self.endings: list[BaseException] = []
        self.wrong: list[Any] = []
        self.calls = 0
        self._threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _call(self, number: int) -> None:
        try:
            while True:
                self.calls += 1
                value = (number, self.calls, bytes(random.randrange(200_000)))
                if self._executor.collective_rpc("echo", args=(value,)) != [(value, 0), (value, 1)]:
                    self.wrong.append(value[:2])
        except BaseException as error:
            self.endings.append(error)

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds * LOAD
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        assert len(self.endings) == len(self._threads), "a caller still waits"
        assert not self.wrong


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_killed_at_any_moment_ends_every_caller(make_executor: Make, seed: int) -> None:  # F002, F007
    executor = make_executor(HostAgent, ring_bytes=65536 * (1 + seed % 2 * 15))
    callers = Callers(executor, 4)
    moment = time.monotonic() + random.Random(seed).random() * 0.05
    while time.monotonic() < moment:
        os.sched_yield()
    os.kill(executor.pids[seed % 2], signal.SIGKILL)
    callers.join(RAISE_S)
    assert {type(error) for error in callers.endings} <= {WorkerDiedError, ExecutorBrokenError}
    for error in callers.endings:
        root = error if isinstance(error, WorkerDiedError) else error.__cause__
        assert isinstance(root, WorkerDiedError)
        assert (root.rank, root.signal_name) == (seed % 2, "SIGKILL")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("verb", ["stop", "release"])
def test_a_stop_at_any_moment_ends_every_caller(make_executor: Make, verb: str, seed: int) -> None:  # F076
    executor = make_executor(HostAgent)
    executor.start()
    callers = Callers(executor, 4)
    moment = time.monotonic() + random.Random(seed).random() * 0.05
    while time.monotonic() < moment:
        os.sched_yield()
    with within(RAISE_S):
        getattr(executor, verb)()
    if verb == "stop":
        # STOPPED ranks may be called, so whoever had not sent yet goes on; the release ends them.
        assert executor.state is State.STOPPED
        executor.release()
    callers.join(RAISE_S)
    assert {type(error) for error in callers.endings} == {ExecutorStoppedError}


async def test_a_death_ends_calls_of_threads_tasks_and_futures(
    make_executor: Make, tmp_path: Path
) -> None:  # F005, F013
    executor = make_executor(HostAgent)
    pipe = Pipe(tmp_path)
    loop = asyncio.get_running_loop()
    future = executor.submit_rpc("sleep", args=(pipe.path,))
    pipe.pids(2)  # both ranks sit in a method that never ends; whatever comes behind it waits
    behind = [loop.run_in_executor(None, lambda: executor.collective_rpc("echo", args=(0,))) for _ in range(2)]
    behind += [asyncio.ensure_future(executor.collective_rpc_async("echo", args=(1,))) for _ in range(2)]
    behind.append(asyncio.wrap_future(executor.submit_rpc("echo", args=(2,))))
    await asyncio.sleep(0)
    watch = ExitWatch(executor.pids[1])
    os.kill(executor.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        await asyncio.wait_for(asyncio.wrap_future(future), RAISE_S * LOAD)
    assert watch.seconds_since(time.monotonic()) <= DEATH_S * LOAD
    assert (caught.value.rank, caught.value.method) == (1, "sleep")
    (states,) = (note for note in caught.value.__notes__ if note.startswith("all ranks: "))
    assert f"rank 0 (pid {executor.pids[0]}) in 'sleep' for " in states
    assert f"rank 1 (pid {executor.pids[1]}) ended (SIGKILL)" in states
    for error in await asyncio.wait_for(asyncio.gather(*behind, return_exceptions=True), RAISE_S * LOAD):
        assert isinstance(error, WorkerDiedError | ExecutorBrokenError)
    pipe.close()
    await loop.shutdown_default_executor()


async def test_a_rank_that_reads_nothing_blocks_neither_the_loop_nor_the_news_of_its_death(
    make_executor: Make,
) -> None:  # F007
    executor = make_executor(HostAgent, ring_bytes=65536)
    os.kill(executor.pids[1], signal.SIGSTOP)
    longest, last = 0.0, time.monotonic()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(0.005)

    ticker = asyncio.ensure_future(tick())
    value = bytes(1 << 20)
    calls = []
    for _ in range(64):
        calls.append(asyncio.ensure_future(executor.collective_rpc_async("echo", args=(value,))))
        await asyncio.sleep(0)
    assert not any(call.done() for call in calls)
    os.kill(executor.pids[1], signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), RAISE_S * LOAD)
    assert all(isinstance(result, WorkerDiedError) for result in results)
    ticker.cancel()
    await asyncio.wait([ticker])
    assert longest < 0.1 * LOAD, f"the loop stood still for {longest:.3f} s"


async def test_wait_tasks_after_the_death_raises_at_once(make_executor: Make) -> None:  # F011
    executor = make_executor(HostAgent)
    executor.start()
    with pytest.raises(WorkerDiedError) as first:
        await executor.collective_rpc_async("end")
    for _ in range(2):
        with within(DEATH_S), pytest.raises(WorkerDiedError) as caught:
            await executor.wait_tasks()
        assert caught.value.rank == first.value.rank == 1


async def test_a_running_call_keeps_a_forgotten_executor_alive(make_executor: Make) -> None:  # F124
    from mpexec import MPExecutor

    async def call() -> Any:
        executor = MPExecutor(
            HostAgent, world_size=2, start_method="forkserver", device="cpu", init_process_group=False, _warn=False
        )
        work = executor.collective_rpc_async("end")
        del executor
        return await work

    task = asyncio.ensure_future(call())
    while not task.done():
        gc.collect()
        await asyncio.sleep(0)
    assert isinstance(task.exception(), WorkerDiedError)
    del task
    gc.collect()


def test_describe_and_health_tell_of_busy_and_stopped_ranks_without_a_call(
    make_executor: Make, faults: Faults, tmp_path: Path
) -> None:  # F070
    executor = make_executor(HostAgent, stop_timeout=1.0)
    pipe = Pipe(tmp_path)
    future = executor.submit_rpc("sleep", args=(pipe.path,))
    pipe.pids(2)
    with within(DEATH_S):
        rows = executor.describe()["ranks"]
    assert [row["method"] for row in rows] == ["sleep", "sleep"]
    assert executor.check_health()
    faults.stop(1)
    faults.wait()
    assert executor.describe()["ranks"][1]["state"] == "stopped"
    with within(DEATH_S):
        assert not executor.check_health()
    assert executor.state is State.READY and not future.done()
    os.kill(executor.pids[1], signal.SIGCONT)
    executor.release()
    with pytest.raises(ExecutorStoppedError):
        future.result(RAISE_S)
    pipe.close()


def test_executors_are_made_among_busy_threads_of_the_program(make_executor: Make) -> None:  # F113
    over = threading.Event()
    busy = [threading.Thread(target=_spin, args=(over,), daemon=True) for _ in range(4)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(2):
            executor = make_executor(HostAgent)
            assert executor.collective_rpc("echo", args=(1,)) == [(1, 0), (1, 1)]
            executor.release()
    finally:
        over.set()
        for thread in busy:
            thread.join()


def _spin(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(1000))


def test_a_second_failure_does_not_hide_the_first(make_executor: Make, faults: Faults) -> None:  # F038
    faults.kill(0, at="echo")
    executor = make_executor(HostAgent)
    with pytest.raises(WorkerDiedError) as caught:
        executor.collective_rpc("echo", args=(0,))
    os.kill(executor.pids[1], signal.SIGKILL)
    with pytest.raises(ExecutorBrokenError) as later:
        executor.collective_rpc("echo", args=(0,))
    assert isinstance(later.value.__cause__, WorkerDiedError)
    assert later.value.__cause__.rank == caught.value.rank == 0
    with within(RAISE_S):
        executor.release()
    with pytest.raises(MpexecError):
        executor.collective_rpc("echo", args=(0,))
