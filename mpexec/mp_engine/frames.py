"""What crosses the socket between a client and the server.

From client to server: typed msgpack, decoded into the structs below or refused; never unpickled, because whoever can
connect could otherwise run code here. The arguments of a call are msgpack inside its msgpack: what cannot be decoded
there fails that call, not its neighbours in the frame.

From server to client: msgpack items whose values are pickled, because a client trusts the server it connects to, and
errors are to arrive as the objects that they are. Each value is pickled by itself and at once: what its owner changes
a moment later, or what cannot be rebuilt at the other end, concerns no other value.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from mpexec.errors import MpexecError, RemoteError, RemoteTraceback, RPCTimeoutError, SerializationError
from mpexec.messages import text_of, traceback_of, unpicklable
from mpexec.transport.frame import dumps

logger = logging.getLogger(__name__)

Id = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
MAX_FRAME_BYTES = 64 << 20  # from client to server
MAX_CREDIT = 1 << 20
MAX_METHOD = 200  # characters of a name
MAX_VALUE_BYTES = (1 << 32) - 1  # msgpack counts the bytes of a value in 32 bits
_SPLIT_BYTES = 1 << 20  # a frame that has grown so large is sent, and what follows goes into another

Credit = Annotated[int, msgspec.Meta(ge=1, le=MAX_CREDIT)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

# Kinds of items, server to client.
WELCOME = 0  # the answer to `Hello`
REPLY = 1  # the value of a plain call
ITEM = 2  # one item of a stream
END = 3  # the stream is over
FAILED = 4  # the call or stream has failed; a `BoxedError`
CANCELLED = 5  # the call was cancelled as asked, and its task has ended
CLOSED = 6  # the server ends; a `BoxedError`, or nothing after a plain stop
NEWS = 7  # something that nobody has asked for

Item = tuple[int, int, bytes]
"""Its kind, the id of its call, and the pickled value, if its kind has one."""


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The first frame of a client; the server answers WELCOME."""


