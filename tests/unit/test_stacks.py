"""Stacks of ranks: the text, or the reason why there is none."""

from __future__ import annotations

import pytest

from mpexec.executor.stacks import collect_stacks
from mpexec.transport.linux import OwnedFd


class Rank:
    """A rank in a given state; one that runs writes its stack when it is asked."""

    pidfd: OwnedFd | None = None

    def __init__(self, state: str, *, stack_signal: int = 1, deaf: bool = False) -> None:
        self._state = state
        self._deaf = deaf
        self.stack_signal = stack_signal
        self.text = "an earlier stack"

    def state(self) -> str:
        return self._state

    def signal_stacks(self) -> None:
        assert self._state == "running", "it could not react"
        if not self._deaf:
            self.text += '  File "model.py", line 7 in forward\n'

    def stack_bytes(self) -> int:
        return len(self.text)

    def read_stacks(self, start: int) -> str:
        return self.text[start:]


def test_what_a_rank_writes_now_is_its_stack() -> None:
    assert collect_stacks({3: Rank("running")}) == {3: 'File "model.py", line 7 in forward'}


@pytest.mark.parametrize("state", ["stopped", "uninterruptible", "zombie", "gone"])
def test_a_rank_that_cannot_react_is_reported_with_the_state_that_the_kernel_tells(state: str) -> None:
    assert collect_stacks({1: Rank(state), 0: Rank("running")}) == {
        0: 'File "model.py", line 7 in forward',
        1: f"<no stack: the process is {state}>",
    }


def test_a_rank_that_does_not_react_is_given_up_and_named() -> None:
    assert "did not react" in collect_stacks({0: Rank("running", deaf=True)})[0]


def test_a_rank_that_has_no_handler_is_not_signalled() -> None:
    rank = Rank("running", stack_signal=0)
    assert collect_stacks({0: rank}) == {0: "<no stack: the process is running>"}
    assert rank.text == "an earlier stack"
