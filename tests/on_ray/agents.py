"""What the ranks do here. Imported by name in the actors."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from faults.misdeeds import announce, misbehave

from mpexec import ModelAgent


class Agent(ModelAgent):
    """Well-behaved but for the rank and the manner that a call names; see `misdeeds.misbehave`."""

    def echo(self, value: Any) -> Any:
        """The value, and this rank."""
        return value, self.rank

    def act(self, manner: str, culprit: int) -> Any:
        return misbehave(manner) if self.rank == culprit else self.rank

    async def act_async(self, manner: str, culprit: int) -> Any:
        await asyncio.sleep(0)
        return misbehave(manner) if self.rank == culprit else self.rank

    def forward(self, inputs: tuple[str, int]) -> Any:
        """As `act`, in the forward loop."""
        return self.act(*inputs)

    def later(self, manner: str, culprit: int) -> None:
        """Misbehave once the rank is idle again."""
        if self.rank == culprit:
            asyncio.get_running_loop().call_soon(misbehave, manner)

    def announced(self, path: str, ranks: list[int], manner: str) -> Any:
        """Say by a named pipe that this rank has begun, then misbehave, where it is one of the ranks."""
        if self.rank not in ranks:
            return self.rank
        announce(path)
        return misbehave(manner)

    def add_up(self, number: int) -> int:
        """The sum over all ranks of number + rank."""
        import torch
        import torch.distributed as dist

        total = torch.tensor([number + self.rank])
        dist.all_reduce(total)
        return int(total)

    def act_in_all_reduce(self, manner: str, culprit: int, pipe: str) -> Any:
        """Sit in an all-reduce, all but the culprit, who misbehaves at the word of the driver."""
        if self.rank != culprit:
            with open(pipe + ".thread", "w") as file:
                file.write(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/stat")
            announce(pipe)
            return self.add_up(0)
        announce(pipe)
        with open(pipe + ".go") as file:
            file.read()
        return misbehave(manner)

    def seat(self) -> dict[str, Any]:
        """Where this rank sits, as it sees it itself."""
        import ray

        context = ray.get_runtime_context()
        return {"node": context.get_node_id(), "group": context.get_placement_group_id(), "pid": os.getpid()}

    # -- arrays --------------------------------------------------------------------------------------------------------

    def size(self, array: Any) -> int:
        return int(array.nbytes)

    def hold(self, array: Any, pipe: str) -> int:
        """Keep the array until the driver gives its word."""
        announce(pipe)
        with open(pipe + ".go") as file:
            file.read()
        return int(array.nbytes)

    def grow(self, nbytes: int, fill: int) -> Any:
        """An array of this rank's own."""
        import numpy

        return numpy.full(nbytes, fill + self.rank, dtype=numpy.uint8)

    def give_back(self, array: Any) -> Any:
        return array

    def scribble(self, array: Any, pipe: str) -> tuple[bool, int]:
        """Rank 0 tries to write into the array, and then rank 1 looks at its own.

        Returns:
            Whether it can be written to, and its sum.
        """
        writable = bool(array.flags.writeable)
        if self.rank == 0:
            if writable:
                array[:] = 0
            announce(pipe)
        else:
            with open(pipe) as file:
                file.read()
        return writable, int(array.sum(dtype="int64"))

    def add_one(self, tensor: Any) -> float:
        """Change a tensor in place; the sum of it."""
        tensor += 1
        return float(tensor.sum())
