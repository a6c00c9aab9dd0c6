"""Which sequences take part in the next step. Pure: no I/O, no clock, no event loop.

Continuous batching: between two steps sequences may leave (ended, cancelled) and others join. A slot has room for a
sequence of full length, so a free slot is also room in the cache: no sequence that has begun ever has to wait for
memory, or to be interrupted.

Up to two steps are in flight: the next one is made before the tokens of this one are known. What must be known is only
whether a sequence goes on. Its end by a count is known beforehand: its slot is free for another one in the very next
step. Its end by a token or a stop string is not: it has taken part in one step more by then, and that token is dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from mpexec.agent.steps import Prefill, Sampling, StepInput, StepOutput, TokenLogprobs
from mpexec.engine.request import FinishReason, Generation
from mpexec.engine.sampling_params import SamplingParams
from mpexec.engine.tokenizer import TextStream
from mpexec.engine.waiting_line import WaitingLine
from mpexec.errors import ConfigError, QueueFullError, TransportError

DEPTH = 2  # steps in flight: one that runs, and one for the ranks to go on with


class Pace(Enum):
    """Which sequences may take part in steps: all, those that have begun, or none."""

    FULL = "full"
    FINISH = "finish"
    NONE = "none"


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and how far its answer is.

    Attributes:
        most: New tokens that it may have: those asked for, or those that the context has room for.
        ends: Tokens that end it.
        sampling: For the agent.
        text: Makes its text; None for token ids only.
        slot: Its row in the agent's cache; None while it waits, and once it needs no further step.
        prefilled: Tokens of the prompt that steps have taken in.
        asked: New tokens that steps have been sent for.
        generated: New tokens that have come.
        ended: Nobody wants further tokens.
    """

    request_id: int
    prompt: tuple[int, ...]
    most: int
    ends: frozenset[int]
    sampling: Sampling
    text: TextStream | None
    slot: int | None = None
    prefilled: int = 0
    asked: int = 0
    generated: int = 0
    ended: bool = False


