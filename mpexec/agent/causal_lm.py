"""CausalLMAgent: one rank of any Hugging Face causal language model that transformers can split over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from mpexec.agent.agreement import together
from mpexec.agent.base import ModelAgent
from mpexec.agent.checkpoint import (
    CheckpointFacts,
    check_libraries,
    check_tensor_parallel,
    read_checkpoint,
    weight_files,
)
from mpexec.agent.hub import resolve_model
from mpexec.agent.kv_cache import PromptView, SlotCache, SlotView, TokenView
from mpexec.agent.loading import ModelSource, build_model, load_model, open_weights, shapes
from mpexec.agent.residence import Residence
from mpexec.agent.sampling import Sampler, choose, logprobs
from mpexec.agent.steps import Prefill, StepInput, StepOutput
from mpexec.config import DTYPES
from mpexec.errors import ConfigError

DEFAULT_MAX_LENGTH = 4096
# Prompts are run together up to this many tokens. More would gain little and need memory for their activations.
TOGETHER = 2048


@dataclass(slots=True)
class Progress:
    """How far the sequence in a slot has come.

    Attributes:
        tokens: Of prompt and answer. While pieces of the prompt are missing, the cache holds all of them; then all but
            the last.
        complete: Whether the prompt is, and so `tokens` ends with a token of the answer.
    """

    sampler: Sampler
    tokens: list[int]
    complete: bool


class CausalLMAgent(ModelAgent):
    """Runs the steps of an engine (`mpexec.agent.steps`) on a causal language model, tensor-parallel over all ranks.

    Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Mixtral are tested on 1, 2 and 4 ranks; `build_model` refuses another
    family that it cannot split or cache. Greedy results equal those of transformers' `generate` on the same weights.
    Every rank chooses, from the same logits and the same random numbers, so all ranks agree on every token without
    telling each other. Log-probabilities are in the output of rank 0 only.
    """

    def __init__(
        self, model_path: str, *, max_slots: int = 8, max_length: int | None = None, dtype: str = "float32"
    ) -> None:
        """Check the arguments and read the folder's configuration; `build_model` loads the weights.

        Args:
            model_path: Local folder with a Hugging Face model, or the name of one on the hub; see `resolve_model`.
            max_slots: Sequences that can be in progress at once.
            max_length: Tokens, prompt included, that a sequence may have; the cache has room for `max_slots` of that
                length. None is the model's context length, but no more than 4096.
            dtype: "float32", "bfloat16" or "float16", for weights and cache.

        Raises:
            ConfigError: The folder cannot be used, or a value cannot work with it.
        """
        super().__init__()
        self._facts = read_checkpoint(resolve_model(model_path))
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
            ConfigError: The heads cannot be shared by `world_size` ranks, a library is missing, transformers has no
                plan for this model, the model does its attention in a way that the cache cannot follow, or the cache
                is too large for the device.
        """
        check_libraries(self.world_size)
        check_tensor_parallel(self._facts, self.world_size)
        self._source = ModelSource(self._facts.path, self.world_size, self.local_rank, self.device, self._dtype)
        self._model, self._vocabulary = load_model(self._source, self.report_progress)
        self.report_progress("allocating the cache")
        self._cache = self._make_cache()
        self._residence = Residence(self._model, self._cache)
        self.report_progress("trying the model")
        self._try_model()

    def _make_cache(self) -> SlotCache:
        """The cache, or a ConfigError that says what would make it smaller."""
        facts, kv_heads, dtype = self._facts, self._facts.kv_heads // self.world_size, getattr(torch, self._dtype)
        try:
            return SlotCache(
                layers=facts.layers,
                slots=self._max_slots,
                kv_heads=kv_heads,
                length=self._max_length,
                head_dim=facts.head_dim,
                dtype=dtype,
                device=self.device,
            )
        except Exception as error:  # of a kind that differs by device, and for sizes that are no memory's
            numbers = 2 * facts.layers * self._max_slots * kv_heads * self._max_length * facts.head_dim
            raise ConfigError(
                f"max_slots={self._max_slots} and max_length={self._max_length} need a cache of "
                f"{numbers * dtype.itemsize} bytes on each rank, which {self.device} does not have: make one of them "
                "smaller"
            ) from error

    @torch.inference_mode()
    def forward(self, inputs: StepInput) -> StepOutput:
        """Run one step. Every rank must be given the same steps in the same order; every rank returns the same tokens.

        Raises:
            ValueError: The step does not fit the slots (in use, empty, full or unknown), or holds a token that is not
                in the vocabulary. Nothing has been changed then.
        """
        self._check(inputs)
        self._free(inputs.free)
        output = StepOutput(inputs.step_id, {})
        # Prompts completed below are not among those decoded: `_check` has seen to it.
        for prompts in _group(inputs.prefill):
            self._prefill(prompts, output)
        if inputs.decode:
            self._decode(tuple(sorted(inputs.decode)), output)
        return output

    def reset(self) -> None:
        """Free every slot."""
        self._free(tuple(self._sequences))

    def _free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            sequence = self._sequences.pop(slot, None)
            if sequence is not None:
                self._cache.clear(slot, len(sequence.tokens))

    def sleep(self, level: int = 1) -> None:
        """Free every slot and the cache; on CUDA the weights move to memory of the host. `wakeup` must come next.

        Raises:
            ConfigError: A level other than 1; nothing has changed then.
        """
        if level != 1:
            raise ConfigError(f"level={level!r} of sleep is unknown to {type(self).__name__}: use 1")
        self.reset()
        self._residence.leave()

    def wakeup(self) -> None:
        """Undo `sleep`: weights back on the device, an empty cache.

        Raises:
            torch.OutOfMemoryError: Others have taken the memory meanwhile.
        """
        self._residence.come_back()

    def update_params(self, source: str | Path | Mapping[str, torch.Tensor]) -> None:
        """Replace all weights, in place and without a restart; every rank must be called with the same ones.

        Sequences in progress go on: their earlier tokens stay in the cache as the old weights left them. Needs memory
        for a second copy of this rank's weights meanwhile.

        Args:
            source: Whole tensors by their names in a checkpoint; or a safetensors file; or a folder of them.

        Raises:
            ValueError: Tensors are missing, of another shape, or not in the model.
            ConfigError: The files cannot be read, or another rank has refused its own. After either, every rank has the
                weights of before.
        """
        with ExitStack() as stack:
            # transformers exchanges something for tensors that it does not find: all ranks must lack the same ones.
            weights = together(self.world_size, lambda: stack.enter_context(self._open_weights(source)), shapes)
            model, _ = together(self.world_size, lambda: build_model(self._source, weights, strict=True))
            with torch.no_grad():
                for old, new in zip(self._model.parameters(), model.parameters(), strict=True):
                    old.copy_(new)

    @contextmanager
    def _open_weights(self, source: str | Path | Mapping[str, torch.Tensor]) -> Iterator[Mapping[str, Any]]:
        if not isinstance(source, str | Path):
            yield source
            return
        path = Path(source)
        with open_weights(weight_files(path) if path.is_dir() else [path], self.report_progress) as weights:
            yield weights

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
        freed = set(inputs.free)
        held = {slot: one for slot, one in self._sequences.items() if slot not in freed}
        decoded: set[int] = set()
        for slot in inputs.decode:
            if slot not in held or not held[slot].complete or slot in decoded:
                raise ValueError(f"slot {slot} cannot be decoded: it holds no whole prompt, or is named twice")
            decoded.add(slot)
            if len(held[slot].tokens) > self._max_length:
                raise ValueError(f"slot {slot} is full: it holds {self._max_length} tokens")
        begun: set[int] = set()
        for piece in inputs.prefill:
            if not 0 <= piece.slot < self._max_slots or piece.slot in begun:
                raise ValueError(f"slot {piece.slot} is named twice or not one of 0 to {self._max_slots - 1}")
            begun.add(piece.slot)
            self._check_piece(piece, held.get(piece.slot))

    def _check_piece(self, piece: Prefill, progress: Progress | None) -> None:
        """Raise ValueError for a piece that does not follow what its slot holds, or is no part of a possible prompt."""
        slot, end = piece.slot, piece.start + len(piece.token_ids)
        if progress is not None and (progress.complete or not piece.start):
            raise ValueError(f"slot {slot} is in use; free it first")
        if piece.start != (here := len(progress.tokens) if progress is not None else 0):
            raise ValueError(f"a piece of the prompt for slot {slot} starts at {piece.start}; it holds {here} tokens")
        if not piece.start < end < self._max_length:
            raise ValueError(f"a prompt of {end} tokens does not fit: it needs 1 to {self._max_length - 1}")
        if min(piece.token_ids) < 0 or max(piece.token_ids) >= self._facts.vocab_size:
            raise ValueError(f"the prompt for slot {slot} has a token outside of 0 to {self._facts.vocab_size - 1}")

    def _prefill(self, pieces: Sequence[Prefill], output: StepOutput) -> None:
        """Run the pieces one after the other in a single pass; add the first new token of each prompt that ends."""
        starts, lengths = [one.start for one in pieces], [len(one.token_ids) for one in pieces]
        spans = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        logits = self._run(
            [[token for one in pieces for token in one.token_ids]],
            [[position for span in spans for position in span]],
            PromptView(self._cache, [one.slot for one in pieces], starts, lengths),
            keep=[end - 1 for end, one in zip(accumulate(lengths), pieces, strict=True) if one.is_last],
        )
        for piece in pieces:
            if not piece.start:
                self._sequences[piece.slot] = Progress(Sampler(piece.sampling), [], False)
            progress = self._sequences[piece.slot]
            progress.tokens += piece.token_ids
            progress.complete = piece.is_last
        self._advance([one.slot for one in pieces if one.is_last], logits[0], output)

    def _decode(self, slots: Sequence[int], output: StepOutput) -> None:
        """Run one token of each slot in a single pass; add the next ones."""
        sequences = [self._sequences[slot].tokens for slot in slots]
        positions = [len(tokens) - 1 for tokens in sequences]
        view = TokenView(self._cache, slots, positions)
        logits = self._run([[tokens[-1]] for tokens in sequences], [[one] for one in positions], view, keep=[0])
        self._advance(slots, logits[:, 0], output)

    def _advance(self, slots: Sequence[int], logits: torch.Tensor, output: StepOutput) -> None:
        """Choose the next token of each slot from its row of this rank's logits, and step there."""
        sequences = [self._sequences[slot] for slot in slots]
        special = [row for row, one in enumerate(sequences) if one.sampler.needs_logits]
        tokens = self._vocabulary.argmax(logits) if len(special) < len(sequences) else [0] * len(sequences)
        if special:
            whole = self._vocabulary.gather(logits[special])
            samplers = [sequences[row].sampler for row in special]
            chosen = choose(whole, samplers, [sequences[row].tokens for row in special])
            for row, row_logits, token in zip(special, whole, chosen, strict=True):
                tokens[row] = token
                count = sequences[row].sampler.sampling.logprobs
                # Only the answer of rank 0 is looked at.
                if count is not None and self.rank == 0:
                    output.logprobs[slots[row]] = logprobs(row_logits, token, count)
        for slot, sequence, token in zip(slots, sequences, tokens, strict=True):
            sequence.tokens.append(token)
            output.tokens[slot] = token

    def _run(
        self, token_ids: list[list[int]], positions: list[list[int]], view: SlotView, *, keep: list[int]
    ) -> torch.Tensor:
        """Run the model on [batch, tokens]; return this rank's logits at `keep`, [batch, len(keep), share]."""
        output = self._model(
            input_ids=torch.tensor(token_ids, device=self.device),
            position_ids=torch.tensor(positions, device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.int64, device=self.device),
            slot_view=view,
        )
        logits: torch.Tensor = output.logits
        return logits

    @torch.inference_mode()
    def _try_model(self) -> None:
        """Meet first-call costs now, and make sure that every layer's attention goes through the cache."""
        # Two tokens, as the vector of a padding token is zero, and so may be its keys and values.
        self._prefill([Prefill(0, (0, 1))], output := StepOutput(0, {}))
        self._decode((0,), output)
        missing = int((self._cache.values[:, 0].abs().amax(dim=(1, 2, 3)) == 0).sum())
        self.reset()
        if missing:
            raise ConfigError(
                f"{missing} of {self._facts.layers} layers of this {self._facts.model_type} model do not use "
                "transformers' attention interface, so mpexec cannot cache their keys and values"
            )


def _resolve_length(facts: CheckpointFacts, wanted: int | None) -> int:
    most = facts.longest
    if wanted is None:
        return min(most, DEFAULT_MAX_LENGTH)
    if not 2 <= wanted <= most:
        reason = "sliding window" if facts.sliding_window and most == facts.sliding_window else "context length"
        raise ConfigError(f"max_length={wanted} is out of range; {facts.path.name} allows 2 to {most}, its {reason}")
    return wanted


def _group(prompts: Sequence[Prefill]) -> Iterator[list[Prefill]]:
    """Yield the pieces in order, in groups of at most `TOGETHER` tokens; a longer piece is a group of its own."""
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
