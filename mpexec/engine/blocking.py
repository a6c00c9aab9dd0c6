"""BlockingEngine: an engine for programs without an event loop; any number of threads may use it at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mpexec.engine.engine import Engine, GenerationOutput, Health, Metrics, ModelPlan, SamplingParams
from mpexec.engine.operations import Weights
from mpexec.errors import EngineStoppedError
from mpexec.tasks import cancel_async_tasks

_PATIENCE_S = 1.0  # beyond the engine's own time-outs


class BlockingEngine:
    """Runs an engine on an event loop in a thread of its own.

    Args:
        engine: An `Engine` or whatever has its face, not started; owned from now on.

    Raises:
        BaseException: What starting the engine raises; it has been released then.
    """

    def __init__(self, engine: Engine | Any) -> None:
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mpexec-engine-loop", daemon=True)
        self._closed = False
        self._lock = threading.Lock()
        self._thread.start()
        try:
            self._await(engine.start_async())
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            # What other threads have handed over meanwhile begins now, and is cancelled: nobody may wait for ever.
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.run_until_complete(cancel_async_tasks(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` on the loop and wait for it; a Ctrl-C meanwhile cancels it."""
        try:
            if self._closed:
                raise RuntimeError
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise EngineStoppedError("the engine has been closed") from None
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineStoppedError("the engine was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    @property
    def plan(self) -> ModelPlan:
        """The model and its limits."""
        plan: ModelPlan = self._engine.plan
        return plan

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        wait: bool = False,
    ) -> Generator[GenerationOutput, None, None]:
        """Continue a prompt; iterate over the result with `for`. As `Engine.generate`, from any thread.

        Leaving the loop early, or closing the generator, takes the request out before the next step.
        """
        outputs = self._engine.generate(prompt, params, priority=priority, wait=wait)
        return self._pieces(outputs)

    def _pieces(self, outputs: Any) -> Generator[GenerationOutput, None, None]:
        try:
            while True:
                try:
                    piece = self._await(anext(outputs))
                except StopAsyncIteration:
                    return
                yield piece
        finally:
            if not self._closed:
                self._await(outputs.aclose())

    def sleep(self, level: int = 1, *, drain_timeout: float | None = None) -> None:
        """As `Engine.sleep_async`; blocks until every rank sleeps."""
        self._await(self._engine.sleep_async(level, drain_timeout=drain_timeout))

    def wakeup(self) -> None:
        """As `Engine.wakeup_async`; blocks until every rank is awake."""
        self._await(self._engine.wakeup_async())

    def update_params(self, weights: Weights, *, drain: bool = True, drain_timeout: float | None = None) -> None:
        """As `Engine.update_params_async`; blocks until every rank has the new weights."""
        self._await(self._engine.update_params_async(weights, drain=drain, drain_timeout=drain_timeout))

    @contextmanager
    def profile(
        self, path: str | Path, *, record_shapes: bool = False, with_stack: bool = False
    ) -> Generator[Path, None, None]:
        """As `Engine.profile`: `with engine.profile("trace.json"): ...`."""
        profile = self._engine.profile(path, record_shapes=record_shapes, with_stack=with_stack)
        file = self._await(profile.__aenter__())
        try:
            yield file
        except BaseException as error:
            self._await(profile.__aexit__(type(error), error, error.__traceback__))
            raise
        self._await(profile.__aexit__(None, None, None))

    def health(self) -> Health:
        """As `Engine.health`."""
        health: Health = self._engine.health()
        return health

    def metrics(self) -> Metrics:
        """As `Engine.metrics`."""
        return self._await(_called(self._engine.metrics))  # type: ignore[no-any-return]

    def wait_tasks(self) -> None:
        """Block until the engine fails, and raise the root cause; return when it is closed.

        Raises:
            BaseException: The root cause.
        """
        try:
            self._await(self._engine.wait_tasks())
        except EngineStoppedError:
            if not self._closed:
                raise

    def close(self) -> None:
        """Stop and release the engine and end the thread. Again, and after a failure, too; from any thread."""
        with self._lock:
            if self._closed:
                return
            try:
                self._await(self._engine.release_async())
            finally:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _called(function: Callable[[], Any]) -> Any:
    return function()
