"""Agents for the engine's tests; in a module of their own, because ranks import them."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from mpexec.agent.base import ModelAgent
from mpexec.agent.steps import StepInput, StepOutput


class BrokenOnPurposeError(Exception):
    """Raised by a rank that was told to."""


class CountingAgent(ModelAgent):
    """A slot's next token is its last one plus one, modulo the vocabulary. Needs no torch and can be told to break."""

    def __init__(self, vocab_size: int = 2048) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._last: dict[int, int] = {}
        self._break: tuple[int, int, str] | None = None

    def break_at(self, token: int, rank: int, manner: str) -> None:
        """From now on, `rank` ends in this manner in the step that would give out `token`."""
        self._break = (token, rank, manner)

    def forward(self, inputs: StepInput) -> Any:
        """One token more for every slot."""
        for slot in inputs.free:
            self._last.pop(slot, None)
        for start in inputs.prefill:
            assert start.slot not in self._last
            self._last[start.slot] = start.token_ids[-1]
        slots = [*inputs.decode, *(start.slot for start in inputs.prefill)]
        for slot in slots:
            self._last[slot] = (self._last[slot] + 1) % self._vocab_size
        if self._break is not None and self._break[0] in self._last.values():
            self._end(*self._break[1:])
        return StepOutput(inputs.step_id, {slot: self._last[slot] for slot in slots})

    def _end(self, rank: int, manner: str) -> None:
        if rank != self.rank:
            if manner == "raise while the peer waits":
                threading.Event().wait()
            return
        if manner == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise BrokenOnPurposeError(f"token {self._break}")
