"""Executors beside each other and inside others' programs, and room in the cluster: on one node with four CPUs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from faults.watching import LOAD, within
from ray.util import placement_group, remove_placement_group, state
from ray.util.placement_group import PlacementGroup

from mpexec import ConfigError, ModelAgent, RayExecutor, StartupError, State, WorkerDiedError
from on_ray.agents import Agent
from on_ray.checking import OPTIONS, Checks, cluster_address, local_cluster, make, on_log
from on_ray.drive_faults import catch, check_usable

CHECKS = Checks()
AT_ONCE_S = 2.0
PLACEMENT = "mpexec.executor.ray_placement"


# -- beside each other -------------------------------------------------------------------------------------------------


@CHECKS
def two_executors_answer_at_the_same_time_and_one_outlives_the_other() -> Any:
    first, second = make(), make()
    with ThreadPoolExecutor(2) as threads:

        def call(executor: RayExecutor) -> None:
            for number in range(50):
                assert executor.collective_rpc("echo", args=(number,)) == [(number, 0), (number, 1)]

        for done in [threads.submit(call, executor) for executor in (first, second)]:
            done.result()
    assert not set(first.pids) & set(second.pids)
    first.release()
    check_usable(second)
    second.release()
    assert (first.state, second.state) == (State.RELEASED, State.RELEASED)


@CHECKS
def an_executor_works_inside_a_ray_task() -> Any:
    @ray.remote(num_cpus=0)
    def task() -> Any:
        executor = RayExecutor(Agent, **OPTIONS)
        try:
            values = executor.collective_rpc("echo", args=("inner",))
            error = catch(lambda: executor.collective_rpc("act", args=("raise", 1)))
        finally:
            executor.release()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("mpexec")]
        return values, type(error).__name__, left, ray.is_initialized()

    assert ray.get(task.remote()) == ([("inner", 0), ("inner", 1)], "ValueError", [], True)


@CHECKS
def release_after_a_death_and_a_second_release_raise_nothing() -> Any:  # F136
    executor = make()
    os.kill(executor.pids[1], signal.SIGKILL)
    executor.release()  # the news of the death may not have come yet
    executor.release()
    executor = make()
    os.kill(executor.pids[0], signal.SIGKILL)
    error = catch(lambda: executor.collective_rpc("echo", args=(0,), timeout=20.0))
    assert type(error) is WorkerDiedError and error.rank == 0
    executor.release()
    executor.release()
    assert executor.state is State.RELEASED
    assert "WorkerDiedError" in executor.describe()["root_cause"]


# -- a group of the user's ---------------------------------------------------------------------------------------------


def group_of(*bundles: dict[str, float]) -> PlacementGroup:
    group = placement_group(list(bundles))
    assert group.wait(30)
    return group


def group_state(group: PlacementGroup) -> str:
    rows = state.list_placement_groups(address=cluster_address(), limit=1000)
    return {row.placement_group_id: row.state for row in rows}[group.id.hex()]


@CHECKS
def ranks_take_the_named_bundles_in_their_order_and_the_group_stays() -> Any:
    group = group_of({"CPU": 1}, {"CPU": 1, "one": 1}, {"CPU": 1, "two": 1})
    try:
        executor = make(placement_group=group, bundle_indices=(2, 1))
        assert [seat["group"] for seat in executor.collective_rpc("seat")] == [group.id.hex()] * 2
        used = {row["pid"]: row for row in _workers_by_bundle(group)}
        assert [used[pid]["bundle"] for pid in executor.pids] == [2, 1]
        executor.release()
        assert group_state(group) == "CREATED"
        executor = make(placement_group=group)
        used = {row["pid"]: row for row in _workers_by_bundle(group)}
        assert sorted(used[pid]["bundle"] for pid in executor.pids) == [0, 1]
        executor.release()
        assert group_state(group) == "CREATED"
    finally:
        remove_placement_group(group)


def _workers_by_bundle(group: PlacementGroup) -> list[dict[str, Any]]:
    """Pid and bundle of each actor in a group, as the cluster knows them."""
    rows = []
    for row in state.list_actors(address=cluster_address(), limit=1000, detail=True):
        if row.state == "ALIVE" and row.placement_group_id == group.id.hex():
            names = [re.fullmatch(r"CPU_group_(\d+)_" + group.id.hex(), name) for name in row.required_resources]
            rows.append({"pid": row.pid, "bundle": next(int(found.group(1)) for found in names if found)})
    return rows


def _bad_options(group: PlacementGroup) -> list[tuple[dict[str, Any], str]]:
    return [
        ({"placement_group": "mine"}, "'mine'"),
        ({"placement_group": group, "bundle_indices": (0, 5)}, "5"),
        ({"placement_group": group, "bundle_indices": (0, -1)}, "-1"),
        ({"placement_group": group, "bundle_indices": (0, 0)}, "[0, 0]"),
        ({"placement_group": group, "bundle_indices": (0,)}, "[0]"),
        ({"placement_group": group, "bundle_indices": ("0", 1)}, "'0'"),
        ({"placement_group": group, "bundle_indices": (0, 2)}, "bundle 2"),  # has too little
        ({"placement_group": group, "world_size": 4}, "3 bundles for 4 ranks"),
        ({"placement_group": group, "resources_per_rank": {"one": 1}}, "bundle 0"),
        ({"bundle_indices": (0, 1)}, "(0, 1)"),
        ({"placement_strategy": "NEAR"}, "'NEAR'"),
        ({"placement_timeout": 0}, "0"),
        ({"cpus_per_rank": -1}, "-1"),
        ({"cpus_per_rank": 0}, "cpus_per_rank=0"),
        ({"address": "ray://head:10001"}, "ray://head:10001"),
        ({"address": "10.9.8.7:6379"}, "10.9.8.7:6379"),
    ]


@CHECKS
def a_group_that_does_not_fit_and_bad_options_are_named() -> Any:
    group = group_of({"CPU": 1}, {"CPU": 1}, {"CPU": 0.5})
    told = []
    try:
        for options, named in _bad_options(group):
            with within(AT_ONCE_S):
                error = catch(lambda: make(**options))  # noqa: B023
            assert type(error) is ConfigError and named in str(error), f"{options}: {error!r}"
            told.append(str(error))
        assert group_state(group) == "CREATED"
    finally:
        remove_placement_group(group)
    return told


# -- room --------------------------------------------------------------------------------------------------------------


def check_no_room(error: BaseException, *facts: str) -> None:
    assert type(error) is StartupError, repr(error)
    assert error.phase == "placement"
    for fact in ("asked", "in the cluster", "free now", *facts):
        assert fact in str(error), str(error)


@CHECKS
def what_can_never_be_placed_fails_at_once_with_a_table() -> Any:  # F134
    for options, facts in (
        ({"world_size": 5}, ("CPU", "5 ranks")),
        ({"cpus_per_rank": 3}, ("CPU",)),
        ({"resources_per_rank": {"unobtainium": 1}}, ("unobtainium",)),
        ({"placement_strategy": "STRICT_SPREAD"}, ("STRICT_SPREAD",)),
    ):
        with within(AT_ONCE_S):
            error = catch(lambda: make(**options))  # type: ignore[arg-type]  # noqa: B023
        check_no_room(error, *facts)
    return str(error)


@CHECKS
def what_can_never_be_placed_waits_as_long_as_it_is_told() -> Any:
    began = time.monotonic()
    error = catch(lambda: make(cpus_per_rank=3, placement_timeout=1.0))
    seconds = time.monotonic() - began
    check_no_room(error, "after 1 s")
    assert 1.0 <= seconds <= 1.0 + AT_ONCE_S * LOAD
    return round(seconds, 2)


@CHECKS
def what_has_no_room_for_now_waits_as_long_as_it_is_told() -> Any:
    group = group_of({"CPU": 4})
    try:
        began = time.monotonic()
        error = catch(lambda: make(placement_timeout=1.0))
        seconds = time.monotonic() - began
    finally:
        remove_placement_group(group)
    check_no_room(error)
    assert re.search(r"CPU +1 +2 +4 +0", str(error)), str(error)
    assert 1.0 <= seconds <= 1.0 + AT_ONCE_S * LOAD


@CHECKS
def room_that_becomes_free_is_taken() -> Any:
    group = group_of({"CPU": 4})
    with on_log(PLACEMENT, "waiting for room", lambda: remove_placement_group(group)) as waited:
        executor = make()
    assert waited.is_set()
    check_usable(executor)


@CHECKS
def a_start_that_waits_for_room_can_be_cancelled() -> Any:
    group = group_of({"CPU": 4})

    async def cancel() -> float:
        loop, waits = asyncio.get_running_loop(), asyncio.Event()
        with on_log(PLACEMENT, "waiting for room", lambda: loop.call_soon_threadsafe(waits.set)):
            starting = asyncio.ensure_future(RayExecutor.create_async(Agent, **OPTIONS))
            await asyncio.wait_for(waits.wait(), 30.0)
            began = time.monotonic()
            starting.cancel()
            await asyncio.wait([starting], timeout=30.0)
            assert starting.cancelled()
            return time.monotonic() - began

    try:
        seconds = asyncio.run(cancel())
    finally:
        remove_placement_group(group)
    assert seconds <= AT_ONCE_S * LOAD
    return round(seconds, 2)


@CHECKS
def a_start_that_builds_can_be_cancelled() -> Any:
    async def cancel() -> float:
        loop, builds = asyncio.get_running_loop(), asyncio.Event()
        with on_log("mpexec.executor.starting", "build model", lambda: loop.call_soon_threadsafe(builds.set)):
            starting = asyncio.ensure_future(RayExecutor.create_async(Endless, **OPTIONS))
            await asyncio.wait_for(builds.wait(), 30.0)
            began = time.monotonic()
            starting.cancel()
            await asyncio.wait([starting], timeout=30.0)
            assert starting.cancelled()
            return time.monotonic() - began

    seconds = asyncio.run(cancel())
    assert seconds <= AT_ONCE_S * LOAD
    return round(seconds, 2)


@CHECKS.over(("raise",), ("os_exit",), ("system_exit",))
def a_rank_that_fails_to_build_fails_the_start(manner: str) -> Any:
    with within(5.0):
        error = catch(lambda: make(Unbuildable, agent_args=(manner,)))
    assert type(error) is StartupError
    assert error.rank == 1
    # What a process said just before it ended at once may not have left it.
    assert error.phase == "build model" or manner == "os_exit"
    assert error.__cause__ is not None
    return [str(error), error.phase, repr(error.__cause__)]


# -- what the program itself defines -----------------------------------------------------------------------------------


class MainError(Exception):
    """Raised in a rank, caught here."""


class MainValue:
    """Goes to the ranks and comes back."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MainValue) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


