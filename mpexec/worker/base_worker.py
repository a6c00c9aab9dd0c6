"""BaseWorker: one per rank. It holds the model agent and the output loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mpexec.agent.base import ModelAgent
from mpexec.config import WorkerSpec
from mpexec.errors import ConfigError
from mpexec.tasks import TaskOwner, TaskSet


class BaseWorker(TaskOwner):
    """Holds a `ModelAgent` in one rank, and pushes the outputs of the output rank to the driver.

    Public methods of a subclass can be called by name through `collective_rpc`; where worker and agent both have a
    name, the worker's is called.

    Args:
        spec: What to run.
        rank: This rank.
        local_rank: This rank among those of the machine.
        device: "cpu" or "cuda:<local_rank>".
        put_output: Sends one output to the driver; called on the output rank only.
        report: Tells the driver how far the start is.

    Attributes:
        on_forward: Told with True when the agent's forward hook begins, and with False when it has ended.
    """

    on_forward: Callable[[bool], None] | None = None

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        rank: int,
        local_rank: int,
        device: str,
        put_output: Callable[[Any], None],
        report: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.spec = spec
        self.rank = rank
        self.world_size = spec.world_size
        self.local_rank = local_rank
        self.device = device
        self._put_output = put_output
        self._report = report
        self.agent: ModelAgent | None = None
        self._owners: dict[str, object] = {}  # whose method a name is, once it has been called

    def build_model(self) -> None:
        """Make the agent, bind its rank and device, and let it build its model; errors go to the starter."""
        spec = self.spec
        self._report("build agent")
        agent = spec.agent(*spec.agent_args, **spec.agent_kwargs)
        if not isinstance(agent, ModelAgent):
            raise ConfigError(f"the agent must be a ModelAgent; {spec.agent!r} made a {type(agent).__qualname__}")
        agent.rank, agent.world_size = self.rank, self.world_size
        agent.local_rank, agent.device = self.local_rank, self.device
        agent._report = self._report
        self.agent = agent
        self._report("build model")
        agent.build_model()

    def find(self, name: str) -> Callable[..., Any]:
        """The public method `name`: the worker's own, else the agent's.

        Raises:
            AttributeError: Neither has it, or it begins with an underscore.
        """
        owner = self._owners.get(name)
        if owner is not None:
            return getattr(owner, name)  # type: ignore[no-any-return]
        if not name.startswith("_"):
            for owner in (self, self.agent):
                method = getattr(owner, name, None)
                if callable(method):
                    self._owners[name] = owner
                    return method  # type: ignore[no-any-return]
        raise AttributeError(
            f"neither {type(self).__name__} nor {type(self.agent).__name__} has a public method {name!r}"
        )

    def method_names(self) -> frozenset[str]:
        """The names that `find` knows."""
        return frozenset(
            name
            for owner in (self, self.agent)
            for name in {*dir(type(owner)), *vars(owner)}
            if not name.startswith("_") and _is_method(inspect.getattr_static(owner, name, None))
        )

    def set_forward_inputs(self, inputs: Any) -> None:
        """Hand one input to the agent's queue and return."""
        assert self.agent is not None
        self.agent.set_forward_inputs(inputs)

    def _open(self, tasks: TaskSet) -> None:
        assert self.agent is not None
        self.agent._on_forward = self.on_forward
        self.agent.start()
        tasks.start(self.agent.wait_tasks(), name="agent")
        tasks.start(self._output_loop(), name="output_loop")

    async def _output_loop(self) -> None:
        """Take every output, and push those of the output rank; on other ranks they would only pile up."""
        assert self.agent is not None
        is_pushed = self.rank == self.spec.topology.output_rank
        while True:
            output = await self.agent.get_output()
            if is_pushed:
                self._put_output(output)

    async def _close(self) -> None:
        if self.agent is not None:
            await self.agent.stop_async()

    def release(self) -> None:
        """Release the agent. Works before `build_model`, after a failure, and twice."""
        agent, self.agent = self.agent, None
        self._owners.clear()
        if agent is not None:
            agent.release()


def _is_method(found: object) -> bool:
    """True for what can be called by name; properties are not evaluated to find out."""
    return callable(found) or isinstance(found, classmethod | staticmethod)
