"""Settings are validated when they are made, and say what would work."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from mpexec.config import EngineConfig, RayOptions, Topology, WorkerSpec
from mpexec.errors import ConfigError


def agent() -> None:
    """Stands for an agent's class."""


def spec(**fields: Any) -> WorkerSpec:
    return WorkerSpec(**{"agent": agent, "world_size": 2, **fields})


def test_ranks_are_integers_in_an_order_without_an_upper_limit() -> None:
    assert list(Topology(3).ranks) == [0, 1, 2]
    assert len(Topology(1000).ranks) == 1000


@pytest.mark.parametrize("world_size", [0, -1, 1.0, "2", None, True])
def test_a_world_that_is_no_positive_integer_is_refused(world_size: Any) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        Topology(world_size)


@pytest.mark.parametrize(
    "ranks, chosen",
    [(None, (0, 1, 2, 3)), (2, (2,)), ([3, 1], (1, 3)), ((1, 1), (1,)), (range(2, 4), (2, 3)), ({0}, (0,))],
)
def test_the_ranks_meant_by_a_caller(ranks: Any, chosen: tuple[int, ...]) -> None:
    assert Topology(4).select(ranks) == chosen


@pytest.mark.parametrize("ranks", [4, -1, [0, 4], "0", 1.0, [1.0], True, [True], object(), [[0]], [0, "a"]])
@pytest.mark.parametrize("what", ["ranks", "reply_ranks"])
def test_what_is_no_rank_is_refused_by_name(ranks: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Topology(4).select(ranks, what)


def test_nobody_may_be_asked_to_reply_but_somebody_must_run() -> None:
    assert Topology(4).select((), "reply_ranks") == ()
    with pytest.raises(ConfigError):
        Topology(4).select(())


@pytest.mark.parametrize(
    "fields",
    [
        {"agent": 5}, {"world_size": 0}, {"start_method": "thread"}, {"device": "cuda:1"}, {"init_timeout": 0},
        {"init_timeout": "5"}, {"stop_timeout": -1}, {"stop_timeout": True}, {"collective_timeout": 0},
        {"failure_grace": -0.1}, {"ring_bytes": 4096}, {"ring_bytes": 65537}, {"threads": 0}, {"max_outputs": 0},
        {"env": {"": "x"}}, {"env": {"A=B": "x"}}, {"env": {"A": 1}}, {"env": {"A": "\0"}}, {"env_per_rank": ({},)},
        {"env_per_rank": ({}, {"A": 1})},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        spec(**fields)


def test_a_changed_copy_is_validated_again() -> None:
    assert spec().with_changes(world_size=3).world_size == 3
    with pytest.raises(ConfigError):
        spec().with_changes(world_size=0)


def test_a_spec_travels() -> None:
    assert pickle.loads(pickle.dumps(spec(agent_args=(1,)))) == spec(agent_args=(1,))


# F121
def test_cores_are_divided_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [spec(world_size=n).threads_per_rank() for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert spec(threads=5).threads_per_rank() == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"max_slots": 0},
        {"max_slots": "8"},
        {"max_slots": True},
        {"max_queue": 0},
        {"prefill_chunk": 0.5},
        {"max_length": 1},
        {"max_length": 64.0},
        {"stop_timeout": 0},
        {"stall_timeout": "5"},
    ],
)
def test_engine_limits_that_cannot_work_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"address": ""}, {"address": 6379}, {"address": "ray://10.0.0.1:10001"}, {"placement_strategy": "CLOSE"},
        {"placement_timeout": 0}, {"placement_timeout": "5"}, {"bundle_indices": (0, 1)}, {"cpus_per_rank": -1},
        {"cpus_per_rank": float("nan")}, {"cpus_per_rank": "1"}, {"resources_per_rank": {"tpu": -1}},
        {"resources_per_rank": {"GPU": 1}}, {"resources_per_rank": {"CPU": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_places_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RayOptions(**fields)