class MainAgent(ModelAgent):
    """Of the program itself: no rank can import it."""

    def twice(self, value: MainValue) -> MainValue:
        assert type(value) is MainValue
        return MainValue(value.number * 2)

    def fail(self) -> None:
        raise MainError("mine", self.rank)


class Endless(Agent):
    """Never ready."""

    def build_model(self) -> None:
        threading.Event().wait()


class Unbuildable(Agent):
    """Its last rank fails when the model is built."""

    def __init__(self, manner: str) -> None:
        self.manner = manner

    def build_model(self) -> None:
        if self.rank == self.world_size - 1:
            self.act(self.manner, self.rank)


@CHECKS
def classes_of_the_main_program_go_to_the_ranks_and_come_back() -> Any:
    assert MainError.__module__ == "__main__"
    executor = make(MainAgent)
    assert executor.collective_rpc("twice", args=(MainValue(21),)) == [MainValue(42)] * 2
    try:
        executor.collective_rpc("fail")
    except MainError as error:
        caught = error
    assert caught.args in (("mine", 0), ("mine", 1))  # whichever came first
    assert [type(other) for other in getattr(caught, "others").exceptions] == [MainError]  # noqa: B009
    calls: list[Callable[..., Any]] = [lambda worker: MainValue(worker.rank)]
    assert executor.collective_rpc(calls[0]) == [MainValue(0), MainValue(1)]


if __name__ == "__main__":
    CHECKS.run(local_cluster(num_cpus=4, resources={"one": 1, "two": 1}))
