"""Logits in parts: the same tokens as from the whole, however the vocabulary falls on the ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from mpexec.agent.vocabulary import Vocabulary


class Exchange:
    """Threads in place of ranks: what `torch.distributed` does for a `Vocabulary`."""

    def __init__(self, ranks: int) -> None:
        self._meeting = threading.Barrier(ranks, timeout=30.0)
        self._given: list[Tensor] = [torch.empty(0)] * ranks
        self._local = threading.local()

    def get_rank(self) -> int:
        rank: int = self._local.rank
        return rank

    def all_gather(self, parts: list[Tensor], mine: Tensor) -> None:
        self._given[self.get_rank()] = mine
        self._meeting.wait()
        for part, given in zip(parts, self._given, strict=True):
            part.copy_(given)
        self._meeting.wait()

    def run(self, rank: int, call: Callable[[], Any]) -> Any:
        self._local.rank = rank
        return call()


def on_ranks(monkeypatch: pytest.MonkeyPatch, logits: Tensor, ranks: int, method: str) -> list[Any]:
    """Give each rank its columns of the logits; return what the method gives on each."""
    exchange = Exchange(ranks)
    monkeypatch.setattr("mpexec.agent.vocabulary.dist", exchange)
    width = logits.shape[-1]
    share = -(-width // ranks)
    with ThreadPoolExecutor(ranks) as pool:
        futures = []
        for rank in range(ranks):
            part = logits[:, min(share * rank, width) : share * (rank + 1)]
            call = getattr(Vocabulary(width, ranks), method)
            futures.append(pool.submit(exchange.run, rank, lambda call=call, part=part: call(part)))
        return [future.result(timeout=30.0) for future in futures]


@pytest.mark.parametrize("width, ranks", [(12, 2), (13, 4), (5, 4), (2, 3), (100_003, 2)])
def test_every_rank_gets_the_tokens_and_the_logits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, width: int, ranks: int
) -> None:
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    assert on_ranks(monkeypatch, logits, ranks, "argmax") == [logits.argmax(-1).tolist()] * ranks
    assert all(torch.equal(whole, logits) for whole in on_ranks(monkeypatch, logits, ranks, "gather"))


def test_the_lowest_token_wins_among_equals_of_one_rank_and_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[0.0, 7.0, 0.0, 7.0, 7.0, 1.0], [1.0, 0.0, 0.0, 5.0, 5.0, 0.0]])
    for kind in (torch.float32, torch.bfloat16):
        assert on_ranks(monkeypatch, logits.to(kind), 2, "argmax") == [[1, 3]] * 2
        assert on_ranks(monkeypatch, logits.to(kind), 3, "argmax") == [[1, 3]] * 3


def test_one_rank_exchanges_nothing() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    assert Vocabulary(3).argmax(logits) == [1]
    assert Vocabulary(3).gather(logits) is logits
