"""Every contract test runs once per kind of executor; a module shares one where its tests leave it usable."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from contract.agents import Agent
from mpexec import Executor, MPExecutor, UniExecutor
from mpexec.executor.base import State

ON_RAY = pytest.param(
    "ray",
    marks=pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra: pip install 'mpexec[ray]'"),
)
KINDS = ("uni", "mp", ON_RAY)
# For the differences between the kinds that the design names.
only_apart = pytest.mark.parametrize("kind", ["mp", ON_RAY], indirect=True, scope="module")
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
    own = {"uni": {}, "mp": {"world_size": 2, "start_method": "spawn"}, "ray": {"world_size": 2, "cpus_per_rank": 0.01}}
    options = {**options, "world_size": 1} if kind == "uni" else {**own[kind], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return class_of(kind)(agent, **options)


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
            _shared[index] = kind, agent, warm(build(kind, agent))


@pytest.fixture(scope="module")
def shared(kind: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """Holds the module's executor of its `AGENT`."""
    agent = getattr(request.module, "AGENT", Agent)
    _shared.append((kind, agent, warm(build(kind, agent))))
    yield
    _shared.pop()[2].release()


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
