"""ModelAgent: what users subclass. One instance lives in each rank."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from mpexec.tasks import TaskOwner, TaskSet


class ModelAgent(TaskOwner):
    """One rank's share of the model.

    Every public method that a subclass adds can be called by name through `collective_rpc`. The constructor runs inside
    the rank and receives the user's arguments only; a subclass that overrides it need not call `super().__init__()`:
    rank and device are bound when it returns, and `build_model` sees them.

    An agent that overrides `forward` gets two background tasks: the preprocess loop and the forward loop move inputs
    from `set_forward_inputs` through the hooks to the output queue, in order; preprocessing of the next input overlaps
    the forward of this one where the hooks are `async`.

    Attributes:
        rank: This rank, 0 to `world_size - 1`.
        world_size: Number of ranks.
        local_rank: Rank among those on this machine.
        device: "cpu" or "cuda:<local_rank>".
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: str = "cpu"
    _report: Callable[[str], None] | None = None
    _on_forward: Callable[[bool], None] | None = None
    _tasks: TaskSet | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        super().__init__()

    def build_model(self) -> None:
        """Load or make the model; called once, before the rank is ready. May be slow and may report progress."""

    def report_progress(self, text: str) -> None:
        """Tell the driver how far `build_model` is; each report restarts the clock of `init_timeout`."""
        if self._report is not None:
            self._report(text)

    def preprocess(self, inputs: Any) -> Any:
        """Prepare one input for `forward`, plain or `async`; identity here."""
        return inputs

    def forward(self, inputs: Any) -> Any:
        """Run the model on one input, plain or `async`."""
        raise NotImplementedError(f"{type(self).__name__} does not override forward")

    def set_forward_inputs(self, inputs: Any) -> None:
        """Queue one input for the preprocess loop and return.

        Raises:
            RuntimeError: The agent has not been started, or does not override `forward`.
        """
        if self._tasks is None or not self._has_forward():
            raise RuntimeError(f"{type(self).__name__} takes no inputs: start it first, and override forward")
        self._inputs.put_nowait(inputs)

    def sleep(self, level: int = 1) -> None:
        """Give back what can be made again: called by `Engine.sleep_async`, on every rank, between steps.

        Nothing here. An agent that refuses a level raises `ConfigError` before it changes anything.
        """

    def wakeup(self) -> None:
        """Undo `sleep`, which has come before."""

    async def get_output(self) -> Any:
        """Wait for the next output, in the order of the inputs."""
        return await self._outputs.get()

    @classmethod
    def _has_forward(cls) -> bool:
        return cls.forward is not ModelAgent.forward

    def _open(self, tasks: TaskSet) -> None:
        self._inputs: asyncio.Queue[Any] = asyncio.Queue()
        self._prepared: asyncio.Queue[Any] = asyncio.Queue(maxsize=2)
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        if self._has_forward():
            tasks.start(self._preprocess_loop(), name="preprocess_loop")
            tasks.start(self._forward_loop(), name="forward_loop")

    async def _preprocess_loop(self) -> None:
        while True:
            await self._prepared.put(await _finish(self.preprocess(await self._inputs.get())))

    async def _forward_loop(self) -> None:
        while True:
            inputs = await self._prepared.get()
            self._tell_forward(True)
            try:
                output = await _finish(self.forward(inputs))
            finally:
                self._tell_forward(False)
            self._outputs.put_nowait(output)
            # The next input may be there already: the output leaves before a forward that holds this thread for long.
            await asyncio.sleep(0)

    def _tell_forward(self, begins: bool) -> None:
        if self._on_forward is not None:
            self._on_forward(begins)


async def _finish(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
