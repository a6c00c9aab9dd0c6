"""Which sequences take part in the next step. Pure: no I/O, no clock, no event loop.

Continuous batching: between two steps sequences may leave (ended, cancelled) and others join, first come, first served.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mpexec.agent.steps import Prefill, Sampling, StepInput, StepOutput
from mpexec.engine.request import FinishReason, SamplingParams
from mpexec.errors import ConfigError, QueueFullError, TransportError


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and how far its answer is.

    Attributes:
        slot: Its row in the agent's cache; None while it waits.
        length: Tokens of prompt and answer so far.
    """

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    slot: int | None = None
    length: int = 0

    @property
    def generated(self) -> int:
        """Number of new tokens so far."""
        return self.length - len(self.prompt)


@dataclass(frozen=True, slots=True)
class Progress:
    """One new token of one request; `finish_reason` is set with the last one."""

    request_id: int
    token_id: int
    finish_reason: FinishReason | None


def check_prompt(prompt: tuple[int, ...], *, max_length: int, vocab_size: int) -> None:
    """Check that a prompt can run at all, so that it cannot bring down the ranks.

    Raises:
        ConfigError: It is empty, leaves no room for an answer, or has a token that the model does not know.
    """
    if not prompt:
        raise ConfigError("the prompt has no tokens: give at least one")
    for token in prompt:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ConfigError(f"token id {token!r} is not one of this model's: use integers from 0 to {vocab_size - 1}")
    if len(prompt) >= max_length:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens; prompt and answer together may have {max_length}: shorten the prompt"
        )


class Scheduler:
    """The sequences of one engine. One step at a time: `next_step`, run it, `complete`.

    Args:
        max_slots: Sequences that run together.
        max_queue: Sequences that may wait beyond those that a free slot can take.
        max_length: Most tokens of prompt and answer together.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens that end a text.
        first_step: Id of the first step. It frees all slots, whatever ran on the same agent before.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_queue: int,
        max_length: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        first_step: int = 1,
    ) -> None:
        self._max_queue = max_queue
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._to_free = list(range(max_slots))
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # by slot, in the order of arrival
        self._in_flight: StepInput | None = None
        self._next_step = first_step

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def next_step_id(self) -> int:
        """Id of the step that comes next."""
        return self._next_step

    def add(self, request_id: int, prompt: tuple[int, ...], params: SamplingParams) -> None:
        """Put a sequence at the end of the queue.

        Raises:
            ConfigError: The prompt can never run.
            QueueFullError: `max_queue` sequences wait already.
        """
        check_prompt(prompt, max_length=self._max_length, vocab_size=self._vocab_size)
        if len(self._waiting) >= self._max_queue + len(self._free_slots):
            raise QueueFullError(
                f"{len(self._running)} requests run and {len(self._waiting)} wait, which is the limit "
                f"(max_queue={self._max_queue}): send this one again later, or raise the limit"
            )
        self._waiting.append(Sequence(request_id, prompt, params, length=len(prompt)))

    def cancel(self, request_id: int) -> bool:
        """Take a sequence out. Its slot is free for others in the next step; a step in flight is not disturbed.

        Returns:
            False if no such sequence waits or runs.
        """
        for sequence in self._waiting:
            if sequence.request_id == request_id:
                self._waiting.remove(sequence)
                return True
        for sequence in self._running.values():
            if sequence.request_id == request_id:
                self._leave(sequence)
                return True
        return False

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        del self._running[sequence.slot]
        self._to_free.append(sequence.slot)
        self._free_slots.append(sequence.slot)

    def next_step(self) -> StepInput | None:
        """The next step, or None when there is nothing to compute. The step counts as in flight until `complete`."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step_id} has not been completed")
        decode = tuple(self._running)
        prefill = tuple(self._admit())
        if not decode and not prefill:
            return None
        self._in_flight = StepInput(self._next_step, free=tuple(self._to_free), prefill=prefill, decode=decode)
        self._next_step += 1
        self._to_free.clear()
        return self._in_flight

    def _admit(self) -> list[Prefill]:
        starts = []
        while self._waiting and self._free_slots:
            sequence = self._waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self._running[sequence.slot] = sequence
            params = sequence.params
            sampling = Sampling(float(params.temperature), params.seed)
            starts.append(Prefill(sequence.slot, sequence.prompt, sampling=sampling))
        return starts

    def complete(self, output: StepOutput) -> list[Progress]:
        """Take the tokens of the step in flight; sequences that end with it leave their slots.

        Tokens of sequences that were cancelled meanwhile are dropped.

        Raises:
            TransportError: The output is not that of the step in flight, or lacks a slot.
        """
        step, self._in_flight = self._in_flight, None
        if step is None or output.step_id != step.step_id:
            expected = f"step {step.step_id}" if step else "none"
            raise TransportError(f"the output of step {output.step_id} arrived, expected {expected}")
        progress = []
        freed = set(self._to_free)
        for slot in (*step.decode, *(start.slot for start in step.prefill)):
            if slot not in output.tokens:
                raise TransportError(f"the output of step {step.step_id} has no token for slot {slot}")
            if slot not in freed:
                progress.append(self._extend(self._running[slot], output.tokens[slot]))
        return progress

    def _extend(self, sequence: Sequence, token_id: int) -> Progress:
        sequence.length += 1
        reason: FinishReason | None = None
        if token_id in self._eos and not sequence.params.ignore_eos:
            reason = "stop"
        elif sequence.generated >= sequence.params.max_new_tokens or sequence.length >= self._max_length:
            reason = "length"
        if reason is not None:
            self._leave(sequence)
        return Progress(sequence.request_id, token_id, reason)
