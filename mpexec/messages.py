"""What crosses a process border: calls, replies, failures, outputs news of a rank's start. Nothing else does."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from mpexec.errors import MpexecError, RemoteError, RemoteTraceback, SerializationError

# The `reply_ranks` of a call whose completion nobody waits for: the driver reads it with what comes later, and is not
# woken for it. A failure wakes it all the same.
NOBODY_WAITS = (-1,)


class Call(NamedTuple):
    """One method to run on ranks. A named tuple: it is made twice a call, and frozen dataclasses are slow to make.

    Attributes:
        call_id: Unique in its executor, ascending in the order of sending.
        method: A public method name, or a callable that takes the worker as its first argument.
        reply_ranks: Ranks whose value travels back; None means every rank. All ranks report completion in any case.
    """

    call_id: int
    method: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    reply_ranks: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The method's name, for people."""
        return method_name(self.method)


def method_name(method: str | Callable[..., Any]) -> str:
    """The name of a method or callable, for people."""
    return method if isinstance(method, str) else getattr(method, "__qualname__", None) or repr(method)


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has built its agent.

    Attributes:
        methods: Public method names of worker and agent that may be called.
        stack_signal: The signal on which the rank writes its stacks, 0 where it could not be registered.
        facts: Device, threads and versions, for `describe()`.
    """

    rank: int
    pid: int
    methods: frozenset[str]
    stack_signal: int
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on a rank, as text that always arrives, with the exception itself where it can be pickled.

    Attributes:
        lost_peer: It looks like the consequence of another rank's end (connection closed, collective timed out).
        at_ns: `time.monotonic_ns()` on the rank; the clock is one for all processes of a machine.
        pickled: The exception, pickled on the rank; None if that failed.
    """

    call_id: int
    rank: int
    pid: int
    method: str
    type_name: str
    text: str
    traceback: str
    lost_peer: bool
    at_ns: int
    pickled: bytes | None = None

    @classmethod
    def of(
        cls, error: BaseException, *, call_id: int, rank: int, method: str, dumps: Callable[[Any], bytes] = pickle.dumps
    ) -> Failure:
        """Describe `error`; whatever its class does when asked for its text or pickled, this does not raise."""
        pickled: bytes | None
        try:
            pickled = dumps(error)
        except Exception:  # user classes may raise anything here; the text below still travels
            pickled = None
        return cls(
            call_id=call_id,
            rank=rank,
            pid=os.getpid(),
            method=method,
            type_name=_qualified(type(error)),
            text=text_of(error),
            traceback=traceback_of(error),
            lost_peer=looks_like_lost_peer(error),
            at_ns=time.monotonic_ns(),
            pickled=pickled,
        )

    def to_exception(self, original: Exception | None = None) -> BaseException:
        """The original exception with its remote traceback as `__cause__`, or a `RemoteError` in its place.

        Args:
            original: The exception itself, where it happened in this process and need not be rebuilt.

        `SystemExit` and `KeyboardInterrupt` always become a `RemoteError`: on a rank they end that rank, they must not
        end the caller's program.
        """
        error: BaseException | None = self._rebuilt() if original is None else _if_it_takes_notes(original)
        if error is None:
            error = RemoteError(
                f"rank {self.rank} raised {self.type_name} in {self.method!r} (call {self.call_id}): {self.text}",
                rank=self.rank,
                method=self.method,
                type_name=self.type_name,
            )
        _link_root_cause(error, RemoteTraceback(self.traceback))
        error.add_note(f"raised on rank {self.rank} (pid {self.pid}) in {self.method!r}, call {self.call_id}")
        return error

    def _rebuilt(self) -> BaseException | None:
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
            str(error)
        except Exception:  # the class may be missing here or demand arguments: the text stands in
            return None
        return _if_it_takes_notes(error) if isinstance(error, Exception) else None


def _if_it_takes_notes(error: Exception) -> Exception | None:
    """The exception, or None if it refuses notes or a cause: a frozen dataclass does."""
    try:
        error.add_note("")
        error.__notes__.pop()
        error.__cause__ = error.__cause__
    except Exception:  # user classes refuse in ways of their own
        return None
    return error


def _link_root_cause(error: BaseException, remote: RemoteTraceback) -> None:
    """Set the remote traceback as cause; an mpexec error that brought its own cause keeps it beneath."""
    if isinstance(error, MpexecError) and error.__cause__ is not None:
        remote.__cause__ = error.__cause__
    error.__cause__ = remote


def _qualified(cls: type) -> str:
    return (
        cls.__qualname__
        if cls.__module__ in ("builtins", "__main__", "__mp_main__")
        else f"{cls.__module__}.{cls.__qualname__}"
    )


def text_of(error: BaseException) -> str:
    """The text of an error, whatever its class does when asked for it."""
    try:
        return str(error)
    except Exception as failed:  # a user's __str__ may raise
        return f"<no text: __str__ raised {type(failed).__name__}>"


def traceback_of(error: BaseException) -> str:
    """The traceback of an error as text, or what can be had of it."""
    try:
        return "".join(traceback.format_exception(error)).rstrip()
    except Exception:  # formatting calls user code too
        return "".join(traceback.format_tb(error.__traceback__)) + f"{_qualified(type(error))}: {text_of(error)}"


_LOST_PEER_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "read timeout",
    "wait timeout",
    "remote process exited",
    "socket timeout",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
)


def looks_like_lost_peer(error: BaseException) -> bool:
    """True for what a collective raises when another rank is gone: a consequence, seldom the root cause."""
    if isinstance(error, ConnectionError):
        return True
    if type(error).__name__ in ("DistBackendError", "DistNetworkError"):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return tells_of_lost_peer(text_of(error))


def tells_of_lost_peer(text: str) -> bool:
    """True for the words of a collective whose peer is gone."""
    text = text.lower()
    return any(part in text for part in _LOST_PEER_TEXTS)


def unpicklable(value: Any, error: BaseException, what: str, *, rank: int | None = None) -> SerializationError:
    """The error for a value that cannot be pickled, naming what it is and the remedy."""
    name = _qualified(type(value))
    return SerializationError(
        f"{what} cannot be pickled: {text_of(error)} (top-level type {name}). Pass plain data, arrays or tensors, "
        "or objects whose class is importable on both sides.",
        type_name=name,
        rank=rank,
    )
