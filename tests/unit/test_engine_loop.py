"""EngineLoop: the order of its end, and how failures reach callers, over an executor that runs in this process."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpexec import UniExecutor
from mpexec.agent.base import ModelAgent
from mpexec.agent.steps import StepInput, StepOutput
from mpexec.config import EngineConfig
from mpexec.engine.engine import Engine, ModelPlan
from mpexec.engine.engine_loop import EngineLoop
from mpexec.engine.request import Generation, Request, RequestManager, RequestType, ResponseType
from mpexec.engine.sampling_params import SamplingParams
from mpexec.engine.scheduler import Scheduler
from mpexec.errors import (
    ConfigError,
    EngineStoppedError,
    ExecutorBrokenError,
    ExecutorStoppedError,
    QueueFullError,
    TaskEndedError,
    TransportError,
)
from mpexec.executor.base import Executor


class CountingAgent(ModelAgent):
    """A slot's next token is its last one plus one. `gate` may hold a step, `error` may fail one."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, int] = {}
        self.steps: list[StepInput] = []
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.error: BaseException | None = None
        self.bad_output: Any = None

    async def forward(self, inputs: StepInput) -> Any:
        self.steps.append(inputs)
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        for slot in inputs.free:
            self.last.pop(slot, None)
        for piece in inputs.prefill:
            assert (piece.slot in self.last) == (piece.start > 0)
            self.last[piece.slot] = piece.token_ids[-1]
        slots = [*inputs.decode, *(piece.slot for piece in inputs.prefill if piece.is_last)]
        for slot in slots:
            self.last[slot] += 1
        return self.bad_output or StepOutput(inputs.step_id, {slot: self.last[slot] for slot in slots})


class InProcessExecutor:
    """The face of an executor around one agent on this loop; notes the order of its verbs."""

    spec = SimpleNamespace(stop_timeout=1.0)

    def __init__(self) -> None:
        self.agent = CountingAgent()
        self.verbs: list[str] = []
        self.fail_in: dict[str, BaseException] = {}
        self.lost: asyncio.Future[None] | None = None
        self.news: Callable[[BaseException], BaseException] = lambda error: error
        self.before_stop: Callable[[], None] = lambda: None

    async def _verb(self, name: str) -> None:
        self.verbs.append(name)
        if name in self.fail_in:
            raise self.fail_in[name]

    async def start_async(self) -> None:
        if not self.agent.running:
            await self._verb("start")
            self.lost = asyncio.get_running_loop().create_future()
            await self.agent.start_async()

    async def wait_tasks(self) -> None:
        assert self.lost is not None
        agent = asyncio.ensure_future(self.agent.wait_tasks())
        try:
            await asyncio.wait({agent, self.lost}, return_when=asyncio.FIRST_COMPLETED)
            if self.lost.done():
                self.lost.result()
            await agent
        finally:
            agent.cancel()
            await asyncio.wait({agent})

    async def forward_async(self, inputs: Any) -> None:
        self.agent.set_forward_inputs(inputs)

    async def get_output_async(self) -> Any:
        assert self.lost is not None
        output = asyncio.ensure_future(self.agent.get_output())
        try:
            await asyncio.wait({output, self.lost}, return_when=asyncio.FIRST_COMPLETED)
            if self.lost.done() and (error := self.lost.exception()) is not None:
                raise self.news(error)
            return await output
        finally:
            output.cancel()

    async def stop_async(self) -> None:
        self.before_stop()
        await self._verb("stop")
        await self.agent.stop_async()

    async def release_async(self) -> None:
        await self._verb("release")
        if self.lost is not None:
            self.lost.cancel()

    def lose(self, error: BaseException) -> None:
        assert self.lost is not None
        self.lost.set_exception(error)
        self.lost.exception()  # somebody may or may not wait for it


class Stack:
    """A loop, its executor and its requests."""

    def __init__(self, **limits: Any) -> None:
        settings = {"max_slots": 4, "max_queue": 8, "max_length": 1000, "vocab_size": 10_000, **limits}
        self.executor = InProcessExecutor()
        self.agent = self.executor.agent
        self.requests = RequestManager()
        self.loop = EngineLoop(
            cast(Executor, self.executor),
            lambda first_step: Scheduler(**settings, first_step=first_step),
            self.requests,
        )

    def post(self, *prompt: int, new: int = 4) -> Request:
        return self.requests.post_request(RequestType.GENERATE, Generation(prompt, SamplingParams(max_new_tokens=new)))

    async def answer(self, *prompt: int, new: int = 4) -> tuple[int, ...]:
        request = self.post(*prompt, new=new)
        token_ids: tuple[int, ...] = ()
        while True:
            response = await request.receive_async()
            token_ids += response.token_ids
            if response.is_last:
                assert response.type is ResponseType.FINISH
                return token_ids


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    stack = Stack()
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with asyncio.timeout(30):
        await stack.loop.start_async()
        yield stack
        await stack.loop.stop_async()
        await stack.loop.release_async()
    del stack
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []  # F127: no "never retrieved"
    assert [task for task in asyncio.all_tasks() if "EngineLoop" in task.get_name()] == []


