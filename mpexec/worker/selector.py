"""The event loop of a rank: its selector looks at the call ring before it asks the kernel, and serves calls there.

A call is served without a turn of the loop, as long as serving it has left the loop nothing to do. Spinning in the
selector, instead of in a callback, keeps tasks fair and timers exact: it happens only when the loop would sleep.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any

from mpexec.transport import linux
from mpexec.transport.doorbell import Spinner

_LOOK_AROUND = 16  # calls served in a row, after which the other descriptors and the timers are looked at

Events = list[tuple[selectors.SelectorKey, int]]


class RingSelector(selectors.EpollSelector):
    """Serves calls whenever the loop asks what is ready.

    Args:
        doorbell: The eventfd that the driver rings when this rank is parked; registered here.
        has_news: True if `serve` has something to do.
        serve: Runs calls that have come. What it raises ends the loop.
        park: Called with True just before the loop sleeps and with False after.

    Attributes:
        spinner: Counts how its waits ended.
    """

    def __init__(
        self, doorbell: int, has_news: Callable[[], bool], serve: Callable[[], None], park: Callable[[bool], None]
    ) -> None:
        super().__init__()
        self._doorbell = doorbell
        self._has_news = has_news
        self._serve = serve
        self._park = park
        self.spinner = Spinner()
        self.loop_has_work = False

    def select(self, timeout: float | None = None) -> Events:
        """As `selectors.BaseSelector.select`; with a timeout that is not 0, serves calls for as long as they come."""
        has_news = self._has_news
        if timeout is not None and timeout <= 0:
            if has_news():
                self._serve()
            return super().select(timeout)
        self.loop_has_work = False
        spinner = self.spinner
        timer = None if timeout is None else time.monotonic() + timeout
        found = has_news()
        for _ in range(_LOOK_AROUND):
            if not (found or spinner.spin(has_news) or has_news()):
                return self._sleep(None if timer is None else max(0.0, timer - time.monotonic()))
            self._serve()
            if self.loop_has_work or (timer is not None and time.monotonic() >= timer):
                break
            found = False
        return super().select(0)

    def _sleep(self, timeout: float | None) -> Events:
        self.spinner.parks += 1
        self._park(True)
        linux.fence()  # the parked word is out before the ring is looked at once more: no wake-up between is lost
        if self._has_news():
            self._park(False)
            return []
        began = time.monotonic_ns()
        events = super().select(timeout)
        self._park(False)
        slept = time.monotonic_ns() - began
        others = [event for event in events if event[0].fd != self._doorbell]
        if len(others) < len(events):
            if self._has_news():  # at once: a turn of a loop that has slept takes as long as the call
                self._serve()
            linux.drain_eventfd(self._doorbell)  # what comes from now on is seen by the look before the next sleep
            self.spinner.woke_after(slept)
        return others


class RankLoop(asyncio.SelectorEventLoop):
    """An asyncio loop over a `RingSelector`, which it tells when it has something to do itself."""

    def __init__(self, selector: RingSelector) -> None:
        self._ring_selector = selector
        super().__init__(selector)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """As `asyncio.AbstractEventLoop.call_soon`."""
        self._ring_selector.loop_has_work = True
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """As `asyncio.AbstractEventLoop.call_soon_threadsafe`."""
        self._ring_selector.loop_has_work = True
        return super().call_soon_threadsafe(callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        """As `asyncio.AbstractEventLoop.call_at`."""
        self._ring_selector.loop_has_work = True
        return super().call_at(when, callback, *args, context=context)
