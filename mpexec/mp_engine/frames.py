"""What crosses the socket between a client and the server.

From client to server: typed msgpack, decoded into the structs below or refused; never unpickled, because whoever can
connect could otherwise run code here. From server to client: one pickled list of items, because a client trusts the
server it connects to, and errors are to arrive as the objects that they are.
"""

from __future__ import annotations

import logging
import pickle
import traceback
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from mpexec.errors import MpexecError, RemoteError, RemoteTraceback
from mpexec.messages import unpicklable
from mpexec.transport.frame import dumps

logger = logging.getLogger(__name__)

Id = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Credit = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

# Kinds of items, server to client.
WELCOME = 0  # the answer to `Hello`
REPLY = 1  # the value of a plain call
ITEM = 2  # one item of a stream
END = 3  # the stream is over
FAILED = 4  # the call or stream has failed; a `BoxedError`
CANCELLED = 5  # the call was cancelled as asked, and its task has ended
NEWS = 7  # something that nobody has asked for
CLOSED = 6  # the server ends; a `BoxedError`, or None after a plain stop

Item = tuple[int, int, Any]


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The first frame of a client; the server answers WELCOME."""


class Call(msgspec.Struct, tag=1, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Run a method.

    Attributes:
        timeout: Seconds that the server gives it; None is no limit.
        credit: Items that a stream may send before it hears of more; None for a plain call.
    """

    id: Id
    method: Annotated[str, msgspec.Meta(max_length=200)]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
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
_decoder = msgspec.msgpack.Decoder(list[Request])


def encode_requests(requests: list[Request]) -> bytes:
    """The bytes of a frame from client to server.

    Raises:
        SerializationError: An argument is not plain data (numbers, texts, bytes, lists, dicts, dataclasses of such).
    """
    try:
        return _encoder.encode(requests)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise unpicklable(requests, error, "the arguments of a call to the engine process") from error


def decode_requests(payload: bytes) -> list[Request]:
    """The requests in a frame.

    Raises:
        msgspec.MsgspecError, RecursionError: It is not such a frame.
    """
    return _decoder.decode(payload)


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


def box_error(error: BaseException, depth: int = 0) -> BoxedError:
    """Describe `error`; whatever its class does, this does not raise."""
    pickled: bytes | None = None
    try:
        pickled = dumps(error)
    except Exception as refused:  # pickling runs code of the user's class; the text travels
        logger.debug("an error cannot be pickled: type=%s reason=%r", type(error).__name__, refused)
    cause = error.__cause__
    own = isinstance(error, MpexecError | RemoteTraceback)
    return BoxedError(
        pickled=pickled,
        type_name=type(error).__qualname__,
        text=_text(error),
        notes=tuple(note for note in getattr(error, "__notes__", ()) if isinstance(note, str)),
        remote_traceback="" if own or cause is not None else _traceback(error),
        cause=None if cause is None or depth >= _DEEPEST else box_error(cause, depth + 1),
    )


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


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:  # a user's __str__ may raise
        return f"<no text: __str__ raised {type(failed).__name__}>"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error)).rstrip()
    except Exception:  # formatting calls user code too
        return f"{type(error).__qualname__}: {_text(error)}"