async def test_requests_are_batched_and_each_gets_its_own_tokens(stack: Stack) -> None:
    answers = await asyncio.gather(*(stack.answer(10 * n, new=3) for n in range(1, 7)))
    assert answers == [tuple(range(10 * n + 1, 10 * n + 4)) for n in range(1, 7)]
    assert max(len(step.decode) for step in stack.agent.steps) == 4
    assert len(stack.agent.steps) == 6
    counts = stack.loop.counters
    assert (counts.requests, counts.finished, counts.cancelled, counts.refused) == (6, 6, 0, 0)
    assert (counts.prompt_tokens, counts.generated_tokens, counts.steps) == (6, 18, 6)
    assert stack.loop.telemetry.tokens.per_second() > 0


async def test_an_idle_loop_uses_no_cpu(stack: Stack) -> None:
    await stack.answer(1)
    before = time.process_time()
    await asyncio.sleep(0.3)
    assert time.process_time() - before < 0.02


async def test_a_cancelled_request_leaves_before_the_next_step(stack: Stack) -> None:
    request = stack.post(1, new=500)
    assert (await request.receive_async()).token_ids[0] == 2
    stack.requests.post_cancel(request)
    assert (await request.receive_async()).type is ResponseType.CANCEL
    assert await stack.answer(50, new=2) == (51, 52)
    assert (stack.loop.scheduler.running, stack.loop.scheduler.waiting) == (0, 0)
    assert stack.loop.counters.cancelled == 1


async def test_a_request_that_finds_no_room_is_refused_and_the_others_go_on() -> None:
    stack = Stack(max_slots=1, max_queue=1)
    stack.agent.gate = asyncio.Event()
    async with stack.loop:
        requests = [stack.post(n, new=1) for n in (1, 2, 3)]
        response = await requests[2].receive_async()
        assert response.type is ResponseType.QUEUE_FULL
        assert isinstance(response.to_exception(), QueueFullError)
        stack.agent.gate.set()
        assert [(await request.receive_async()).token_ids for request in requests[:2]] == [(2,), (3,)]


async def test_a_request_that_can_never_run_is_refused_and_the_loop_lives(stack: Stack) -> None:
    response = await stack.post(999_999).receive_async()
    assert response.type is ResponseType.INPUT_ERROR
    assert "999999" in str(response.error)
    assert await stack.answer(1, new=1) == (2,)


async def test_an_error_in_the_agent_reaches_every_request_and_wait_tasks_as_itself(stack: Stack) -> None:
    stack.agent.gate = asyncio.Event()
    running, waiting = stack.post(1), [stack.post(n) for n in range(2, 9)]
    await stack.agent.entered.wait()
    stack.agent.error = cause = ZeroDivisionError("in forward")
    stack.agent.gate.set()
    with pytest.raises(ZeroDivisionError) as caught:
        await stack.loop.wait_tasks()
    assert caught.value is cause
    for request in (running, *waiting, stack.post(1)):
        response = await request.receive_async()
        assert response.type is ResponseType.ENGINE_STOP_ERROR
        assert response.error is cause


async def test_requests_hear_of_a_failure_before_the_executor_has_stopped(stack: Stack) -> None:
    request = stack.post(1, new=500)
    await request.receive_async()
    ended_at_stop: list[bool] = []
    stack.executor.before_stop = lambda: ended_at_stop.append(request.ended)
    stack.executor.lose(OSError("rank lost"))
    with pytest.raises(OSError, match="rank lost"):
        await stack.loop.wait_tasks()
    assert ended_at_stop == [True]


async def test_after_a_failure_siblings_end_then_the_executor_stops_then_releases(stack: Stack) -> None:
    def siblings() -> list[str]:
        names = [task.get_name() for task in asyncio.all_tasks()]
        return [name for name in names if name.startswith("EngineLoop.") and name != "EngineLoop.end_executor"]

    alive_at_stop: list[list[str]] = []
    stack.executor.before_stop = lambda: alive_at_stop.append(siblings())
    assert len(siblings()) == 5
    stack.executor.lose(OSError("rank lost"))
    with pytest.raises(OSError, match="rank lost"):
        await stack.loop.wait_tasks()
    assert stack.executor.verbs == ["start", "stop", "release"]
    assert alive_at_stop == [[]]


