"""The error tree: facts as attributes, and every class survives pickle, copy and cloudpickle."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from mpexec import errors
from mpexec.errors import (
    ConfigError,
    MpexecError,
    RemoteError,
    RemoteTraceback,
    RPCTimeoutError,
    SerializationError,
    StartupError,
    TaskEndedError,
    WorkerDiedError,
    WrongStateError,
    attach_others,
)

FACTS: dict[type[MpexecError], dict[str, Any]] = {
    WrongStateError: {"state": "READY"},
    StartupError: {"rank": 1, "phase": "rendezvous"},
    WorkerDiedError: {
        "rank": 3, "pid": 42, "exit_code": None, "signal_name": "SIGKILL", "method": "forward", "last_lines": ("a",),
    },
    RPCTimeoutError: {"method": "forward", "missing_ranks": (0, 2), "stacks": {0: "in forward", 2: "<stopped>"}},
    SerializationError: {"type_name": "_thread.lock", "rank": 1},
    RemoteError: {"rank": 1, "method": "forward", "type_name": "x.Y"},
    TaskEndedError: {"task_name": "Agent.loop"},
}  # fmt: skip
CLASSES = sorted(
    (cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, MpexecError)),
    key=lambda cls: cls.__name__,
)
WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "pickle protocol 2": lambda error: pickle.loads(pickle.dumps(error, 2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "cloudpickle": lambda error: pickle.loads(cloudpickle.dumps(error)),
}


def full(cls: type[MpexecError]) -> MpexecError:
    """An error with all facts, a cause, a note and others."""
    error = cls("what happened", **FACTS.get(cls, {}))
    error.__cause__ = ValueError("root")
    error.add_note("a note")
    error.others = ExceptionGroup("more", [KeyError("k")])
    return error


# F032
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_survives_with_text_facts_cause_notes_and_others(cls: type[MpexecError], way: str) -> None:
    again = WAYS[way](full(cls))
    assert type(again) is cls
    assert str(again) == "what happened"
    assert {name: getattr(again, name) for name in FACTS.get(cls, {})} == FACTS.get(cls, {})
    assert (type(again.__cause__), again.__cause__.args) == (ValueError, ("root",))
    assert again.__notes__ == ["a note"]
    assert again.others is not None
    assert [type(other) for other in again.others.exceptions] == [KeyError]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_defaults_for_its_facts(cls: type[MpexecError]) -> None:
    error = cls("text")
    assert all(hasattr(error, name) for name in FACTS.get(cls, {}))
    assert error.others is None
    assert cls().args == ("",)


def test_a_copy_shares_nothing_that_changes() -> None:
    error = full(RPCTimeoutError)
    again = copy.deepcopy(error)
    again.stacks[9] = "x"  # type: ignore[attr-defined]
    again.add_note("another")
    assert 9 not in error.stacks  # type: ignore[attr-defined]
    assert error.__notes__ == ["a note"]


def test_two_time_outs_do_not_share_their_stacks() -> None:
    first, second = RPCTimeoutError("a"), RPCTimeoutError("b")
    first.stacks[0] = "x"
    assert second.stacks == {}


POOL = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from mpexec.errors import RPCTimeoutError, WorkerDiedError

def fail():
    error = WorkerDiedError("died", rank=3, pid=42, signal_name="SIGKILL", last_lines=("a",))
    error.add_note("a note")
    raise error

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        error = pool.submit(fail).exception(60)
        print(type(error).__name__, error.rank, error.pid, error.signal_name, error.last_lines, error.__notes__)
"""


# F032
def test_an_error_passes_through_somebody_elses_process_pool(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.strip() == "WorkerDiedError 3 42 SIGKILL ('a',) ['a note']"


def test_the_tree_fits_the_handlers_that_people_write() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RPCTimeoutError, TimeoutError)
    assert issubclass(RPCTimeoutError, asyncio.TimeoutError)
    assert issubclass(RemoteError, SerializationError)
    assert all(issubclass(cls, Exception) for cls in CLASSES)


def test_the_remote_traceback_shows_its_text_and_survives() -> None:
    remote = RemoteTraceback("Traceback ...\nValueError: x")
    again = pickle.loads(pickle.dumps(remote))
    assert str(again) == str(remote)
    assert "ValueError: x" in str(remote)


def test_others_leave_out_the_error_itself_and_hold_what_no_group_of_exceptions_can() -> None:
    error = ValueError("root")
    attach_others(error, [error])
    assert not hasattr(error, "others")
    attach_others(error, [KeyError("k"), error, SystemExit(3)])
    assert [type(other) for other in error.others.exceptions] == [KeyError, RemoteError]  # type: ignore[attr-defined]


def test_an_error_that_takes_no_attributes_gets_notes_instead() -> None:
    class Sealed(Exception):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "others":
                raise AttributeError(name)
            super().__setattr__(name, value)

    error = Sealed("x")
    attach_others(error, [KeyError("k")])
    assert "KeyError" in error.__notes__[0]


def test_attaching_others_never_raises() -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(name)

    class NoText(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    attach_others(Frozen("x"), [KeyError("k"), NoText()])
    attach_others(KeyError("k"), [NoText(), Frozen("x")])
