"""The engine's face at the other end of a connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpexec.config import check_flags
from mpexec.engine.engine import GenerationOutput, Health, Metrics, ModelPlan, SamplingParams
from mpexec.engine.files import absolute
from mpexec.engine.operations import Weights, drain_seconds, sleep_level
from mpexec.engine.profiling import profiling
from mpexec.engine.request import Generation
from mpexec.errors import ConfigError, ConnectionLostError, EngineStoppedError, WrongStateError
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.service import News
from mpexec.mp_engine.sockets import ClientKeys, check_address
from mpexec.tasks import TaskOwner, TaskSet

_CREDIT = 16  # pieces of one answer under way; more of them would only be older
_CALL_S = 10.0


class EngineClient(TaskOwner):
    """A client of an engine that runs in another process, with the face of `Engine`.

    `start` connects and `stop` disconnects; the engine itself belongs to whoever made it. `wait_tasks` raises the root
    cause when the engine fails, or a `ConnectionLostError` when it is gone; streams raise `EngineStoppedError` with
    that cause.

    Args:
        address: `ZMQEngine.address` of the engine.
        keys: For TCP.
    """

    def __init__(self, address: str, *, keys: ClientKeys | None = None) -> None:
        super().__init__()
        check_address(address, keys)
        self._address = address
        self._keys = keys
        self._plan: ModelPlan | None = None
        self._root: BaseException | None = None
        self._was_started = False
        self._released = False
        self._client: AsyncRPCClient | None = None
        self._news: News | None = None
        self._told_at = 0.0  # monotonic seconds

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where the engine listens; further clients of the same user may connect there."""
        return self._address

    @property
    def plan(self) -> ModelPlan:
        """The model and its limits.

        Raises:
            WrongStateError: Not connected yet.
        """
        if self._plan is None:
            raise _not_started()
        return self._plan

    def health(self) -> Health:
        """Whether requests are served, without asking: the end of the engine is known here when it happens.

        The rest is what the engine told last: ten times a second while it is asked for anything, and when its state
        changes. If it says nothing, though asked, that is known here as well.
        """
        if self._root is not None:
            return Health(False, "stopped", self._root)
        client = self._client
        if self.running and client is not None:
            return self._health_told(client.silence)
        return Health(False, "stopped" if self._was_started or self._released else "new")

    def metrics(self) -> Metrics:
        """The counts that the engine told last: at the end of each answer and, while any runs, ten times a second."""
        return Metrics() if self._news is None else self._news.metrics

    def _health_told(self, silence: float | None) -> Health:
        """What the engine told last; a step that was under way then is older by now."""
        if self._news is None:  # a moment after the start
            return Health(True, "running", silence=silence)
        health, limit = self._news.health, self._news.stall_timeout
        if health.state in ("new", "stopped"):
            health = Health(True, "running")
        age = None if health.step_age is None else health.step_age + time.monotonic() - self._told_at
        return replace(health, step_age=age, silence=silence).judged(limit)

    # -- operations ----------------------------------------------------------------------------------------------------

    async def sleep_async(self, level: int = 1, *, drain_timeout: float | None = None) -> None:
        """As `Engine.sleep_async`."""
        await self._operate("sleep", sleep_level(level), drain_seconds(drain_timeout))

    async def wakeup_async(self) -> None:
        """As `Engine.wakeup_async`."""
        await self._operate("wakeup")

    async def update_params_async(
        self, weights: Weights, *, drain: bool = True, drain_timeout: float | None = None
    ) -> None:
        """As `Engine.update_params_async`, but from files only: tensors do not go over this connection.

        Raises:
            ConfigError: Also for a state dict.
        """
        if not isinstance(weights, str | Path):
            raise ConfigError(
                "this engine runs in another process: save the state dict to a safetensors file, and name it"
            )
        check_flags(drain=drain)
        await self._operate("update_params", str(absolute(weights)), drain, drain_seconds(drain_timeout))

    def profile(
        self, path: str | Path, *, record_shapes: bool = False, with_stack: bool = False
    ) -> AbstractAsyncContextManager[Path]:
        """As `Engine.profile`; the file is written on the engine's machine."""
        return profiling(self, path, record_shapes=record_shapes, with_stack=with_stack)

    async def start_profile_async(self, *, record_shapes: bool = False, with_stack: bool = False) -> None:
        """As `Engine.start_profile_async`."""
        check_flags(record_shapes=record_shapes, with_stack=with_stack)
        await self._operate("start_profile", record_shapes=record_shapes, with_stack=with_stack)

    async def stop_profile_async(self, path: str | Path) -> Path:
        """As `Engine.stop_profile_async`; the file is written on the engine's machine."""
        return Path(await self._operate("stop_profile", str(absolute(path))))

    async def _operate(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine that may take as long as it likes; what ends it otherwise is the engine's end."""
        try:
            return await self._usable_client().call(method, *args, **kwargs)
        except ConnectionLostError as lost:
            ended = await self._stopped(lost)
            raise ended from ended.__cause__

    # -- requests ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        wait: bool = False,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Continue a prompt; as `Engine.generate`, which says how it ends and what is raised."""
        # Made here as well as at the other end, so that what cannot work is refused at the call.
        params = params or SamplingParams()
        text = self.plan.text_stream(params)
        return self._generate(Generation(self.plan.encode(prompt), params, text, priority, wait))

    async def _generate(self, wanted: Generation) -> AsyncGenerator[GenerationOutput, None]:
        prompt = wanted.prompt_token_ids
        pieces = self._usable_client().stream(
            "generate", list(prompt), wanted.params, wanted.priority, wanted.wait, credit=_CREDIT
        )
        try:
            async for text, token_ids, finish_reason, logprobs in pieces:
                yield GenerationOutput(text, token_ids, finish_reason, prompt, logprobs)
        except EngineStoppedError as stopped:
            ended = await self._stopped(stopped.__cause__, stopped)
            raise ended from ended.__cause__
        except WrongStateError:  # this client was stopped in the middle of it
            raise await self._stopped(None) from None
        except ConnectionLostError as lost:
            ended = await self._stopped(lost)
            raise ended from ended.__cause__
        finally:
            await pieces.aclose()

    def _usable_client(self) -> AsyncRPCClient:
        if self._root is not None:
            raise stopped_error(self._root)
        if self._client is None or not self.running:
            if self._was_started or self._released:
                raise EngineStoppedError("the engine was stopped")
            raise _not_started()
        if asyncio.get_running_loop() is not self._loop:
            raise WrongStateError(
                f"the engine was started on {self._loop!r}: send requests there, or stop it and start it on this loop",
                state="running",
            )
        return self._client

    async def _stopped(self, cause: BaseException | None, told: EngineStoppedError | None = None) -> EngineStoppedError:
        """What the readers of a stream get: the same root cause for all of them, none after a plain stop."""
        if cause is None or self._released:
            return told or EngineStoppedError("the engine was stopped")
        if isinstance(cause, ConnectionLostError):
            cause = await self._why_lost(cause)
        return stopped_error(self._learn(cause))

    def _learn(self, cause: BaseException) -> BaseException:
        """The first news of a failure is the root cause."""
        if self._root is None:
            self._root = cause
        return self._root

    async def _why_lost(self, lost: ConnectionLostError) -> BaseException:
        """What lies behind a lost connection, as far as this side can know."""
        return lost.__cause__ or lost

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def _open(self, tasks: TaskSet) -> None:
        tasks.start(self._watch(), name="watch")

    async def start_async(self) -> None:
        """Connect; requests are served when this returns. Calling it while running changes nothing.

        Raises:
            EngineStoppedError: The engine has failed, or this was released.
            ConnectionLostError: Nobody answers at the address.
        """
        await self._settle()
        if self.running and self._client is not None and self._client.running:
            return
        if self._root is not None:
            raise stopped_error(self._root)
        if self._released:
            raise EngineStoppedError("the engine has been released")
        client = AsyncRPCClient(self._address, keys=self._keys)
        client.on_news = self._on_news
        try:
            await client.start_async()
            await self._greet(client)
        except BaseException:
            await client.stop_async()
            raise
        self._client = client
        self._was_started = True
        self.start()

    async def _greet(self, client: AsyncRPCClient) -> None:
        """What is said first on a new connection."""
        if self._plan is None:
            self._plan = ModelPlan.of_facts(*await client.call("about", timeout=_CALL_S))

    async def _part(self, client: AsyncRPCClient) -> None:
        """What is said last before a connection is closed from this side."""

    def _on_news(self, news: News) -> None:
        self._news, self._told_at = news, time.monotonic()

    async def _watch(self) -> None:
        """Wait for the engine's failure."""
        assert self._client is not None
        try:
            await self._client.wait_tasks()
        except asyncio.CancelledError:  # by `stop` on this thread, or by the end of the loop
            await self._close()
            raise
        except ConnectionLostError as lost:
            root = self._learn(await self._why_lost(lost))
        except BaseException as error:
            root = self._learn(error)
        else:
            return
        await self._close()
        await self._after_failure()
        raise root

    async def _after_failure(self) -> None:
        """Called once before the root cause is raised to whoever waits for the tasks."""

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self._root is None and not self._released:
                await self._part(client)
        finally:
            await client.stop_async()

    def release(self) -> None:
        """Disconnect for good. Works in any state, twice, and after a failure."""
        self._released = True
        self.stop()
        if self._client is not None and (self._loop is None or not self._loop.is_running()):
            self._client.release()  # nobody is left who could close it on its loop
            self._client = None


def stopped_error(root: BaseException) -> EngineStoppedError:
    """A new error for one caller, with the root cause that all share."""
    stopped = EngineStoppedError(f"the engine has stopped after {type(root).__name__}: {root}")
    stopped.__cause__ = root
    return stopped


def _not_started() -> WrongStateError:
    return WrongStateError("the engine has not been started: use `async with engine`", state="new")
