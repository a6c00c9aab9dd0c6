"""Keys and values of several sequences, one slot each, and the attention over them that transformers calls.

A model loaded with `attn_implementation=ATTENTION_NAME` hands every layer's query, key and value to `slot_attention`,
and with them the `SlotView` that was given to the model as the keyword `slot_view`. The view stores the new keys and
values and attends over what its slots hold. Shapes below: H query heads and K key/value heads of this rank, D width of
a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION_NAME = "mpexec_slots"


class SlotCache:
    """Room for `slots` sequences of up to `length` tokens, allocated once.

    Attributes:
        keys: [layers, slots, K, length, D].
        values: The same shape.
    """

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (layers, slots, kv_heads, length, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Size in bytes; on a CPU the kernel provides pages only as they are written."""
        return self.keys.nbytes + self.values.nbytes

    def clear(self, slot: int, length: int) -> None:
        """Forget the first `length` tokens of a slot.

        What lies beyond a sequence is masked only: with a weight of zero, a value that is not finite still makes the
        whole sum not a number. Masked keys have no such effect.
        """
        self.values[:, slot, :, :length] = 0


class SlotView(Protocol):
    """The slots of one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store `key` and `value`, [batch, K, tokens, D]; return the attention of `query`, [batch, H, tokens, D]."""
        ...


class PromptView:
    """Prompts of one or several sequences, or pieces of prompts, one after the other in a batch of 1."""

    def __init__(self, cache: SlotCache, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Prepare a pass over `sum(lengths)` tokens.

        The first `lengths[0]` belong to `slots[0]`, which holds `starts[0]` tokens before them, and so on.
        """
        device = cache.keys.device
        self._cache = cache
        self._lengths = list(lengths)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        self._pieces = list(zip(slots, starts, ends, strict=True))
        self._masks = [_visible(start, end, device) if start else None for _, start, end in self._pieces]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend causally within each prompt, over its earlier pieces too. See `SlotView`; batch is 1."""
        queries, keys, values = (one.split(self._lengths, dim=2) for one in (query, key, value))
        outputs = []
        for (slot, start, end), mask, q, k, v in zip(self._pieces, self._masks, queries, keys, values, strict=True):
            held_keys, held_values = self._cache.keys[layer, slot, :, :end], self._cache.values[layer, slot, :, :end]
            held_keys[:, start:], held_values[:, start:] = k[0], v[0]
            if start:
                k, v = held_keys[None], held_values[None]
            grouped = q.shape[1] != k.shape[1]
            causal = mask is None and end > 1
            outputs.append(
                scaled_dot_product_attention(q, k, v, mask, scale=scale, is_causal=causal, enable_gqa=grouped)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _visible(start: int, end: int, device: torch.device) -> Tensor:
    """Return [end - start, end]: which positions the tokens from `start` on may see."""
    return torch.arange(end, device=device)[None] <= torch.arange(start, end, device=device)[:, None]


class TokenView:
    """One new token of each of several sequences."""

    def __init__(self, cache: SlotCache, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Prepare a pass that writes the token of `slots[i]` at `positions[i]`; slots are distinct."""
        device = cache.keys.device
        self._cache = cache
        self._slots = torch.tensor(slots, device=device)
        self._positions = torch.tensor(positions, device=device)
        self._used = max(positions) + 1
        # Rows that lie next to each other in order need no gathering: a slice is a view.
        first = slots[0]
        self._slice = slice(first, first + len(slots)) if list(slots) == [*range(first, first + len(slots))] else None
        self._mask: Tensor | None = None
        if min(positions) != max(positions):
            visible = torch.arange(self._used, device=device)[None] <= self._positions[:, None]
            self._mask = visible[:, None, None, :]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend over everything each slot holds, the new token included. See `SlotView`; tokens is 1."""
        keys = self._store(self._cache.keys[layer], key)
        values = self._store(self._cache.values[layer], value)
        batch, heads, _, width = query.shape
        # The query heads that share a key/value head become rows of one product, so keys need no repeating.
        grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
        output = scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        return output.reshape(batch, heads, 1, width)

    def _store(self, held: Tensor, new: Tensor) -> Tensor:
        """Write [batch, K, 1, D] into [slots, K, length, D]; return the used part of the rows, [batch, K, used, D]."""
        held[self._slots, :, self._positions] = new[:, :, 0]
        used = held[:, :, : self._used]
        return used[self._slice] if self._slice is not None else used.index_select(0, self._slots)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slot_view: SlotView,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers. Returns [batch, tokens, H, D] and no weights.

    `attention_mask` is None: transformers makes no mask for an implementation whose name it does not know.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    return slot_view.attend(layer, query, key, value, scaling).transpose(1, 2), None
