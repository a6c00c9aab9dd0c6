"""A training loop in one program: it makes the batches, two ranks learn from half of each, and agree on the gradients.

usage: python examples/training_loop.py FOLDER    # another run with the same folder goes on where this one ended
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mpexec import ModelAgent, build_executor

STEPS = 40
RATE = 0.05


class Trainer(ModelAgent):
    def build_model(self) -> None:
        torch.manual_seed(0)  # all ranks begin with the same parameters
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.model.to(self.device)

    def train(self, points: torch.Tensor, targets: torch.Tensor) -> float:
        predicted = self.model(points.to(self.device))
        loss = torch.nn.functional.mse_loss(predicted, targets.to(self.device))
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        with torch.no_grad():  # by hand, which starts a second sooner than torch.optim; that works as well
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                dist.all_reduce(gradient)  # the sum over all ranks
                parameter -= RATE * gradient / self.world_size
        return loss.item()

    def parameters(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().cpu()

    def save(self, path: Path, step: int) -> None:
        half = path.with_suffix(".half")  # a run that ends while it writes leaves the old checkpoint whole
        torch.save({"step": step, "model": self.model.state_dict()}, half)
        os.replace(half, path)

    def load(self, path: Path) -> int:
        saved = torch.load(path, map_location=self.device)
        self.model.load_state_dict(saved["model"])
        return saved["step"]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    points = torch.rand(64, 2, generator=torch.Generator().manual_seed(step))
    return points, (points[:, :1] * points[:, 1:]).sqrt()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    # From the fork server: torch is imported once, for both ranks.
    with build_executor(Trainer, world_size=2, start_method="forkserver") as executor:
        first = 0
        if checkpoint.exists():
            first = executor.collective_rpc("load", args=(checkpoint,), reply_ranks=0)
            print("goes on after step", first)
        for step in range(first + 1, first + STEPS + 1):
            halves = list(zip(*(tensor.chunk(2) for tensor in batch(step)), strict=True))
            losses = executor.collective_rpc("train", args_per_rank=halves, timeout=60.0)
            if step % 10 == 0:
                print(f"step {step:3}  loss {sum(losses) / len(losses):.4f}")
        executor.collective_rpc("save", args=(checkpoint, step), ranks=0)
        one, other = executor.collective_rpc("parameters")
        print("the ranks have the same parameters:", torch.equal(one, other))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) == 2 else sys.exit(__doc__))
