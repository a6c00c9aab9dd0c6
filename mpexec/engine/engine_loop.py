"""EngineLoop: takes requests, drives the executor one step at a time, hands out what comes back.

Its tasks and the order of its end (siblings, executor stopped, executor released, root cause out) are those of
lmdeploy's engine loop; every ending of every task counts here, and none can hide the first one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mpexec.agent.steps import StepOutput
from mpexec.engine.request import Generation, Request, RequestManager, RequestType, Response, ResponseType
from mpexec.engine.scheduler import Pace, Progress, Scheduler
from mpexec.engine.telemetry import Telemetry
from mpexec.errors import (
    ConfigError,
    EngineStoppedError,
    ExecutorBrokenError,
    ExecutorStoppedError,
    MpexecError,
    QueueFullError,
    TransportError,
    attach_others,
)
from mpexec.tasks import TaskOwner, TaskSet, cancel_async_tasks

if TYPE_CHECKING:
    from mpexec.executor.base import Executor

logger = logging.getLogger(__name__)

_LAST_STEPS_SHARE = 0.3  # of the executor's stop timeout, for the steps in flight when the engine stops


@dataclass(slots=True)
class Counters:
    """What one engine has done since it was made.

    Attributes:
        requests: Taken by the loop, refused ones included.
        finished: Ended by "stop" or "length".
        cancelled: Given up by the caller while they waited or ran.
        refused: Answered with QUEUE_FULL or INPUT_ERROR.
        prompt_tokens: Tokens of the prompts accepted.
        generated_tokens: New tokens handed out.
        steps: Steps of the model.
        interrupted: Ended by `interrupt`, or by the end of the loop, its failure included.
    """

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    interrupted: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


class EngineLoop(TaskOwner):
    """The background tasks of one engine.

    When one of them fails, every request is answered with the root cause before anything else happens. Then the other
    tasks are ended, the executor is stopped and released, and `wait_tasks` raises the root cause. After a plain `stop`
    the executor is stopped only, and `start` may follow.

    Args:
        executor: Runs an agent that understands `mpexec.agent.steps`; started and stopped by the loop.
        new_scheduler: Makes an empty scheduler for each start and after each end; its argument is the id of the first
            step.
        requests: Opened and closed by the loop.

    Attributes:
        telemetry: Observes requests and steps.
        at_rest: Set while no step is under way. Whoever has set a pace may wait for it to have the ranks for himself.
    """

    def __init__(self, executor: Executor, new_scheduler: Callable[[int], Scheduler], requests: RequestManager) -> None:
        super().__init__()
        self._executor = executor
        self._new_scheduler = new_scheduler
        self._requests = requests
        self.scheduler = new_scheduler(1)
        self.counters = Counters()
        self.telemetry = Telemetry()
        self.at_rest = asyncio.Event()
        self._pace = Pace.FULL
        self._end: asyncio.Task[BaseException | None] | None = None

    def _open(self, tasks: TaskSet) -> None:
        self._requests.open()
        self._forget_requests()  # of a loop that was closed before it came to an end
        self.at_rest = asyncio.Event()
        self._started = tasks
        self._end = None
        self._work = asyncio.Event()
        self._executor_started = asyncio.Event()
        self._outbox: asyncio.Queue[list[Progress]] = asyncio.Queue()
        self._own: list[asyncio.Task[None]] = []
        for work, name in (
            (self._run_executor(), "executor"),
            (self._preprocess_loop(), "preprocess_loop"),
            (self._main_loop(), "main_loop"),
            (self._response_loop(), "response_loop"),
        ):
            self._start_own(tasks, _raising_root_cause(work), name)

    def _forget_requests(self) -> None:
        """The tasks are gone: nothing that is under way will be answered to the end. Again, it changes nothing."""
        done = self.counters
        done.interrupted = done.requests - done.finished - done.cancelled - done.refused
        self.scheduler = self._new_scheduler(self.scheduler.next_step_id)
        self.scheduler.pace = self._pace
        self.telemetry.reset()

    def _start_own(self, tasks: TaskSet, work: Coroutine[Any, Any, None], name: str) -> None:
        task = tasks.start(work, name=name)
        # After the set's own callback, so that the failure is known: callers hear of it in this turn of the loop.
        task.add_done_callback(lambda _: self._requests.close(root_cause(tasks.failure)))
        self._own.append(task)

    def fail(self, error: BaseException) -> None:
        """End the engine with this root cause, as if one of its tasks had failed with it."""

        async def fail() -> None:
            raise root_cause(error) or error

        if self.running and self._started.failure is None:
            self._start_own(self._started, fail(), "operation")

    def set_pace(self, pace: Pace) -> None:
        """Say which requests take part in steps from now on; it stays so over a stop and a start."""
        self._pace = self.scheduler.pace = pace
        if self.running:
            self._work.set()

    def interrupt(self, error: EngineStoppedError) -> None:
        """End every request that runs with this error; their slots are free for others in the next step."""
        for request_id in self.scheduler.running_ids:
            self.scheduler.cancel(request_id)
            self.counters.interrupted += 1
            self.telemetry.gone(request_id)
            request = self._requests.find(request_id)
            if request is not None:
                self._requests.post_response(request, Response(ResponseType.ENGINE_STOP_ERROR, error=error))

    async def start_async(self) -> None:
        """Start the executor and the tasks. Callers may send requests when this returns."""
        await self._settle()
        if not self.running:
            await self._executor.start_async()
        self.start()

    async def _run_executor(self) -> None:
        await self._executor.start_async()
        self._executor_started.set()
        waiting = asyncio.create_task(self._executor.wait_tasks(), name="EngineLoop.wait_executor")
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await self._let_steps_end()
            raise
        finally:
            await cancel_async_tasks([waiting])  # the last to wait: this stops the executor
        raise ExecutorStoppedError("the executor was stopped while the engine was using it; stop the engine instead")

    async def _let_steps_end(self) -> None:
        """Take the outputs of the steps in flight, within a bound, before a plain stop reaches the ranks.

        Each rank stops wherever it is between two steps: one that is ahead would wait in a collective of the next step
        for one that is behind.
        """
        if self._started.failure is not None:
            return
        last = self.scheduler.next_step_id - 1
        try:
            async with asyncio.timeout(self._executor.spec.stop_timeout * _LAST_STEPS_SHARE):
                while self.scheduler.in_flight and (await self._executor.get_output_async()).step_id < last:
                    pass
        except (TimeoutError, MpexecError) as error:
            logger.debug("the steps in flight did not end: %r", error)

    async def _preprocess_loop(self) -> None:
        while True:
            for request in await self._requests.take_async():
                self._take(request)

    def _take(self, request: Request) -> None:
        if request.type is RequestType.CANCEL:
            self.counters.cancelled += self.scheduler.cancel(request.data)
            self.telemetry.gone(request.data)
            return
        generation: Generation = request.data
        self.counters.requests += 1
        try:
            self.scheduler.add(request.request_id, generation)
        except (QueueFullError, ConfigError) as error:
            kind = ResponseType.QUEUE_FULL if isinstance(error, QueueFullError) else ResponseType.INPUT_ERROR
            self.counters.refused += 1
            self._requests.post_response(request, Response(kind, error=error))
        else:
            self.counters.prompt_tokens += len(generation.prompt_token_ids)
            self.telemetry.accepted(request.request_id)
            self._work.set()

    async def _main_loop(self) -> None:
        """Keep two steps in flight: the ranks go on with the next one while the tokens of this one are handed out."""
        await self._executor_started.wait()
        while True:
            while (step := self.scheduler.next_step()) is not None:
                self.telemetry.sent(step.step_id, self.scheduler.take_started())
                await self._executor.forward_async(step)
            if not self.scheduler.in_flight:
                self._work.clear()
                self.at_rest.set()
                await self._work.wait()
                self.at_rest.clear()
                continue
            output = await self._next_output()
            self.telemetry.received(output.step_id)
            self.counters.steps += 1
            try:
                if not self._outbox.empty():
                    # An output that is there at once does not suspend this task, and callers and cancellations need
                    # their turn.
                    await asyncio.sleep(0)
            finally:  # also where a stop comes just then: the step is no longer in flight
                progress = self.scheduler.complete(output)
            self._outbox.put_nowait(progress)

    async def _next_output(self) -> StepOutput:
        """The output of the oldest step in flight."""
        step_id = self.scheduler.oldest_step_id
        output = await self._executor.get_output_async()
        while isinstance(output, StepOutput) and output.step_id < step_id:
            logger.debug("late output dropped: step=%d expected=%d", output.step_id, step_id)
            output = await self._executor.get_output_async()
        if not isinstance(output, StepOutput):
            raise TransportError(f"the agent put out a {type(output).__name__}, expected a StepOutput")
        return output

    async def _response_loop(self) -> None:
        while True:
            progress = await self._outbox.get()
            for one in progress:
                self._hand_out(one)
            self.telemetry.tokens.add(len(progress))

    def _hand_out(self, one: Progress) -> None:
        self.counters.generated_tokens += 1
        self.counters.finished += one.finish_reason is not None
        self.telemetry.token(one.request_id, one.finish_reason is not None)
        request = self._requests.find(one.request_id)
        if request is not None:
            kind = ResponseType.SUCCESS if one.finish_reason is None else ResponseType.FINISH
            logprobs = None if one.logprobs is None else (one.logprobs,)
            response = Response(kind, (one.token_id,), one.finish_reason, text=one.text, logprobs=logprobs)
            self._requests.post_response(request, response)

    async def wait_tasks(self) -> None:
        """Wait until a task or a rank fails; return only after `stop`.

        Raises:
            BaseException: The root cause. The other tasks have ended and the executor has been stopped and released.
        """
        tasks = self._tasks
        if tasks is None:
            return
        try:
            await tasks.wait()
        except BaseException:
            # A cancelled wait leaves the tasks alone while others wait; the last one has taken them along.
            if all(task.done() for task in self._own):
                await self._finish(tasks)
            raise
        if await self._finish(tasks):
            raise asyncio.CancelledError

    async def _close(self) -> None:
        if await self._finish(self._started):
            raise asyncio.CancelledError

    async def _finish(self, tasks: TaskSet) -> bool:
        """Stop the executor; after a failure release it too. Once, however many wait for it.

        A cancellation does not cut it short. The return value tells the caller whether there was one, so that it can
        be passed on where it hides no root cause.
        """
        if self._end is None:
            self._forget_requests()
            self._end = asyncio.create_task(self._end_executor(tasks.failure), name="EngineLoop.end_executor")
        interrupted = False
        while not self._end.done():
            try:
                await asyncio.wait({self._end})
            except asyncio.CancelledError:
                interrupted = True
        error = None if self._end.cancelled() else self._end.result()
        if error is not None and tasks.failure is None:
            raise error
        return interrupted

    async def _end_executor(self, failure: BaseException | None) -> BaseException | None:
        """Return the first error of the clean-up itself; next to a failure it is kept as one of its `others`."""
        errors: list[BaseException] = []
        steps = [self._executor.stop_async]
        if failure is not None:
            steps.append(self._executor.release_async)
        for step in steps:
            try:
                await step()
            except Exception as error:  # the next step must run, and the root cause must stay the root cause
                logger.warning("the executor did not end cleanly: step=%s error=%r", step.__name__, error)
                errors.append(error)
        if failure is not None and errors:
            earlier: ExceptionGroup[Exception] | None = getattr(failure, "others", None)
            attach_others(failure, [*(earlier.exceptions if earlier else ()), *errors])
        return errors[0] if errors else None

    def release(self) -> None:
        """Free the executor's ranks; blocks up to the stop timeout. Works in any state, twice, and after a failure."""
        self.stop()
        self._requests.close(None)
        self._executor.release()

    async def release_async(self) -> None:
        """As `release`, without blocking the loop."""
        try:
            await self.stop_async()
        finally:
            self._requests.close(None)
            await self._executor.release_async()


async def _raising_root_cause(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; where it hears that the executor is broken or stopped, raise what did that."""
    try:
        await work
    except (ExecutorBrokenError, ExecutorStoppedError) as news:
        cause = root_cause(news) or news
    else:
        return
    raise cause


def root_cause(error: BaseException | None) -> BaseException | None:
    """What lies beneath the news that an executor is broken or stopped."""
    while isinstance(error, ExecutorBrokenError | ExecutorStoppedError) and error.__cause__ is not None:
        error = error.__cause__
    return error
