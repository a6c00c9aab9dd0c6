"""What the values of options may be. `mpexec run` needs these too, and starts at once: nothing heavy is imported."""

from __future__ import annotations

import math
from typing import Any

import click

_LARGEST_PID = 1 << 22  # that Linux can be made to use


def whole_number(text: str, *, most: int) -> int | None:
    """A number from 0 to `most` in ASCII digits; None for anything else, of any length."""
    digits = text.lstrip("0") or text[:1]
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > len(str(most)):
        return None
    return number if (number := int(digits)) <= most else None


class ClusterAddress(click.ParamType[str]):
    """Where a Ray cluster is: "auto", "local", or host and port."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address, or a usage error that names the value."""
        text = str(value)
        if text in ("auto", "local"):
            return text
        if "://" in text:
            self.fail(
                f"{text!r} is of Ray Client: run this command on a node of the cluster, with HOST:PORT.", param, ctx
            )
        host, _, port = text.rpartition(":")
        if not host or not whole_number(port, most=65535):
            self.fail(f"{text!r} is not HOST:PORT, 'auto' or 'local'; for example 10.0.0.1:6379.", param, ctx)
        return text


class ProcessId(click.ParamType[int]):
    """The number of a process, which there need not be."""

    name = "process id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number, or a usage error that names the value."""
        number = whole_number(str(value), most=_LARGEST_PID)
        if not number:
            self.fail(f"{value!r} is no process id: give one that `mpexec ps` shows.", param, ctx)
        return number


class Number(click.ParamType[float]):
    """A finite number within bounds."""

    name = "float"

    def __init__(self, *, above: float | None = None, least: float = 0.0, most: float = math.inf) -> None:
        """Either `above`, a bound that is not itself allowed, or `least` is the lower bound."""
        self._above = above
        self._least = least
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error that names the value."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        is_low = number <= self._above if self._above is not None else number < self._least
        if not math.isfinite(number) or is_low or number > self._most:
            self.fail(f"{value!r} is not a finite number {self._bounds()}.", param, ctx)
        return number

    def _bounds(self) -> str:
        lower = f"of at least {self._least:g}" if self._above is None else f"above {self._above:g}"
        return lower if self._most == math.inf else f"{lower} and at most {self._most:g}"


class StopString(click.ParamType[str]):
    """Text that ends an answer: \\n and \\t are a line end and a tab, as a shell has no easy way to write them."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, or a usage error for an empty one."""
        text = str(value).replace("\\n", "\n").replace("\\t", "\t")
        if not text:
            self.fail("'' is empty: give at least one character.", param, ctx)
        return text
