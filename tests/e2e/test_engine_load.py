"""The engine under load: whatever callers do, nothing is lost, nobody is held up, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from engine_agents import CountingAgent, mp_engine
from hypothesis import given, settings
from hypothesis import strategies as some
from patience import within

from mpexec import Engine, EngineConfig, SamplingParams, UniExecutor
from mpexec.agent.steps import StepInput
from mpexec.engine.engine import ModelPlan
from mpexec.errors import EngineStoppedError, WorkerDiedError

SLOTS = 8
CHUNK = 16


class RecordingAgent(CountingAgent):
    """Keeps the steps, in the process of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[StepInput] = []

    def forward(self, inputs: StepInput) -> Any:
        """One token more for every slot."""
        self.steps.append(inputs)
        return super().forward(inputs)


@contextmanager
def recording_engine() -> Iterator[tuple[Engine, RecordingAgent]]:
    agents: list[RecordingAgent] = []

    def make() -> RecordingAgent:
        agents.append(RecordingAgent())
        return agents[0]

    config = EngineConfig(max_slots=SLOTS, max_queue=1000, prefill_chunk=CHUNK)
    engine = Engine(UniExecutor(make, world_size=1), ModelPlan.read(None, 1, config), config)
    try:
        yield engine, agents[0]
    finally:
        engine.release()


@dataclass(frozen=True)
class Caller:
    """One request, and how its caller behaves.

    Attributes:
        manner: "read"; "slow" reads one piece, and the rest only when everybody else is done; "leave" goes after
            `patience` pieces; "cancel" is a task that is cancelled after so many turns of the loop.
    """

    prompt: int
    new: int
    manner: str
    patience: int
    priority: int


def draw_callers(seed: int, count: int) -> list[Caller]:
    dice = random.Random(seed)
    manners = ["read", "read", "read", "slow", "leave", "cancel"]
    return [
        Caller(
            prompt=dice.randint(1, 3 * CHUNK),
            new=dice.randint(1, 12),
            manner=dice.choice(manners),
            patience=dice.randint(0, 30),
            priority=dice.choice([0, 0, 1]),
        )
        for _ in range(count)
    ]


async def call(engine: Engine, number: int, caller: Caller, others_done: asyncio.Event) -> list[int] | None:
    """The tokens, or None of a caller that has not read to the end."""
    first = 50 * (number % 30)
    prompt = [*range(caller.prompt - 1), first]
    params = SamplingParams(max_new_tokens=caller.new, ignore_eos=True)
    outputs = engine.generate(prompt, params, priority=caller.priority)
    tokens: list[int] = []
    pieces = 0
    async for output in outputs:
        tokens += output.token_ids
        pieces += 1
        if caller.manner == "slow" and pieces == 1:
            await others_done.wait()
        if caller.manner == "leave" and pieces > caller.patience:
            await outputs.aclose()
            return None
    assert tokens == list(range(first + 1, first + 1 + caller.new))  # nothing lost, nothing twice
    return tokens


async def serve(engine: Engine, callers: list[Caller]) -> list[list[int] | None]:
    """Let all callers do what they want; whatever they do, all come to an end."""
    others_done = asyncio.Event()
    tasks, cancelling = [], []
    for number, caller in enumerate(callers):
        tasks.append(asyncio.create_task(call(engine, number, caller, others_done)))
        if caller.manner == "cancel":
            cancelling.append(asyncio.create_task(_cancel_later(tasks[-1], caller.patience)))
        if number % 7 == 0:
            await asyncio.sleep(0)
    quick = [task for task, caller in zip(tasks, callers, strict=True) if caller.manner != "slow"]
    await asyncio.wait(quick)
    others_done.set()
    await asyncio.wait([*tasks, *cancelling])
    for task, caller in zip(tasks, callers, strict=True):
        assert not task.cancelled() or caller.manner == "cancel"
    return [None if task.cancelled() else task.result() for task in tasks]


