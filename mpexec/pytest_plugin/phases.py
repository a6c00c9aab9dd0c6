"""What the driver and the ranks of a test tell each other: which phase to run, and how it went."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpexec.messages import looks_like_lost_peer, text_of

When = Literal["setup", "call", "teardown"]
Outcome = Literal["failed", "skipped", "xfailed", "exit"]


@dataclass(frozen=True, slots=True)
class RankSettings:
    """All that a rank needs to know of the driver's pytest session.

    Attributes:
        args: The command line of pytest.
        folder: The folder in which it was given.
        basetemp: Folder for the `tmp_path` folders of the ranks, "" where pytest makes none.
        workerinput: What a worker of pytest-xdist has there: plug-ins and conftests see that this is not the main one.
        color: Compare values in colour.
        device: "auto", "cpu" or "cuda".
        coverage: Options of `coverage.Coverage`, None where nothing is measured.
        no_cov: pytest-cov is there, and must keep its hands off.
    """

    args: tuple[str, ...]
    folder: str
    basetemp: str
    workerinput: Mapping[str, Any]
    color: bool
    device: str
    coverage: Mapping[str, Any] | None
    no_cov: bool


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of one test, for all ranks of its group.

    Attributes:
        number: Of this test among those of the group, from 1 on.
        nodeid: The test; `path` is its file.
        next_nodeid: The test that comes next on these ranks, whose fixtures stay; None where none does.
        seconds: What is left for the test, None where there is no limit.
        skipped: The teardown of a test that the driver has skipped, without any setup here.
    """

    when: When
    number: int
    nodeid: str
    path: str
    next_nodeid: str | None = None
    next_path: str | None = None
    seconds: float | None = None
    skipped: bool = False


@dataclass(slots=True)
class Notes:
    """What a phase left on one rank, apart from its outcome.

    Attributes:
        sections: Titles and texts of what was captured.
        warnings: As `warning_facts` gives them.
        properties: What `record_property` was given.
        damage: Why these ranks should not run another test; "" where nothing speaks against it.
    """

    rank: int
    sections: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    properties: list[tuple[str, Any]] = field(default_factory=list)
    damage: str = ""


class PhaseFailed(Exception):
    """A phase did not pass on a rank.

    Attributes:
        rank: The rank.
        pid: Its process.
        outcome: "failed", "skipped", "xfailed" or "exit".
        reason: Why it was skipped or expected to fail, or the text of the exception.
        report: The rank's own report, as `pytest_report_to_serializable` gives it; None where there is none.
        notes: As for a phase that passes.
    """

    rank: int
    pid: int
    outcome: Outcome
    reason: str
    report: dict[str, Any] | None
    notes: Notes

    def __init__(self, message: str, facts: Mapping[str, Any]) -> None:
        super().__init__(message, facts)
        self.__dict__.update(facts)

    def __str__(self) -> str:
        return str(self.args[0])

    @staticmethod
    def of(
        error: BaseException | None, outcome: Outcome, reason: str, report: dict[str, Any] | None, notes: Notes
    ) -> PhaseFailed:
        """The failure of this rank; one that a lost peer has caused says so in its type, for the executor to see."""
        kind = PhaseLostPeer if error is not None and looks_like_lost_peer(error) else PhaseFailed
        text = reason if error is None else f"{type(error).__name__}: {text_of(error)}"
        return kind(
            f"rank {notes.rank}: {text}",
            {
                "rank": notes.rank,
                "pid": os.getpid(),
                "outcome": outcome,
                "reason": reason,
                "report": report,
                "notes": notes,
            },
        )


class PhaseLostPeer(PhaseFailed, ConnectionError):
    """A phase failed because another rank was gone: a consequence, seldom the root cause."""

    __str__ = PhaseFailed.__str__
