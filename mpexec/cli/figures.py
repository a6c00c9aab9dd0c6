"""The figures of `mpexec bench`: what was measured, percentiles of it, and how it is printed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from mpexec.cli.report import print_json_line

PERCENTS = (50, 90, 99)
_ENOUGH = 100  # values, for the 99th percentile to be another one than the largest


@dataclass(frozen=True, slots=True)
class Setting:
    """What all levels of a run have in common."""

    model: str
    tp: int
    executor: str
    dtype: str
    device: str
    prompt_tokens: int
    new_tokens: int

    @property
    def title(self) -> str:
        """For people, on one line."""
        sizes = f"{self.prompt_tokens} prompt tokens, {self.new_tokens} new tokens"
        where = "" if self.device == "auto" else f" on {self.device}"
        return f"{self.model}, TP {self.tp}, {self.dtype}{where}, {sizes}"


@dataclass(slots=True)
class Level:
    """What was measured at one concurrency.

    Attributes:
        requests: How many are to be sent.
        began: Monotonic seconds, as is `ended`; None while it runs.
        tokens: New tokens, of requests that are not finished too.
        first_token_s: Seconds from sending a request to its first token, one for each request.
        inter_token_s: Seconds between a token and the one before, of all requests.
        end_to_end_s: Seconds from sending a request to its last token, one for each finished request.
    """

    concurrency: int
    requests: int
    began: float
    ended: float | None = None
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    end_to_end_s: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """True if all its requests are answered."""
        return len(self.end_to_end_s) == self.requests

    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (self.ended or time.monotonic()) - self.began

    def tokens_per_second(self) -> float:
        """New tokens of all streams together."""
        return self.tokens / max(self.seconds(), 1e-9)

    def latencies(self) -> dict[str, dict[int, float | None]]:
        """Milliseconds by what was measured and percent."""
        return {
            "first token": in_milliseconds(self.first_token_s),
            "between tokens": in_milliseconds(self.inter_token_s),
            "whole request": in_milliseconds(self.end_to_end_s),
        }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values are at most; between two of them, on the line that joins them.

    Args:
        ordered: Ascending, at least one.
    """
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def in_milliseconds(seconds: Sequence[float]) -> dict[int, float | None]:
    """The percentiles of `PERCENTS`; None where nothing was measured."""
    ordered = sorted(seconds)
    return {percent: percentile(ordered, percent) * 1e3 if ordered else None for percent in PERCENTS}


def print_json(setting: Setting, level: Level) -> None:
    """Print one level as one line."""
    latencies = {
        f"{name.replace(' ', '_')}_ms": {f"p{percent}": _rounded(value) for percent, value in values.items()}
        for name, values in level.latencies().items()
    }
    figures = {
        **asdict(setting),
        "concurrency": level.concurrency,
        "requests": len(level.end_to_end_s),
        "complete": level.is_whole,
        "seconds": round(level.seconds(), 3),
        "tokens": level.tokens,
        "tokens_per_second": round(level.tokens_per_second(), 1),
        **latencies,
    }
    print_json_line(figures)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def print_table(setting: Setting, levels: Sequence[Level]) -> None:
    """Print all levels, a row for each percentile; for other programs every row is whole, and a cell is one word."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = list(levels[0].latencies())
    terminal = Console(highlight=False)
    if terminal.is_terminal:
        title = Text(setting.title, "table.title")  # as it is: a string would be taken for markup
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
        headers = ["streams", "requests", "tokens/s", "", *(f"{name}\nms" for name in names)]
    else:
        terminal = Console(highlight=False, width=10_000)
        table = Table(box=None, pad_edge=False)
        headers = ["streams", "requests", "tokens/s", "percentile", *(f"{name.replace(' ', '-')}-ms" for name in names)]
    for header in headers:
        table.add_column(header, justify="right")
    for level in levels:
        leading, latencies = _leading(level), level.latencies()
        for percent in PERCENTS:
            table.add_row(*leading, f"p{percent}", *(_shown(latencies[name][percent]) for name in names))
            if terminal.is_terminal:
                leading = ("", "", "")
    if terminal.is_terminal and any(level.requests < _ENOUGH for level in levels):
        table.caption = f"p99 of fewer than {_ENOUGH} requests is near the slowest of them"
        table.caption_justify = "left"
    terminal.print(table)


def _leading(level: Level) -> tuple[str, str, str]:
    done = len(level.end_to_end_s)
    requests = str(done) if level.is_whole else f"{done}/{level.requests}"
    return str(level.concurrency), requests, f"{level.tokens_per_second():.1f}"


def _shown(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"
