"""What people see: describe, check_health, pids, warnings, which executor was picked and why, what gets imported."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.agents import Agent
from contract.conftest import InThread, last_rank, only_apart, settle, until
from mpexec import ConfigError, Executor, MPExecutor, UniExecutor, WorkerSpec, build_executor
from mpexec.executor import choose_backend
from mpexec.executor.base import State

OPTIONS: dict[str, Any] = {"device": "cpu", "init_process_group": False, "start_method": "forkserver"}


def test_describe_has_a_row_for_every_rank(executor: Executor) -> None:
    settle(executor)
    facts = executor.describe()
    assert facts["state"] == "RUNNING"
    assert facts["root_cause"] is None
    assert [row["rank"] for row in facts["ranks"]] == list(range(executor.world_size))
    assert tuple(row["pid"] for row in facts["ranks"]) == executor.pids
    for row in facts["ranks"]:
        assert row["state"] == "running"
        assert row["exit"] is None
        assert (row["method"], row["call_id"]) == (None, None)


def test_describe_is_plain_data(executor: Executor) -> None:
    settle(executor)
    facts = executor.describe()
    assert json.loads(json.dumps(facts)) == facts


# F070
def test_describe_and_health_tell_what_a_busy_rank_does_without_queueing_behind_it(
    executor: Executor, go: Path
) -> None:
    rank = last_rank(executor)
    call = InThread(lambda: executor.collective_rpc("wait_for_file", (str(go),), ranks=[rank]))
    until(lambda: executor.describe()["ranks"][rank]["method"] == "wait_for_file")
    assert executor.check_health()
    row = executor.describe()["ranks"][rank]
    assert isinstance(row["call_id"], int)
    assert row["seconds"] >= 0
    assert executor.describe()["calls_in_flight"] >= 1
    assert not call.done.is_set()
    go.touch()
    call.result()
    until(lambda: executor.describe()["ranks"][rank]["method"] is None)


def test_rank_stacks_show_where_every_rank_is_and_disturb_nothing(executor: Executor, go: Path) -> None:
    rank = last_rank(executor)
    call = InThread(lambda: executor.collective_rpc("wait_for_file", (str(go), 7), ranks=[rank], reply_ranks=rank))
    until(lambda: executor.describe()["ranks"][rank]["method"] == "wait_for_file")
    for _ in range(3):
        stacks = executor.rank_stacks()
        assert list(stacks) == list(range(executor.world_size))
        assert "wait_for_file" in stacks[rank]
    go.touch()
    assert call.result() == 7
    executor.release()
    assert executor.rank_stacks() == {}


def test_describe_and_health_answer_in_every_state(fresh: Callable[..., Executor]) -> None:
    executor = fresh()
    seen = [(executor.describe()["state"], executor.check_health())]
    for verb in ("start", "stop", "release"):
        getattr(executor, verb)()
        seen.append((executor.describe()["state"], executor.check_health()))
    assert seen == [("READY", True), ("RUNNING", True), ("STOPPED", True), ("RELEASED", False)]


def test_describe_never_raises_while_others_stop_and_release(fresh: Callable[..., Executor]) -> None:
    for _ in range(5):
        executor = fresh()
        executor.start()

        def look(executor: Executor = executor) -> None:
            while executor.state is not State.RELEASED:
                executor.describe()
                executor.check_health()
            executor.describe()

        looking = InThread(look)
        executor.collective_rpc("echo")
        executor.stop()
        executor.release()
        looking.result()


def test_measures_tell_how_long_methods_took_on_each_rank(executor: Executor) -> None:
    def counts() -> list[tuple[int, int, int]]:
        found = [rank.methods or {} for rank in executor.measures().ranks]
        names = ("_rest", "_rest_async", "echo")
        return [tuple(one[name].count if name in one else 0 for name in names) for one in found]  # type: ignore[misc]

    if executor.describe()["kind"] == "ray":
        assert [rank.methods for rank in executor.measures().ranks] == [None] * executor.world_size
        return
    settle(executor)
    executor.collective_rpc("echo")
    before = counts()
    for _ in range(3):
        executor.collective_rpc(_rest, (0.005,))
        executor.collective_rpc(_rest_async, (0.005,))
    executor.collective_rpc("echo")
    # Short calls show when a rank sleeps, and so the first echo may come now.
    until(
        lambda: all(
            (now[0], now[1]) == (was[0] + 3, was[1] + 3) and now[2] > was[2]
            for was, now in zip(before, counts(), strict=True)
        )
    )
    for rank in executor.measures().ranks:
        for name in ("_rest", "_rest_async"):
            assert ((rank.methods or {})[name].quantile(0.5) or 0.0) > 0.004


def _rest(worker: Any, seconds: float) -> None:
    time.sleep(seconds)


async def _rest_async(worker: Any, seconds: float) -> None:
    await asyncio.sleep(seconds)


def test_a_rank_that_reads_no_calls_shows_in_the_fill_of_the_ring(executor: Executor, go: Path) -> None:
    if executor.describe()["kind"] != "mp":
        assert executor.measures().call_ring_fill is None
        return
    until(lambda: executor.measures().call_ring_fill == 0.0)
    rank = last_rank(executor)
    call = InThread(lambda: executor.collective_rpc("wait_for_file", (str(go),), ranks=[rank]))
    until(lambda: executor.describe()["ranks"][rank]["method"] == "wait_for_file")
    for _ in range(100):
        executor.notify("echo", ("x" * 4000,))
    assert 0.05 < (executor.measures().call_ring_fill or 0.0) < 1.0
    go.touch()
    call.result()
    until(lambda: executor.measures().call_ring_fill == 0.0)


def test_describe_shows_the_root_cause_of_a_broken_executor(fresh: Callable[..., Executor], go: Path) -> None:
    executor = fresh()
    with pytest.raises(TimeoutError):
        executor.collective_rpc("wait_for_file", (str(go),), timeout=0.1)
    assert "RPCTimeoutError" in executor.describe()["root_cause"]
    if executor.describe()["kind"] == "uni":
        assert executor.describe()["abandoned_thread"]


@only_apart
def test_pids_are_those_of_the_ranks_and_stay_readable(fresh: Callable[..., Executor]) -> None:
    executor = fresh()
    assert tuple(executor.collective_rpc(lambda worker: os.getpid())) == executor.pids
    assert os.getpid() not in executor.pids
    pids = executor.pids
    executor.release()
    assert executor.pids == pids


def test_the_methods_of_object_and_lifecycle_stay_callable_only_by_their_public_names(executor: Executor) -> None:
    for name in ("__class__", "_tasks", "_report"):
        with pytest.raises(AttributeError):
            executor.collective_rpc(name)


# -- warnings and choice ---------------------------------------------------------------------------------------------


def deprecations(work: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work().release()
    return [one for one in caught if issubclass(one.category, DeprecationWarning)]


def test_constructing_an_mp_executor_warns_once_at_the_users_line() -> None:
    seen = deprecations(lambda: MPExecutor(Agent, world_size=1, **OPTIONS))
    assert [one.filename for one in seen] == [__file__]
    assert "build_executor" in str(seen[0].message)


def test_asking_for_mp_warns_once_at_the_users_line() -> None:
    seen = deprecations(lambda: build_executor(Agent, "mp", world_size=1, **OPTIONS))
    assert [one.filename for one in seen] == [__file__]


def test_creating_an_mp_executor_from_a_coroutine_warns_at_the_users_line() -> None:
    async def create() -> Executor:
        return await MPExecutor.create_async(Agent, world_size=1, **OPTIONS)

    seen = deprecations(lambda: asyncio.run(create()))
    assert [one.filename for one in seen] == [__file__]


def test_letting_the_library_choose_is_silent() -> None:
    assert deprecations(lambda: build_executor(Agent, world_size=2, **OPTIONS)) == []
    assert deprecations(lambda: build_executor(Agent, **OPTIONS)) == []
    assert deprecations(lambda: UniExecutor(Agent, **OPTIONS)) == []


@pytest.mark.parametrize("world_size, expected", [(1, UniExecutor), (2, MPExecutor)])
def test_the_executor_that_fits_is_chosen_and_the_reason_logged(
    world_size: int, expected: type[Executor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mpexec.executor"):
        executor = build_executor(Agent, world_size=world_size, **OPTIONS)
    executor.release()
    assert type(executor) is expected
    assert any("because" in record.getMessage() for record in caplog.records)


def test_a_whole_spec_may_stand_in_for_the_agent() -> None:
    executor = build_executor(WorkerSpec(agent=Agent, world_size=1, **OPTIONS), stop_timeout=2.0)
    assert isinstance(executor, UniExecutor)
    assert executor.spec.stop_timeout == 2.0
    assert executor.collective_rpc("where") == [0]
    executor.release()


@pytest.mark.parametrize("options", [{"backend": "ray?"}, {"backend": "uni", "world_size": 2}, {"unknown": 1}])
def test_a_choice_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build_executor(Agent, **{**OPTIONS, **options})


# -- what the driver imports -----------------------------------------------------------------------------------------

PROGRAM = """
    import sys
    import warnings

    warnings.simplefilter("ignore")
    from mpexec import MPExecutor, ModelAgent

    class Doubler(ModelAgent):
        def double(self, x):
            return 2 * x + self.rank

    if __name__ == "__main__":
        with MPExecutor(Doubler, world_size=2, device="cpu", init_process_group={group}) as executor:
            print(executor.collective_rpc("double", args=(20,)))
            print(executor.submit_rpc("double", (1,)).result())
            heavy = ("torch", "zmq", "ray", "transformers", "numpy", "cloudpickle")
            print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.parametrize("group", [False, True])
