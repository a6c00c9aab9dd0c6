"""RayExecutor against what bare Ray actors give by themselves, and an engine on it against one on MPExecutor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from tests.bench import fresh
from tests.bench.agents import EchoAgent
from tests.bench.generation import PROMPTS, take_turns
from tests.bench.settings import Settings, in_turn
from tests.bench.stats import Figures, Row, columns, quantile

ROUND_TRIP_BAR = 1.2

_BLOCK = 50  # calls until it is the other peer's turn: both are to meet the same moments of a busy machine
_LIMIT_NS = 500_000_000  # no block takes longer than this, however busy the machine is
_ROOM_S = 60.0
_TP = 2
_NEW_TOKENS = 40

Call = Callable[[int], list[int]]


def run(settings: Settings) -> list[Row]:
    """Round trips at every world size, and then the whole way, tp=2."""
    if find_spec("ray") is None:
        raise fresh.BenchError("Ray is not installed: pip install 'mpexec[ray]'")
    return [*_round_trips(settings), *_engines(settings)]


def _round_trips(settings: Settings) -> list[Row]:
    settings.say("ray, round trips by turns")
    rounds = 2 if settings.quick else max(6, settings.repeats)
    sizes = list(settings.world_sizes)
    measured = fresh.call(drive_round_trips, world_sizes=sizes, rounds=rounds, blocks=1 if settings.quick else 4)
    return [
        Row(f"N={world_size} round trip {key}", *columns(figures, key, "us"), bar)
        for world_size, figures in zip(sizes, measured, strict=True)
        for key, bar in (("p50", ROUND_TRIP_BAR), ("p99", None))
    ]


def _engines(settings: Settings) -> list[Row]:
    settings.say("ray, two engines by turns")
    runs = 1 if settings.quick else settings.repeats
    figures = fresh.call(drive_engines, runs=runs, new_tokens=_NEW_TOKENS, alone=_NEW_TOKENS)
    return [
        Row(f"tp={_TP}, {len(PROMPTS)} requests at once", *columns(figures, "tokens", "token/s")),
        Row(f"tp={_TP}, 1 request, from piece to piece p50", *columns(figures, "p50", "us")),
    ]


# -- in the driver processes ---------------------------------------------------------------------------------------


def drive_round_trips(world_sizes: list[int], rounds: int, blocks: int) -> list[dict[str, list[Figures]]]:
    """The figures at each world size, rounds by turns: executor and bare actors are there all the time.

    Args:
        world_sizes: Numbers of ranks, and of bare actors.
        rounds: For each of the two.
        blocks: Of calls in a round, by turns too.
    """
    from mpexec import RayExecutor

    found = []
    with _cluster(cpus=2 * max(world_sizes)):
        for world_size in world_sizes:
            with (
                RayExecutor(EchoAgent, world_size=world_size, init_process_group=False) as executor,
                _bare_actors(world_size) as bare,
            ):
                peers: dict[str, Call] = {"mpexec": _through(executor), "bare actors": bare}
                found.append(_by_turns(peers, world_size, rounds, blocks))
    return found


def _through(executor: Any) -> Call:
    def call(value: int) -> list[int]:
        answers: list[int] = executor.collective_rpc("echo", (value,))
        return answers

    return call


def _by_turns(peers: dict[str, Call], world_size: int, rounds: int, blocks: int) -> dict[str, list[Figures]]:
    figures: dict[str, list[Figures]] = {peer: [] for peer in peers}
    for number in range(1 + rounds):
        samples: dict[str, list[int]] = {peer: [] for peer in peers}
        for block in range(blocks):
            for peer in in_turn(list(peers), block):
                samples[peer] += _series(peers[peer], world_size)
        for peer, of_round in samples.items():
            if number:  # the first round warms up
                figures[peer].append({"p50": quantile(of_round, 0.5) / 1e3, "p99": quantile(of_round, 0.99) / 1e3})
    return figures


def _series(call: Call, world_size: int) -> list[int]:
    """A block of calls, one after the other; each must bring its argument back from every rank."""
    samples = []
    end = time.perf_counter_ns() + _LIMIT_NS
    for number in range(_BLOCK):
        start = time.perf_counter_ns()
        answers = call(number)
        now = time.perf_counter_ns()
        samples.append(now - start)
        if answers != [number] * world_size:
            raise RuntimeError(f"{answers} came back for {number}")
        if now > end:
            break
    return samples


def drive_engines(runs: int, new_tokens: int, alone: int) -> dict[str, list[Figures]]:
    """The figures of runs by turns, see `take_turns`; the ranks of both engines have one thread each."""
    from mpexec.config import EngineConfig
    from mpexec.engine.engine import Engine, ModelPlan
    from mpexec.executor import build_executor

    config = EngineConfig()
    plan = ModelPlan.read(None, _TP, config)
    spec = plan.worker_spec(config, threads=1)
    with _cluster(cpus=_TP), contextlib.ExitStack() as made:
        engines = {}
        for backend in ("ray", "mp"):
            engines[backend] = Engine(build_executor(spec, backend), plan, config)
            made.callback(engines[backend].release)
        return asyncio.run(take_turns(engines, runs, new_tokens, alone))


@contextlib.contextmanager
def _cluster(cpus: int) -> Iterator[None]:
    """A cluster on this machine, whose files go with it. Ray starts as many processes at once as it has CPUs."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING,
                log_to_driver=False, _temp_dir=folder,
            )  # fmt: skip
            yield
        finally:
            ray.shutdown()


class BareActor:
    """Answers, and does nothing else."""

    async def echo(self, value: int) -> int:
        return value


@contextlib.contextmanager
def _bare_actors(world_size: int) -> Iterator[Call]:
    """Actors made with the options of RayExecutor's, in a placement group of their own; gives a call of all."""
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from mpexec.executor.ray_group import _ROOM

    group = placement_group([{"CPU": 1.0}] * world_size, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=_ROOM_S):
            raise RuntimeError(f"no room for {world_size} bare actors within {_ROOM_S:g} s")
        actors: list[Any] = [
            ray.remote(BareActor)
            .options(
                num_cpus=1,
                max_concurrency=_ROOM,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            .remote()
            for index in range(world_size)
        ]

        def call(value: int) -> list[int]:
            answers: list[int] = ray.get([actor.echo.remote(value) for actor in actors])
            return answers

        yield call
    finally:
        remove_placement_group(group)  # ends the actors too
