"""What is served: the engine as the server sees it, where it is made, and the model's name and chat template."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from mpexec.config import EngineConfig, StartMethod
from mpexec.engine.engine import GenerationOutput, Health, Metrics, ModelPlan
from mpexec.engine.sampling_params import SamplingParams
from mpexec.http.chat import ChatTemplate
from mpexec.mp_engine.zmq_engine import ZMQEngine


class ServedEngine(Protocol):
    """The part of an engine's face that the server uses; see `ZMQEngine` for what each verb promises."""

    @property
    def plan(self) -> ModelPlan: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        wait: bool = False,
    ) -> AsyncGenerator[GenerationOutput, None]: ...

    def health(self) -> Health: ...

    def metrics(self) -> Metrics: ...

    async def start_async(self) -> None: ...

    async def wait_tasks(self) -> None: ...

    async def stop_async(self) -> None: ...

    async def release_async(self) -> None: ...


async def make_engine(
    path: Path, tp: int, *, config: EngineConfig, dtype: str, device: str, start_method: StartMethod
) -> ServedEngine:
    """Load a model over `tp` ranks. Cancelling it ends the ranks that were started.

    Raises:
        ConfigError: Found before any rank starts.
        StartupError: A rank did not become ready; nothing is left behind.
    """
    # In a process of its own: answering HTTP and driving the ranks never wait for each other. Ranks are processes also
    # where there is one: a model that crashes must not take the engine's last words along.
    return await ZMQEngine.from_pretrained_async(
        path, tp, backend="mp", config=config, dtype=dtype, device=device, start_method=start_method
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it.

    Attributes:
        name: In requests and answers.
        template: None where the model was not made for conversations.
    """

    name: str
    template: ChatTemplate | None

    @classmethod
    def read(cls, plan: ModelPlan, name: str | None) -> Self:
        """Read a model's folder, whose name is the model's unless another is given.

        Raises:
            ConfigError: A file of the chat template cannot be read.
        """
        return cls(name or plan.facts.path.name, ChatTemplate.load(plan.facts.path))
