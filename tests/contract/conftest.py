"""Every contract test runs once per kind of executor; a module shares one where its tests leave it usable."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from contract.agents import Agent
from mpexec import Executor, MPExecutor, UniExecutor
from mpexec.executor.base import State

ON_RAY = pytest.param(
    "ray",
    marks=pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra: pip install 'mpexec[ray]'"),
)
# The ranks are processes of a job, and the driver is this process. All of it is slow: `MPExecutor` runs the same tests.
ATTACHED = pytest.param("attached", marks=pytest.mark.slow)
KINDS = ("uni", "mp", ATTACHED, ON_RAY)
# For the differences between the kinds that the design names.
only_apart = pytest.mark.parametrize("kind", ["mp", ATTACHED, ON_RAY], indirect=True, scope="module")
only_mp = pytest.mark.parametrize("kind", ["mp"], indirect=True, scope="module")
only_uni = pytest.mark.parametrize("kind", ["uni"], indirect=True, scope="module")
PATIENCE = 20.0  # seconds after which an event that a test waits for counts as lost


def class_of(kind: str) -> type[Executor]:
    """The class of a kind."""
    if kind == "ray":
        from mpexec import RayExecutor

        return RayExecutor
    return UniExecutor if kind == "uni" else MPExecutor


def build(kind: str, agent: Any = Agent, **options: Any) -> Executor:
    """An executor of a kind: two spawned ranks for "mp", two actors for "ray", and no process group: it is quick."""
    options = {"device": "cpu", "init_process_group": False, "init_timeout": 60.0, **options}
    if kind == "attached":
        return attach(agent, **{"world_size": 2, **options})
    own = {"uni": {}, "mp": {"world_size": 2, "start_method": "spawn"}, "ray": {"world_size": 2, "cpus_per_rank": 0.01}}
    options = {**options, "world_size": 1} if kind == "uni" else {**own[kind], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return class_of(kind)(agent, **options)


_WORKER = "from mpexec import MPExecutor, ModelAgent; MPExecutor.attach(ModelAgent, init_timeout=60.0)"
_jobs: list[tuple[Executor, list[subprocess.Popen[bytes]]]] = []


def attach(agent: Any, world_size: int, **options: Any) -> Executor:
    """An attached executor: this process is the first of a job, and the others are started for it."""
    variables = {
        "RANK": "0",
        "WORLD_SIZE": f"{world_size + 1}",
        "MASTER_ADDR": "here",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": f"contract-{os.getpid()}-{time.monotonic_ns()}",
    }
    environ = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen([sys.executable, "-c", _WORKER], env={**environ, "RANK": str(rank)})
        for rank in range(1, world_size + 1)
    ]
    # Some tests make their executor on a running loop or in a thread, which in a real job a worker could not.
    anywhere = mock.patch("mpexec.executor.attached.check_place")
    try:
        with mock.patch.dict(os.environ, variables), anywhere, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            executor = MPExecutor.attach(agent, world_size=world_size, **options)
    except BaseException:
        await_workers(workers)
        raise
    _jobs.append((executor, workers))
    return executor


def await_workers(workers: list[subprocess.Popen[bytes]]) -> None:
    """As their launcher does: wait for the end of those that have been let go."""
    for worker in workers:
        worker.wait(PATIENCE)


def end_jobs() -> None:
    """Wait for the workers of all attached executors that have been released."""
    for executor, workers in list(_jobs):
        if executor.state is State.RELEASED:
            await_workers(workers)
            _jobs.remove((executor, workers))


@pytest.fixture(autouse=True)
def ended_jobs() -> Iterator[None]:
    """What a test has released is gone when it ends."""
    yield
    end_jobs()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of executor."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return str(request.param)


_shared: list[tuple[str, Any, Executor]] = []  # the module's executor, with what it was built from


def warm(executor: Executor) -> Executor:
    """Let the executor make what it makes on first use, its callback thread for one."""
    ended = threading.Event()
    executor.submit_rpc("where").add_done_callback(lambda _: ended.set())
    assert ended.wait(PATIENCE)
    return executor


def _usable(executor: Executor) -> bool:
    return executor.state in (State.READY, State.RUNNING, State.STOPPED)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Replace an executor that a failing test has left unusable, before the next test is measured for leaks."""
    for index, (kind, agent, executor) in enumerate(_shared):
        if not _usable(executor):
            executor.release()
            end_jobs()
            _shared[index] = kind, agent, warm(build(kind, agent))


@pytest.fixture(scope="module")
def shared(kind: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """Holds the module's executor of its `AGENT`."""
    agent = getattr(request.module, "AGENT", Agent)
    _shared.append((kind, agent, warm(build(kind, agent))))
    yield
    _shared.pop()[2].release()
    end_jobs()


@pytest.fixture
def executor(shared: None) -> Executor:
    """The module's executor, started, its log empty."""
    executor = _shared[-1][2]
    executor.start()
    executor.collective_rpc("take_log")
    return executor


@pytest.fixture
def fresh(kind: str) -> Iterator[Callable[..., Executor]]:
    """Makes executors of one test's own, which may break or release them. Ranks come from the fork server."""
    made: list[Executor] = []

    def make(agent: Any = Agent, **options: Any) -> Executor:
        executor = build(kind, agent, **{"start_method": "forkserver", **options})
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.release()


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """A file that ends `wait_for_file` once it exists; whatever the test does, it exists in the end."""
    path = tmp_path / "go"
    yield path
    path.touch()


def settle(executor: Executor) -> None:
    """Wait until no rank is in a call: a rank says so a moment after its reply."""
    until(lambda: all(row["call_id"] is None for row in executor.describe()["ranks"]), "an idle executor")


def last_rank(executor: Executor) -> int:
    """The highest rank."""
    return executor.world_size - 1


class InThread:
    """A call in a thread of its own; `result` gives its value or raises its error, and never waits for ever."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self.done.set()

    def result(self, timeout: float = PATIENCE) -> Any:
        """Its outcome."""
        assert self.done.wait(timeout), "the call does not end"
        if self._error is not None:
            raise self._error
        return self._value


def until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait for a state that nothing announces, seen from outside."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never came: {what or condition}"
        time.sleep(0.001)


async def until_async(condition: Callable[[], Any], what: str = "") -> None:
    """As `until`, letting the loop turn."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never came: {what or condition}"
        await asyncio.sleep(0.001)


async def in_time(work: Any, timeout: float = PATIENCE) -> Any:
    """Await with a bound, so that a test fails instead of hanging."""
    async with asyncio.timeout(timeout):
        return await work
