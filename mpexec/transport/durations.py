"""How long the methods of one rank took, in shared words: the rank writes, anybody who maps them reads, nobody asks.

A rank that is stuck can be read like any other, and reading waits for nothing.
"""

from __future__ import annotations

from collections import defaultdict

from mpexec.histogram import BUCKETS, Histogram, bucket_of
from mpexec.transport.segment import PAGE, Segment

_NAME_WORDS = 8
_NAME_BYTES = 8 * _NAME_WORDS
_TOTAL = _NAME_WORDS  # in a row: the name, all durations added up (ns), the counts
_COUNTS = _TOTAL + 1
_ROW_WORDS = _COUNTS + BUCKETS
_ROWS = 16
_WORDS = _ROWS * _ROW_WORDS
OTHERS = "(others)"
SHORT_NS = 16384  # calls shorter than that are only counted; they go into the bucket in the middle


def create_durations() -> Segment:
    """A segment for the durations of one rank."""
    return Segment.create("mpexec-durations", -(-8 * _WORDS // PAGE) * PAGE)


class Durations:
    """One histogram for each method, in words that one rank writes.

    There is room for fifteen methods; all further ones share a row. A reader may see a duration in the counts a moment
    before it is in the total, and short ones when the rank has nothing to do.

    Args:
        words: All zero, of a segment from `create_durations` or of this process alone; None makes the latter.

    Attributes:
        short: Where the writer counts calls that took less than `SHORT_NS`, by method: `add` takes a tenth of the time
            that a round trip takes, this a hundredth.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        self._words = memoryview(bytearray(8 * _WORDS)).cast("Q") if words is None else words
        self._rows: dict[str, int] = {}
        self.short: defaultdict[str, int] = defaultdict(int)

    def add(self, method: str, ns: int, times: int = 1) -> None:
        """Count a duration; by the one writer."""
        row = self._rows.get(method)
        if row is None:
            row = self._open(method)
        words = self._words
        words[row + _COUNTS + bucket_of(ns)] += times
        words[row + _TOTAL] += ns * times

    def publish_short(self) -> None:
        """Write down the short ones; by the one writer, when it has nothing better to do."""
        for method, times in self.short.items():
            self.add(method, SHORT_NS // 2, times)
        self.short.clear()

    def _open(self, method: str) -> int:
        used = len(self._rows)
        if used >= _ROWS - 1:  # names are not kept from here on: there may be any number of them
            row, name = (_ROWS - 1) * _ROW_WORDS, OTHERS
        else:
            row, name = used * _ROW_WORDS, method
            self._rows[method] = row
        if not self._words[row]:
            encoded = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
            for at in range(_NAME_WORDS - 1, -1, -1):  # the first word last: a row counts as named from then on
                self._words[row + at] = int.from_bytes(encoded[8 * at : 8 * at + 8], "little")
        return row

    def read(self) -> dict[str, Histogram]:
        """The durations so far, by method; by anybody."""
        found: dict[str, Histogram] = {}
        for row in range(0, _WORDS, _ROW_WORDS):
            if not self._words[row]:
                continue
            values = self._words[row : row + _ROW_WORDS].tolist()
            name = b"".join(word.to_bytes(8, "little") for word in values[:_NAME_WORDS]).rstrip(b"\0")
            counts = {bucket: count for bucket, count in enumerate(values[_COUNTS:]) if count}
            found[name.decode(errors="replace")] = Histogram(counts, values[_TOTAL])
        return found
