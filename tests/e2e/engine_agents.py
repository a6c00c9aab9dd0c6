"""Agents for the engine's tests; in a module of their own, because ranks import them."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from mpexec import ConfigError, Engine, EngineConfig, UniExecutor, WorkerSpec, build_executor
from mpexec.agent.base import ModelAgent
from mpexec.agent.steps import StepInput, StepOutput, TokenLogprobs
from mpexec.engine.engine import ModelPlan


class BrokenOnPurposeError(Exception):
    """Raised by a rank that was told to."""


def as_if_likely(token: int) -> TokenLogprobs:
    """What the counting agent says of a token."""
    return TokenLogprobs(-token / 1024, ((token, -token / 1024),))


class CountingAgent(ModelAgent):
    """A slot's next token is its last one plus one, modulo the vocabulary. Needs no torch and can be told to break."""

    def __init__(
        self, vocab_size: int = 2048, break_at: tuple[int, int, str] | None = None, step_seconds: float = 0.0
    ) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._last: dict[int, int] = {}
        self._logprobs: set[int] = set()  # the slots that ask for them
        self._break = break_at

    def break_at(self, token: int, rank: int, manner: str) -> None:
        """From now on, `rank` ends in this manner in the step that would give out `token`."""
        self._break = (token, rank, manner)

    def forward(self, inputs: StepInput) -> Any:
        """One token more for every slot."""
        time.sleep(self._step_seconds)  # as a model's computing would
        for slot in inputs.free:
            self._last.pop(slot, None)
            self._logprobs.discard(slot)
        for piece in inputs.prefill:
            assert (piece.slot in self._last) == (piece.start > 0)
            self._last[piece.slot] = piece.token_ids[-1]
            if piece.sampling.logprobs is not None:
                self._logprobs.add(piece.slot)
        slots = [*inputs.decode, *(piece.slot for piece in inputs.prefill if piece.is_last)]
        for slot in slots:
            self._last[slot] = (self._last[slot] + 1) % self._vocab_size
        if self._break is not None and self._break[0] in self._last.values():
            self._end(*self._break[1:])
        tokens = {slot: self._last[slot] for slot in slots}
        asked = self._logprobs.intersection(slots)
        return StepOutput(inputs.step_id, tokens, {slot: as_if_likely(tokens[slot]) for slot in asked})

    def _end(self, rank: int, manner: str) -> None:
        if rank != self.rank:
            if manner == "raise while the peer waits":
                threading.Event().wait()
            return
        if manner == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if manner == "hang":
            threading.Event().wait()
        raise BrokenOnPurposeError(f"token {self._break}", time.monotonic())


def uni_engine(break_at: tuple[int, int, str] | None = None, **limits: Any) -> Engine:
    """An engine over one counting rank in this process."""
    config = EngineConfig(**limits)
    executor = UniExecutor(CountingAgent, agent_kwargs={"break_at": break_at})
    return Engine(executor, ModelPlan.read(None, 1, config), config)


def mp_engine(
    break_at: tuple[int, int, str] | None = None,
    step_seconds: float = 0.0,
    start_method: Any = "spawn",
    **limits: Any,
) -> Engine:
    """An engine over two counting ranks, each a process."""
    config = EngineConfig(**limits)
    spec = WorkerSpec(
        agent=CountingAgent,
        world_size=2,
        agent_kwargs={"break_at": break_at, "step_seconds": step_seconds},
        start_method=start_method,
        device="cpu",
        init_process_group=False,
        stop_timeout=2.0,
        failure_grace=0.3,
    )
    return Engine(build_executor(spec), ModelPlan.read(None, 2, config), config)


class Unbuildable(CountingAgent):
    """Fails where a model is built."""

    def build_model(self) -> None:
        raise RuntimeError("cannot build")


def unbuildable_engine(manner: str) -> Engine:
    """A factory that does not give an engine."""
    if manner == "config":
        raise ConfigError("no such model")
    if manner == "exit":
        os._exit(7)
    if manner == "hang":
        threading.Event().wait()
    spec = WorkerSpec(agent=Unbuildable, world_size=2, device="cpu", init_process_group=False)
    return Engine(build_executor(spec), ModelPlan.read(None, 2, EngineConfig()), EngineConfig())
