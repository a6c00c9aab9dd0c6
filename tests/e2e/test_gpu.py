"""What needs CUDA devices; skipped, and said so, where there are none."""

from __future__ import annotations

import pytest

from mpexec import ModelAgent, build_executor


def _devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class OnDevice(ModelAgent):
    def total(self) -> tuple[str, float]:
        import torch
        import torch.distributed as dist

        ones = torch.ones(4, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(ones)
        return self.device, float(ones.sum())


@pytest.mark.gpu
def test_each_rank_has_a_device_of_its_own_and_reduces_over_nccl() -> None:
    count = _devices()
    if count == 0:
        pytest.skip("needs a CUDA device: torch sees none here")
    with build_executor(OnDevice, backend="auto", world_size=count, device="cuda") as executor:
        assert executor.collective_rpc("total") == [(f"cuda:{rank}", 4.0 * count) for rank in range(count)]
