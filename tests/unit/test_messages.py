"""What crosses a process border: failures above all, whose text always arrives."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from mpexec.errors import RemoteError, RemoteTraceback, SerializationError
from mpexec.messages import Call, Failure, Ready, looks_like_lost_peer, method_name


class NeedsArgumentsError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


class RefusesError(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoReprError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


class LockError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class SealedError(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def travel(error: BaseException, **facts: Any) -> Failure:
    """A failure as it arrives at the driver."""
    settings = {"call_id": 7, "rank": 3, "method": "forward", **facts}
    try:
        raise error
    except BaseException as raised:
        return pickle.loads(pickle.dumps(Failure.of(raised, **settings)))  # type: ignore[no-any-return]


def test_an_ordinary_exception_is_rebuilt_with_cause_and_note() -> None:
    error = travel(ValueError("a", 1)).to_exception()
    assert (type(error), error.args) == (ValueError, ("a", 1))
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "test_messages.py" in str(error.__cause__)
    assert all(fact in error.__notes__[-1] for fact in ("rank 3", "forward", "call 7"))


# F031
@pytest.mark.parametrize(
    "error",
    [NeedsArgumentsError(1, 2), RefusesError("x"), NoTextError("x"), NoReprError("x"), LockError("x")],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_rebuilt_arrives_as_text(error: Exception) -> None:
    rebuilt = travel(error).to_exception()
    assert isinstance(rebuilt, RemoteError)
    assert isinstance(rebuilt, SerializationError)
    assert (rebuilt.rank, rebuilt.method) == (3, "forward")
    assert rebuilt.type_name.endswith(type(error).__name__)
    assert type(error).__name__ in str(rebuilt.__cause__)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_would_end_the_callers_program_becomes_a_remote_error(error: BaseException) -> None:
    rebuilt = travel(error).to_exception()
    assert isinstance(rebuilt, RemoteError)
    assert type(error).__name__ in str(rebuilt)


def test_a_class_that_is_missing_here_is_named_in_the_text() -> None:
    failure = travel(ValueError("x"))
    foreign = pickle.dumps(ValueError("x")).replace(b"ValueError", b"WalueError")
    failure = pickle.loads(pickle.dumps(failure))
    object.__setattr__(failure, "pickled", foreign)
    assert isinstance(failure.to_exception(), RemoteError)


def test_something_that_is_no_exception_is_not_raised() -> None:
    failure = travel(ValueError("x"))
    object.__setattr__(failure, "pickled", pickle.dumps("not an exception"))
    assert isinstance(failure.to_exception(), RemoteError)


def test_the_users_own_notes_and_causes_are_in_what_arrives() -> None:
    error = ValueError("x")
    error.add_note("mine")
    error.__cause__ = KeyError("inner")
    rebuilt = travel(error).to_exception()
    assert rebuilt.__notes__[0] == "mine"
    assert "KeyError: 'inner'" in str(rebuilt.__cause__)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("x"), BrokenPipeError("x"), ConnectionRefusedError("x"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError("Timed out waiting 5000ms for recv operation to complete"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
    ],
)  # fmt: skip
def test_consequences_of_a_lost_peer_are_told_apart(error: Exception) -> None:
    assert looks_like_lost_peer(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), ValueError("connection closed by peer"), KeyError("x"), NoTextError()]
)
def test_real_errors_do_not_look_like_consequences(error: Exception) -> None:
    assert not looks_like_lost_peer(error)


def test_methods_have_names_for_people() -> None:
    assert method_name("forward") == "forward"
    assert method_name(travel) == "travel"
    assert "partial" in method_name(__import__("functools").partial(travel))


@pytest.mark.parametrize("message", [Call(1, "m", (1,), {"k": 2}, (0,)), Ready(0, 1, frozenset({"m"}), 10, {})])
def test_messages_travel_unchanged(message: Any) -> None:
    assert pickle.loads(pickle.dumps(message)) == message
