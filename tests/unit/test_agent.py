"""ModelAgent: inputs through the hooks to the outputs, in order, preprocessing overlapping the forward before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mpexec import ModelAgent


async def bounded(work: Any) -> Any:
    async with asyncio.timeout(20):
        return await work


class Doubling(ModelAgent):
    def preprocess(self, inputs: Any) -> Any:
        return inputs + 1

    def forward(self, inputs: Any) -> Any:
        return inputs * 2


class Overlapping(ModelAgent):
    """Async hooks that say what they do, and wait to be let on."""

    def __init__(self) -> None:
        self.trace: list[str] = []
        self.go: dict[str, asyncio.Event] = {}

    async def step(self, name: str) -> None:
        self.trace.append(name)
        await self.go.setdefault(name, asyncio.Event()).wait()

    async def preprocess(self, inputs: Any) -> Any:
        await self.step(f"preprocess {inputs}")
        return inputs

    async def forward(self, inputs: Any) -> Any:
        await self.step(f"forward {inputs}")
        return inputs

    def let(self, name: str) -> None:
        self.go.setdefault(name, asyncio.Event()).set()

    async def reached(self, name: str) -> None:
        while name not in self.trace:
            await asyncio.sleep(0)


async def test_inputs_pass_the_hooks_in_order() -> None:
    async with Doubling() as agent:
        for number in range(50):
            agent.set_forward_inputs(number)
        assert [await bounded(agent.get_output()) for _ in range(50)] == [2 * (n + 1) for n in range(50)]


async def test_preprocessing_of_the_next_input_overlaps_the_forward_of_this_one() -> None:
    async with Overlapping() as agent:
        agent.set_forward_inputs("a")
        agent.set_forward_inputs("b")
        agent.let("preprocess a")
        await bounded(agent.reached("forward a"))
        await bounded(agent.reached("preprocess b"))
        agent.let("preprocess b")
        for _ in range(5):
            await asyncio.sleep(0)
        assert "forward b" not in agent.trace
        for name in ("forward a", "forward b"):
            agent.let(name)
        assert [await bounded(agent.get_output()) for _ in range(2)] == ["a", "b"]


async def test_an_output_can_be_taken_before_a_forward_that_blocks_the_loop_runs_on_the_next_input() -> None:
    trace: list[str] = []

    class Blocking(ModelAgent):
        def forward(self, inputs: Any) -> Any:
            trace.append(f"forward {inputs}")
            return inputs

    async def take(agent: ModelAgent) -> None:
        for _ in range(3):
            trace.append(f"taken {await agent.get_output()}")

    async with Blocking() as agent:
        taker = asyncio.create_task(take(agent))
        for number in range(3):
            agent.set_forward_inputs(number)
        await bounded(taker)
    assert trace == [f"{what} {number}" for number in range(3) for what in ("forward", "taken")]


async def test_preprocessing_does_not_run_ahead_without_bound() -> None:
    class Counting(ModelAgent):
        prepared = 0

        def preprocess(self, inputs: Any) -> Any:
            self.prepared += 1
            return inputs

        async def forward(self, inputs: Any) -> Any:
            await asyncio.Event().wait()

    async with Counting() as agent:
        for number in range(50):
            agent.set_forward_inputs(number)
        for _ in range(200):
            await asyncio.sleep(0)
        assert 2 <= agent.prepared <= 5


@pytest.mark.parametrize("hook", ["preprocess", "forward"])
async def test_an_error_in_a_hook_ends_the_agents_tasks_with_that_error(hook: str) -> None:
    def fail(_: Any, inputs: Any) -> Any:
        raise ValueError(hook)

    agent = type("Failing", (Doubling,), {hook: fail})()
    agent.start()
    agent.set_forward_inputs(1)
    with pytest.raises(ValueError, match=hook):
        await bounded(agent.wait_tasks())
    await agent.stop_async()


async def test_inputs_need_a_started_agent_that_overrides_forward() -> None:
    with pytest.raises(RuntimeError, match="start it first"):
        Doubling().set_forward_inputs(1)
    async with ModelAgent() as agent:
        with pytest.raises(RuntimeError, match="override forward"):
            agent.set_forward_inputs(1)
        waiting = asyncio.ensure_future(agent.wait_tasks())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(NotImplementedError):
        ModelAgent().forward(1)


async def test_after_a_stop_the_queues_are_new() -> None:
    agent = Doubling()
    agent.start()
    agent.set_forward_inputs(1)
    await agent.stop_async()
    agent.start()
    agent.set_forward_inputs(10)
    assert await bounded(agent.get_output()) == 22
    await agent.stop_async()


async def test_an_agent_may_leave_the_constructor_to_itself() -> None:
    class Own(ModelAgent):
        def __init__(self, size: int) -> None:
            self.size = size

        def forward(self, inputs: Any) -> Any:
            return inputs * self.size

    agent = Own(3)
    assert (agent.rank, agent.world_size, agent.device) == (0, 1, "cpu")
    async with agent:
        agent.set_forward_inputs(2)
        assert await bounded(agent.get_output()) == 6


def test_progress_goes_to_whoever_asked_for_it() -> None:
    agent = ModelAgent()
    agent.report_progress("nobody listens")
    told: list[str] = []
    agent._report = told.append
    agent.report_progress("half")
    assert told == ["half"]
