"""The fixture `mp_executor`: whatever a test does, its executors are released, and no failure is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from plugin.faulty import Agent
from plugin.inner import run

from mpexec import ConfigError, MPExecutor, State, WorkerDiedError, WorkerSpec
from mpexec.pytest_plugin.executors import ExecutorFactory

pytestmark = pytest.mark.timeout(300)

HEAD = """
import os, signal, time
import pytest
from mpexec import ModelAgent

pytestmark = pytest.mark.usefixtures("no_leaks")
made = []

class Agent(ModelAgent):
    def echo(self, value):
        return value

    def slow(self):
        time.sleep(0.2)

    def forward(self, inputs):
        raise ValueError("deep inside")

@pytest.fixture
def mp_executor_options():
    return dict(
        start_method="fork", allow_unsafe_fork=True, device="cpu", init_process_group=False, stop_timeout=1.0
    )

"""

RELEASES = (
    HEAD
    + """
@pytest.fixture
def broken_fixture(mp_executor):
    made.append(mp_executor(Agent))
    raise RuntimeError("half a set-up")

def test_fails(mp_executor):
    made.append(mp_executor(Agent))
    made.append(mp_executor(Agent))
    assert False, "as tests do"

def test_whose_set_up_fails(broken_fixture):
    pass

def test_breaks_one_and_releases_one(mp_executor):
    first, second, third = (mp_executor(Agent) for _ in range(3))
    made.extend((first, second, third))
    os.kill(first.pids[1], signal.SIGKILL)
    os.kill(third.pids[0], signal.SIGSTOP)
    second.release()

def test_whose_release_fails(mp_executor, monkeypatch):
    first, second, third = (mp_executor(Agent) for _ in range(3))
    made.extend((first, second, third))
    release = second.release
    def fails():
        release()
        raise OSError("refused")
    second.release = fails

def test_no_leaks_comes_last(mp_executor, no_leaks):
    made.append(mp_executor(Agent))

def test_all_are_released_and_gone():
    assert [executor.state.name for executor in made] == ["RELEASED"] * 10
    for executor in made:
        for pid in executor.pids:
            assert not os.path.exists(f"/proc/{pid}") or "Z" in open(f"/proc/{pid}/stat").read()
"""
)

UNHEARD = (
    HEAD
    + """
async def fail(executor):
    executor.start()
    await executor.forward_async(1)
    with pytest.raises(ValueError):
        await executor.wait_tasks()

async def test_heard_by_wait_tasks(mp_executor):
    await fail(mp_executor(Agent))

def fail_unheard(executor):
    executor.start()
    executor.notify("set_forward_inputs", args=(1,))
    while executor._background.error is None:  # nothing public tells without being told
        os.sched_yield()

def test_unheard(mp_executor):
    fail_unheard(mp_executor(Agent))

def test_unheard_and_still_on_its_way(mp_executor):
    mp_executor(Agent).notify("forward", args=(1,))

def test_notified_and_slow_but_well(mp_executor):
    mp_executor(Agent).notify("slow")

def test_unheard_twice_and_released(mp_executor):
    for _ in range(2):
        executor = mp_executor(Agent)
        fail_unheard(executor)
        executor.release()

def test_heard_as_the_cause_of_an_error(mp_executor):
    executor = mp_executor(Agent)
    executor.start()
    os.kill(executor.pids[0], signal.SIGKILL)
    while executor.state.name != "BROKEN":
        os.sched_yield()
    with pytest.raises(Exception, match="SIGKILL"):
        executor.collective_rpc("echo", args=(1,))

def test_meant(mp_executor, faults):
    executor = mp_executor(Agent)
    executor.start()
    faults.kill(1)
    faults.wait()
    while executor.state.name != "BROKEN":
        os.sched_yield()

def test_with_forked_ranks(mp_executor, faults):
    faults.raises(1, ValueError("carried"), at="echo")
    executor = mp_executor(Agent)
    with pytest.raises(ValueError, match="carried"):
        executor.collective_rpc("echo", args=(1,))
    faults.kill(0, after="echo")
    with pytest.raises(Exception, match="SIGKILL"):
        executor.collective_rpc("echo", args=(1,))

def test_a_fault_without_an_executor(faults):
    faults.kill(1, at="echo")
"""
)


def test_all_are_released_whatever_the_tests_do(pytester: pytest.Pytester) -> None:
    result = run(pytester, RELEASES)
    result.assert_outcomes(passed=4, failed=1, errors=2)
    result.stdout.fnmatch_lines(["*half a set-up*", "*refused*"])
    result.stdout.no_fnmatch_line("*left behind*")


def test_a_failure_that_nobody_has_heard_of_fails_the_test(pytester: pytest.Pytester) -> None:
    result = run(pytester, UNHEARD)
    result.assert_outcomes(passed=9, errors=4)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_unheard _*",
            "E *ValueError: deep inside",
            "E *nobody had heard of this background failure*wait_tasks()",
            "*ERROR at teardown of test_unheard_and_still_on_its_way _*",
            "*ERROR at teardown of test_unheard_twice_and_released _*",
            "*ERROR at teardown of test_a_fault_without_an_executor _*",
            "*ConfigError: faults.kill(1, at='echo'): no executor was made after that*",
        ]
    )


def test_it_warns_of_nothing_and_takes_what_an_executor_takes(
    mp_executor: Callable[..., MPExecutor], mp_options: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor = mp_executor(Agent, 3, agent_args=("name",))
    assert executor.world_size == 3 and executor.state is State.READY and type(executor) is MPExecutor
    spec = WorkerSpec(agent=Agent, **{**mp_options, "world_size": 1})
    assert mp_executor(spec).world_size == 1
    with pytest.raises(ConfigError, match="world_size"):
        mp_executor(Agent, world_size=0)
    with pytest.raises(ConfigError, match="wurld_size"):
        mp_executor(Agent, wurld_size=1)


def test_the_default_is_two_ranks_and_no_option() -> None:
    factory = ExecutorFactory({"device": "cpu", "start_method": "forkserver", "init_process_group": False}, None)
    executor = factory(Agent)
    assert executor.world_size == 2
    factory.release_all()
    assert executor.state is State.RELEASED
    factory.release_all()


async def test_a_death_that_a_call_has_told_is_no_failure_of_the_test(
    mp_executor: Callable[..., MPExecutor], faults: Any
) -> None:
    executor = mp_executor(Agent)
    executor.start()
    faults.kill(1, at="echo")
    with pytest.raises(WorkerDiedError):
        await executor.collective_rpc_async("echo")
