"""Tokens from logits: greedy, drawn, and independent of company."""

import pytest
import torch

from mpexec.agent.sampling import sample, uniform


def draw(logits: torch.Tensor, temperature: float, seeds: list[int], positions: list[int]) -> list[int]:
    rows = logits.shape[0]
    return sample(logits, temperatures=[temperature] * rows, seeds=seeds, positions=positions)


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_token_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    assert draw(logits, 0.0, [1, 2], [5, 6]) == [1, 0]


def test_the_random_number_depends_on_seed_and_position_only() -> None:
    numbers = {uniform(seed, position) for seed in (-1, 0, 2**80) for position in range(100)}
    assert len(numbers) == 300
    assert all(0.0 <= number < 1.0 for number in numbers)
    # Fixed for good: a change would change every sampled text that users have stored with its seed.
    assert uniform(0, 0) == 0.3859926107094097


def test_a_row_draws_the_same_token_alone_and_in_any_company() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3))
    seeds, positions = [4, 4, 9, -7, 0, 2**70], [1, 2, 1, 50, 0, 3]
    together = draw(logits, 1.3, seeds, positions)
    alone = [draw(logits[row : row + 1], 1.3, [seeds[row]], [positions[row]])[0] for row in range(6)]
    order = [3, 5, 0, 2, 4, 1]
    shuffled = draw(logits[order], 1.3, [seeds[row] for row in order], [positions[row] for row in order])
    assert together == alone
    assert [together[row] for row in order] == shuffled


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 5.0], [0.0, 5.0]])
    tokens = sample(logits, temperatures=[0.0, 1e-3], seeds=[0, 0], positions=[0, 0])
    assert tokens == [1, 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drawn_tokens_follow_the_distribution(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -50.0])
    count = 4000
    drawn = draw(logits.expand(count, -1), temperature, [11] * count, list(range(count)))
    shares = torch.bincount(torch.tensor(drawn), minlength=5) / count
    # Five standard deviations of a share are below 0.04 at this count.
    assert torch.allclose(shares, (logits / temperature).softmax(0), atol=0.04)
    assert shares[4] == 0


def test_low_precision_logits_are_accepted() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert all(0 <= token < 50 for token in draw(logits, 0.8, [1, 2], [0, 0]))
