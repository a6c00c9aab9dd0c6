"""What crosses the socket: requests, items, and errors in boxes."""

from __future__ import annotations

import contextlib
import pickle
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpexec.errors import (
    ConfigError,
    ConnectionLostError,
    RemoteError,
    RemoteTraceback,
    SerializationError,
    WorkerDiedError,
)
from mpexec.mp_engine import frames
from mpexec.mp_engine.frames import (
    ITEM,
    MAX_CREDIT,
    REPLY,
    BoxedError,
    Call,
    Cancel,
    Hello,
    More,
    box_error,
    decode_arguments,
    decode_items,
    decode_requests,
    dump_value,
    encode_arguments,
    encode_items,
    encode_requests,
    load_value,
    unbox_error,
)

QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The error as it is after it has been raised and caught."""
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def there_and_back(error: BaseException) -> BaseException:
    box = pickle.loads(pickle.dumps(box_error(error)))
    assert isinstance(box, BoxedError)
    return unbox_error(box)


# -- requests ----------------------------------------------------------------------------------------------------------

ids = st.integers(1, (1 << 63) - 1)
requests = st.one_of(
    st.just(Hello()),
    st.builds(Cancel, ids),
    st.builds(More, ids, st.integers(1, MAX_CREDIT)),
    st.builds(
        Call,
        ids,
        st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
        st.binary(),
        st.none() | st.floats(0, 1e9),
        st.none() | st.integers(1, MAX_CREDIT),
    ),
)


@QUICK
@given(st.lists(requests))
def test_requests_return_as_they_were(sent: list[Any]) -> None:
    assert decode_requests(encode_requests(sent)) == sent


@QUICK
@given(st.binary())
def test_whatever_the_bytes_are_they_are_requests_or_refused(payload: bytes) -> None:
    for decode in (decode_requests, decode_arguments):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            decode(payload)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc_é"), inner),
    max_leaves=6,
)


@QUICK
@given(st.lists(plain, max_size=4), st.dictionaries(st.text("abc_é"), plain, max_size=3))
def test_plain_arguments_return_as_they_were(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert decode_arguments(encode_arguments(tuple(args), kwargs)) == (args, kwargs)


@pytest.mark.parametrize("bad", [object(), 1 << 64, {1, object()}, "\udc00", lambda: 0], ids=repr)
def test_arguments_that_are_not_plain_are_refused_where_they_are_given(bad: Any) -> None:
    with pytest.raises(SerializationError, match="the arguments of a call"):
        encode_arguments((bad,), {})


# -- items -------------------------------------------------------------------------------------------------------------


@QUICK
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, (1 << 63) - 1), st.binary())))
def test_items_return_as_they_were(items: list[Any]) -> None:
    assert [item for frame in encode_items(items) for item in decode_items(frame)] == items


def test_a_frame_that_would_be_large_becomes_several_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_SPLIT_BYTES", 100)
    items = [(ITEM, number, bytes(size)) for number, size in enumerate((40, 40, 40, 500, 1, 99, 3))]
    sent = list(encode_items(items))
    assert [[item[1] for item in decode_items(frame)] for frame in sent] == [[0, 1, 2], [3], [4, 5], [6]]
    assert list(encode_items([])) == []


def test_a_value_that_is_too_large_for_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_VALUE_BYTES", 1000)
    with pytest.raises(SerializationError, match="at most 1000"):
        dump_value(bytes(1000))
    assert load_value(dump_value((REPLY, [None]))) == (REPLY, [None])


def test_a_value_whose_class_raises_while_it_is_pickled_is_refused() -> None:
    class Stays:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("stays here")

    for value in (Stays(), [threading.Lock()], (number for number in ())):
        with pytest.raises(SerializationError, match="cannot be pickled"):
            dump_value(value)


# -- errors ------------------------------------------------------------------------------------------------------------


class PlainError(Exception):
    pass


class HardToRebuildError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a}/{b}")


class HostileError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> Any:
        raise ValueError("no pickle")


class FrozenError(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def test_an_error_keeps_type_arguments_attributes_notes_and_causes() -> None:
    root = WorkerDiedError("rank 1 died", rank=1, pid=7, signal_name="SIGKILL")
    middle = PlainError("middle", 2)
    middle.extra = [1, 2]  # type: ignore[attr-defined]
    middle.add_note("seen in the middle")
    got = there_and_back(raised(ConfigError("outer"), raised(middle, raised(root))))
    assert type(got) is ConfigError
    assert got.args == ("outer",)
    assert type(got.__cause__) is PlainError
    assert got.__cause__.args == ("middle", 2)
    assert got.__cause__.extra == [1, 2]  # type: ignore[attr-defined]
    assert got.__cause__.__notes__ == ["seen in the middle"]
    died = got.__cause__.__cause__
    assert isinstance(died, WorkerDiedError)
    assert (died.rank, died.pid, died.signal_name) == (1, 7, "SIGKILL")
    assert died.__cause__ is None


def test_the_traceback_of_a_foreign_error_arrives_as_text_with_all_that_followed() -> None:
    got = there_and_back(raised(PlainError("outer"), raised(ValueError("inner"))))
    assert type(got.__cause__) is ValueError
    text = str(got.__cause__.__cause__)
    assert "ValueError: inner" in text
    assert "PlainError: outer" in text
    assert "in raised" in text


def test_our_own_errors_carry_no_traceback() -> None:
    assert there_and_back(raised(ConnectionLostError("gone"))).__cause__ is None


def test_a_traceback_from_further_away_is_kept() -> None:
    got = there_and_back(raised(PlainError("x"), RemoteTraceback("on rank 3")))
    assert isinstance(got.__cause__, RemoteTraceback)
    assert got.__cause__.args == ("on rank 3",)
    assert got.__cause__.__cause__ is None


def test_one_of_our_errors_travels_though_its_cause_cannot() -> None:
    locked = PlainError("locked")
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    error = raised(ConfigError("outer", value=3), raised(locked))
    got = there_and_back(error)
    assert type(got) is ConfigError
    assert got.value == 3  # type: ignore[attr-defined]
    assert isinstance(got.__cause__, RemoteError)
    assert "locked" in str(got.__cause__)
    assert error.__cause__ is locked  # boxing has changed nothing


@pytest.mark.parametrize(
    "error", [HardToRebuildError(1, 2), HostileError(), SystemExit(3), KeyboardInterrupt()], ids=type
)
def test_what_cannot_be_rebuilt_or_must_not_is_told_as_text(error: BaseException) -> None:
    error.add_note("a note")
    got = there_and_back(raised(error))
    assert type(got) is RemoteError
    assert got.type_name == type(error).__name__
    assert got.__notes__ == ["a note"]
    assert isinstance(got.__cause__, RemoteTraceback)


def test_odd_errors_break_nothing() -> None:
    odd = PlainError("odd notes")
    odd.__notes__ = None  # type: ignore[assignment]
    assert there_and_back(raised(odd)).args == ("odd notes",)
    assert there_and_back(FrozenError("frozen")).args == ("frozen",)
    circle = PlainError("circle")
    circle.__cause__ = other = PlainError("other")
    other.__cause__ = circle
    assert there_and_back(circle).args == ("circle",)
    chain: BaseException = PlainError(0)
    for number in range(1, 200):
        chain = raised(PlainError(number), chain)
    assert there_and_back(chain).args == (199,)


def test_an_unboxed_error_is_new_each_time() -> None:
    box = box_error(raised(PlainError("x")))
    assert unbox_error(box) is not unbox_error(box)
