"""Rows of results: medians over the repeats, their ratio, and whether it keeps its bar."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["ratio", "speed", "value"]
Figures = dict[str, float]


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def columns(figures: dict[str, list[Figures]], key: str, unit: str) -> tuple[list[float], str, list[float]]:
    """What was measured, its unit, and the comparator; the peers are in this order."""
    ours, theirs = ([one[key] for one in of_peer] for of_peer in figures.values())
    return ours, unit, theirs


@dataclass
class Row:
    """One line of the table.

    Attributes:
        measured: What mpexec took, one figure for each repeat (or each kill).
        unit: Unit of `measured` and `comparator`.
        comparator: The same of what it is compared with, empty if nothing.
        bar: The limit; None where the figure is only printed.
        kind: "ratio" is measured / comparator and must be at most the bar; "speed" is comparator / measured and must be
            at least the bar; "value" is the measured figure itself, at most the bar.
        at_least: The bar is a lower limit, although the kind is not "speed": what is measured is itself a speed.
        note: Anything the reader should know.
    """

    name: str
    measured: list[float]
    unit: str
    comparator: list[float] = field(default_factory=list)
    bar: float | None = None
    kind: Kind = "ratio"
    at_least: bool = False
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.measured)

    @property
    def comparator_median(self) -> float | None:
        return statistics.median(self.comparator) if self.comparator else None

    @property
    def result(self) -> float | None:
        """The figure that is held against the bar, None where there is no comparator to form a ratio with."""
        if self.kind == "value":
            return self.median
        other = self.comparator_median
        return None if other is None else self._divide(self.median, other)

    def _divide(self, measured: float, other: float) -> float:
        over, under = (other, measured) if self.kind == "speed" else (measured, other)
        return over / under if under else float("inf")

    @property
    def spread(self) -> tuple[float, float] | None:
        """Lowest and highest figure of single repeats; pairs of one repeat form the ratios."""
        if self.kind == "value":
            return min(self.measured), max(self.measured)
        if not self.comparator or len(self.comparator) != len(self.measured):
            return None
        ratios = [self._divide(a, b) for a, b in zip(self.measured, self.comparator, strict=True)]
        return min(ratios), max(ratios)

    @property
    def verdict(self) -> str:
        """`ok`, `MISS`, or nothing where there is no bar."""
        if self.bar is None or self.result is None:
            return ""
        lower_limit = self.at_least or self.kind == "speed"
        return "ok" if (self.result >= self.bar if lower_limit else self.result <= self.bar) else "MISS"

    def as_dict(self) -> dict[str, Any]:
        """Everything, with the figures of every repeat."""
        return {
            "name": self.name, "unit": self.unit, "measured": self.median, "comparator": self.comparator_median,
            "result": self.result, "spread": self.spread, "kind": self.kind, "bar": self.bar, "verdict": self.verdict,
            "samples": {"measured": self.measured, "comparator": self.comparator}, "note": self.note,
        }  # fmt: skip


HEADINGS = ("", "mpexec", "other", "unit", "ratio", "(range)", "bar", "", "")


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    right = {1, 2, 4}
    text = []
    for line in lines:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    result = None if row.kind == "value" else row.result
    other = row.comparator_median
    limit = ">=" if row.at_least or row.kind == "speed" else "<="
    return (
        row.name,
        figure(row.median),
        "" if other is None else figure(other),
        row.unit,
        "" if result is None else f"{result:.2f}",
        "" if row.spread is None else f"({_short(row.spread[0], row)}-{_short(row.spread[1], row)})",
        "" if row.bar is None else f"{limit} {row.bar:g}",
        row.verdict,
        row.note,
    )


def _short(value: float, row: Row) -> str:
    return figure(value) if row.kind == "value" else f"{value:.2f}"


def figure(value: float) -> str:
    """A number with about three digits that say something."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}"
