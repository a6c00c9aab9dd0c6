"""The error tree. Every class carries facts as attributes and survives pickle, copy and cloudpickle.

    MpexecError
    ├── ConfigError (also ValueError)      a value that cannot work, with the remedy
    ├── WrongStateError                    a verb that the present state does not allow
    ├── StartupError                       a rank did not become ready; `rank`, `phase`
    ├── WorkerDiedError                    a rank's process ended; `rank`, `pid`, `exit_code`, `signal_name`
    ├── RPCTimeoutError (also TimeoutError)  the deadline passed; `missing_ranks`, `stacks`
    ├── SerializationError                 a value that cannot travel; nothing else is disturbed
    │   └── RemoteError                    a remote exception that could not be rebuilt; `rank`, `type_name`
    ├── TransportError                     a record that is not what it must be; breaks the executor
    ├── ExecutorStoppedError               the call was ended by `stop`
    ├── ExecutorBrokenError                a rank was lost earlier; `__cause__` is the root cause
    ├── EngineStoppedError                 the engine ended; `__cause__` is the root cause
    ├── ConnectionLostError (also ConnectionError)  the engine's process, or the way to it, is gone
    ├── QueueFullError                     the engine's queue has no room
    └── TaskEndedError                     a background task returned, or was cancelled, while nobody had called stop

A method that raises on a rank reaches the caller as the user's own class, with `__cause__` a `RemoteTraceback`.
"""

from __future__ import annotations

import logging
from typing import Any, Self

logger = logging.getLogger(__name__)


def _restore(
    cls: type[MpexecError], args: tuple[Any, ...], facts: dict[str, Any], cause: BaseException | None
) -> MpexecError:
    """Rebuild without `__init__`: constructors here take facts by name, which plain exception pickling cannot pass."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    if cause is not None:
        error.__cause__ = cause
    return error


class MpexecError(Exception):
    """Base of all errors of mpexec.

    Attributes:
        others: Further failures of the same event, for example of other ranks; None when there were none.
    """

    others: ExceptionGroup[Exception] | None = None

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, dict(self.__dict__), self.__cause__)

    def __copy__(self) -> Self:
        return _restore(type(self), self.args, dict(self.__dict__), self.__cause__)  # type: ignore[return-value]


class ConfigError(MpexecError, ValueError):
    """A value that cannot work. The message names the value and the remedy."""


class WrongStateError(MpexecError):
    """The present state does not allow this verb; nothing was changed.

    Attributes:
        state: Name of the state that the object was in.
    """

    state: str = ""


class StartupError(MpexecError):
    """A rank did not become ready. Every process that had been started is gone when this is raised.

    Attributes:
        rank: The rank that failed first; None when the failure belongs to no single rank.
        phase: What that rank was doing: "spawn", "import main", "rendezvous", "build model", ...
    """

    rank: int | None = None
    phase: str = ""


class WorkerDiedError(MpexecError):
    """A rank's process ended.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        exit_code: Exit status, None when a signal ended it.
        signal_name: For example "SIGKILL", None when it exited by itself.
        method: The method it was in, or None.
        last_lines: The last lines it wrote to stdout and stderr, oldest first.
        node: Where it ran, in the words of the cluster; "" on this machine.
        reason: What the cluster said of its end, "" where there is none.
    """

    rank: int = -1
    pid: int = -1
    exit_code: int | None = None
    signal_name: str | None = None
    method: str | None = None
    last_lines: tuple[str, ...] = ()
    node: str = ""
    reason: str = ""


class RPCTimeoutError(MpexecError, TimeoutError):
    """The deadline passed before every rank had answered; the executor is BROKEN.

    Attributes:
        method: Name of the method called.
        missing_ranks: Ranks that had not answered, ascending.
        stacks: Python stacks of the missing ranks as text; where a rank cannot show one, the reason.
    """

    method: str = ""
    missing_ranks: tuple[int, ...] = ()
    stacks: dict[int, str]

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message, **{"stacks": {}, **facts})


class SerializationError(MpexecError):
    """A value, argument or exception that cannot be pickled or rebuilt. Other calls are not disturbed.

    Attributes:
        type_name: Qualified name of the type of the offending value.
        rank: The rank on which it happened; None in the driver.
    """

    type_name: str = ""
    rank: int | None = None


class RemoteError(SerializationError):
    """Stands for an exception of a rank that could not be rebuilt here; type, text and traceback are kept as text.

    Attributes:
        rank: The rank that raised it.
        method: The method it was raised in.
        type_name: Qualified name of the original class.
    """

    method: str = ""


class TransportError(MpexecError):
    """A record that is not what it must be: foreign, torn or out of sequence. The executor is BROKEN."""


class ExecutorStoppedError(MpexecError):
    """The call was in flight or queued when `stop` or `release` was called."""


class ExecutorBrokenError(MpexecError):
    """The executor lost a rank earlier. `__cause__` is the root cause."""


class EngineStoppedError(MpexecError):
    """The engine no longer serves requests. `__cause__` is the root cause, None after a plain `stop`."""


class ConnectionLostError(MpexecError, ConnectionError):
    """The process at the other end of the connection is gone, does not answer, or has closed."""


class QueueFullError(MpexecError):
    """The engine's queue has no room for another request."""


class TaskEndedError(MpexecError):
    """A background task returned or was cancelled from outside, though nobody had called `stop`.

    Attributes:
        task_name: Name of that task.
    """

    task_name: str = ""


class RemoteTraceback(Exception):
    """The traceback of a failure on a rank, as text: the `__cause__` of the exception that reaches the caller.

    The idea of carrying it as a cause is that of `concurrent.futures`.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def attach_others(error: BaseException, others: list[BaseException]) -> None:
    """Set `error.others` to a group of further failures; exceptions that refuse attributes get notes, or nothing.

    It never raises, whatever the classes of users do: it runs while failures are being told.
    """
    rest = [other for other in others if other is not error]
    if not rest:
        return
    try:
        group = ExceptionGroup("further failures", [_as_exception(other) for other in rest])
        try:
            error.others = group  # type: ignore[attr-defined]
        except Exception:
            for other in rest:
                error.add_note(f"further failure: {type(other).__name__}: {other}")
    except Exception as refused:
        logger.debug("further failures of %s are lost: %r", type(error).__name__, refused)


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RemoteError(repr(error), type_name=type(error).__name__)
