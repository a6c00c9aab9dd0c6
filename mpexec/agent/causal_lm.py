"""CausalLMAgent: one rank of any Hugging Face causal language model that transformers can split over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from mpexec.agent.base import ModelAgent
from mpexec.agent.checkpoint import CheckpointFacts, check_tensor_parallel, read_checkpoint
from mpexec.agent.kv_cache import PromptView, SlotCache, SlotView, TokenView
from mpexec.agent.sampling import sample
from mpexec.agent.sharding import load_model
from mpexec.agent.steps import Prefill, StepInput, StepOutput
from mpexec.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_MAX_LENGTH = 4096
# Prompts are run together up to this many tokens. More would gain little and need memory for their activations.
TOGETHER = 2048


@dataclass(slots=True)
class Progress:
    """How far the sequence in a slot has come."""

    last_token: int
    position: int  # of last_token, which is not in the cache yet
    temperature: float
    seed: int


class CausalLMAgent(ModelAgent):
    """Runs the steps of an engine (`mpexec.agent.steps`) on a causal language model, tensor-parallel over all ranks.

    Greedy results equal those of transformers' `generate` on the same weights. Every rank samples, from the same logits
    and the same random numbers, so all ranks agree on every token without telling each other.
    """

    def __init__(
        self, model_path: str, *, max_slots: int = 8, max_length: int | None = None, dtype: str = "float32"
    ) -> None:
        """Check the arguments and read the folder's configuration; `build_model` loads the weights.

        Args:
            model_path: Local folder with a Hugging Face model.
            max_slots: Sequences that can be in progress at once.
            max_length: Tokens, prompt included, that a sequence may have; the cache has room for `max_slots` of that
                length. None is the model's context length, but no more than 4096.
            dtype: "float32", "bfloat16" or "float16", for weights and cache.

        Raises:
            ConfigError: The folder cannot be used, or a value cannot work with it.
        """
        super().__init__()
        self._facts = read_checkpoint(model_path)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if max_slots < 1:
            raise ConfigError(f"max_slots={max_slots} leaves no room for a sequence; use 1 or more")
        self._dtype = dtype
        self._max_slots = max_slots
        self._max_length = _resolve_length(self._facts, max_length)
        self._sequences: dict[int, Progress] = {}

    def build_model(self) -> None:
        """Load this rank's weights, allocate the cache and run one short prompt through both.

        Raises:
            ConfigError: The heads cannot be shared by `world_size` ranks, transformers is missing or has no plan for
                this model, or the model does its attention in a way that the cache cannot follow.
        """
        check_tensor_parallel(self._facts, self.world_size)
        self.report_progress(f"loading {self._facts.path.name}")
        self._model = load_model(
            str(self._facts.path),
            world_size=self.world_size,
            local_rank=self.local_rank,
            device=self.device,
            dtype=self._dtype,
        )
        self._cache = SlotCache(
            layers=self._facts.layers,
            slots=self._max_slots,
            kv_heads=self._facts.kv_heads // self.world_size,
            length=self._max_length,
            head_dim=self._facts.head_dim,
            dtype=getattr(torch, self._dtype),
            device=self.device,
        )
        self.report_progress("trying the model")
        self._try_model()

    @torch.inference_mode()
    def forward(self, inputs: StepInput) -> StepOutput:
        """Run one step. Every rank must be given the same steps in the same order; every rank returns the same tokens.

        Raises:
            ValueError: The step does not fit the slots (in use, empty, full or unknown), or holds a token that is not
                in the vocabulary. Nothing has been changed then.
        """
        self._check(inputs)
        for slot in inputs.free:
            self._sequences.pop(slot, None)
        tokens: dict[int, int] = {}
        # Sequences started below are not among those decoded: `_check` has seen to it.
        for prompts in _group(inputs.prefill):
            tokens.update(self._prefill(prompts))
        if inputs.decode:
            tokens.update(self._decode(tuple(sorted(inputs.decode))))
        return StepOutput(inputs.step_id, tokens)

    def reset(self) -> None:
        """Free every slot."""
        self._sequences.clear()

    def model_facts(self) -> dict[str, Any]:
        """Return plain values about model and cache; counts are of the whole model, `cache_nbytes` of this rank."""
        facts = self._facts
        return {
            "path": str(facts.path),
            "model_type": facts.model_type,
            "vocab_size": facts.vocab_size,
            "context_length": facts.context_length,
            "eos_token_ids": facts.eos_token_ids,
            "layers": facts.layers,
            "heads": facts.heads,
            "kv_heads": facts.kv_heads,
            "parameters": facts.parameters,
            "dtype": self._dtype,
            "max_slots": self._max_slots,
            "max_length": self._max_length,
            "cache_tokens": self._max_slots * self._max_length,
            "cache_nbytes": self._cache.nbytes,
        }

    def _check(self, inputs: StepInput) -> None:
        """Raise ValueError for what `forward` refuses, before anything has been changed."""
        busy = self._sequences.keys() - set(inputs.free)
        for slot in inputs.decode:
            if slot not in busy or inputs.decode.count(slot) > 1:
                raise ValueError(f"slot {slot} cannot be decoded: it holds no sequence, or is named twice")
            if self._sequences[slot].position >= self._max_length:
                raise ValueError(f"slot {slot} is full: it holds {self._max_length} tokens")
        for prompt in inputs.prefill:
            slot, length = prompt.slot, len(prompt.token_ids)
            if slot in busy or not 0 <= slot < self._max_slots:
                raise ValueError(f"slot {slot} is in use or not one of 0 to {self._max_slots - 1}; free it first")
            busy.add(slot)
            if not 0 < length < self._max_length:
                raise ValueError(f"a prompt of {length} tokens does not fit: it needs 1 to {self._max_length - 1}")
            if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= self._facts.vocab_size:
                raise ValueError(f"the prompt for slot {slot} has a token outside of 0 to {self._facts.vocab_size - 1}")

    def _prefill(self, prompts: Sequence[Prefill]) -> dict[int, int]:
        """Run the prompts one after the other in a single pass; return the first new token of each slot."""
        slots, lengths = [one.slot for one in prompts], [len(one.token_ids) for one in prompts]
        logits = self._run(
            [[token for one in prompts for token in one.token_ids]],
            [[position for length in lengths for position in range(length)]],
            PromptView(self._cache, slots, lengths),
            keep=[end - 1 for end in accumulate(lengths)],
        )
        started = [Progress(0, len(one.token_ids) - 1, one.sampling.temperature, one.sampling.seed) for one in prompts]
        self._sequences.update(zip(slots, started, strict=True))
        return dict(zip(slots, self._advance(started, logits[0]), strict=True))

    def _decode(self, slots: Sequence[int]) -> dict[int, int]:
        """Run one token of each slot in a single pass; return the next ones."""
        running = [self._sequences[slot] for slot in slots]
        positions = [one.position for one in running]
        view = TokenView(self._cache, slots, positions)
        logits = self._run([[one.last_token] for one in running], [[one] for one in positions], view, keep=[0])
        return dict(zip(slots, self._advance(running, logits[:, 0]), strict=True))

    def _advance(self, sequences: list[Progress], logits: torch.Tensor) -> list[int]:
        """Choose the next token of each sequence from its row of logits, and step there."""
        tokens = sample(
            logits,
            temperatures=[one.temperature for one in sequences],
            seeds=[one.seed for one in sequences],
            positions=[one.position + 1 for one in sequences],
        )
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.last_token, sequence.position = token, sequence.position + 1
        return tokens

    def _run(
        self, token_ids: list[list[int]], positions: list[list[int]], view: SlotView, *, keep: list[int]
    ) -> torch.Tensor:
        """Run the model on [batch, tokens]; return the logits at the indices `keep`, [batch, len(keep), vocabulary]."""
        output = self._model(
            input_ids=torch.tensor(token_ids, device=self.device),
            position_ids=torch.tensor(positions, device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, device=self.device),
            slot_view=view,
        )
        logits: torch.Tensor = output.logits
        return logits

    @torch.inference_mode()
    def _try_model(self) -> None:
        """Meet first-call costs now, and make sure that every layer's attention goes through the cache."""
        # Two tokens, as the vector of a padding token is zero, and so may be its keys and values.
        self._prefill([Prefill(0, (0, 1))])
        self._decode((0,))
        self.reset()
        missing = int((self._cache.values[:, 0].abs().amax(dim=(1, 2, 3)) == 0).sum())
        if missing:
            raise ConfigError(
                f"{missing} of {self._facts.layers} layers of this {self._facts.model_type} model do not use "
                "transformers' attention interface, so mpexec cannot cache their keys and values"
            )


def _resolve_length(facts: CheckpointFacts, wanted: int | None) -> int:
    most = min(facts.context_length, facts.sliding_window or facts.context_length)
    if wanted is None:
        return min(most, DEFAULT_MAX_LENGTH)
    if not 2 <= wanted <= most:
        reason = "sliding window" if facts.sliding_window and most == facts.sliding_window else "context length"
        raise ConfigError(f"max_length={wanted} is out of range; {facts.path.name} allows 2 to {most}, its {reason}")
    return wanted


def _group(prompts: Sequence[Prefill]) -> Iterator[list[Prefill]]:
    """Yield the prompts in order, in groups of at most `TOGETHER` tokens; a longer prompt is a group of its own."""
    group: list[Prefill] = []
    tokens = 0
    for prompt in prompts:
        if group and tokens + len(prompt.token_ids) > TOGETHER:
            yield group
            group, tokens = [], 0
        group.append(prompt)
        tokens += len(prompt.token_ids)
    if group:
        yield group