class Progress(NamedTuple):
    """One new token of one request, and the text that has become certain; `finish_reason` is set with the last one."""

    request_id: int
    token_id: int
    finish_reason: FinishReason | None
    text: str = ""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose output has not come, and whose tokens it will bring, by slot."""

    step_id: int
    owners: tuple[tuple[int, Sequence], ...]


def check_prompt(prompt: tuple[int, ...], *, max_length: int, vocab_size: int, limit: str = "") -> None:
    """Check that a prompt can run at all, so that it cannot bring down the ranks.

    Args:
        prompt: Token ids.
        max_length: Most tokens of prompt and answer together.
        vocab_size: Token ids are below it.
        limit: `max_length` in words, where there is more to say of it.

    Raises:
        ConfigError: It is empty, leaves no room for an answer, or has a token that the model does not know.
    """
    if not prompt:
        raise ConfigError("the prompt has no tokens: give at least one")
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocab_size:  # True is an int, and no id to the ranks
            raise ConfigError(f"token id {token!r} is not one of this model's: use integers from 0 to {vocab_size - 1}")
    if len(prompt) >= max_length:
        limit = limit or f"{max_length} tokens"
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens; prompt and answer together may have {limit}: shorten the prompt"
        )


class Scheduler:
    """The sequences of one engine: `next_step` while there is one, run the steps, `complete` each in order.

    Args:
        max_slots: Sequences that run together.
        max_queue: Sequences that may wait beyond those that a free slot can take.
        max_length: Most tokens of prompt and answer together.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens that end a text.
        first_step: Id of the first step. It frees all slots, whatever ran on the same agent before.
        prefill_chunk: Tokens of prompts that one step takes in. A longer prompt is cut; a shorter one is not.

    Attributes:
        pace: See `Pace`; `next_step` keeps to it.
    """

    pace = Pace.FULL

    def __init__(
        self,
        *,
        max_slots: int,
        max_queue: int,
        max_length: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        first_step: int = 1,
        prefill_chunk: int = 512,
    ) -> None:
        self._max_queue = max_queue
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._chunk = prefill_chunk
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._to_free = list(range(max_slots))
        self._waiting: WaitingLine[Sequence] = WaitingLine()
        self._running: dict[int, Sequence] = {}  # by request, in the order of their start; until their last token
        self._prefilling: Sequence | None = None  # the one whose prompt is so long that further pieces follow
        self._decoding: dict[int, Sequence] = {}  # by slot: those that want one token more of each step
        self._flights: deque[_Flight] = deque()
        self._next_step = first_step
        self._started: list[int] = []

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that have been started, and whose last token has not come."""
        return len(self._running)

    @property
    def running_ids(self) -> tuple[int, ...]:
        """The requests that have been started, the oldest first."""
        return tuple(self._running)

    def take_started(self) -> list[int]:
        """The requests that have been started since this was asked last."""
        started, self._started = self._started, []
        return started

    @property
    def next_step_id(self) -> int:
        """Id of the step that comes next."""
        return self._next_step

    @property
    def in_flight(self) -> int:
        """Steps that have not been completed."""
        return len(self._flights)

    @property
    def oldest_step_id(self) -> int:
        """Id of the step in flight that comes back first; there is one."""
        return self._flights[0].step_id

    def add(self, request_id: int, generation: Generation) -> None:
        """Let a sequence wait for a slot.

        Raises:
            ConfigError: The prompt can never run.
            QueueFullError: `max_queue` sequences wait already, and this one does not want to.
        """
        prompt, params = generation.prompt_token_ids, generation.params
        check_prompt(prompt, max_length=self._max_length, vocab_size=self._vocab_size)
        if len(self._waiting) >= self._max_queue + len(self._free_slots) and not generation.wait:
            raise QueueFullError(
                f"{len(self._running)} requests run and {len(self._waiting)} wait, which is the limit "
                f"(max_queue={self._max_queue}): send this one again later, let it wait, or raise the limit"
            )
        sequence = Sequence(
            request_id,
            prompt,
            most=min(params.max_new_tokens, self._max_length - len(prompt)),
            ends=self._ends(params),
            sampling=params.sampling(),
            text=generation.text,
        )
        self._waiting.join(request_id, sequence, generation.priority)

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset() if params.ignore_eos else self._eos
        return own.union(params.stop_token_ids) if params.stop_token_ids else own

    def cancel(self, request_id: int) -> bool:
        """Take a sequence out. Its slot is free for others in the next step; steps in flight are not disturbed.

        Returns:
            False if no such sequence waits or runs.
        """
        if self._waiting.leave(request_id):
            return True
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._end(sequence)
        return sequence is not None

    def _end(self, sequence: Sequence) -> None:
        """Nobody wants more of it."""
        sequence.ended = True
        del self._running[sequence.request_id]
        if sequence is self._prefilling:
            self._prefilling = None
        self._leave_slot(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        slot, sequence.slot = sequence.slot, None
        if slot is not None:
            self._decoding.pop(slot, None)
            self._to_free.append(slot)
            self._free_slots.append(slot)

    def next_step(self) -> StepInput | None:
        """The next step, or None: nothing to compute, or two steps in flight. It is in flight until `complete`."""
        if len(self._flights) >= DEPTH or self.pace is Pace.NONE:
            return None
        decode = tuple(self._decoding.items())
        pieces = self._prefill()
        if not decode and not pieces:
            return None
        free = tuple(self._to_free)
        self._to_free.clear()
        started = [(piece.slot, sequence) for piece, sequence in pieces if piece.is_last]
        owners = (*decode, *started)
        for _, sequence in owners:
            sequence.asked += 1
            if sequence.asked == sequence.most:
                self._leave_slot(sequence)  # of the step after this one
        step = StepInput(self._next_step, free, tuple(piece for piece, _ in pieces), tuple(slot for slot, _ in decode))
        self._flights.append(_Flight(self._next_step, owners))
        self._next_step += 1
        return step

    def _prefill(self) -> list[tuple[Prefill, Sequence]]:
        """The pieces of prompts for one step, first started, first served."""
        room = self._chunk
        pieces = []
        while (sequence := self._prefilling or self._next_to_start(room)) is not None:
            pieces.append(self._piece(sequence, room))
            room -= len(pieces[-1][0].token_ids)
            if sequence is self._prefilling:
                break
        return pieces

    def _next_to_start(self, room: int) -> Sequence | None:
        """Start a sequence whose first piece fits.

        What fits into one step as a whole is not cut, and a longer prompt begins with a whole step: it waits for the
        next one, and so does all that is behind it.
        """
        sequence = self._waiting.next() if self._free_slots and self.pace is Pace.FULL else None
        if sequence is None or room < min(len(sequence.prompt), self._chunk):
            return None
        self._waiting.take()
        sequence.slot = self._free_slots.pop()
        self._running[sequence.request_id] = sequence
        self._started.append(sequence.request_id)
        return sequence

    def _piece(self, sequence: Sequence, room: int) -> tuple[Prefill, Sequence]:
        """The next piece of a prompt, `room` tokens at most; after the last one the sequence is decoded."""
        assert sequence.slot is not None
        start = sequence.prefilled
        token_ids = sequence.prompt[start : start + room]
        sequence.prefilled += len(token_ids)
        is_last = sequence.prefilled == len(sequence.prompt)
        if is_last:
            self._decoding[sequence.slot] = sequence
        self._prefilling = None if is_last else sequence
        return Prefill(sequence.slot, token_ids, start, is_last, sequence.sampling), sequence

    def complete(self, output: StepOutput) -> list[Progress]:
        """Take the tokens of the oldest step in flight; sequences that end with it leave their slots.

        Tokens of sequences that have ended meanwhile are dropped.

        Raises:
            TransportError: The output is not that of the oldest step in flight, or lacks a slot.
        """
        flight = self._flights.popleft() if self._flights else None
        if flight is None or output.step_id != flight.step_id:
            expected = f"step {flight.step_id}" if flight else "none"
            raise TransportError(f"the output of step {output.step_id} arrived, expected {expected}")
        progress = []
        for slot, sequence in flight.owners:
            if slot not in output.tokens:
                raise TransportError(f"the output of step {flight.step_id} has no token for slot {slot}")
            if sequence.ended:
                continue
            logprobs = None
            if sequence.sampling.logprobs is not None:
                logprobs = output.logprobs.get(slot)
                if logprobs is None:
                    raise TransportError(f"the output of step {flight.step_id} has no logprobs for slot {slot}")
            progress.append(self._extend(sequence, output.tokens[slot], logprobs))
        return progress

    def _extend(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> Progress:
        sequence.generated += 1
        is_end = token_id in sequence.ends
        is_last = is_end or sequence.generated == sequence.most
        stops = is_end
        piece = ""
        if sequence.text is not None:
            piece = sequence.text.push(() if is_end else (token_id,), last=is_last)
            stops = is_end or sequence.text.stopped
        if stops or is_last:
            self._end(sequence)
        reason: FinishReason | None = "stop" if stops else "length" if is_last else None
        return Progress(sequence.request_id, token_id, reason, piece, logprobs)
