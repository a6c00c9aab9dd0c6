"""What a test must leave in a rank as it found it: put back where that can be done, told where it cannot."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Key = tuple[str, Any]
State = dict[Key, Any]

_THREADS_END_S = 0.2
_ABSENT: Any = object()
_FOR_PYTEST = ("PYTEST_CURRENT_TEST",)


def _set_cwd(_: Any, value: str) -> None:
    os.chdir(value)


def _set_variable(name: str, value: Any) -> None:
    if value is _ABSENT:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _set_handler(number: int, value: Any) -> None:
    if value is not None:  # one that was not set from Python cannot be set from Python
        signal.signal(number, value)


def _set_deterministic(_: Any, value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_PUT_BACK: Mapping[str, Callable[[Any, Any], object]] = {
    "cwd": _set_cwd,
    "variable": _set_variable,
    "handler": _set_handler,
    "stream": lambda name, value: setattr(sys, name, value),
    "default dtype": lambda _, value: torch.set_default_dtype(value),
    "default device": lambda _, value: torch.set_default_device(None if value == "cpu" else value),
    "gradients": lambda _, value: torch.set_grad_enabled(value),
    "deterministic": _set_deterministic,
    "torch threads": lambda _, value: torch.set_num_threads(value),
}


def take_state() -> State:
    """The present state, as a flat table; about a tenth of a millisecond."""
    state: State = {
        ("cwd", ""): os.getcwd(),
        ("stream", "stdout"): sys.stdout,
        ("stream", "stderr"): sys.stderr,
        ("default dtype", ""): torch.get_default_dtype(),
        ("default device", ""): str(torch.get_default_device()),
        ("gradients", ""): torch.is_grad_enabled(),
        ("deterministic", ""): (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        ("torch threads", ""): torch.get_num_threads(),
    }
    state.update({("variable", name): value for name, value in os.environ.items() if name not in _FOR_PYTEST})
    state.update({("handler", number): signal.getsignal(number) for number in _SIGNALS})
    state.update({("thread", thread): thread.name for thread in threading.enumerate()})
    return state


_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class StateWatch:
    """Compares the state after a test with that before it."""

    def __init__(self) -> None:
        self._expected: State = {}
        self._wider: dict[Any, dict[Key, Any]] = {}

    def begin(self) -> None:
        """A test begins: the state is to be this again when it has ended."""
        self._expected = take_state()

    @contextlib.contextmanager
    def widening(self, owner: Any) -> Iterator[None]:
        """What changes meanwhile stays until `narrowed` is called for the same owner."""
        before = take_state()
        try:
            yield
        finally:
            changes = _differences(before, take_state())
            self._wider[owner] = {key: old for key, (old, _) in changes.items()}
            for key, (_, new) in changes.items():
                _set(self._expected, key, new)

    def narrowed(self, owner: Any) -> None:
        """What `owner` has changed is to be as it was before."""
        for key, old in self._wider.pop(owner, {}).items():
            _set(self._expected, key, old)

    def end(self) -> str:
        """Put back what differs; what cannot be put back, in words, and "" where all is well."""
        self._await_threads()
        left: list[str] = []
        for key, (old, new) in _differences(self._expected, take_state()).items():
            kind, what = key
            if kind == "thread":
                if new is not _ABSENT:
                    left.append(f"a running thread {new!r}")
                continue
            try:
                _PUT_BACK[kind](what, old)
            except (OSError, RuntimeError, ValueError, TypeError) as error:
                left.append(f"{kind} {what}: {error}".replace(" :", ":"))
        return ", ".join(left)

    def _await_threads(self) -> None:
        """Give threads that are about to end the time to do so."""
        end = time.monotonic() + _THREADS_END_S
        for thread in threading.enumerate():
            if ("thread", thread) not in self._expected and thread is not threading.current_thread():
                with contextlib.suppress(RuntimeError):  # a thread that threading does not know well
                    thread.join(max(0.0, end - time.monotonic()))


def _differences(before: State, after: State) -> dict[Key, tuple[Any, Any]]:
    """The old and the new value of what differs."""
    return {
        key: (old, new)
        for key in before.keys() | after.keys()
        if (old := before.get(key, _ABSENT)) is not (new := after.get(key, _ABSENT)) and old != new
    }


def _set(state: State, key: Key, value: Any) -> None:
    if value is _ABSENT:
        state.pop(key, None)
    else:
        state[key] = value