def test_a_running_executor_leaves_heavy_modules_out_of_the_driver(tmp_path: Path, group: bool) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM.replace("{group}", str(group))))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=False)
    assert (done.stdout.splitlines(), done.stderr) == (["[40, 41]", "[2, 3]", "[]"], "")


def test_importing_the_package_is_quick_and_light() -> None:
    code = "import sys, mpexec; mpexec.MPExecutor; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "fields, address, variables, chosen",
    [
        ({"world_size": 1}, None, {}, "uni"),
        ({"world_size": 2}, None, {}, "mp"),
        ({"world_size": 1}, "10.0.0.1:6379", {}, "ray"),
        ({"world_size": 1}, None, {"RAY_ADDRESS": "10.0.0.1:6379"}, "ray"),
        ({"world_size": 2, "device": "cuda"}, None, {"CUDA_VISIBLE_DEVICES": "0,1"}, "mp"),
        ({"world_size": 3, "device": "cuda"}, None, {"CUDA_VISIBLE_DEVICES": "0,1"}, "ray"),
        ({"world_size": 1, "device": "cuda"}, None, {"CUDA_VISIBLE_DEVICES": "-1"}, "ray"),
        ({"world_size": 64, "device": "cpu"}, None, {}, "mp"),
    ],
    ids=str,
)
def test_auto_takes_ray_where_a_cluster_is_named_or_the_machine_is_too_small(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], address: str | None, variables: dict[str, str], chosen: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    backend, why = choose_backend(WorkerSpec(agent=Agent, **fields), address=address)
    assert backend == chosen
    assert why


def test_options_of_ray_are_refused_where_it_is_not_what_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"placement_timeout.*'mp'"):
        build_executor(Agent, "mp", world_size=2, placement_timeout=1.0, **OPTIONS)
