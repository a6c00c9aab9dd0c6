"""Tokens from logits: greedy, drawn, and independent of company."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mpexec.agent.loading import import_transformers
from mpexec.agent.sampling import Sampler, choose, logits_processors, logprobs, uniform
from mpexec.agent.steps import Sampling


def draw(logits: torch.Tensor, temperature: float, seeds: list[int], positions: list[int]) -> list[int]:
    samplers = [Sampler(Sampling(temperature, seed)) for seed in seeds]
    return choose(logits, samplers, [[0] * position for position in positions])


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
    tokens = choose(logits, [Sampler(Sampling()), Sampler(Sampling(1e-3))], [[], []])
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


EVERYTHING = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"repetition_penalty": 1.3},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 9},
        {"temperature": 1.4, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
        EVERYTHING,
    ],
    ids=lambda values: "+".join(values) or "greedy",
)
def test_scores_are_those_of_transformers_generate(values: dict[str, Any]) -> None:
    transformers = import_transformers()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=90,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            initializer_range=0.5,
        )
    ).eval()
    prompt = [5, 9, 9, 71]
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        pad_token_id=0,
        eos_token_id=None,
        do_sample="temperature" in values,
        **{"top_k": 0, "temperature": 1.0, **values},
    )
    sequence = output.sequences[0].tolist()
    sampler = Sampler(Sampling(**values))
    for step, (logits, wanted) in enumerate(zip(output.logits, output.scores, strict=True)):
        scores = sampler.scores(logits[0], sequence[: len(prompt) + step])
        assert torch.equal(scores.isinf(), wanted[0].isinf())
        torch.testing.assert_close(scores.float(), wanted[0])


def test_the_processors_are_in_the_order_of_generate() -> None:
    names = [type(one).__name__ for one in logits_processors(Sampling(**EVERYTHING))]
    assert names == [
        "RepetitionPenaltyLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]


def test_what_is_filtered_out_is_never_drawn_even_at_the_end_of_the_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.tensor([[1.0, 1.0, 0.9, -3.0, -3.0]])
    sampler = Sampler(Sampling(1.0, top_k=3))
    for point, token in [(0.0, 0), (1.0 - 2.0**-53, 2)]:
        monkeypatch.setattr("mpexec.agent.sampling.uniform", lambda *_, point=point: point)
        assert choose(logits, [sampler], [[7]]) == [token]


@pytest.mark.parametrize("value", [1e-308, float("nan"), float("inf")])
def test_scores_that_are_no_numbers_still_give_a_token_of_the_vocabulary(value: float) -> None:
    logits = torch.tensor([[1.0, 2.0, -3.0]]) * (1.0 if value == 1e-308 else value)
    small = 1e-308 if value == 1e-308 else 1.0
    for sampling in (Sampling(small, top_k=2), Sampling(1.0, repetition_penalty=small)):
        assert 0 <= choose(logits, [Sampler(sampling)], [[0, 1]])[0] < 3


def test_a_penalty_counts_for_greedy_rows_too() -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0]])
    assert choose(logits, [Sampler(Sampling(repetition_penalty=1.2))], [[0]]) == [1]
    assert choose(logits, [Sampler(Sampling(repetition_penalty=1.2))], [[2]]) == [0]


def test_only_rows_that_need_them_ask_for_all_logits() -> None:
    assert not Sampler(Sampling(seed=3, top_k=4, top_p=0.5)).needs_logits
    assert Sampler(Sampling(logprobs=0)).needs_logits
    assert Sampler(Sampling(0.1)).needs_logits
    assert Sampler(Sampling(repetition_penalty=1.1)).needs_logits


def test_log_probabilities_name_the_chosen_token_and_the_best() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    wanted = logits.log_softmax(0).tolist()
    found = logprobs(logits, 0, 2)
    assert found.chosen == pytest.approx(wanted[0])
    assert [token for token, _ in found.top] == [1, 2]
    assert [value for _, value in found.top] == pytest.approx([wanted[1], wanted[2]])
    assert logprobs(logits, 0, 0).top == ()
    assert len(logprobs(logits, 0, 20).top) == 3


def test_making_a_sampler_looks_at_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made within a step, and a temporary folder may hold any number of names."""
    import_transformers()
    monkeypatch.setattr(Path, "glob", lambda *_: pytest.fail("a folder was looked at"))
    Sampler(Sampling(0.7, top_k=5, repetition_penalty=1.1))
