"""Objects to bytes and back: pickle protocol 5, with large arrays and tensors outside the stream.

Plain pickle comes first because it is three times as fast; cloudpickle follows where pickle fails, or where the user's
`__main__` has no file and its classes cannot be found by name in another process. Calls and replies of numbers and
strings only, which are the most, go by `marshal`: it takes half as long as pickle, and both ends are one interpreter.
"""

from __future__ import annotations

import functools
import io
import marshal
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mpexec.messages import unpicklable

OUT_OF_BAND = 65536  # bytes from which a buffer leaves the pickle stream

PLAIN = frozenset({int, str, float, bool, type(None)})  # exactly these, no subclasses: marshal knows no others
PROTOCOL = 5


class Frame:
    """An encoded object: the pickle stream and, in order, the buffers that left it.

    Attributes:
        payload: The pickle stream.
        buffers: Contiguous byte views of the large buffers. They point into the caller's objects.
        private: For each buffer, whether its reader must get a private copy-on-write view (tensors).
    """

    __slots__ = ("buffers", "payload", "private")

    def __init__(self, payload: bytes, buffers: Sequence[memoryview] = (), private: Sequence[bool] = ()) -> None:
        self.payload = payload
        self.buffers = buffers
        self.private = private


load_plain = marshal.loads


def dump_plain(value: Any, limit: int) -> bytes | None:
    """The bytes of a plain value, or of a tuple or dict of such; None where they are more than `limit`."""
    try:
        payload = marshal.dumps(value, 2)  # the version without back references is the fastest
    except ValueError:  # a text of two gigabytes; pickle has no limit
        return None
    return payload if len(payload) <= limit else None


def is_plain(values: Sequence[Any]) -> bool:
    """True if every value is an int, str, float, bool or None: `dump_plain` then does it all."""
    for value in values:  # noqa: SIM110  # `all` with a generator takes twice as long
        if type(value) not in PLAIN:
            return False
    return True


def encode(value: Any, what: str, *, main_by_value: bool = False) -> Frame:
    """Pickle `value`.

    Args:
        value: Anything picklable, or cloudpicklable.
        what: How an error names it, for example "the arguments of 'forward'".
        main_by_value: It goes to a process whose `__main__` is another program: what `__main__` holds here travels with
            it. cloudpickle makes both sides know such a class as one, so that `except MyError` works here for what is
            raised there.

    Raises:
        SerializationError: It cannot be pickled.
    """
    if type(value) in PLAIN:
        return Frame(pickle.dumps(value, PROTOCOL))
    buffers: list[memoryview] = []
    private: list[bool] = []
    tensor_bytes: set[int] = set()

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: pickle copies it
            return True
        if raw.nbytes < OUT_OF_BAND:
            return True
        buffers.append(raw)
        private.append(id(buffer) in tensor_bytes)
        return False

    stream = io.BytesIO()
    try:
        if _main_is_nameless() or not _pickled_plainly(
            _PlainPickler(stream, keep_in_band, tensor_bytes), value, stream, main_by_value
        ):
            stream = io.BytesIO()
            buffers.clear()
            private.clear()
            tensor_bytes.clear()
            _cloud_pickler()(stream, keep_in_band, tensor_bytes).dump(value)
    except Exception as error:  # pickling runs code of the user's classes, which may raise anything
        raise unpicklable(value, error, what) from error
    return Frame(stream.getvalue(), buffers, private)


def _pickled_plainly(pickler: pickle.Pickler, value: Any, stream: io.BytesIO, main_by_value: bool) -> bool:
    """False where cloudpickle has to do it."""
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return not (main_by_value and b"__main__" in stream.getvalue())


def dumps(value: Any) -> bytes:
    """Pickle `value` to bytes with everything in the stream; raises what pickling raises."""
    if not _main_is_nameless():
        try:
            return pickle.dumps(value, PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
    import cloudpickle

    return bytes(cloudpickle.dumps(value, PROTOCOL))


def decode(payload: Any, buffers: Sequence[memoryview] | None = None) -> Any:
    """Rebuild an object; raises whatever unpickling raises."""
    return pickle.loads(payload, buffers=buffers)


def _main_is_nameless() -> bool:
    """True if another process cannot import the program: it came from stdin, `-c`, a notebook, or its file is gone."""
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:
        return False
    file = getattr(main, "__file__", None)
    return file is None or not _is_file(file)


@functools.lru_cache(maxsize=4)
def _is_file(path: str) -> bool:
    return os.path.isfile(path)


def _tensor_state(tensor: Any, tensor_bytes: set[int]) -> tuple[Any, ...] | None:
    """How a dense CPU tensor travels: its bytes as one buffer, whatever its dtype. None for every other tensor."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj():
        return None
    flat = tensor.detach().resolve_neg().contiguous().reshape(-1)
    data = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
    tensor_bytes.add(id(data))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _rebuild_tensor, (type(tensor) is torch.nn.Parameter, data, dtype, tuple(tensor.shape), tensor.requires_grad)


def _rebuild_tensor(parameter: bool, data: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    view = memoryview(data)
    if view.nbytes == 0:
        tensor = torch.empty(shape, dtype=kind)
    else:
        writable = data if not view.readonly else bytearray(view)
        tensor = torch.frombuffer(writable, dtype=torch.uint8).view(kind).reshape(shape)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _reduce_tensor(pickler: Any, value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return NotImplemented
    return _tensor_state(value, pickler.tensor_bytes) or NotImplemented


class _PlainPickler(pickle.Pickler):
    def __init__(
        self, stream: io.BytesIO, keep_in_band: Callable[[pickle.PickleBuffer], bool], tensors: set[int]
    ) -> None:
        super().__init__(stream, PROTOCOL, buffer_callback=keep_in_band)
        self.tensor_bytes = tensors
        torch = sys.modules.get("torch")
        nn = getattr(torch, "nn", None)  # absent while another thread still imports torch
        if torch is not None and nn is not None:
            # A table instead of `reducer_override`: the C pickler then calls Python for tensors only.
            def reduce(tensor: Any) -> Any:
                return _tensor_state(tensor, tensors) or tensor.__reduce_ex__(PROTOCOL)

            self.dispatch_table = {torch.Tensor: reduce, nn.Parameter: reduce}


_cloud_pickler_class: type[Any] | None = None


def _cloud_pickler() -> type[Any]:
    """The cloudpickle twin, made on first use: importing cloudpickle takes as long as importing mpexec."""
    global _cloud_pickler_class
    if _cloud_pickler_class is None:
        import cloudpickle

        class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
            def __init__(self, stream: Any, keep_in_band: Any, tensors: set[int]) -> None:
                super().__init__(stream, PROTOCOL, buffer_callback=keep_in_band)
                self.tensor_bytes = tensors

            def reducer_override(self, value: Any) -> Any:
                reduced = _reduce_tensor(self, value)
                return super().reducer_override(value) if reduced is NotImplemented else reduced

        _cloud_pickler_class = CloudPickler
    return _cloud_pickler_class
