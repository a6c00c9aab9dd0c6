"""What travels between an engine and `CausalLMAgent`: one step in, one token per slot out. Needs no torch.

A slot is one row of the agent's cache and belongs to one sequence at a time. The life of a slot is
`prefill` (the whole prompt; yields the first new token), `decode` once per further token, `free`.
The agent remembers the last token and the position of every slot, so a step names slots only, and an engine may
send the next step before it has seen the tokens of this one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefill:
    """Start a sequence in a free slot.

    A sequence that was interrupted is resumed by a prefill of its prompt and the tokens generated so far: with the same
    seed it goes on as if nothing had happened, because the random number of a token depends on seed and position only.

    Attributes:
        slot: 0 to `max_slots - 1`.
        token_ids: The prompt: at least one token, and fewer than `max_length`.
        temperature: 0 is greedy; above 0, logits are divided by it and a token is drawn.
        seed: Of this sequence; any integer. Without effect at temperature 0.
    """

    slot: int
    token_ids: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step of the model. The parts run in the order `free`, `prefill`, `decode`.

    Attributes:
        step_id: Chosen by the sender; comes back in `StepOutput`.
        free: Slots whose sequences have ended; freeing a free slot does nothing.
        prefill: Sequences to start; their slots must be free.
        decode: Slots to give one more token each, in one batch. A slot prefilled in this very step is not among them.
    """

    step_id: int
    free: tuple[int, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The new tokens of one step.

    Attributes:
        step_id: That of the input.
        tokens: Next token by slot, for every slot in `prefill` and `decode`.
    """

    step_id: int
    tokens: dict[int, int]
