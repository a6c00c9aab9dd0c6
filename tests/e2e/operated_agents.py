"""A counting agent that can be put to sleep and be given weights, and can refuse or break; and an engine over it."""

from __future__ import annotations

import threading
from typing import Any

from engine_agents import CountingAgent

from mpexec import ConfigError, Engine, EngineConfig, UniExecutor, WorkerSpec, build_executor
from mpexec.agent.steps import StepInput
from mpexec.engine.engine import ModelPlan


class OperatedAgent(CountingAgent):
    """Notes what is done to it. `fails` names an operation, the rank that fails in it (-1: all), and how."""

    def __init__(self, step_seconds: float = 0.0, fails: tuple[str, int, str] | None = None) -> None:
        super().__init__(step_seconds=step_seconds)
        self._fails = fails
        self.done: list[str] = []

    def forward(self, inputs: StepInput) -> Any:
        """As it counts; never while it sleeps."""
        assert self.done.count("sleep") == self.done.count("wakeup")
        return super().forward(inputs)

    def sleep(self, level: int = 1) -> None:
        """Fall asleep."""
        if level != 1:
            raise ConfigError(f"level={level}")
        self._do("sleep")
        self._last.clear()

    def wakeup(self) -> None:
        """Wake up."""
        self._do("wakeup")

    def update_params(self, weights: Any) -> None:
        """Take any weights; an empty file makes it refuse them."""
        if isinstance(weights, str) and weights.endswith("refused"):
            raise ValueError("not the weights of this model")
        self._do("update_params")

    def history(self) -> list[str]:
        """What was done."""
        return self.done

    def _do(self, operation: str) -> None:
        if self._fails is not None and self._fails[0] == operation and self._fails[1] in (-1, self.rank):
            if self._fails[2] == "hang":
                threading.Event().wait()
            if self._fails[2] == "slow":
                threading.Event().wait(0.3)
                self.done.append(operation)
                return
            raise RuntimeError(f"{operation} failed on rank {self.rank}")
        self.done.append(operation)


def operated_engine(
    step_seconds: float = 0.0, fails: tuple[str, int, str] | None = None, world_size: int = 1, **limits: Any
) -> Engine:
    """An engine over counting ranks: one in this process, or several processes."""
    config = EngineConfig(**limits)
    spec = WorkerSpec(
        agent=OperatedAgent,
        world_size=world_size,
        agent_kwargs={"step_seconds": step_seconds, "fails": fails},
        start_method="forkserver",
        device="cpu",
        init_process_group=False,
        stop_timeout=2.0,
        failure_grace=0.3,
    )
    executor = UniExecutor(spec) if world_size == 1 else build_executor(spec)
    return Engine(executor, ModelPlan.read(None, world_size, config), config)
