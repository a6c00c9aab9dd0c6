"""Durations of methods in shared words: what the rank notes, a reader of the same memory sees."""

from __future__ import annotations

from mpexec.histogram import Histogram
from mpexec.transport.durations import OTHERS, SHORT_NS, Durations, create_durations


def test_a_reader_of_the_same_segment_sees_every_method_with_its_durations() -> None:
    segment = create_durations()
    rank, driver = Durations(segment.words), Durations(segment.words)
    expected = {"forward": Histogram(), "m": Histogram()}
    for method, ns in (("forward", 3_000_000), ("m", 20_000), ("forward", 5_000_000)):
        rank.add(method, ns)
        expected[method].observe_ns(ns)
    assert driver.read() == expected
    segment.close()


def test_short_calls_are_seen_once_they_are_published() -> None:
    durations = Durations()
    durations.short["m"] += 3
    assert durations.read() == {}
    durations.publish_short()
    durations.publish_short()
    (histogram,) = durations.read().values()
    assert (histogram.count, histogram.total_ns) == (3, 3 * SHORT_NS // 2)


def test_methods_beyond_the_room_share_a_row_and_their_names_are_not_kept() -> None:
    durations = Durations()
    for number in range(1000):
        durations.add(f"method {number}", 1000)
    found = durations.read()
    assert len(found) == 16
    assert found["method 14"].count == 1
    assert found[OTHERS].count == 985
    assert len(durations._rows) == 15


def test_long_and_foreign_names_are_cut_to_their_room() -> None:
    durations = Durations()
    durations.add("ü" * 100, 1)
    durations.add("", 1)
    (name,) = durations.read()
    assert name.startswith("ü" * 32)