async def test_the_steps_in_flight_end_before_a_stop_reaches_the_ranks(stack: Stack) -> None:
    left: list[int] = []
    queues = stack.agent._inputs, stack.agent._prepared, stack.agent._outputs
    stack.executor.before_stop = lambda: left.append(sum(queue.qsize() for queue in queues))
    request = stack.post(1, new=50)
    await request.receive_async()
    assert stack.loop.scheduler.in_flight > 0
    await stack.loop.stop_async()
    assert left == [0]


async def test_errors_of_the_clean_up_neither_hide_the_root_cause_nor_skip_the_release(stack: Stack) -> None:
    stack.executor.fail_in = {"stop": RuntimeError("stop failed"), "release": RuntimeError("release failed")}
    cause = OSError("rank lost")
    stack.executor.lose(cause)
    with pytest.raises(OSError, match="rank lost") as caught:
        await stack.loop.wait_tasks()
    assert caught.value is cause
    assert stack.executor.verbs == ["start", "stop", "release"]
    others = caught.value.others.exceptions  # type: ignore[attr-defined]
    assert [str(other) for other in others] == ["stop failed", "release failed"]
    stack.executor.fail_in = {}


async def test_an_executor_that_only_says_broken_gives_its_cause(stack: Stack) -> None:
    cause = OSError("rank lost")

    def broken(error: BaseException) -> BaseException:
        news = ExecutorBrokenError("lost earlier")
        news.__cause__ = error
        return news

    stack.executor.news = broken
    request = stack.post(1, new=500)
    await request.receive_async()
    stack.executor.lose(cause)
    with pytest.raises(OSError, match="rank lost"):
        await stack.loop.wait_tasks()
    response = await request.receive_async()
    assert response.error is cause


async def test_a_failure_before_anybody_waits_is_still_raised_to_every_waiter(stack: Stack) -> None:  # F011
    request = stack.post(1, new=500)
    stack.executor.lose(OSError("rank lost"))
    while not (await request.receive_async()).is_last:
        pass
    for _ in range(2):
        with pytest.raises(OSError, match="rank lost"):
            await stack.loop.wait_tasks()
    waiters = await asyncio.gather(*(stack.loop.wait_tasks() for _ in range(2)), return_exceptions=True)
    assert [type(outcome) for outcome in waiters] == [OSError, OSError]
    assert stack.executor.verbs == ["start", "stop", "release"]


@pytest.mark.parametrize("end", ["stop", "failure"])
async def test_requests_that_an_end_cuts_short_count_as_interrupted_and_are_not_under_way_any_more(end: str) -> None:
    stack = Stack(max_slots=2)
    counts = stack.loop.counters

    def ended() -> tuple[int, ...]:
        under_way = stack.loop.scheduler.running + stack.loop.scheduler.waiting
        assert counts.requests == counts.finished + counts.cancelled + counts.refused + counts.interrupted + under_way
        return counts.finished, counts.cancelled, counts.refused, counts.interrupted, under_way

    async with asyncio.timeout(30), stack.loop:
        await stack.answer(1, new=1)
        requests = [stack.post(n, new=500) for n in (1, 2, 3, 4, 999_999)]
        await requests[0].receive_async()
        stack.requests.post_cancel(requests[3])
        await requests[4].receive_async()
        await requests[0].receive_async()
        assert ended() == (1, 1, 1, 0, 3)
        if end == "stop":
            await stack.loop.stop_async()
        else:
            stack.executor.lose(OSError("rank lost"))
            with pytest.raises(OSError, match="rank lost"):
                await stack.loop.wait_tasks()
        assert ended() == (1, 1, 1, 3, 0)
        await stack.loop.stop_async()
        if end == "stop":
            await stack.loop.start_async()
            await stack.answer(1, new=1)
            assert ended() == (2, 1, 1, 3, 0)


async def test_stop_ends_wait_tasks_normally_answers_requests_and_may_be_followed_by_start(stack: Stack) -> None:
    waiter = asyncio.create_task(stack.loop.wait_tasks())
    request = stack.post(1, new=500)
    await request.receive_async()
    await stack.loop.stop_async()
    await waiter
    while (response := await request.receive_async()).type is ResponseType.SUCCESS:
        pass
    assert response.type is ResponseType.ENGINE_STOP_ERROR
    assert isinstance(response.error, EngineStoppedError)
    assert stack.executor.verbs == ["start", "stop"]

    await stack.loop.start_async()
    assert await stack.answer(20, new=3) == (21, 22, 23)
    ids = [step.step_id for step in stack.agent.steps]
    assert ids == sorted(set(ids))
    await stack.loop.stop_async()


async def test_stop_without_waiting_on_the_loops_own_thread_ends_wait_tasks(stack: Stack) -> None:
    waiter = asyncio.create_task(stack.loop.wait_tasks())
    request = stack.post(1, new=500)
    await request.receive_async()
    stack.loop.stop()
    await waiter
    assert stack.executor.verbs == ["start", "stop"]
    assert request.ended


