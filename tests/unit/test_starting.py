"""The start of a group: how long it may take, and what its errors say."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from mpexec import ModelAgent, StartupError, WorkerSpec
from mpexec.deadline import Deadline
from mpexec.executor.starting import StartWatch, died_error
from mpexec.messages import Ready
from mpexec.processes import Death

SECOND = 1_000_000_000


class Played(StartWatch):
    """News comes at times of a clock of its own.

    Args:
        news: Second, rank, and "ready" or the name of a phase.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, news: list[tuple[float, int, str]]) -> None:
        self.now = 0.0
        monkeypatch.setattr("mpexec.deadline.time.monotonic_ns", lambda: int(self.now * SECOND))
        super().__init__(WorkerSpec(agent=ModelAgent, world_size=2, init_timeout=10.0), None)
        self._news = news

    def next(self, deadline: Deadline) -> tuple[str, int, Any]:
        assert deadline.at_ns is not None
        end = deadline.at_ns / SECOND
        if not self._news or self._news[0][0] > end:
            self.now = end
            raise queue.Empty
        self.now, rank, what = self._news.pop(0)
        ready = ("ready", Ready(rank, 100 + rank, frozenset(), 0, {}))
        return "message", rank, ready if what == "ready" else ("phase", what)


def test_each_report_of_progress_gives_its_rank_the_whole_init_timeout_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [(second, rank, f"layer {second}") for second in range(9, 90, 9) for rank in (0, 1)]
    watch = Played(monkeypatch, [*reports, (90, 1, "ready"), (91, 0, "ready")])
    assert [ready.rank for ready in watch.await_ready()] == [0, 1]
    assert watch.now == 91


def test_a_rank_without_progress_for_init_timeout_fails_the_start_whatever_the_others_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Played(monkeypatch, [(3, 1, "build model"), *((second, 0, "layer") for second in range(4, 90, 2))])
    with pytest.raises(StartupError, match="no progress for 10 s") as caught:
        watch.await_ready()
    assert watch.now == 13
    assert (caught.value.rank, caught.value.phase) == (1, "build model")
    assert "rank 0 in phase 'layer', rank 1 in phase 'build model'" in str(caught.value)


def test_the_hint_that_memory_ran_out_is_in_the_error() -> None:
    death = Death(1, 77, None, "SIGKILL", sent_by_us=False, at_ns=0, last_lines=("loading",), out_of_memory=True)
    error = died_error(death, "forward", "rank 0 idle")
    assert "rank 1 (pid 77) killed by SIGKILL" in str(error)
    assert "likely out of memory" in str(error)
    assert error.last_lines == ("loading",)
    assert error.__notes__ == ["all ranks: rank 0 idle"]
