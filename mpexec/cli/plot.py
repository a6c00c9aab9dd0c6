"""The picture of `mpexec bench --plot`. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from mpexec.cli.figures import Level, Setting

_COLOURS = {"first token": "#0072b2", "between tokens": "#009e73", "whole request": "#d55e00"}  # for all eyes
_GREY = "#555555"


def draw(setting: Setting, levels: Sequence[Level], file: Path) -> None:
    """Draw speed (left) and latencies (right) over the concurrency.

    Raises:
        OSError: The file cannot be written.
    """
    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(setting.title, fontsize=13, fontweight="bold")
    left, right = figure.subplots(1, 2)
    _draw_speed(left, levels)
    _draw_latencies(right, levels)
    for axes in (left, right):
        _label_streams(axes, [level.concurrency for level in levels])
    figure.savefig(file, format="png")


def _draw_speed(axes: Any, levels: Sequence[Level]) -> None:
    streams = [level.concurrency for level in levels]
    speeds = [level.tokens_per_second() for level in levels]
    axes.plot(streams, speeds, marker="o", color="black", linewidth=2)
    for number, speed in zip(streams, speeds, strict=True):
        axes.annotate(f"{speed:.0f}", (number, speed), (0, 8), textcoords="offset points", ha="center")
    axes.set_title("Speed, all streams together", loc="left")
    axes.set_ylabel("new tokens per second")
    axes.set_ylim(0, max(speeds) * 1.15)


def _draw_latencies(axes: Any, levels: Sequence[Level]) -> None:
    streams = [level.concurrency for level in levels]
    for name, colour in _COLOURS.items():
        rows = [level.latencies()[name] for level in levels]
        if any(row[50] is None for row in rows):
            continue
        medians = [row[50] or 0.0 for row in rows]
        axes.plot(streams, medians, marker="o", color=colour, linewidth=2, label=f"{name}: median")
        axes.plot(streams, [row[90] for row in rows], color=colour, linestyle="--", label=f"{name}: 90 %")
        axes.plot(streams, [row[99] for row in rows], color=colour, linestyle=":", label=f"{name}: 99 %")
        for number, median in zip(streams, medians, strict=True):
            axes.annotate(
                _milliseconds(median), (number, median), (0, -14), textcoords="offset points", ha="center", color=colour
            )
    axes.set_yscale("log")
    axes.set_title("Latency (logarithmic)", loc="left")
    axes.set_ylabel("milliseconds")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.15)
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)


def _label_streams(axes: Any, streams: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(streams, [str(number) for number in streams])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("requests at the same time")
    axes.grid(visible=True, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_GREY)
    axes.margins(x=0.08)


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
