"""Telemetry: which moments of requests and steps become which durations."""

from __future__ import annotations

import pytest

from mpexec.engine.telemetry import Telemetry


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def at(self, seconds: float) -> None:
        self.now = int(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def telemetry(clock: Clock) -> Telemetry:
    return Telemetry(clock)


def test_the_times_of_a_request_are_counted_from_its_arrival(telemetry: Telemetry, clock: Clock) -> None:
    telemetry.accepted(1)
    for seconds, event in ((2, lambda: telemetry.sent(1, [1])), (3, lambda: telemetry.token(1, False))):
        clock.at(seconds)
        event()
    clock.at(5)
    telemetry.token(1, True)
    totals = {name: (one.count, one.total_ns / 1e9) for name, one in telemetry.as_dict().items()}
    assert totals == {
        "queue_wait": (1, 2.0),
        "time_to_first_token": (1, 3.0),
        "inter_token": (1, 2.0),
        "end_to_end": (1, 5.0),
        "step": (0, 0.0),
    }


def test_a_request_that_goes_away_leaves_nothing_behind(telemetry: Telemetry) -> None:
    telemetry.accepted(1)
    telemetry.gone(1)
    telemetry.token(1, True)
    telemetry.sent(1, [1])
    assert telemetry.end_to_end.count == telemetry.queue_wait.count == 0
    assert not telemetry._requests


def test_of_two_steps_in_flight_the_second_counts_from_the_end_of_the_first(telemetry: Telemetry, clock: Clock) -> None:
    telemetry.sent(1, [])
    telemetry.sent(2, [])
    clock.at(4)
    telemetry.received(1)
    clock.at(5)
    telemetry.received(2)
    assert (telemetry.step.count, telemetry.step.total_ns) == (2, 5_000_000_000)


def test_the_age_of_a_step_counts_from_the_last_sign_of_progress(telemetry: Telemetry, clock: Clock) -> None:
    assert telemetry.step_age() is None
    clock.at(10)
    telemetry.sent(1, [])
    telemetry.sent(2, [])
    clock.at(13)
    assert telemetry.step_age() == 3
    telemetry.received(1)
    clock.at(14)
    assert telemetry.step_age() == 1
    telemetry.received(2)
    assert telemetry.step_age() is None


@pytest.mark.parametrize(
    "ages, rate",
    [((60.0, 11.0), 0.0), ((11.0, 4.0, 2.0), 4.0), ((9.0, 4.0, 2.0), 24 / 9), ((0.5, 0.2), 16.0), ((), 0.0)],
)
def test_a_rate_is_over_ten_seconds_or_since_the_first_but_over_a_second_at_least(
    telemetry: Telemetry, clock: Clock, ages: tuple[float, ...], rate: float
) -> None:
    for age in ages:
        clock.at(100 - age)
        telemetry.tokens.add(8)
    clock.at(100)
    assert telemetry.tokens.per_second() == pytest.approx(rate)
