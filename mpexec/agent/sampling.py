"""From logits to tokens. The random number of a token depends on its seed and position, and on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpexec.agent.loading import import_transformers
from mpexec.agent.steps import Sampling, TokenLogprobs


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token at `position` of the sequence with `seed`.

    The same on every machine, rank and device. Seeds may be any integers, of any size and sign.
    """
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


class Sampler:
    """Scores the tokens of one sequence by transformers' own logits processors; made when the sequence starts.

    Attributes:
        sampling: What was asked for.
        needs_logits: False if the index of the largest logit is all that matters.
    """

    __slots__ = ("_processors", "needs_logits", "sampling")

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._processors = logits_processors(sampling)
        self.needs_logits = bool(self._processors) or sampling.logprobs is not None

    def scores(self, logits: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Return the logits, [vocabulary], after penalty, temperature and filters; what is filtered out has -inf.

        They are float64 where a token is drawn, so that one rank and several hardly differ, and float32, as in
        `generate`, where the largest one is taken.

        Args:
            logits: [vocabulary], any float type and device.
            token_ids: The sequence so far, prompt and answer.
        """
        drawn = self.sampling.temperature > 0.0
        scores = logits[None].to(torch.float64 if drawn else torch.float32)
        penalised = self.sampling.repetition_penalty != 1.0
        so_far = torch.tensor([token_ids], device=logits.device) if penalised else None
        for processor in self._processors:
            scores = processor(so_far, scores)
        return scores[0]


def logits_processors(sampling: Sampling) -> list[Any]:
    """Return the processors that `generate` would use for the same values, in its order."""
    wanted: list[tuple[str, Any]] = []
    if sampling.repetition_penalty != 1.0:
        wanted.append(("RepetitionPenaltyLogitsProcessor", float(sampling.repetition_penalty)))
    if sampling.temperature > 0.0:
        wanted.append(("TemperatureLogitsWarper", float(sampling.temperature)))
        if sampling.top_k:
            wanted.append(("TopKLogitsWarper", sampling.top_k))
        if sampling.top_p < 1.0:
            wanted.append(("TopPLogitsWarper", sampling.top_p))
        if sampling.min_p:
            wanted.append(("MinPLogitsWarper", sampling.min_p))
    if not wanted:
        return []
    processors = import_transformers().generation.logits_process
    return [getattr(processors, name)(value) for name, value in wanted]


def choose(logits: Tensor, samplers: Sequence[Sampler], sequences: Sequence[Sequence[int]]) -> list[int]:
    """Choose the next token of each sequence.

    At temperature 0 it is the one with the best score, and the lowest id among equals. Else it is drawn by inverting
    the cumulative distribution at the random number of the token's position. A row's token does not depend on other
    rows.

    Args:
        logits: [rows, vocabulary], any float type and device.
        samplers: One for each row.
        sequences: The tokens so far, prompt and answer, one sequence for each row.
    """
    scores = [one.scores(row, tokens) for one, row, tokens in zip(samplers, logits, sequences, strict=True)]
    drawn = [row for row, sampler in enumerate(samplers) if sampler.sampling.temperature > 0.0]
    tokens = [-1 if row in drawn else int(one.argmax()) for row, one in enumerate(scores)]
    if drawn:
        points = [uniform(samplers[row].sampling.seed, len(sequences[row])) for row in drawn]
        for row, token in zip(drawn, _invert(torch.stack([scores[row] for row in drawn]), points), strict=True):
            tokens[row] = token
    return tokens


def logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Return how likely the model finds `token`, and its `count` most likely ones.

    Args:
        logits: [vocabulary], any float type and device.
    """
    logarithms = logits.double().log_softmax(dim=-1)
    best = logarithms.topk(min(count, logarithms.shape[0]))
    return TokenLogprobs(float(logarithms[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def _invert(scores: Tensor, points: list[float]) -> list[int]:
    """Return, for each row, the first token whose cumulative probability exceeds the row's point."""
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1)
    # Scaled by the last sum, not by 1, and kept below it: a point near 1 must not fall past the last possible token.
    total = cumulative[:, -1:]
    targets = torch.tensor(points, dtype=torch.float64, device=scores.device)[:, None] * total
    targets = targets.minimum(total.nextafter(torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    # Scores that are no numbers are found nowhere: the model must not be asked for a token that there is not.
    tokens: list[int] = found.clamp_(max=scores.shape[-1] - 1).tolist()
    return tokens
