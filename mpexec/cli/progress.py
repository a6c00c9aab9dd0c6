"""One line that says what is going on, for a person at a terminal; nobody else sees anything of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressLine:
    """The last line of the terminal that stderr goes to, with the seconds since it began; without a display, nothing.

    Made by `progress`.
    """

    def __init__(self, display: Progress | None = None) -> None:
        self._display = display

    @property
    def is_shown(self) -> bool:
        """True if somebody can see it."""
        return self._display is not None

    def update(self, text: str) -> None:
        """Say something else; drawn ten times a second at most."""
        if self._display is not None:
            self._display.update(self._display.task_ids[0], description=text)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the line away for as long as something else is written to the terminal."""
        if self._display is None:
            yield
            return
        self._display.stop()
        try:
            yield
        finally:
            self._display.start()


@contextmanager
def progress(text: str, *, shown: bool = True) -> Iterator[ProgressLine]:
    """Show a line while the block runs; `shown=False` is for when the terminal shows the progress in another way."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield ProgressLine()
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    display = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    display.add_task(text)
    with display:
        yield ProgressLine(display)
