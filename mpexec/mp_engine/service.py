"""The engine's side of the RPC: what clients may call, and how the engine's end reaches them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from mpexec.agent.checkpoint import CheckpointFacts
from mpexec.agent.steps import TokenLogprobs
from mpexec.engine.engine import Engine, Health, Metrics, SamplingParams
from mpexec.errors import ConfigError, EngineStoppedError
from mpexec.mp_engine.rpc_server import AsyncRPCServer, when_caller_goes
from mpexec.tasks import TaskOwner, TaskSet

logger = logging.getLogger(__name__)

_METRICS_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class News:
    """What clients are told of the engine.

    Attributes:
        stall_timeout: See `EngineConfig`; where the engine itself has come to a halt, only clients can tell.
    """

    metrics: Metrics
    health: Health
    stall_timeout: float | None


Piece = tuple[str, tuple[int, ...], str | None, tuple[TokenLogprobs, ...] | None]


class EngineService(TaskOwner):
    """Serves one engine to the clients of one server.

    The failure of the engine reaches every client the moment the engine's own requests hear of it, before the ranks
    have been ended; `wait_tasks` raises it when they have.

    Args:
        engine: Started and stopped by the clients, released by the process.
        server: Its methods are registered here.
    """

    def __init__(self, engine: Engine, server: AsyncRPCServer) -> None:
        super().__init__()
        self._engine = engine
        self._server = server
        self._streams = 0
        self._draining = False
        self._is_told = False
        self._profile: object = None  # stands for the one that a client has begun
        self._abandoned = asyncio.Event()
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        for name, function in (
            ("generate", self.generate),
            ("start", self.start_engine),
            ("stop", self.stop_engine),
            ("about", self.about),
            ("sleep", self.sleep),
            ("wakeup", self.wakeup),
            ("update_params", self.update_params),
            ("start_profile", self.start_profile),
            ("stop_profile", self.stop_profile),
        ):
            server.register(name, function)

    @property
    def open_streams(self) -> int:
        """Requests that clients are reading now."""
        return self._streams

    def _open(self, tasks: TaskSet) -> None:
        tasks.start(self._watch_server(), name="server")
        tasks.start(self._publish_news(), name="news")
        self._begun = asyncio.Event()
        tasks.start(self._watch_engine(), name="engine")
        tasks.start(self._tell_failure(), name="failure")
        tasks.start(self._drop_profiles(), name="profiles")

    # -- what clients call -------------------------------------------------------------------------------------------

    def about(self) -> tuple[CheckpointFacts, int, int]:
        """The model, its ranks and the limit of its texts: arguments of `ModelPlan.of_facts`."""
        self._server.publish(self._news())  # whoever asks has just come, and knows nothing yet
        plan = self._engine.plan
        return plan.facts, plan.tp, plan.max_length

    async def start_engine(self) -> None:
        """Start the engine's tasks; while they run, changes nothing."""
        await self._engine.start_async()
        self._begun.set()
        self._changed.set()

    async def stop_engine(self) -> None:
        """Stop the engine's tasks; every open request hears of it. `start_engine` may follow."""
        await self._operate(self._engine.stop_async())

    async def generate(
        self, prompt: list[int], params: SamplingParams, priority: int = 0, wait: bool = False
    ) -> AsyncGenerator[Piece, None]:
        """Continue a prompt, as `Engine.generate`: text, token ids, finish reason, logprobs."""
        if self._draining:
            raise EngineStoppedError("the engine is about to end: it finishes what runs and takes no new requests")
        self._streams += 1
        self._idle.clear()
        self._changed.set()
        try:
            async with aclosing(self._engine.generate(prompt, params, priority=priority, wait=wait)) as outputs:
                async for output in outputs:
                    if output.finish_reason is not None:
                        self._tell_end()
                    yield output.text, output.token_ids, output.finish_reason, output.logprobs
        finally:
            self._streams -= 1
            self._changed.set()
            if not self._streams:
                self._idle.set()

    async def sleep(self, level: int, drain_timeout: float | None) -> None:
        """As `Engine.sleep_async`."""
        await self._operate(self._engine.sleep_async(level, drain_timeout=drain_timeout))

    async def wakeup(self) -> None:
        """As `Engine.wakeup_async`."""
        await self._operate(self._engine.wakeup_async())

    async def update_params(self, path: str, drain: bool, drain_timeout: float | None) -> None:
        """As `Engine.update_params_async`, from files."""
        await self._operate(self._engine.update_params_async(path, drain=drain, drain_timeout=drain_timeout))

    async def _operate(self, operation: Coroutine[Any, Any, None]) -> None:
        """Clients hear of state and counts when an operation begins and when it has ended."""
        self._changed.set()
        try:
            await operation
        finally:
            self._server.publish(self._news())

    async def start_profile(self, record_shapes: bool = False, with_stack: bool = False) -> None:
        """As `Engine.start_profile_async`; should the client go, its profile goes, too."""
        self._changed.set()
        earlier, mine = self._profile, object()
        self._profile = mine
        when_caller_goes(lambda: self._abandoned.set() if self._profile is mine else None)
        try:
            await self._engine.start_profile_async(record_shapes=record_shapes, with_stack=with_stack)
        except ConfigError:
            self._profile = earlier
            raise

    async def _drop_profiles(self) -> None:
        while True:
            await self._abandoned.wait()
            self._abandoned.clear()
            try:
                await self._engine.discard_profile_async()
            except Exception as error:  # the engine has failed, or was stopped; its next start drops the profile
                logger.debug("a profile was not dropped: %r", error)

    async def stop_profile(self, path: str) -> str:
        """End the profile and write it, as `Engine.stop_profile_async`."""
        self._changed.set()
        written = await self._engine.stop_profile_async(path)
        self._profile = None
        return str(written)

    async def drain(self, seconds: float) -> bool:
        """Take no new requests, and wait for those that run; False if some still do when the time is over."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # -- what clients are told -----------------------------------------------------------------------------------------

    async def _watch_server(self) -> None:
        await self._server.wait_tasks()

    async def _watch_engine(self) -> None:
        while True:
            await self._begun.wait()
            self._begun.clear()
            await self._engine.wait_tasks()  # returns after a plain stop; another start may follow

    async def _tell_failure(self) -> None:
        while True:
            response = await self._engine.requests.closed_async()
            reason = response.to_exception()
            cause = None if reason is None else reason.__cause__
            if cause is not None:
                self._server.say_closed(cause)
                await asyncio.Event().wait()  # the engine's own end, with its clean-up, ends this task
            await self._engine.requests.opened_async()

    def _news(self) -> News:
        # The root cause may not travel as it is: `say_closed` boxes it.
        health = replace(self._engine.health(), reason=None)
        return News(self._engine.metrics(), health, self._engine.stall_timeout)

    def _tell_end(self) -> None:
        """Publish before an answer's last piece; once in a turn of the loop, as many answers may end in one step."""
        if not self._is_told:
            self._is_told = True
            asyncio.get_running_loop().call_soon(self._turn_is_over)
            self._server.publish(self._news())

    def _turn_is_over(self) -> None:
        self._is_told = False

    async def _publish_news(self) -> None:
        """Clients see counts that are a moment old; while nothing changes, and nobody waits, nothing is sent.

        Whoever waits for something hears a word ten times a second: silence means that this process has come to a halt.
        """
        last: News | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (now := self._news()) != last or self._server.open_calls:
                self._server.publish(now)
                last = now
                await asyncio.sleep(_METRICS_EVERY_S)
