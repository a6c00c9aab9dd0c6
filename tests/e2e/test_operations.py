"""Sleep, wakeup and other weights on a running engine; what health and metrics tell meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from operated_agents import operated_engine
from patience import until, within

from mpexec import BlockingEngine, ConfigError, Engine, EngineStoppedError, SamplingParams, WorkerDiedError, ZMQEngine
from mpexec.errors import WrongStateError

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[MakeEngine]:
    """Makes engines; released at the end, whatever the test does."""
    made: list[Engine] = []

    def make_one(**options: Any) -> Engine:
        made.append(operated_engine(**options))
        return made[-1]

    yield make_one
    for engine in made:
        engine.release()


@pytest.fixture(autouse=True)
async def no_hang() -> AsyncIterator[None]:
    async with asyncio.timeout(90):
        yield


def many(new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


async def tokens(engine: Any, first: int, new: int = 3) -> list[int]:
    return [token async for output in engine.generate([first], many(new)) for token in output.token_ids]


async def history(engine: Engine) -> Any:
    return await engine.executor.collective_rpc_async("history", reply_ranks=0)


# -- sleep and wakeup ----------------------------------------------------------------------------------------------


async def test_sleep_finishes_what_runs_and_what_waits_and_what_comes_goes_on_after_the_wakeup(
    make: MakeEngine,
) -> None:
    async with make(step_seconds=0.005, max_slots=1) as engine:
        running = asyncio.create_task(tokens(engine, 10, 40))
        waiting = asyncio.create_task(tokens(engine, 500))
        await until(lambda: engine.metrics().generated_tokens)
        sleeping = asyncio.create_task(engine.sleep_async())
        await until(lambda: engine.health().state == "draining")
        assert engine.health().ok
        await sleeping
        assert await running == list(range(11, 51))
        later = asyncio.create_task(tokens(engine, 600))
        await until(lambda: engine.metrics().waiting == 2)
        assert (engine.health().ok, engine.health().state) == (True, "sleeping")
        assert not (waiting.done() or later.done())
        await engine.sleep_async()  # asleep already
        await engine.wakeup_async()
        assert await waiting == [501, 502, 503]
        assert await later == [601, 602, 603]
        await engine.wakeup_async()  # awake already
        assert engine.health().state == "running"
        assert await history(engine) == ["sleep", "wakeup"]


async def test_requests_that_run_too_long_for_a_sleep_are_told_and_the_next_ones_are_served(make: MakeEngine) -> None:
    async with make(step_seconds=0.005, max_slots=1) as engine:
        running = asyncio.create_task(tokens(engine, 10, 1500))
        waiting = asyncio.create_task(tokens(engine, 500))
        await until(lambda: engine.metrics().generated_tokens)
        await engine.sleep_async(drain_timeout=0.05)
        with pytest.raises(EngineStoppedError, match=r"put to sleep.*within 0\.05 s"):
            await running
        assert engine.metrics().interrupted == 1
        await engine.wakeup_async()
        assert await waiting == [501, 502, 503]


async def test_a_sleep_that_is_cancelled_while_requests_end_leaves_the_engine_awake(make: MakeEngine) -> None:
    async with make(step_seconds=0.005, max_slots=1) as engine:
        running = asyncio.create_task(tokens(engine, 10, 60))
        waiting = asyncio.create_task(tokens(engine, 500))
        await until(lambda: engine.metrics().generated_tokens)
        sleeping = asyncio.create_task(engine.sleep_async())
        await until(lambda: engine.health().state == "draining")
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        assert engine.health().state == "running"
        assert len(await running) == 60
        assert len(await waiting) == 3
        assert await history(engine) == []


async def test_a_request_cancelled_while_the_engine_sleeps_is_gone(make: MakeEngine) -> None:
    async with make() as engine:
        await engine.sleep_async()
        waiting = asyncio.create_task(tokens(engine, 500))
        await until(lambda: engine.metrics().waiting == 1)
        waiting.cancel()
        await until(lambda: engine.metrics().waiting == 0)
        await engine.wakeup_async()
        assert await tokens(engine, 1) == [2, 3, 4]


async def test_a_sleeping_engine_stays_asleep_over_a_stop_and_a_start(make: MakeEngine) -> None:
    engine = make()
    await engine.start_async()
    await engine.sleep_async()
    waiting = asyncio.create_task(tokens(engine, 500))
    await until(lambda: engine.metrics().waiting == 1)
    await engine.stop_async()
    with pytest.raises(EngineStoppedError):
        await waiting
    with pytest.raises(EngineStoppedError):
        await engine.wakeup_async()
    await engine.start_async()
    assert engine.health().state == "sleeping"
    waiting = asyncio.create_task(tokens(engine, 500))
    await until(lambda: engine.metrics().waiting == 1)
    await engine.wakeup_async()
    assert await waiting == [501, 502, 503]
    await engine.stop_async()


async def test_a_stop_ends_a_sleep_that_waits_for_requests(make: MakeEngine) -> None:
    engine = make(step_seconds=0.005)
    await engine.start_async()
    running = asyncio.create_task(tokens(engine, 10, 1500))
    await until(lambda: engine.metrics().generated_tokens)
    sleeping = asyncio.create_task(engine.sleep_async())
    await until(lambda: engine.health().state == "draining")
    await engine.stop_async()
    for task in (sleeping, running):
        with pytest.raises(EngineStoppedError):
            await task


async def test_a_stop_amid_a_sleep_leaves_the_engine_asleep_over_the_next_start(make: MakeEngine) -> None:
    engine = make(world_size=2, fails=("sleep", -1, "slow"))
    await engine.start_async()
    sleeping = asyncio.create_task(engine.sleep_async())
    await until(lambda: [rank.method for rank in engine.health().ranks] == ["sleep"] * 2)
    await engine.stop_async()
    with pytest.raises(EngineStoppedError, match="before every rank was done with 'sleep'"):
        await sleeping
    await engine.start_async()
    assert engine.health().state == "sleeping"
    await engine.wakeup_async()
    assert await tokens(engine, 1) == [2, 3, 4]
    await engine.stop_async()


async def test_after_a_stop_amid_a_change_of_weights_ranks_may_differ_and_no_start_follows(
    make: MakeEngine, tmp_path: Path
) -> None:
    engine = make(world_size=2, fails=("update_params", -1, "slow"))
    await engine.start_async()
    changing = asyncio.create_task(engine.update_params_async(tmp_path))
    await until(lambda: "update_params" in [rank.method for rank in engine.health().ranks])
    await engine.stop_async()
    with pytest.raises(EngineStoppedError, match="update_params"):
        await changing
    with pytest.raises(WrongStateError, match="release it"):
        await engine.start_async()


@pytest.mark.parametrize("options", [{"level": 7}, {"drain_timeout": -1.0}])
async def test_a_sleep_with_a_bad_value_is_refused_and_the_engine_serves_on(
    make: MakeEngine, options: dict[str, Any]
) -> None:
    async with make() as engine:
        with pytest.raises(ConfigError, match=r"level=7|drain_timeout"):
            await engine.sleep_async(**options)
        assert await tokens(engine, 1) == [2, 3, 4]
        assert engine.health().state == "running"


async def test_an_engine_that_was_not_started_cannot_be_put_to_sleep(make: MakeEngine) -> None:
    with pytest.raises(WrongStateError, match="not been started"):
        await make().sleep_async()


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation, manner",
    [
        ("sleep", "raise"),
        ("update_params", "die"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("sleep", "die"), ("wakeup", "raise"))),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("wakeup", "die"), ("update_params", "raise"))),
    ],
)
async def test_an_operation_that_fails_on_one_rank_of_two_fails_the_engine_with_that_error(
    make: MakeEngine, tmp_path: Path, operation: str, manner: str
) -> None:
    engine = make(world_size=2, fails=(operation, 1, "hang" if manner == "die" else "raise"))
    await engine.start_async()
    waiter = asyncio.create_task(engine.wait_tasks())
    if operation == "wakeup":
        await engine.sleep_async()
    stuck = {
        "sleep": engine.sleep_async,
        "wakeup": engine.wakeup_async,
        "update_params": partial(engine.update_params_async, tmp_path),
    }[operation]
    operating = asyncio.create_task(stuck())
    if manner == "die":
        await until(lambda: engine.health().ranks[1].method == operation)
        os.kill(engine.rank_pids[1], signal.SIGKILL)
    expected: Any = WorkerDiedError if manner == "die" else RuntimeError
    since = time.monotonic()
    with pytest.raises(expected, match="rank 1"):
        await operating
    with pytest.raises(expected, match="rank 1"):
        await waiter
    assert time.monotonic() - since < within(3.0)
    assert engine.health().state == "stopped"
    with pytest.raises(EngineStoppedError):
        await tokens(engine, 1)


# -- other weights -------------------------------------------------------------------------------------------------


async def test_running_requests_end_before_the_weights_change_and_waiting_ones_begin_after(
    make: MakeEngine, tmp_path: Path
) -> None:
    async with make(step_seconds=0.005, max_slots=1) as engine:
        running = asyncio.create_task(tokens(engine, 10, 40))
        waiting = asyncio.create_task(tokens(engine, 500))
        await until(lambda: engine.metrics().generated_tokens)
        await engine.update_params_async(tmp_path)
        assert engine.metrics().finished == 1
        assert await running == list(range(11, 51))
        assert await waiting == [501, 502, 503]
        assert await history(engine) == ["update_params"]


async def test_without_a_drain_the_weights_change_between_two_steps(make: MakeEngine, tmp_path: Path) -> None:
    async with make(step_seconds=0.005) as engine:
        running = asyncio.create_task(tokens(engine, 10, 100))
        await until(lambda: engine.metrics().generated_tokens)
        await engine.update_params_async(tmp_path, drain=False, drain_timeout=0.0)
        assert engine.metrics().finished == 0
        assert await running == list(range(11, 111))


async def test_weights_that_every_rank_refuses_leave_the_engine_as_it_was(make: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "refused").touch()
    async with make(world_size=2) as engine:
        with pytest.raises(ValueError, match="not the weights of this model"):
            await engine.update_params_async(tmp_path / "refused")
        assert await tokens(engine, 1) == [2, 3, 4]


@pytest.mark.parametrize(
    "weights", ["/no/such/file", "", "a" * 300, "~nobody-here/x", {}, {"a": 1}, {1: None}, None, 3]
)
async def test_weights_that_are_none_are_refused_before_anything_stops(make: MakeEngine, weights: Any) -> None:
    async with make() as engine:
        with pytest.raises(ConfigError, match=r"no file or folder|weights must|an empty state dict"):
            await engine.update_params_async(weights)


async def test_a_sleeping_engine_takes_no_weights(make: MakeEngine, tmp_path: Path) -> None:
    async with make() as engine:
        await engine.sleep_async()
        with pytest.raises(WrongStateError, match="sleeps"):
            await engine.update_params_async(tmp_path)
        await engine.wakeup_async()
        await engine.update_params_async(tmp_path)


# -- health and metrics --------------------------------------------------------------------------------------------


async def test_health_names_what_a_rank_is_stuck_in_and_says_stalled_after_the_limit(make: MakeEngine) -> None:
    engine = make(world_size=2, stall_timeout=0.3)
    async with engine:
        assert [(rank.rank, rank.pid, rank.state) for rank in engine.health().ranks] == [
            (rank, pid, "running") for rank, pid in enumerate(engine.rank_pids)
        ]
        assert engine.health().step_age is None
        os.kill(engine.rank_pids[0], signal.SIGSTOP)
        running = asyncio.create_task(tokens(engine, 10, 20))
        try:
            await until(lambda: engine.health().state == "stalled")
            health = engine.health()
            assert not health.ok
            assert health.step_age is not None
            assert health.step_age >= 0.3
            assert health.ranks[0].state == "stopped"
        finally:
            os.kill(engine.rank_pids[0], signal.SIGCONT)
        assert len(await running) == 20
        assert engine.health().ok


async def test_a_step_that_does_not_end_is_named_by_the_sleep_that_waits_for_it(make: MakeEngine) -> None:
    async with make(world_size=2, stall_timeout=0.3) as engine:
        os.kill(engine.rank_pids[0], signal.SIGSTOP)
        running = asyncio.create_task(tokens(engine, 10, 20))
        try:
            await until(lambda: engine.metrics().running)
            with pytest.raises(TimeoutError, match=r"within 0\.3 s: rank 0 .* stopped"):
                await engine.sleep_async(drain_timeout=0.0)
            with pytest.raises(EngineStoppedError, match="put to sleep"):
                await running
        finally:
            os.kill(engine.rank_pids[0], signal.SIGCONT)
        assert await tokens(engine, 1) == [2, 3, 4]


async def test_health_shows_a_step_while_a_rank_is_in_it(make: MakeEngine) -> None:
    async with make(world_size=2, step_seconds=0.2) as engine:
        running = asyncio.create_task(tokens(engine, 10, 5))
        await until(lambda: [rank.method for rank in engine.health().ranks] == ["forward"] * 2)
        assert (engine.health().ranks[0].seconds or 0.0) < within(0.3)
        await running
        await until(lambda: [rank.method for rank in engine.health().ranks] == [None] * 2)


async def test_a_profile_does_not_go_on_over_a_stop_and_a_start(make: MakeEngine, tmp_path: Path) -> None:
    engine = make()
    await engine.start_async()
    await engine.start_profile_async()
    await engine.stop_async()
    async with engine:
        with pytest.raises(ConfigError, match="not being profiled"):
            await engine.stop_profile_async(tmp_path / "trace.json")
        async with engine.profile(tmp_path / "trace.json"):
            await tokens(engine, 1)
        await engine.start_async()  # running, it changes nothing
    assert (tmp_path / "trace.json").exists()


def forwards(engine: Engine) -> list[int]:
    """How many steps each rank has been through."""
    ranks = engine.metrics().executor.ranks
    return [rank.methods["forward"].count for rank in ranks if rank.methods is not None]


@pytest.mark.parametrize("world_size", [1, 2])
async def test_metrics_tell_the_times_of_requests_steps_and_methods_on_each_rank(
    make: MakeEngine, world_size: int
) -> None:
    async with make(world_size=world_size, step_seconds=0.01) as engine:
        await asyncio.gather(*(tokens(engine, 100 * n, 5) for n in range(3)))
        await until(lambda: engine.metrics().running == 0)
        # Ranks that count need not wait for each other: one may still be at the last step.
        await until(lambda: set(forwards(engine)) == {engine.metrics().steps})
        metrics = engine.metrics()
    counts = [
        getattr(metrics, name).count for name in ("queue_wait", "time_to_first_token", "inter_token", "end_to_end")
    ]
    assert counts == [3, 3, 12, 3]
    assert metrics.step.count == metrics.steps
    for rank in metrics.executor.ranks:
        assert rank.methods is not None
        forward = rank.methods["forward"]
        assert (forward.quantile(0.0) or 0.0) > 0.008
        assert {"start", "set_forward_inputs"} <= rank.methods.keys()
    if world_size == 2:
        assert metrics.executor.call_ring_fill == 0.0
        assert (metrics.executor.parks or 0) > 0
        assert all((rank.parks or 0) > 0 for rank in metrics.executor.ranks)
    else:
        assert metrics.executor.call_ring_fill is None


# -- the other faces -----------------------------------------------------------------------------------------------


def test_the_blocking_engine_sleeps_wakes_and_takes_weights(make: MakeEngine, tmp_path: Path) -> None:
    with BlockingEngine(make()) as engine:
        engine.sleep(drain_timeout=1.0)
        assert engine.health().state == "sleeping"
        answers: list[int] = []
        reader = threading.Thread(
            target=lambda: answers.extend(t for o in engine.generate([1], many(3)) for t in o.token_ids)
        )
        reader.start()
        engine.wakeup()
        reader.join(within(10.0))
        assert answers == [2, 3, 4]
        engine.update_params(tmp_path)
        with pytest.raises(ConfigError):
            engine.update_params("/no/such/file")


async def test_an_engine_in_a_process_of_its_own_is_operated_from_here(tmp_path: Path) -> None:
    engine = ZMQEngine(partial(operated_engine, step_seconds=0.005, max_slots=1), start_timeout=60.0)
    try:
        async with engine:
            await until(lambda: len(engine.health().ranks) == 1)
            running = asyncio.create_task(tokens(engine, 10, 1500))
            await until(lambda: engine.metrics().generated_tokens)
            sleeping = asyncio.create_task(engine.sleep_async(drain_timeout=0.3))
            await until(lambda: engine.health().state == "draining")
            await sleeping
            with pytest.raises(EngineStoppedError, match="put to sleep"):
                await running
            assert engine.health().state == "sleeping"
            with pytest.raises(ConfigError, match="level=7"):
                await engine.wakeup_async()
                await engine.sleep_async(7)
            assert await tokens(engine, 1) == [2, 3, 4]
            await engine.update_params_async(tmp_path)
            with pytest.raises(ConfigError, match="another process"):
                await engine.update_params_async({"a": object()})
            assert engine.health().state == "running"
            await until(lambda: engine.metrics().time_to_first_token.count == 2)
    finally:
        engine.release()
