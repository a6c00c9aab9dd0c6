"""The logits of a model whose ranks compute a part of the vocabulary each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Vocabulary:
    """Puts the ranks' parts of the logits together, and no more of them than is needed.

    Each rank has the tokens `share * rank` to `share * (rank + 1) - 1`, but the last ranks may have fewer. All ranks
    must call the methods together; each gets the same answer. With one rank nothing is exchanged.
    """

    def __init__(self, width: int, ranks: int = 1) -> None:
        """Take the number of tokens, and the number of ranks that share their logits."""
        self._width = width
        self._ranks = ranks
        self._share = -(-width // ranks)

    def argmax(self, part: Tensor) -> list[int]:
        """Return the token with the largest logit in each row of [rows, share]; the lowest one among equals."""
        if self._ranks == 1:
            tokens: list[int] = part.argmax(dim=-1).tolist()
            return tokens
        best = self._padded(part).max(dim=-1)
        # A double holds every token id exactly, so that one exchange brings both.
        mine = torch.stack((best.values.double(), (best.indices + self._share * dist.get_rank()).double()))
        values, indices = self._exchange(mine).unbind(1)
        winners = values.argmax(dim=0, keepdim=True)
        return [int(token) for token in indices.gather(0, winners)[0].tolist()]

    def gather(self, part: Tensor) -> Tensor:
        """Return all logits, [rows, vocabulary], from this rank's [rows, share]."""
        if self._ranks == 1:
            return part
        return self._exchange(self._padded(part)).movedim(0, -2).flatten(-2)[..., : self._width]

    def _padded(self, part: Tensor) -> Tensor:
        missing = self._share - part.shape[-1]
        return torch.nn.functional.pad(part, (0, missing), value=-torch.inf) if missing else part

    def _exchange(self, mine: Tensor) -> Tensor:
        """Return [ranks, ...]."""
        mine = mine.contiguous()
        parts = mine.new_empty(self._ranks, *mine.shape)
        dist.all_gather(list(parts.unbind(0)), mine)
        return parts