class Call(msgspec.Struct, tag=1, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Run a method.

    Attributes:
        arguments: See `encode_arguments`.
        timeout: Seconds that the server gives it; None is no limit.
        credit: Items that a stream may send before it hears of more; None for a plain call.
    """

    id: Id
    method: Annotated[str, msgspec.Meta(max_length=MAX_METHOD)]
    arguments: bytes
    timeout: Seconds | None = None
    credit: Credit | None = None


class Cancel(msgspec.Struct, tag=2, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Nobody waits for this call or stream any more."""

    id: Id


class More(msgspec.Struct, tag=3, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The client has taken so many items of a stream: as many more may come."""

    id: Id
    count: Credit


Request = Hello | Call | Cancel | More
_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(list[Request])
_argument_decoder = msgspec.msgpack.Decoder(tuple[list[Any], dict[str, Any]])
_item_decoder = msgspec.msgpack.Decoder(list[Item])


def encode_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The arguments of a call as bytes.

    Raises:
        SerializationError: One is not plain data (numbers, texts, bytes, lists, dicts, dataclasses of such).
    """
    try:
        return _encoder.encode((args, kwargs))
    except Exception as error:  # it asks the user's classes
        raise unpicklable((args, kwargs), error, "the arguments of a call to the engine process") from error


def decode_arguments(payload: bytes) -> tuple[list[Any], dict[str, Any]]:
    """The arguments again, dataclasses as dicts; raises an `Exception` of whatever kind where these are none."""
    return _argument_decoder.decode(payload)


def encode_requests(requests: list[Request]) -> bytes:
    """The bytes of a frame from client to server."""
    return _encoder.encode(requests)


def decode_requests(payload: bytes) -> list[Request]:
    """The requests in a frame; raises an `Exception` of whatever kind if it is no such frame."""
    return _request_decoder.decode(payload)


def dump_value(value: Any) -> bytes:
    """A value for a client.

    Raises:
        SerializationError: It cannot be pickled, or is too large.
    """
    try:
        payload = dumps(value)
    except Exception as error:  # pickling runs code of the user's class
        raise unpicklable(value, error, "a value for a client of the engine process") from error
    if len(payload) > MAX_VALUE_BYTES:
        raise SerializationError(f"a value of {len(payload)} bytes; at most {MAX_VALUE_BYTES} can go to a client")
    return payload


def load_value(payload: bytes) -> Any:
    """The value again; raises whatever unpickling raises, for example where its class is missing here."""
    return pickle.loads(payload)


def encode_items(items: list[Item]) -> Iterator[bytes]:
    """The bytes of frames from server to client; several where one would be large."""
    begun, size = 0, 0
    for end, item in enumerate(items, 1):
        size += len(item[2])
        if size >= _SPLIT_BYTES:
            yield _encoder.encode(items[begun:end])
            begun, size = end, 0
    if begun < len(items):
        yield _encoder.encode(items[begun:])


def decode_items(payload: bytes) -> list[Item]:
    """The items in a frame from server to client."""
    return _item_decoder.decode(payload)


def timed_out(method: str, timeout: float | None) -> RPCTimeoutError:
    """The error of a call whose deadline has passed: both sides keep it, and whichever notices says the same."""
    return RPCTimeoutError(f"{method!r} was not done within {timeout} s", method=method)


@dataclass(frozen=True, slots=True)
class BoxedError:
    """An exception with its cause, each also as text that always arrives.

    Attributes:
        pickled: The exception; None where it cannot be pickled.
        remote_traceback: Where it was raised, for an exception that has no cause and is not mpexec's own.
    """

    pickled: bytes | None
    type_name: str
    text: str
    notes: tuple[str, ...]
    remote_traceback: str
    cause: BoxedError | None


_DEEPEST = 16


def box_error(error: BaseException) -> BoxedError:
    """Describe `error`; whatever its class does, this does not raise."""
    return _box(error, error, 0)


def _box(error: BaseException, whole: BaseException, depth: int) -> BoxedError:
    """Describe one exception of a chain of causes; the end of the chain shows where the `whole` was raised."""
    cause = error.__cause__ if depth < _DEEPEST else None
    own = isinstance(error, MpexecError | RemoteTraceback)
    return BoxedError(
        pickled=_pickled(error),
        type_name=type(error).__qualname__,
        text=text_of(error),
        notes=_notes(error),
        remote_traceback="" if own or cause is not None else traceback_of(whole),
        cause=None if cause is None else _box(cause, whole, depth + 1),
    )


def _pickled(error: BaseException) -> bytes | None:
    try:
        if isinstance(error, MpexecError) and error.__cause__ is not None:  # its cause has a box of its own
            error = copy.copy(error)
            error.__cause__ = None
        return dumps(error)
    except Exception as refused:  # pickling runs code of the user's class; the text travels
        logger.debug("an error cannot be pickled: type=%s reason=%r", type(error).__name__, refused)
        return None


def _notes(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", ())
    return tuple(note for note in notes if isinstance(note, str)) if isinstance(notes, list | tuple) else ()


def unbox_error(box: BoxedError) -> BaseException:
    """The exception again, a new one each time, or a `RemoteError` in its place where it cannot be rebuilt."""
    error = _rebuilt(box)
    if error is None:
        error = RemoteError(f"the engine process raised {box.type_name}: {box.text}", type_name=box.type_name)
        for note in box.notes:
            error.add_note(note)
    try:
        error.__cause__ = _cause(box)
    except Exception as refused:  # a frozen class of the user's refuses attributes; better without cause than lost
        logger.debug("an error refuses its cause: type=%s reason=%r", box.type_name, refused)
    return error


def _rebuilt(box: BoxedError) -> BaseException | None:
    if box.pickled is None:
        return None
    try:
        error = pickle.loads(box.pickled)
    except Exception as failed:  # the class may be missing here or demand arguments: the text stands in
        logger.debug("an error cannot be rebuilt: type=%s reason=%r", box.type_name, failed)
        return None
    return error if isinstance(error, Exception) else None


def _cause(box: BoxedError) -> BaseException | None:
    if box.cause is not None:
        return unbox_error(box.cause)
    return RemoteTraceback(box.remote_traceback) if box.remote_traceback else None
