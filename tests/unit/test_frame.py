"""Objects to bytes and back: large parts leave the stream, and what plain pickle refuses goes by value."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from mpexec.errors import SerializationError
from mpexec.transport.frame import OUT_OF_BAND, Frame, decode, dump_plain, dumps, encode, is_plain, load_plain

BIG = OUT_OF_BAND


def travel(value: Any, *, writable: bool = False) -> Any:
    """As a reader gets it: the buffers read-only, or writable where tensors are private."""
    frame = encode(value, "a value")
    views = [
        memoryview(bytearray(buffer)) if private or writable else memoryview(bytes(buffer))
        for buffer, private in zip(frame.buffers, frame.private, strict=True)
    ]
    return decode(frame.payload, views)


@pytest.mark.parametrize("value", [1, -(1 << 70), 2.5, True, None, "text", b"bytes", [1, {"a": (2, {3})}], range(3)])
def test_plain_values_need_no_buffers(value: Any) -> None:
    frame = encode(value, "a value")
    assert list(frame.buffers) == []
    assert travel(value) == value


def test_plain_values_are_told_by_their_exact_type() -> None:
    class Number(int):
        pass

    assert is_plain((1, "a", 2.5, True, None))
    assert is_plain(())
    assert not is_plain((Number(1),))
    assert not is_plain(([1],))


@pytest.mark.parametrize("size, leaves", [(BIG - 1, False), (BIG, True), (BIG + 1, True)])
def test_buffers_leave_the_stream_from_64_kib_on(size: int, leaves: bool) -> None:
    frame = encode(np.zeros(size, np.uint8), "a value")
    assert len(frame.buffers) == leaves
    assert list(frame.private) == [False] * leaves
    assert (len(frame.payload) < 1000) == leaves


def test_arrays_and_tensors_are_told_apart_whatever_their_order() -> None:
    tensors = [torch.zeros(BIG) for _ in range(3)]
    arrays = [np.zeros(BIG) for _ in range(3)]
    mixed = [item for pair in zip(tensors, arrays, strict=True) for item in pair]
    frame = encode({"mixed": mixed, "more": [np.zeros(BIG)]}, "a value")
    assert list(frame.private) == [True, False] * 3 + [False]
    back = travel(mixed)
    assert all(not back[i].flags.writeable for i in (1, 3, 5))
    back[0][0] = 1


@pytest.mark.parametrize(
    "dtype",
    [
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "bool",
        "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [0, 1, 3, 70_000])
def test_tensors_of_every_dtype_and_size_travel_unchanged(dtype: str, count: int) -> None:
    tensor = (torch.arange(count) % 2).to(getattr(torch, dtype))
    back = travel(tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_a_small_tensor_shares_no_memory_with_its_stream() -> None:
    frame = encode(torch.zeros(4), "a value")
    first, second = decode(frame.payload), decode(frame.payload)
    first[0] = 1
    assert second[0] == 0


def test_a_tensor_in_read_only_memory_is_copied_before_anybody_can_write() -> None:
    frame = encode(torch.zeros(BIG), "a value")
    source = bytes(frame.buffers[0])
    back = decode(frame.payload, [memoryview(source)])
    back[0] = 1
    assert source[:4] == bytes(4)


@pytest.mark.parametrize("trains", [True, False])
def test_parameters_and_gradients_flags_travel(trains: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(BIG), requires_grad=trains)
    back = travel(parameter)
    assert type(back) is torch.nn.Parameter
    assert back.requires_grad is trains
    assert travel(torch.ones(3, requires_grad=trains)).requires_grad is trains


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning", "ignore:TypedStorage:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(300, 400).t(), lambda: torch.arange(90_000).reshape(300, 300)[::2, 1:],
        lambda: torch.ones(1).expand(70_000), lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.complex(torch.ones(3), torch.ones(3)).conj().imag, lambda: torch.tensor(5.0),
        lambda: torch.empty(0, 7), lambda: torch.eye(5).to_sparse(), lambda: torch.ones(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    ],
)  # fmt: skip
def test_tensors_of_every_layout_travel(make: Any) -> None:
    tensor = make()
    back = travel(tensor)
    assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
    assert (back.device, back.layout) == (tensor.device, tensor.layout)
    if tensor.device.type == "cpu":
        assert torch.equal(dense(back), dense(tensor))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as an ordinary tensor."""
    return tensor.to_dense() if tensor.is_sparse else tensor.dequantize() if tensor.is_quantized else tensor.clone()


def test_a_module_and_its_state_travel() -> None:
    layer = torch.nn.Linear(200, 200)
    back = travel(layer)
    assert torch.equal(back.weight, layer.weight)
    assert isinstance(back.weight, torch.nn.Parameter)
    state = travel(layer.state_dict())
    assert torch.equal(state["weight"], layer.weight)


def test_identity_within_one_value_is_kept() -> None:
    array, tensor = np.zeros(BIG), torch.zeros(BIG)
    back = travel([array, array, tensor, tensor])
    assert back[0] is back[1]
    assert back[2] is back[3]


def test_what_plain_pickle_refuses_goes_by_value() -> None:
    offset = 5

    class Local:
        def add(self, number: int) -> int:
            return number + offset

    assert travel(lambda x: x + offset)(1) == 6
    assert travel(Local()).add(1) == 6
    function, tensor, array = travel((lambda x: x, torch.ones(BIG), np.ones(BIG)))
    assert function(3) == 3
    assert tensor.sum() == array.sum() == BIG


def test_classes_of_a_main_without_a_file_go_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    main = types.ModuleType("__main__")
    exec("class Mine:\n    x = 5", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    payloads = encode(main.Mine(), "a value").payload, dumps(main.Mine())
    del main.Mine
    for payload in payloads:
        assert decode(payload).x == 5


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), [threading.Lock()], (i for i in ()), Raises(ValueError("no")), Raises(RecursionError())],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_pickled_is_named(value: Any) -> None:
    with pytest.raises(SerializationError, match="the arguments of 'f'") as caught:
        encode(value, "the arguments of 'f'")
    assert caught.value.type_name.rpartition(".")[2] == type(value).__name__
    assert caught.value.__cause__ is not None


def test_an_endless_structure_is_an_error_and_not_a_crash() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError):
        encode(deep, "a value")


@pytest.mark.parametrize(
    "value",
    [0, -1, 1 << 5000, True, False, None, 0.1, float("inf"), -0.0, "", "a\0b", "\ud800", ("m", (1,), {"k": 2}, None)],
)
def test_plain_values_are_the_same_on_the_other_side(value: Any) -> None:
    payload = dump_plain(value, 10_000)
    assert payload is not None
    got = load_plain(memoryview(payload))
    assert (got, type(got), repr(got)) == (value, type(value), repr(value))


def test_what_is_too_long_or_refused_by_marshal_is_no_plain_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = dump_plain("x" * 100, 1000)
    assert payload is not None
    assert dump_plain("x" * 100, len(payload)) == payload
    assert dump_plain("x" * 100, len(payload) - 1) is None

    def refuse(*_: Any) -> bytes:
        raise ValueError("unmarshallable object")  # as for a text of two gigabytes

    monkeypatch.setattr("marshal.dumps", refuse)
    assert dump_plain("x", 1000) is None


def test_a_frame_without_buffers_is_a_pickle() -> None:
    assert pickle.loads(encode({"a": 1}, "a value").payload) == {"a": 1}
    assert decode(Frame(pickle.dumps(5)).payload) == 5
