"""The picture of `mpexec bench --plot`. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mpexec.cli.figures import Level, Setting
from mpexec.engine.files import write_whole

Value = TypeVar("Value")

_COLOURS = {"first token": "#0072b2", "between tokens": "#009e73", "whole request": "#d55e00"}  # for all eyes
_GREY = "#555555"
_TITLE_WIDTH, _WIDE_TITLE_WIDTH = 64, 48  # characters of the title's size on a line; those of other scripts are wider
_LEAST_GAP = 0.085  # between two levels with numbers, as a share of the axis: a number of four digits and some air
_NEAR = 2.5  # points whose values differ by a smaller factor have their numbers on different sides


def draw(setting: Setting, levels: Sequence[Level], file: Path) -> None:
    """Draw speed (left) and latencies (right) over the concurrency; a picture that was there is replaced at the end.

    Raises:
        OSError: The file cannot be written.
    """
    picture = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a model's name may be in any script
        _figure(setting, levels).savefig(picture, format="png")
    write_whole(file, picture.getvalue())


def _figure(setting: Setting, levels: Sequence[Level]) -> Figure:
    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    title = textwrap.fill(setting.title, _TITLE_WIDTH if setting.title.isascii() else _WIDE_TITLE_WIDTH)
    figure.suptitle(title, fontsize=13, fontweight="bold", parse_math=False)
    left, right = figure.subplots(1, 2)
    _draw_speed(left, levels)
    _draw_latencies(right, levels)
    for axes in (left, right):
        _label_streams(axes, [level.concurrency for level in levels])
    return figure


def _draw_speed(axes: Any, levels: Sequence[Level]) -> None:
    streams = [level.concurrency for level in levels]
    speeds = [level.tokens_per_second() for level in levels]
    axes.plot(streams, speeds, marker="o", color="black", linewidth=2)
    for number, speed in _with_room(streams, speeds):
        _write(axes, f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}", number, speed, (-7, 12), "black")
    axes.set_title("Speed, all streams together", loc="left")
    axes.set_ylabel("new tokens per second")
    axes.set_ylim(0, max(speeds) * 1.15)


def _draw_latencies(axes: Any, levels: Sequence[Level]) -> None:
    streams = [level.concurrency for level in levels]
    by_level = [level.latencies() for level in levels]
    for name, colour in _COLOURS.items():
        rows = [latencies[name] for latencies in by_level]
        if any(row[50] is None for row in rows):
            continue
        axes.plot(streams, [row[50] for row in rows], "o-", color=colour, linewidth=2, label=f"{name}: median")
        axes.plot(streams, [row[90] for row in rows], "_--", color=colour, label=f"{name}: 90 %")
        axes.plot(streams, [row[99] for row in rows], ".:", color=colour, markersize=4, label=f"{name}: 99 %")
        for number, latencies in _with_room(streams, by_level):
            median = latencies[name][50] or 0.0
            others = [values[50] or 0.0 for other, values in latencies.items() if other != name]
            is_crowded = any(median / _NEAR < other <= median for other in others)  # beneath is another one's number
            _write(axes, _milliseconds(median), number, median, (0, 13 if is_crowded else -13), colour)
    axes.set_yscale("log")
    axes.set_title("Latency (logarithmic)", loc="left")
    axes.set_ylabel("milliseconds")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.15)
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)


def _with_room(streams: Sequence[int], values: Sequence[Value]) -> list[tuple[int, Value]]:
    """The levels, ascending, that are far enough apart for a number at each, with their values; the largest is one."""
    gap = _LEAST_GAP * math.log2(streams[-1] / streams[0])
    kept: list[tuple[int, Value]] = []
    for number, value in zip(reversed(streams), reversed(values), strict=True):
        if not kept or math.log2(kept[-1][0] / number) >= gap:
            kept.append((number, value))
    return kept[::-1]


def _write(axes: Any, text: str, x: float, y: float, offset: tuple[int, int], colour: str) -> None:
    """Write a number beside a point (the offset is in points of print), readable on top of lines."""
    paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
    place = {"xytext": offset, "textcoords": "offset points", "ha": "center", "va": "center"}
    axes.annotate(text, (x, y), color=colour, fontweight="bold", bbox=paper, **place)


def _label_streams(axes: Any, streams: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    shown = [number for number, _ in _with_room(streams, streams)]
    axes.set_xticks(shown, [str(number) for number in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("requests at the same time")
    axes.grid(visible=True, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_GREY)
    axes.margins(x=0.08)


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
