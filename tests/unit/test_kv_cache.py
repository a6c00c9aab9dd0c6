"""The slot cache against attention computed from the whole sequences."""

import pytest
import torch
from torch import Tensor

from mpexec.agent.kv_cache import PromptView, SlotCache, TokenView

HEADS, KV_HEADS, WIDTH, LENGTH = 6, 2, 8, 16


def new_cache(slots: int = 5) -> SlotCache:
    return SlotCache(
        layers=2, slots=slots, kv_heads=KV_HEADS, length=LENGTH, head_dim=WIDTH, dtype=torch.float32, device="cpu"
    )


def random_sequence(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    shapes = ((1, HEADS, tokens, WIDTH), (1, KV_HEADS, tokens, WIDTH), (1, KV_HEADS, tokens, WIDTH))
    query, key, value = (torch.randn(shape, generator=source) for shape in shapes)
    return query, key, value


def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention, written out."""
    key, value = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * WIDTH**-0.5
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ value


def test_a_prompt_attends_causally_and_stays_in_its_slot() -> None:
    cache = new_cache()
    query, key, value = random_sequence(7, seed=0)
    output = PromptView(cache, [3], [0], [7]).attend(1, query, key, value, WIDTH**-0.5)
    torch.testing.assert_close(output, expected(query, key, value))
    torch.testing.assert_close(cache.keys[1, 3, :, :7], key[0])
    assert not cache.keys[0].any()
    assert not cache.keys[1, :3].any()


def test_prompts_that_share_a_pass_do_not_see_each_other() -> None:
    cache = new_cache()
    sequences = [random_sequence(tokens, seed=tokens) for tokens in (1, 9, 4)]
    query, key, value = (torch.cat([one[part] for one in sequences], dim=2) for part in range(3))
    output = PromptView(cache, [2, 4, 0], [0, 0, 0], [1, 9, 4]).attend(0, query, key, value, WIDTH**-0.5)
    torch.testing.assert_close(output, torch.cat([expected(*one) for one in sequences], dim=2))
    torch.testing.assert_close(cache.values[0, 4, :, :9], sequences[1][2][0])
    assert not cache.values[0, [1, 3]].any()


def test_pieces_of_prompts_attend_to_the_pieces_before_them() -> None:
    cache = new_cache()
    one, other = random_sequence(9, seed=3), random_sequence(6, seed=4)
    outputs: dict[int, list[Tensor]] = {1: [], 3: []}
    # Both prompts are cut in pieces of other sizes: (start, end) in slot 1 and in slot 3.
    for first, second in [((0, 4), (0, 1)), ((4, 5), (1, 3)), ((5, 9), (3, 6))]:
        parts = [
            torch.cat([a[:, :, slice(*first)], b[:, :, slice(*second)]], dim=2) for a, b in zip(one, other, strict=True)
        ]
        sizes = [first[1] - first[0], second[1] - second[0]]
        output = PromptView(cache, [1, 3], [first[0], second[0]], sizes).attend(0, *parts, None)
        for slot, part in zip((1, 3), output.split(sizes, dim=2), strict=True):
            outputs[slot].append(part)
    torch.testing.assert_close(torch.cat(outputs[1], dim=2), expected(*one))
    torch.testing.assert_close(torch.cat(outputs[3], dim=2), expected(*other))


@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 2, 3], [0, 2, 4], [4, 0, 3]], ids=str)
def test_decoding_several_slots_equals_whole_sequences(slots: list[int]) -> None:
    cache = new_cache()
    sequences = [random_sequence(tokens, seed=tokens) for tokens in (3, 9, 5)]
    for slot, (query, key, value) in zip(slots, sequences, strict=True):
        prompt = PromptView(cache, [slot], [0], [query.shape[2] - 1])
        prompt.attend(0, query[:, :, :-1], key[:, :, :-1], value[:, :, :-1], None)
    view = TokenView(cache, slots, [2, 8, 4])
    query, key, value = (torch.cat([one[part][:, :, -1:] for one in sequences]) for part in range(3))
    output = view.attend(0, query, key, value, WIDTH**-0.5)
    for row, sequence in enumerate(sequences):
        torch.testing.assert_close(output[row : row + 1], expected(*sequence)[:, :, -1:])


def test_a_reused_slot_does_not_see_the_sequence_before() -> None:
    cache = new_cache(slots=1)
    PromptView(cache, [0], [0], [15]).attend(0, *random_sequence(15, seed=1), None)
    query, key, value = random_sequence(4, seed=2)
    PromptView(cache, [0], [0], [3]).attend(0, query[:, :, :3], key[:, :, :3], value[:, :, :3], None)
    output = TokenView(cache, [0], [3]).attend(0, query[:, :, 3:], key[:, :, 3:], value[:, :, 3:], None)
    torch.testing.assert_close(output, expected(query, key, value)[:, :, 3:])


def test_size_is_that_of_keys_and_values() -> None:
    assert new_cache().nbytes == 2 * 2 * 5 * KV_HEADS * LENGTH * WIDTH * 4
