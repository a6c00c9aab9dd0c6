"""A model agent of your own: each of two ranks holds half of a matrix, and together they multiply by all of it."""

import asyncio

import torch
import torch.distributed as dist

from mpexec import Executor, ModelAgent, build_executor


class SplitMatrix(ModelAgent):
    def __init__(self, size: int) -> None:
        self.size = size

    def build_model(self) -> None:
        """Runs once on every rank before the executor is ready; here `self.rank` and `self.device` are known."""
        whole = torch.arange(self.size * self.size, dtype=torch.float32).reshape(self.size, self.size)
        share = self.size // self.world_size
        self.mine = slice(self.rank * share, (self.rank + 1) * share)
        self.weight = whole[:, self.mine].to(self.device)

    def count(self, at_least: int) -> int:
        """Any public method can be called by its name."""
        entries = self.weight.numel()
        if entries < at_least:
            raise ValueError(f"rank {self.rank} has only {entries} entries")
        return entries

    def preprocess(self, inputs: list[float]) -> torch.Tensor:
        """Prepares the next input while `forward` is at this one."""
        if len(inputs) != self.size:
            raise ValueError(f"{len(inputs)} numbers for a matrix of {self.size} columns")
        return torch.tensor(inputs, device=self.device)

    def forward(self, inputs: torch.Tensor) -> list[float]:
        """What it returns on rank 0 is the output."""
        product = self.weight @ inputs[self.mine]
        dist.all_reduce(product)
        return product.tolist()


async def main(executor: Executor) -> None:
    async with executor:
        print("entries on each rank:", await executor.collective_rpc_async("count", args=(1,)))

        for number in (1.0, 2.0, 3.0):  # the next is sent while the ranks are at the one before
            await executor.forward_async([number, 0.0, 0.0, number])
        for _ in range(3):
            print("output:", await executor.get_output_async())

        try:
            await executor.collective_rpc_async("count", args=(100,), ranks=[1])
        except ValueError as error:  # the error of the rank itself; all ranks live on
            print("a call failed:", error)
        print("the next call:", await executor.collective_rpc_async("count", args=(1,)))

        await executor.forward_async([1.0, 2.0])
        await executor.wait_tasks()  # until `preprocess` or `forward` fails on some rank


if __name__ == "__main__":
    try:
        asyncio.run(main(build_executor(SplitMatrix, agent_args=(4,), world_size=2)))
    except ValueError as error:
        print("a background task failed:", error)
