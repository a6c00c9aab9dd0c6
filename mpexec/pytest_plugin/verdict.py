"""What a phase of a test has come to, when it did not pass on all ranks."""

from __future__ import annotations

from typing import NoReturn

import pytest

from mpexec.pytest_plugin.phases import Notes, PhaseFailed


class RanksFailed(Exception):
    """A phase failed on some rank.

    Attributes:
        failures: Of the ranks that failed, the root cause first.
        others: What else happened: ranks that died afterwards.
        size: The number of ranks.
        preface: What is wrong, where it is not the failure of a single rank.
    """

    def __init__(self, failures: list[PhaseFailed], others: list[BaseException], size: int, preface: str = "") -> None:
        super().__init__(preface or str(failures[0]))
        self.failures = failures
        self.others = others
        self.size = size
        self.preface = preface


def failures_of(first: PhaseFailed) -> tuple[list[PhaseFailed], list[BaseException]]:
    """The failures that ranks have told of, the root cause first, and what else happened."""
    everything = [first, *getattr(getattr(first, "others", None), "exceptions", ())]
    told = [error for error in everything if isinstance(error, PhaseFailed)]
    return told, [error for error in everything if not isinstance(error, PhaseFailed)]


def notes_of(first: PhaseFailed) -> list[Notes]:
    """What the ranks noted on which the phase failed."""
    return [failure.notes for failure in failures_of(first)[0]]


def judge(first: PhaseFailed, size: int) -> NoReturn:
    """Raise what one process would have raised.

    Args:
        first: The executor's choice of the root cause, with the other failures in `others`.
        size: The number of ranks.

    Raises:
        RanksFailed: Some rank failed, or was lost, or only some were skipped.
        pytest.skip.Exception: All ranks were skipped.
        pytest.xfail.Exception: Some rank failed as expected, and none otherwise.
        pytest.exit.Exception: Some rank asked for the end of the session.
    """
    told, others = failures_of(first)
    by_outcome = {
        outcome: [failure for failure in told if failure.outcome == outcome]
        for outcome in ("exit", "failed", "xfailed", "skipped")
    }
    if by_outcome["exit"]:
        raise pytest.exit.Exception(by_outcome["exit"][0].reason)
    if by_outcome["failed"]:
        raise RanksFailed(by_outcome["failed"], others, size)
    if by_outcome["xfailed"] and others:
        raise RanksFailed(by_outcome["xfailed"], others, size, "a rank failed as expected, but another one was lost")
    if by_outcome["xfailed"]:
        raise pytest.xfail.Exception(by_outcome["xfailed"][0].reason)
    skipped = by_outcome["skipped"]
    if len(skipped) == size:
        raise pytest.skip.Exception(skipped[0].reason, _use_item_location=True)
    raise RanksFailed(skipped, others, size, _disagreement(skipped, size))


def _disagreement(skipped: list[PhaseFailed], size: int) -> str:
    who = {failure.rank: failure.reason for failure in sorted(skipped, key=lambda failure: failure.rank)}
    rest = [rank for rank in range(size) if rank not in who]
    said = "; ".join(f"rank {rank} was skipped ({reason})" for rank, reason in who.items())
    return f"the ranks do not agree: {said}; {_ranks(rest)} not. Skip on all ranks or on none: others wait for it."


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} was" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} were"
