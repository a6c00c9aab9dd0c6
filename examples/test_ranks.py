"""Tests of code that runs on several ranks: `pytest examples/test_ranks.py`. Copy what you need."""

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def weights(rank, world_size):
    """A fixture of your own runs on every rank; here each rank makes its share of the columns of one matrix."""
    whole = torch.arange(32.0).reshape(4, 8)
    return whole, whole.chunk(world_size, dim=1)[rank]


@pytest.mark.ranks(2)  # two processes, with a process group ready
def test_all_reduce_adds_up(rank, world_size, device):
    value = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(value)
    assert value.item() == world_size * (world_size + 1) / 2


@pytest.mark.ranks(1, 2, 4)  # once for each number of ranks
@pytest.mark.parametrize("batch", [1, 3])
def test_a_matrix_split_by_columns_gives_the_whole_product(weights, world_size, batch):
    whole, own = weights
    inputs = torch.ones(batch, 4)
    parts = [torch.empty(batch, own.shape[1]) for _ in range(world_size)]
    dist.all_gather(parts, inputs @ own)
    torch.testing.assert_close(torch.cat(parts, dim=1), inputs @ whole)


@pytest.mark.ranks(2, timeout=20)  # a hang is over after 20 s, and the stacks of both ranks are shown
class TestMessages:
    def test_send_and_receive(self, rank):
        message = torch.zeros(3)
        if rank == 0:
            dist.send(torch.tensor([1.0, 2.0, 3.0]), dst=1)
        else:
            dist.recv(message, src=0)
            assert message.tolist() == [1.0, 2.0, 3.0]


def test_without_ranks_runs_as_ever():
    assert torch.ones(2).sum() == 2
