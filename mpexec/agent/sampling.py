"""From logits to tokens. The random number of a token depends on its seed and position, and on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token at `position` of the sequence with `seed`.

    The same on every machine, rank and device. Seeds may be any integers, of any size and sign.
    """
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


def sample(
    logits: Tensor, *, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """Choose one token for each row.

    A row at temperature 0 gets its largest logit (the lowest token id among equals). Other rows are drawn by inverting
    the cumulative distribution at `uniform(seed, position)`, in float64, so that a row's token does not depend on other
    rows.

    Args:
        logits: [rows, vocabulary], any float type and device.
        temperatures: One for each row, 0 or above.
        seeds: One for each row.
        positions: Index that the new token will have in its sequence, one for each row.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [row for row, temperature in enumerate(temperatures) if temperature > 0.0]
    if drawn:
        scale = torch.tensor([temperatures[row] for row in drawn], dtype=torch.float64, device=logits.device)
        points = [uniform(seeds[row], positions[row]) for row in drawn]
        chosen = _invert(logits[drawn].double() / scale[:, None], points)
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


def _invert(scores: Tensor, points: list[float]) -> list[int]:
    """Return, for each row, the first token whose cumulative probability exceeds the row's point."""
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1)
    # Scaling by the last sum, not by 1, keeps a point just below 1 from falling past the end.
    targets = torch.tensor(points, dtype=torch.float64, device=scores.device)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True).clamp_(max=scores.shape[-1] - 1)
    return [int(token) for token in found[:, 0].tolist()]
