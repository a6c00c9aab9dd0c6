"""One script, three ways to run it: as a program that starts its ranks, or as a job whose processes become the ranks.

python examples/attach.py
mpexec run --nproc-per-node 3 examples/attach.py
torchrun --standalone --nproc-per-node 3 examples/attach.py
"""

import warnings

from mpexec import ModelAgent, MPExecutor


class Mean(ModelAgent):
    """Every rank holds a part of the numbers; the ranks together know their mean."""

    def build_model(self) -> None:
        import torch

        self.part = torch.arange(4.0) + 4 * self.rank

    def mean(self, shift: float) -> float:
        import torch.distributed as dist

        total = (self.part + shift).sum()
        dist.all_reduce(total)
        return float(total / (len(self.part) * self.world_size))


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)
    # In a job of three processes, two of them stay in this line as ranks until the executor is released, then end.
    with MPExecutor.attach(Mean, world_size=2, device="cpu") as executor:
        print(executor.collective_rpc("mean", args=(0.0,)))
        print(executor.collective_rpc("mean", args=(1.0,)))
