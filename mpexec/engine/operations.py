"""What is done to all ranks of a running engine between two steps: sleep, wakeup, update_params.

One operation at a time. It sees to it that no step is under way, calls a method of the agent on every rank, and counts
as done when every rank has said so. Ranks that would differ after it are worth nothing: where some did it and others
did not, the engine fails.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpexec.config import check_flags
from mpexec.deadline import Deadline
from mpexec.engine.engine_loop import EngineLoop
from mpexec.engine.files import absolute
from mpexec.engine.health import RankHealth
from mpexec.engine.request import RequestManager
from mpexec.engine.scheduler import Pace
from mpexec.errors import ConfigError, EngineStoppedError, ExecutorStoppedError, WrongStateError
from mpexec.executor.threads import in_thread
from mpexec.tasks import cancel_async_tasks

if TYPE_CHECKING:
    from mpexec.executor.base import Executor

Weights = str | Path | Mapping[str, Any]
_MAX_LEVEL = 100  # no agent knows so many


class Operations:
    """The operations of one engine.

    Args:
        executor: Its agent has the methods `sleep`, `wakeup` and `update_params`. One that raises `ConfigError` or
            `ValueError` has changed nothing; all ranks do so together, within the executor's `failure_grace`, or the
            engine fails. A `wakeup` without a `sleep` changes nothing either.
        loop: Of the same engine; told how far requests may go.
        requests: Of the same engine.
        step_timeout: Seconds for the steps under way, once no request is waited for; None waits.

    Attributes:
        state: "awake", "draining", "asleep".
    """

    def __init__(
        self, executor: Executor, loop: EngineLoop, requests: RequestManager, step_timeout: float | None
    ) -> None:
        self.state = "awake"
        self._executor = executor
        self._loop = loop
        self._requests = requests
        self._step_timeout = step_timeout
        self._turn = asyncio.Lock()
        self._ranks_may_differ = False

    def check_ranks(self) -> None:
        """Refuse a start over ranks that may have different weights.

        Raises:
            WrongStateError: A stop came while they took other ones.
        """
        if self._ranks_may_differ:
            raise WrongStateError(
                "the engine was stopped while its ranks took other weights, and they may differ: release it",
                state="stopped",
            )

    def open(self) -> None:
        """The engine starts, perhaps on another event loop."""
        self.check_ranks()
        self._turn = asyncio.Lock()

    async def sleep_async(self, level: int, drain_timeout: float | None) -> None:
        """See `Engine.sleep_async`."""
        level, drain_timeout = sleep_level(level), drain_seconds(drain_timeout)
        async with self._turn:
            if self.state == "asleep":
                return
            async with self._ranks_free("was put to sleep", Pace.FINISH, drain_timeout):
                await self._on_all_ranks("sleep", level, then=self._fall_asleep)

    async def wakeup_async(self) -> None:
        """See `Engine.wakeup_async`."""
        async with self._turn:
            if self.state != "asleep":
                return
            self._check_serving()
            await self._on_all_ranks("wakeup", then=self._go_on)

    async def update_params_async(self, weights: Weights, drain: bool, drain_timeout: float | None) -> None:
        """See `Engine.update_params_async`."""
        drain_timeout = drain_seconds(drain_timeout)
        check_flags(drain=drain)
        given = await in_thread(lambda: portable(weights), name="mpexec-weights")
        async with self._turn:
            if self.state == "asleep":
                raise WrongStateError("the engine sleeps: wake it up, then give it other weights", state="sleeping")
            pace = Pace.FINISH if drain else Pace.NONE
            async with self._ranks_free("was given other weights", pace, drain_timeout):
                await self._on_all_ranks("update_params", given)

    def _fall_asleep(self) -> None:
        self.state = "asleep"

    def _go_on(self) -> None:
        self.state = "awake"
        self._loop.set_pace(Pace.FULL)

    # -- the requests --------------------------------------------------------------------------------------------------

    def _check_serving(self) -> None:
        ended = self._requests.stop_response
        if ended is not None:
            raise ended.to_exception() or EngineStoppedError("the engine was stopped")
        if not self._requests.accepting:
            raise WrongStateError("the engine has not been started: use `async with engine`", state="new")

    @asynccontextmanager
    async def _ranks_free(self, what: str, pace: Pace, drain_timeout: float | None) -> AsyncIterator[None]:
        """No step is under way inside. Requests go on afterwards, unless the engine is asleep then."""
        self._check_serving()
        self.state = "draining"
        self._loop.set_pace(pace)
        try:
            drained = pace is Pace.FINISH and await self._comes_to_rest(drain_timeout)
            if pace is Pace.FINISH and not drained:
                late = f"the engine {what}, and this request had not ended within {drain_timeout:g} s: send it again"
                self._loop.interrupt(EngineStoppedError(late))
            if not drained and not await self._comes_to_rest(self._step_timeout):
                ranks = "; ".join(str(RankHealth.of_row(row)) for row in self._executor.describe()["ranks"])
                raise TimeoutError(f"a step has not ended within {self._step_timeout} s: {ranks}")
            yield
        finally:
            if self.state != "asleep":
                self._go_on()

    async def _comes_to_rest(self, seconds: float | None) -> bool:
        """Wait until no step is under way; False if one still is when the time is over.

        Raises:
            EngineStoppedError: The engine was stopped, or failed, meanwhile.
        """
        rest = asyncio.create_task(self._loop.at_rest.wait(), name="operation.rest")
        closed = asyncio.create_task(self._requests.closed_async(), name="operation.closed")
        try:
            await asyncio.wait({rest, closed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._check_serving()
            return rest.done()
        finally:
            await cancel_async_tasks({rest, closed})

    # -- the ranks -----------------------------------------------------------------------------------------------------

    async def _on_all_ranks(self, method: str, *args: Any, then: Callable[[], None] = lambda: None) -> None:
        """Call a method on every rank, and `then` when all are done; a cancellation waits for it: no rank may miss it.

        Raises:
            ConfigError: Every rank has refused; nothing has changed. Or its agent has no such method.
            EngineStoppedError: The engine was stopped meanwhile.
            BaseException: A rank has failed, and the engine with it.
        """
        # In a thread, because weights are copied on their way out, and the loop has others to serve.
        work = in_thread(lambda: self._call(method, args), name=f"mpexec-{method}")
        call = asyncio.create_task(work, name=f"operation.{method}")
        interrupted: asyncio.CancelledError | None = None
        while not call.done():
            try:
                await asyncio.wait({call})
            except asyncio.CancelledError as cancelled:
                interrupted = cancelled
        error = call.exception()
        if isinstance(error, ExecutorStoppedError):
            error = self._torn_by_stop(method)
        elif error is not None and not self._is_refusal(error):
            self._loop.fail(error)
        if error is None:
            then()
        if interrupted is not None:
            raise interrupted
        if error is not None:
            raise error

    def _torn_by_stop(self, method: str) -> BaseException:
        """Note what a stop may leave: each rank may have done it or not. Returns the caller's error."""
        if method == "sleep":
            self._fall_asleep()  # waking a rank that did not fall asleep changes nothing
        self._ranks_may_differ |= method == "update_params" and self._executor.world_size > 1
        ended = self._requests.stop_response
        failed = None if ended is None else ended.to_exception()
        if failed is not None and failed.__cause__ is not None:
            return failed
        return EngineStoppedError(f"the engine was stopped before every rank was done with {method!r}")

    def _call(self, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._executor.collective_rpc(method, args, reply_ranks=())
        except AttributeError as error:
            if method in str(error) and error.__cause__ is None:  # raised here, not on a rank
                raise ConfigError(f"the agent has no method {method!r}") from None
            raise

    def _is_refusal(self, error: BaseException) -> bool:
        """True if every rank has refused before it changed anything, or none was asked."""
        others: ExceptionGroup[Exception] | None = getattr(error, "others", None)
        errors = (error, *(others.exceptions if others is not None else ()))
        if isinstance(error, ConfigError) and error.__cause__ is None:
            return True
        return len(errors) == self._executor.world_size and all(isinstance(e, ConfigError | ValueError) for e in errors)


def sleep_level(level: Any) -> int:
    """How deep to sleep, as it can go to the ranks.

    Raises:
        ConfigError: It is no number that an agent may know.
    """
    if not isinstance(level, int) or isinstance(level, bool) or not 0 <= level <= _MAX_LEVEL:
        raise ConfigError(f"level={level!r}: use an integer from 0 to {_MAX_LEVEL}; the agent knows which")
    return int(level)


def drain_seconds(drain_timeout: Any) -> float | None:
    """How long to wait for requests that run; None is for as long as it takes, and so is more than a year.

    Raises:
        ConfigError: It is no time.
    """
    try:
        is_endless = Deadline.after(drain_timeout).at_ns is None
    except ConfigError:
        raise ConfigError(f"drain_timeout={drain_timeout!r}: use seconds of at least 0, or None to wait") from None
    return None if is_endless else float(drain_timeout)


def portable(weights: Weights) -> str | dict[str, Any]:
    """Weights as they can go to the ranks: an absolute path, or tensors in this machine's own memory.

    Raises:
        ConfigError: No such file or folder, no tensors, or values that are none.
    """
    if isinstance(weights, str | Path):
        path = absolute(weights)
        if not os.path.exists(path):  # or none that may be looked at; that of pathlib raises then
            raise ConfigError(f"there is no file or folder {path}: give safetensors files, or a state dict")
        return str(path)
    if not isinstance(weights, Mapping):
        raise ConfigError(f"weights must be a path or a state dict with tensors, not {type(weights).__name__}")
    if not weights:
        raise ConfigError("the weights are an empty state dict: give tensors, or the path of safetensors files")
    torch = sys.modules.get("torch")  # who has no torch has no tensors either
    found: dict[str, Any] = {}
    for name, tensor in weights.items():
        if not isinstance(name, str) or torch is None or not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"weights must map names to tensors, not {name!r} to a {type(tensor).__name__}")
        found[name] = tensor.detach().to("cpu")
    return found
