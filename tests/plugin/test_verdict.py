"""What the failures of single ranks come to."""

from __future__ import annotations

from typing import Any

import pytest

from mpexec import WorkerDiedError
from mpexec.errors import attach_others
from mpexec.pytest_plugin.phases import Notes, PhaseFailed
from mpexec.pytest_plugin.verdict import RanksFailed, judge


def failed(outcome: Any, rank: int = 0) -> PhaseFailed:
    return PhaseFailed.of(None, outcome, f"why rank {rank} did", None, Notes(rank))


def test_an_expected_failure_hides_no_failure_and_no_lost_rank() -> None:
    with pytest.raises(pytest.xfail.Exception, match="why rank 0 did"):
        judge(failed("xfailed"), 2)
    for other in (failed("failed", 1), WorkerDiedError("rank 1 was killed by SIGSEGV", rank=1)):
        first = failed("xfailed")
        attach_others(first, [other])
        with pytest.raises((RanksFailed, pytest.xfail.Exception)) as caught:  # which would hide a failure
            judge(first, 2)
        assert isinstance(caught.value, RanksFailed)
        assert other in (*caught.value.failures, *caught.value.others)
