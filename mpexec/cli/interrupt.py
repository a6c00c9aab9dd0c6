"""Ctrl-C and SIGTERM: the command ends within a second, whatever it is doing.

The command owns its process, so it may install signal handlers; the library never does. As long as there is nothing to
clean up the process just ends. While ranks exist their clean-up is given most of a second; after that the process ends
too, and the kernel ends its ranks.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import asyncio

_CLEAN_UP_S = 0.8
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TERMINAL_AS_IT_WAS = b"\r\x1b[K\x1b[?25h"  # a progress display has a line, and hides the cursor


class Interrupted(Exception):
    """A signal has ended the work, and the clean-up is done."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


def end_on_signals() -> None:
    """From now on Ctrl-C and SIGTERM end the process at once: there is nothing to clean up yet."""

    def end(number: int, _frame: FrameType | None) -> None:
        _end_process(128 + number)

    for number in _SIGNALS:
        signal.signal(number, end)


def _end_process(exit_code: int) -> NoReturn:
    """End this process where it stands, with the terminal as it was before."""
    with suppress(OSError):  # the terminal may have gone
        if os.isatty(2) and select.select([], [2], [], 0)[1]:  # one that is held by Ctrl-S would keep us
            os.write(2, _TERMINAL_AS_IT_WAS)
    os._exit(exit_code)


def end_process_in(seconds: float, exit_code: int) -> None:
    """End this process after a while, unless it has ended by then: no clean-up may outlast the user's patience."""
    timer = threading.Timer(seconds, _end_process, args=(exit_code,))
    timer.daemon = True
    timer.start()


def run_interruptibly(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` on a new event loop; a signal cancels it, and the process ends soon whether or not that helps.

    Raises:
        Interrupted: A signal came.
    """
    import asyncio

    received: list[int] = []

    async def guarded() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(number: int, _frame: FrameType | None) -> None:
            if received:
                _end_process(128 + number)
            received.append(number)
            end_process_in(_CLEAN_UP_S, 128 + number)
            loop.call_soon_threadsafe(task.cancel)

        for number in _SIGNALS:
            signal.signal(number, interrupt)
        await work

    try:
        asyncio.run(guarded())
    except BaseException as error:
        if received:  # what the clean-up ran into is of no interest to somebody who wants out
            raise Interrupted(received[0]) from error
        raise
    finally:
        if not received:
            end_on_signals()


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Within the block, a first signal sets the event, and a second one ends the process at once.

    For use inside `run_interruptibly`, whose way with signals is back after the block.
    """
    import asyncio

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    received: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if received:
            _end_process(128 + number)
        received.append(number)
        loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
