"""The agents that the benchmarks put into ranks. Importing this module loads neither torch nor numpy."""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from typing import Any

from mpexec.agent.base import ModelAgent


class EchoAgent(ModelAgent):
    """Answers, and does nothing else."""

    def echo(self, value: Any) -> Any:
        return value


class TorchAgent(EchoAgent):
    """Lives in a rank that has torch loaded."""

    def has_gloo(self) -> bool:
        import torch.distributed

        return torch.distributed.is_initialized()

    def sleep(self, seconds: float) -> None:
        """Keep the rank's main thread in C."""
        time.sleep(seconds)

    async def wait_for_nothing(self) -> None:
        """Stay in the call for ever while the rank itself is idle."""
        await asyncio.Event().wait()


class BufferAgent(ModelAgent):
    """Takes and gives large buffers."""

    def build_model(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._kept: Any = None

    def touch(self, buffer: Any) -> None:
        """Read the first and the last element."""
        float(buffer[0])
        float(buffer[-1])

    def checksum(self, buffer: Any) -> int:
        """CRC of all bytes."""
        return checksum(buffer)

    def keep(self, kind: str, nbytes: int, start: int) -> int:
        """Make a buffer for `give`; returns its CRC."""
        self._kept = make_buffer(kind, nbytes, start)
        return checksum(self._kept)

    def give(self) -> Any:
        """The buffer that `keep` made."""
        return self._kept


def make_buffer(kind: str, nbytes: int, start: int) -> Any:
    """A float32 array or tensor of `nbytes` bytes, with contents that no shift or mix-up of parts leaves alike."""
    import numpy as np

    words = np.arange(start, start + nbytes // 4, dtype=np.uint32)
    array = (words & np.uint32(0x007FFFFF)).astype(np.float32)
    if kind == "numpy":
        return array
    import torch

    return torch.from_numpy(array)


def checksum(buffer: Any) -> int:
    """CRC of an array's or tensor's bytes."""
    torch = sys.modules.get("torch")
    array = buffer.numpy() if torch is not None and isinstance(buffer, torch.Tensor) else buffer
    return zlib.crc32(array.view("u1").data)
