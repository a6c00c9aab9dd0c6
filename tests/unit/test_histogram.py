"""Histogram: what goes in comes out within the width of a bucket."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpexec.histogram import BUCKETS, Histogram, bucket_of, lower_bound

durations = st.integers(0, 1 << 41)


def of(*ns: int) -> Histogram:
    histogram = Histogram()
    for one in ns:
        histogram.observe_ns(one)
    return histogram


@given(durations)
def test_a_duration_lies_in_its_bucket_and_a_bucket_is_at_most_an_eighth_wide(ns: int) -> None:
    bucket = bucket_of(ns)
    assert lower_bound(bucket) <= ns < lower_bound(bucket + 1)
    assert lower_bound(bucket + 1) - lower_bound(bucket) <= max(1, lower_bound(bucket) // 8)


def test_what_is_too_long_or_negative_goes_into_the_last_or_first_bucket() -> None:
    assert bucket_of(1 << 60) == BUCKETS - 1
    assert bucket_of(-5) == 0


def test_quantiles_mean_and_count_tell_what_was_observed() -> None:
    histogram = of(*(ms * 1_000_000 for ms in range(1, 101)))
    assert histogram.count == 100
    assert histogram.mean == pytest.approx(0.0505)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert histogram.quantile(share) == pytest.approx(share / 10, rel=1 / 16)


@given(st.integers(0, (1 << 42) - 1), st.sampled_from([1, 2, 1000]))
def test_one_and_the_same_duration_is_off_by_a_sixteenth_at_most_at_every_quantile(ns: int, times: int) -> None:
    histogram = Histogram({bucket_of(ns): times}, times * ns)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        assert histogram.quantile(share) == pytest.approx(ns / 1e9, rel=1 / 16, abs=0)


@given(st.lists(durations, min_size=1), st.floats(0, 1))
def test_a_quantile_is_off_by_a_sixteenth_at_most_however_durations_are_spread(ns: list[int], share: float) -> None:
    exact = sorted(ns)[max(0, math.ceil(share * len(ns)) - 1)]
    assert of(*ns).quantile(share) == pytest.approx(exact / 1e9, rel=1 / 16, abs=0)


def test_an_empty_histogram_has_neither_mean_nor_quantiles() -> None:
    assert (Histogram().count, Histogram().mean, Histogram().quantile(0.5)) == (0, None, None)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        of(1).quantile(share)


@given(st.lists(durations), st.lists(durations))
def test_two_histograms_add_up_to_that_of_both(left: list[int], right: list[int]) -> None:
    merged = Histogram.merged({"a": of(*left), "b": of(*right)})
    assert merged == of(*left, *right)
    assert pickle.loads(pickle.dumps(merged)) == merged


def test_a_copy_goes_its_own_way() -> None:
    histogram = of(5)
    copy = histogram.copy()
    histogram.observe_ns(5)
    assert (copy.count, histogram.count) == (1, 2)


@given(st.lists(durations))
def test_cumulative_counts_are_those_of_the_durations_below_each_bound(ns: list[int]) -> None:
    for bound, count in of(*ns).cumulative(3, 30):
        assert count == sum(one / 1e9 < bound for one in ns)
