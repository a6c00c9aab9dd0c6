"""Deadline: one point on the monotonic clock, made once and handed down."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from mpexec.deadline import Deadline
from mpexec.errors import ConfigError


def test_none_never_expires() -> None:
    deadline = Deadline.after(None)
    assert (deadline.expired, deadline.remaining(), deadline.poll_ms()) == (False, None, None)
    assert deadline.share(0.5) is deadline


def test_zero_has_expired_already() -> None:
    deadline = Deadline.after(0)
    assert deadline.expired
    assert (deadline.remaining(), deadline.poll_ms()) == (0.0, 0)


def test_time_runs_from_the_making_on_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    deadline = Deadline.after(2.5)
    assert deadline.remaining() == 2.5
    now += 2_000_000_000
    assert deadline.remaining() == 0.5
    assert not deadline.expired
    now += 500_000_000
    assert deadline.expired
    now += 500_000_000
    assert deadline.remaining() == 0.0


def test_polling_never_wakes_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    deadline = Deadline.after(0.0101)
    assert deadline.poll_ms() == 11
    now = 10_099_999
    assert deadline.poll_ms() == 1
    now = 10_100_000
    assert deadline.poll_ms() == 0


def test_a_share_leaves_the_rest_to_the_steps_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 0)
    assert Deadline.after(10).share(0.4).remaining() == 4.0


def test_the_sooner_of_two() -> None:
    early, late, never = Deadline.after(1), Deadline.after(2), Deadline.after(None)
    assert early.sooner(late) is late.sooner(early) is early
    assert early.sooner(never) is never.sooner(early) is early
    assert never.sooner(never) is never


@pytest.mark.parametrize("seconds", [-1, -1e-9, math.nan, "5", [], object()])
def test_what_is_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        Deadline.after(seconds)


@pytest.mark.parametrize("seconds", [math.inf, 1e300, 1e12])
def test_a_time_beyond_every_clock_is_usable_everywhere(seconds: float) -> None:
    deadline = Deadline.after(seconds)
    assert not deadline.expired
    left = deadline.remaining()
    assert left is None or left < 1e10  # what poll, epoll and locks take