async def test_cancelling_one_of_two_waiters_leaves_the_loop_alone_and_the_last_ends_it(stack: Stack) -> None:
    first, second = (asyncio.create_task(stack.loop.wait_tasks()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await stack.answer(1, new=1) == (2,)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert stack.executor.verbs == ["start", "stop"]
    assert (await stack.post(1).receive_async()).type is ResponseType.ENGINE_STOP_ERROR


async def test_a_cancellation_during_the_clean_up_does_not_replace_the_root_cause(stack: Stack) -> None:
    waiter = asyncio.create_task(stack.loop.wait_tasks())
    await asyncio.sleep(0)
    stack.executor.before_stop = waiter.cancel  # type: ignore[assignment]
    stack.executor.lose(OSError("rank lost"))
    with pytest.raises(OSError, match="rank lost"):
        await waiter
    assert stack.executor.verbs == ["start", "stop", "release"]


@pytest.mark.parametrize("name", ["main_loop", "preprocess_loop", "response_loop", "executor"])
async def test_a_task_cancelled_from_outside_ends_the_engine_and_is_named(stack: Stack, name: str) -> None:
    (victim,) = [task for task in asyncio.all_tasks() if task.get_name() == f"EngineLoop.{name}"]
    request = stack.post(1, new=500)
    victim.cancel()
    with pytest.raises(TaskEndedError, match=name):
        await stack.loop.wait_tasks()
    while (response := await request.receive_async()).type is ResponseType.SUCCESS:
        pass
    assert isinstance(response.error, TaskEndedError)


async def test_an_executor_stopped_beneath_the_engine_is_a_failure(stack: Stack) -> None:
    await stack.executor.stop_async()
    with pytest.raises(ExecutorStoppedError):
        await stack.loop.wait_tasks()


async def test_an_agent_that_puts_out_something_else_is_a_failure(stack: Stack) -> None:
    stack.agent.bad_output = "no step"
    request = stack.post(1)
    with pytest.raises(TransportError, match="str"):
        await stack.loop.wait_tasks()
    assert (await request.receive_async()).type is ResponseType.ENGINE_STOP_ERROR


async def test_late_outputs_of_an_earlier_run_are_dropped(stack: Stack) -> None:
    assert await stack.answer(1, new=1) == (2,)
    stack.agent._outputs.put_nowait(StepOutput(0, {0: 77}))
    assert await stack.answer(5, new=2) == (6, 7)


async def test_an_executor_that_cannot_start_raises_from_start_and_release_still_works() -> None:
    stack = Stack()
    stack.executor.fail_in = {"start": OSError("no device")}
    with pytest.raises(OSError, match="no device"):
        await stack.loop.start_async()
    stack.loop.start()
    with pytest.raises(OSError, match="no device"):
        await stack.loop.wait_tasks()
    await stack.loop.release_async()
    assert stack.executor.verbs[-1] == "release"


async def test_run_raises_the_root_cause_after_clean_up() -> None:
    stack = Stack()
    await stack.loop.start_async()
    runner = asyncio.create_task(stack.loop.run())
    await stack.answer(1, new=1)
    stack.executor.lose(OSError("rank lost"))
    with pytest.raises(OSError, match="rank lost"):
        await runner
    assert not stack.loop.running


def test_an_executor_that_takes_one_input_at_a_time_is_refused() -> None:
    config = EngineConfig()
    with pytest.raises(ConfigError, match="max_outputs=1"):
        Engine.from_pretrained(max_outputs=1)
    with UniExecutor(CountingAgent, world_size=1, max_outputs=1) as executor:
        with pytest.raises(ConfigError, match="at least 2"):
            Engine(executor, ModelPlan.read(None, 1, config), config)


def test_leaving_the_event_loop_without_stop_stops_the_executor() -> None:
    stack = Stack()

    async def main() -> None:
        await stack.loop.start_async()
        task = asyncio.create_task(stack.loop.wait_tasks())
        await stack.answer(1, new=1)
        assert not task.done()

    asyncio.run(main())
    assert stack.executor.verbs == ["start", "stop"]
    gc.collect()


async def test_cancelling_at_any_point_of_a_requests_life_brings_the_count_back_to_zero(stack: Stack) -> None:  # F130
    async def consume(request: Request) -> None:
        try:
            while not (await request.receive_async()).is_last:
                pass
        finally:
            stack.requests.post_cancel(request)

    for turns in range(50):
        request = stack.post(1, new=12)
        consumer = asyncio.create_task(consume(request))
        for _ in range(turns):
            await asyncio.sleep(0)
        consumer.cancel()
        await asyncio.wait({consumer})
    assert await stack.answer(5, new=1) == (6,)
    assert (stack.loop.scheduler.running, stack.loop.scheduler.waiting, stack.requests.pending) == (0, 0, 0)
