"""What one rank's model and cache occupy, given back while nobody asks for text, and taken again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mpexec.agent.kv_cache import SlotCache


class Residence:
    """The memory of a model and its cache.

    Args:
        model: Its parameters and buffers leave a CUDA device for memory of the host; on a CPU they stay.
        cache: What it holds is lost.

    Attributes:
        is_left: Between `leave` and `come_back`.
    """

    _moving = frozenset({"cuda"})

    def __init__(self, model: torch.nn.Module, cache: SlotCache) -> None:
        self._model = model
        self._cache = cache
        self._shape = cache.keys.shape
        self._moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self.is_left = False

    def leave(self) -> None:
        """Give the memory back to device and kernel. Again changes nothing."""
        if self.is_left:
            return
        self.is_left = True
        empty = self._cache.keys.new_empty(0)
        self._cache.keys = self._cache.values = empty
        # By storage, not by tensor: whatever else refers to a weight, such as the closure of a layer, stays right.
        for storage in self._storages():
            self._moved.append((storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)))
            storage.resize_(0)
        if empty.is_cuda:
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Take the memory again, the cache empty. Without `leave`, changes nothing.

        Raises:
            torch.OutOfMemoryError: Others have it. What has come back stays, and another call goes on.
        """
        while self._moved:
            storage, copy = self._moved[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self._moved.pop()
        if self.is_left:
            cache = self._cache
            cache.keys, cache.values = (
                torch.zeros(self._shape, dtype=held.dtype, device=held.device) for held in (cache.keys, cache.values)
            )
        self.is_left = False

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Each of the model's that is to move, once."""
        seen: set[int] = set()
        tensors: list[Any] = [*self._model.parameters(), *self._model.buffers()]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type in self._moving and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage
