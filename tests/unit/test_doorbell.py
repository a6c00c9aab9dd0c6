"""The spin before sleeping: it pays for itself, or it is left out."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from mpexec.transport.doorbell import Spinner


class Clock:
    """Time moves only when a core is yielded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_yield_ns: int = 1000) -> None:
        self.now = 10**9
        self.yields = 0
        self.per_yield_ns = per_yield_ns
        monkeypatch.setattr(os, "sched_yield", self.give)
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now)

    def give(self) -> None:
        self.yields += 1
        self.now += self.per_yield_ns


def after(count: int) -> Callable[[], bool]:
    """True from the n-th look on."""
    looks = 0

    def found() -> bool:
        nonlocal looks
        looks += 1
        return looks >= count

    return found


def skipped(spinner: Spinner, most: int = 2000) -> int:
    """Waits that are not spun for, until the next one that is."""
    for count in range(most):
        if spinner.wants_to_spin():
            return count
    return most


def test_a_fresh_spinner_spins_and_sees_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spinner = Clock(monkeypatch), Spinner()
    assert spinner.wants_to_spin()
    assert spinner.spin(after(5))
    assert clock.yields == 5
    assert spinner.wants_to_spin()


def test_the_budget_is_counted_in_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spinner = Clock(monkeypatch), Spinner(60)
    assert not spinner.spin(lambda: False)
    assert clock.yields == 60


def test_the_wall_clock_caps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spinner = Clock(monkeypatch, per_yield_ns=50_000), Spinner(1000)
    assert not spinner.spin(lambda: False)
    assert clock.yields <= 8  # 300 us


def test_each_miss_doubles_the_pause_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    spinner = Spinner()
    pauses = []
    for _ in range(9):
        assert not spinner.spin(lambda: False)
        pauses.append(skipped(spinner))
    assert pauses[0] >= 1
    assert pauses == sorted(pauses)
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(pauses))
    assert pauses[-1] == pauses[-2] <= 64


def test_a_hit_ends_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    spinner = Spinner()
    for _ in range(5):
        spinner.spin(lambda: False)
        skipped(spinner)
    assert spinner.spin(after(1))
    assert spinner.wants_to_spin()
    spinner.spin(lambda: False)
    assert skipped(spinner) <= 2


def test_a_wake_up_soon_after_parking_brings_the_spin_back(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    spinner = Spinner()
    for _ in range(8):
        spinner.spin(lambda: False)
        skipped(spinner)
    spinner.spin(lambda: False)
    spinner.woke_after(50_000_000)  # late: a spin would not have seen it
    assert not spinner.wants_to_spin()
    spinner.woke_after(20_000)
    assert spinner.wants_to_spin()


def test_on_busy_cores_spinning_stops_for_a_long_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spinner = Clock(monkeypatch, per_yield_ns=4_000_000), Spinner()
    assert not spinner.spin(lambda: False)
    assert clock.yields == 1
    spinner.woke_after(1000)
    assert skipped(spinner) > 100


def test_news_on_busy_cores_is_still_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, per_yield_ns=4_000_000)
    assert Spinner().spin(lambda: True)


def test_a_look_that_raises_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)

    def broken() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Spinner().spin(broken)