async def _cancel_later(task: asyncio.Task[Any], turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()


def check_shares(steps: list[StepInput]) -> None:
    """No running answer is left out of a step, and no step takes in more of prompts than it may."""
    running: dict[int, int] = {}  # tokens of the prompt in each slot, or -1 for one that is decoded
    for step in steps:
        for slot in step.free:
            running.pop(slot, None)
        assert set(step.decode) <= {slot for slot, held in running.items() if held < 0}
        assert sum(len(piece.token_ids) for piece in step.prefill) <= CHUNK
        for piece in step.prefill:
            assert running.get(piece.slot, 0) == piece.start
            running[piece.slot] = -1 if piece.is_last else piece.start + len(piece.token_ids)
        fresh = {piece.slot for piece in step.prefill}
        left_out = {slot for slot, held in running.items() if held < 0} - set(step.decode) - fresh
        for slot in left_out:  # its last token has been asked for: the next step frees it
            running[slot] = 0
        assert len(running) <= SLOTS


@settings(max_examples=6, deadline=None)
@given(seed=some.integers(0, 1 << 32))
def test_200_callers_that_read_dawdle_leave_and_cancel_get_all_that_is_theirs(seed: int) -> None:
    callers = draw_callers(seed, 200)
    with recording_engine() as (engine, agent):

        async def main() -> None:
            async with engine:
                async for _ in engine.generate((1,), SamplingParams(max_new_tokens=1)):
                    pass  # now all tasks of the engine run
                tasks = asyncio.all_tasks()
                async with asyncio.timeout(60):
                    answers = await serve(engine, callers)
                for answer, caller in zip(answers, callers, strict=True):
                    assert answer is not None or caller.manner in ("leave", "cancel")
                await asyncio.sleep(0)
                metrics = engine.metrics()
                assert (metrics.running, metrics.waiting, engine.requests.pending) == (0, 0, 0)
                assert metrics.requests >= metrics.finished + metrics.cancelled
                assert asyncio.all_tasks() == tasks
                # Every slot is free again: so many more run together.
                done = len(agent.steps)
                await serve(engine, [Caller(1, 12, "read", 0, 0)] * SLOTS)
                assert max(len(step.decode) for step in agent.steps[done:]) == SLOTS

        asyncio.run(main())
        check_shares(agent.steps)


@pytest.mark.parametrize("requests", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_short_requests_in_a_row_leave_memory_and_tasks_as_they_were(requests: int) -> None:
    with recording_engine() as (engine, agent):

        async def some_requests(count: int) -> None:
            for start in range(0, count, 20):
                await serve(engine, [Caller(1 + n % 5, 2, "read", 0, 0) for n in range(start, start + 20)])
            agent.steps.clear()

        async def main() -> None:
            async with engine:
                await some_requests(400)  # whatever is made once is there
                tasks = asyncio.all_tasks()
                gc.collect()
                objects, rss = len(gc.get_objects()), psutil.Process().memory_info().rss
                await some_requests(requests)
                await asyncio.sleep(0)
                gc.collect()
                assert len(gc.get_objects()) - objects < 300
                assert psutil.Process().memory_info().rss - rss < 8 << 20
                assert asyncio.all_tasks() == tasks
                assert engine.metrics().finished == 400 + requests

        asyncio.run(main())


@pytest.mark.parametrize("manner", ["raise", "kill", "raise while the peer waits"])
async def test_64_pending_requests_end_together_with_the_same_root_cause_when_a_rank_fails(manner: str) -> None:
    engine = mp_engine(start_method="forkserver", max_slots=8, break_at=(150, 1, manner))
    ended: list[float] = []

    async def read(first: int) -> BaseException:
        try:
            async for _ in engine.generate([first], SamplingParams(max_new_tokens=900, ignore_eos=True)):
                pass
        except EngineStoppedError as error:
            ended.append(time.monotonic())
            return error
        raise AssertionError("an answer came to its end")

    try:
        await engine.start_async()
        errors = await asyncio.gather(*(read(100 if n == 0 else 200 + n) for n in range(64)))
        (cause,) = {error.__cause__ for error in errors}
        with pytest.raises(type(cause)) as caught:
            await engine.wait_tasks()
        assert caught.value is cause
        assert isinstance(cause, WorkerDiedError) == (manner == "kill")
        assert max(ended) - min(ended) < within(0.1)
    finally:
        await engine.release_async()
