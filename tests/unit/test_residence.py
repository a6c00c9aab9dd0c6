"""Memory that a sleeping rank gives back, and what stands in it after the wakeup."""

from __future__ import annotations

import pytest
import torch

from mpexec.agent.kv_cache import SlotCache
from mpexec.agent.residence import Residence


@pytest.fixture
def cache() -> SlotCache:
    sizes = {"layers": 2, "slots": 3, "kv_heads": 1, "length": 5, "head_dim": 4}
    return SlotCache(**sizes, dtype=torch.bfloat16, device="cpu")


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands in for a device whose memory weights leave."""
    monkeypatch.setattr(Residence, "_moving", frozenset({"cpu"}))


def test_the_cache_is_gone_while_asleep_and_empty_afterwards(cache: SlotCache) -> None:
    cache.keys[:] = 7
    shape, residence = cache.keys.shape, Residence(torch.nn.Linear(2, 2), cache)
    residence.leave()
    residence.leave()
    assert cache.nbytes == 0
    residence.come_back()
    residence.come_back()
    assert (cache.keys.shape, cache.values.shape, cache.keys.dtype) == (shape, shape, torch.bfloat16)
    assert not cache.keys.any()


def test_weights_on_a_cpu_stay(cache: SlotCache) -> None:
    model = torch.nn.Linear(2, 2)
    residence = Residence(model, cache)
    residence.leave()
    assert model.weight.untyped_storage().nbytes() == 16


@pytest.mark.usefixtures("moving")
def test_weights_leave_their_device_and_come_back_for_whoever_refers_to_them(cache: SlotCache) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model[0].register_parameter("tied", model[0].weight)
    weight, inputs = model[0].weight.detach()[1:], torch.ones(2, 4)
    model.eval()
    before, part = model(inputs), weight.clone()
    residence = Residence(model, cache)
    residence.leave()
    assert {one.untyped_storage().nbytes() for one in [*model.parameters(), *model.buffers()]} == {0}
    residence.come_back()
    assert torch.equal(model(inputs), before)
    assert torch.equal(weight, part)


@pytest.mark.usefixtures("moving")
def test_a_wakeup_without_memory_can_be_tried_again(cache: SlotCache, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    residence = Residence(model, cache)
    residence.leave()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            residence.come_back()
    residence.come_back()
    assert torch.equal(model.weight, before)
    assert cache.nbytes > 0
