"""Large arrays and tensors: whole, private to each rank, and valid for as long as somebody holds them."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from contract.agents import Arrays
from contract.conftest import last_rank, only_apart, only_mp
from mpexec import Executor

AGENT = Arrays
Fresh = Callable[..., Executor]
MANY = 100_000  # elements: beyond the size at which buffers leave the pickle stream


def test_an_array_arrives_whole_on_every_rank(executor: Executor) -> None:
    array = np.arange(MANY, dtype=np.int64)
    assert executor.collective_rpc("sum", (array,)) == [float(array.sum())] * executor.world_size


@only_apart
def test_large_arrays_are_read_only_views_in_the_ranks(executor: Executor) -> None:
    array = np.ones(MANY)
    assert [facts["writeable"] for facts in executor.collective_rpc("facts", (array,))] == [False, False]
    assert executor.collective_rpc("try_to_write", (array,)) == ["ValueError", "ValueError"]
    assert array.flags.writeable


@only_apart
def test_large_arrays_come_back_as_read_only_views(executor: Executor) -> None:
    array = executor.collective_rpc("numpy_of", (MANY, 2.5), reply_ranks=1)
    assert not array.flags.writeable
    assert (array == 2.5).all()


@only_apart
@pytest.mark.parametrize("count", [10, MANY])
def test_a_write_into_a_tensor_on_one_rank_is_seen_by_nobody_else(executor: Executor, count: int) -> None:
    tensor = torch.ones(count)
    for _ in range(3):  # the pages of the first round must not show through in the next
        assert executor.collective_rpc("write_on", (tensor, (0,), 7)) == [7.0, 1.0]
        assert executor.collective_rpc("write_on", (tensor, (1,), 9)) == [1.0, 9.0]
    assert tensor[0] == 1.0


@only_apart
def test_a_tensor_that_came_back_belongs_to_the_caller(executor: Executor) -> None:
    first = executor.collective_rpc("tensor_of", ((MANY,), 3.0), reply_ranks=0)
    first.add_(1)
    second = executor.collective_rpc("tensor_of", ((MANY,), 3.0), reply_ranks=0)
    assert first.sum() == 4 * MANY
    assert second.sum() == 3 * MANY


DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "float8_e4m3fn",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, MANY])
def test_tensors_of_every_dtype_go_and_come_unchanged(executor: Executor, dtype: str, count: int) -> None:
    tensor = (torch.arange(count) % 100).to(getattr(torch, dtype))
    back = executor.collective_rpc("echo", (tensor,), reply_ranks=last_rank(executor))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def shapes() -> dict[str, torch.Tensor]:
    base = torch.arange(400 * 300, dtype=torch.float32).reshape(400, 300)
    return {
        "transposed": base.t(),
        "sliced": base[::2, 1::3],
        "expanded": torch.ones(1, 1).expand(300, 300),
        "offset": base[100:],
        "zero size": torch.empty(0, 5),
        "no dimension": torch.tensor(3.5),
        "conjugate": torch.complex(base, base).conj(),
        "negative view": torch.complex(base, base).conj().imag,
        "needs gradient": base.clone().requires_grad_(),
        "result of a graph": base.clone().requires_grad_() * 2,
    }


@pytest.mark.parametrize("name", list(shapes()))
def test_tensors_of_every_layout_go_and_come_unchanged(executor: Executor, name: str) -> None:
    tensor = shapes()[name]
    back = executor.collective_rpc("echo", (tensor.detach() if name == "result of a graph" else tensor,), reply_ranks=0)
    assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(back.detach(), tensor.detach())


@only_apart
def test_parameters_stay_parameters(executor: Executor) -> None:
    for trains in (True, False):
        parameter = torch.nn.Parameter(torch.ones(MANY), requires_grad=trains)
        facts = executor.collective_rpc("facts", (parameter,), reply_ranks=0)
        assert (facts["type"], facts["requires_grad"]) == ("Parameter", trains)


@only_apart
def test_tensors_deep_inside_a_value_are_private_too(executor: Executor) -> None:
    state = {"a": [torch.ones(MANY)], "b": (np.ones(MANY), "text", torch.zeros(2))}
    back = executor.collective_rpc("echo", (state,), reply_ranks=0)
    assert torch.equal(back["a"][0], state["a"][0])
    back["a"][0].zero_()
    assert not back["b"][0].flags.writeable
    assert torch.equal(back["b"][2], state["b"][2])


@pytest.mark.parametrize("name", ["fortran", "strided", "object", "structured", "empty", "zero dimensions", "datetime"])
def test_numpy_arrays_of_every_kind_go_and_come_unchanged(executor: Executor, name: str) -> None:
    base = np.arange(90_000, dtype=np.float64).reshape(300, 300)
    array = {
        "fortran": np.asfortranarray(base),
        "strided": base[::2, ::3],
        "object": np.array([1, "two", None], dtype=object),
        "structured": np.zeros(30_000, dtype=[("a", "i4"), ("b", "f8")]),
        "empty": np.empty((0, 3)),
        "zero dimensions": np.array(5),
        "datetime": np.array(["2020-01-01"], dtype="datetime64[D]"),
    }[name]
    back = executor.collective_rpc("echo", (array,), reply_ranks=0)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()


def test_the_same_array_twice_in_one_call_arrives_twice(executor: Executor) -> None:
    array = np.ones(MANY)
    back = executor.collective_rpc("echo", ([array, array],), reply_ranks=0)
    assert back[0] is back[1] or (back[0] == back[1]).all()


@only_apart
def test_an_argument_that_a_rank_keeps_is_never_overwritten_by_later_calls(executor: Executor) -> None:
    executor.collective_rpc("keep", (np.full(MANY, 2.0),), reply_ranks=())
    for number in range(50):
        executor.collective_rpc("sum", (np.full(MANY, float(number)),))
    assert executor.collective_rpc("kept_sum") == [2.0 * MANY] * 2
    executor.collective_rpc("drop")


@only_apart
def test_a_value_that_the_caller_keeps_is_never_overwritten_by_later_calls(executor: Executor) -> None:
    kept = [executor.collective_rpc("numpy_of", (MANY, float(n)), reply_ranks=n % 2) for n in range(20)]
    parts = [array[10:20] for array in kept]
    del kept
    gc.collect()
    for _ in range(50):
        executor.collective_rpc("numpy_of", (MANY, -1.0))
    assert [part[0] for part in parts] == [float(n) for n in range(20)]


@only_mp
def test_memory_is_used_again_once_the_views_are_gone(executor: Executor) -> None:
    pool = executor._link.sender.pool  # type: ignore[attr-defined]
    array = np.ones(MANY)
    for _ in range(5):
        executor.collective_rpc("sum", (array,))
    reserved = pool.reserved_bytes
    for _ in range(200):
        executor.collective_rpc("sum", (array,))
    assert pool.reserved_bytes == reserved


@only_apart
def test_parts_of_a_scatter_go_to_their_ranks_only(executor: Executor) -> None:
    parts = [(np.full(MANY, float(rank + 1)),) for rank in range(2)]
    assert executor.collective_rpc("sum", args_per_rank=parts) == [MANY, 2.0 * MANY]


# F044, F055
def test_views_outlive_release_and_the_ranks(fresh: Fresh) -> None:
    executor = fresh(Arrays)
    array = executor.collective_rpc("numpy_of", (MANY, 1.5), reply_ranks=0)
    tensor = executor.collective_rpc("tensor_of", ((MANY,), 2.5, "bfloat16"), reply_ranks=last_rank(executor))
    text = executor.collective_rpc("big", (10 << 20, 7), reply_ranks=0)
    executor.release()
    gc.collect()
    assert (array == 1.5).all()
    tensor.mul_(2)
    assert (tensor == 5.0).all()
    assert text == bytes([7]) * (10 << 20)


@only_mp
def test_shared_views_show_the_same_memory_to_all_ranks(fresh: Fresh) -> None:
    executor = fresh(Arrays, shared_views=True)
    executor.collective_rpc("keep", (np.zeros(MANY),), reply_ranks=())
    executor.collective_rpc(lambda worker: worker.agent.kept.__setitem__(0, 5.0), ranks=[0])
    assert executor.collective_rpc("kept_sum") == [5.0, 5.0]
    tensor = torch.zeros(MANY)
    executor.collective_rpc("keep", (tensor,), reply_ranks=())
    executor.collective_rpc(lambda worker: worker.agent.kept.__setitem__(0, 3.0), ranks=[1])
    assert executor.collective_rpc("kept_sum") == [3.0, 3.0]
    assert tensor[0] == 0
    executor.collective_rpc("drop")


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 1 << 20, (4 << 20) + 1, 33 << 20])
def test_sizes_around_every_border_arrive_whole(executor: Executor, size: int) -> None:
    data = np.frombuffer(np.random.default_rng(size).bytes(size), dtype=np.uint8)
    assert executor.collective_rpc("checksum", (data,), reply_ranks=0) == zlib.crc32(data)
    plain = data.tobytes()
    assert executor.collective_rpc("checksum", (plain,), reply_ranks=0) == zlib.crc32(plain)
    back = executor.collective_rpc("echo", (data,), reply_ranks=last_rank(executor))
    assert zlib.crc32(back) == zlib.crc32(data)


@only_apart
def test_many_buffers_in_one_value(executor: Executor) -> None:
    arrays = [np.full(20_000, number, dtype=np.float64) for number in range(60)]
    back = executor.collective_rpc("echo", (arrays,), reply_ranks=1)
    assert [array[-1] for array in back] == list(range(60))
