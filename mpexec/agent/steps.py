"""What travels between an engine and `CausalLMAgent`: one step in, one token per slot out. Needs no torch.

A slot is one row of the agent's cache and belongs to one sequence at a time. The life of a slot is
`prefill` (the whole prompt at once or piece by piece; the last piece yields the first new token), `decode` once per
further token, `free`. The agent remembers the last token and the position of every slot, so a step names slots only,
and an engine may send the next step before it has seen the tokens of this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one sequence are chosen. What `SamplingParams` has checked; the agent checks nothing.

    Attributes:
        temperature: 0 is greedy; above 0, logits are divided by it and a token is drawn.
        seed: Of this sequence; any integer. Without effect at temperature 0.
        top_k: Only the k most likely tokens are drawn from; 0 for all.
        top_p: Only the most likely tokens that together have this probability; 1 for all.
        min_p: Only tokens that are at least this share as likely as the most likely one; 0 for all.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens that prompt or answer have
            already; 1 for none. Also applies at temperature 0.
        logprobs: How many of the most likely tokens are reported beside the chosen one; None reports nothing.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Prefill:
    """A piece of a prompt: the first one starts a sequence in a free slot, the last one yields its first new token.

    A sequence that was interrupted is resumed by a prefill of its prompt and the tokens generated so far: with the same
    seed it goes on as if nothing had happened, because the random number of a token depends on seed and position only.

    Attributes:
        slot: 0 to `max_slots - 1`.
        token_ids: Of this piece: at least one. The whole prompt has fewer than `max_length`.
        start: Position of the piece's first token: 0 for the first piece, then where the piece before ended.
        is_last: False if more of the prompt follows; then the slot is not among the tokens of the output.
        sampling: The same for all pieces.
    """

    slot: int
    token_ids: tuple[int, ...]
    start: int = 0
    is_last: bool = True
    sampling: Sampling = GREEDY


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step of the model. The parts run in the order `free`, `prefill`, `decode`.

    Attributes:
        step_id: Chosen by the sender; comes back in `StepOutput`.
        free: Slots whose sequences have ended; freeing a free slot does nothing.
        prefill: Pieces of prompts, at most one for each slot.
        decode: Slots to give one more token each, in one batch. A slot prefilled in this very step is not among them.
    """

    step_id: int
    free: tuple[int, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a chosen token was, and which ones were the most likely.

    Attributes:
        chosen: Natural logarithm of the probability of the chosen token, of the model's own distribution (before
            temperature, penalties and filters).
        top: Token ids with their logarithms, the most likely first, as many as were asked for.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The new tokens of one step.

    Attributes:
        step_id: That of the input.
        tokens: Next token by slot, for every slot whose prompt's last piece is in `prefill`, or that is in `decode`.
        logprobs: By slot, for those that asked for it.
    """

    step_id: int
    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
