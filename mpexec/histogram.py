"""How long things took: counts in buckets whose bounds grow by the same factor, from a nanosecond to an hour.

Eight buckets to each doubling, read in their middle: what is read from them is off by a sixteenth at most. Observing
takes the same short time whatever was observed before, and two histograms add up to that of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_PARTS_LOG = 3  # eight buckets to each doubling
_PARTS = 1 << _PARTS_LOG
_DOUBLINGS = 42  # 2**42 ns are 73 minutes; the last bucket takes what is longer, too
BUCKETS = _PARTS * (_DOUBLINGS - _PARTS_LOG + 1)


def bucket_of(ns: int) -> int:
    """Index of the bucket for a duration; below 0 counts as 0."""
    if ns < _PARTS:
        return max(0, ns)
    shift = ns.bit_length() - _PARTS_LOG - 1
    return min((shift << _PARTS_LOG) + (ns >> shift), BUCKETS - 1)


def lower_bound(bucket: int) -> int:
    """The shortest duration in a bucket (ns); the longest is one below the next bucket's."""
    shift = max(0, (bucket >> _PARTS_LOG) - 1)
    return (bucket - (shift << _PARTS_LOG)) << shift


@dataclass(slots=True)
class Histogram:
    """Durations, in nanoseconds inside and in seconds outside. Not thread-safe; plain data.

    Attributes:
        counts: By bucket, where it is not 0.
        total_ns: All durations added up.
    """

    counts: dict[int, int] = field(default_factory=dict)
    total_ns: int = 0

    def observe_ns(self, ns: int) -> None:
        """Count one duration."""
        bucket = bucket_of(ns)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total_ns += ns

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float | None:
        """Seconds; None for an empty histogram."""
        count = self.count
        return self.total_ns / count / 1e9 if count else None

    def quantile(self, share: float) -> float | None:
        """Seconds that this share of the durations did not exceed; 0.5 gives the median. None where there are none.

        Off by a sixteenth at most: it is the middle of the bucket of the one that was observed.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share} of the durations: use 0 to 1")
        wanted, below = share * self.count, 0
        for bucket in sorted(self.counts):
            below += self.counts[bucket]
            if below >= wanted:
                return (lower_bound(bucket) + lower_bound(bucket + 1) - 1) / 2e9
        return None

    def cumulative(self, first: int, last: int) -> Iterator[tuple[float, int]]:
        """For each power of two from 2**first to 2**last ns: that bound in seconds, and how many were below it."""
        for power in range(first, last + 1):
            end = bucket_of(1 << power)
            yield (1 << power) / 1e9, sum(count for bucket, count in self.counts.items() if bucket < end)

    def copy(self) -> Histogram:
        """One that goes its own way."""
        return Histogram(dict(self.counts), self.total_ns)

    def merge(self, other: Histogram) -> None:
        """Add the durations of another one."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total_ns += other.total_ns

    @classmethod
    def merged(cls, parts: Mapping[str, Histogram]) -> Histogram:
        """All of several together."""
        whole = cls()
        for part in parts.values():
            whole.merge(part)
        return whole
