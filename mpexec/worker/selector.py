"""The selector of a rank's event loop: it looks at the call ring before it asks the kernel, and spins a little."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Any

from mpexec.transport import linux
from mpexec.transport.doorbell import Spinner

_LOOK_AROUND = 16  # turns with calls waiting, after which the other descriptors are looked at too

Events = list[tuple[selectors.SelectorKey, int]]


class RingSelector(selectors.EpollSelector):
    """Reports the doorbell as readable whenever the ring has news, which costs no system call.

    Spinning here, instead of in a callback, keeps tasks fair and timers exact: it happens only when the loop has
    nothing to do.

    Args:
        doorbell: The eventfd that the driver rings when this rank is parked.
        has_news: True if the doorbell's callback has something to do.
        park: Called with True just before the loop sleeps and with False after.
    """

    def __init__(self, doorbell: int, has_news: Callable[[], bool], park: Callable[[bool], None]) -> None:
        super().__init__()
        self._doorbell = doorbell
        self._has_news = has_news
        self._park = park
        self._spinner = Spinner()
        self._turns = 0
        self._ring_events: Events = []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """As `selectors.BaseSelector.register`; what the doorbell's turn reports is made here, once."""
        key = super().register(fileobj, events, data)
        if key.fd == self._doorbell:
            self._ring_events = [(key, selectors.EVENT_READ)]
        return key

    def select(self, timeout: float | None = None) -> Events:
        """As `selectors.BaseSelector.select`."""
        if self._has_news():
            self._turns += 1
            if self._turns % _LOOK_AROUND and not (timeout is not None and timeout <= 0):
                return self._news()
            return self._with_news(super().select(0))
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        spinner = self._spinner
        if spinner.wants_to_spin() and spinner.spin(self._has_news):
            return self._news()
        return self._sleep(timeout)

    def _sleep(self, timeout: float | None) -> Events:
        self._park(True)
        linux.fence()  # the parked word is out before the ring is looked at once more: no wake-up between is lost
        if self._has_news():
            self._park(False)
            return self._news()
        began = time.monotonic_ns()
        events = super().select(timeout)
        self._park(False)
        if any(key.fd == self._doorbell for key, _ in events):
            linux.drain_eventfd(self._doorbell)
            self._spinner.woke_after(time.monotonic_ns() - began)
        return events

    def _news(self) -> Events:
        return self._ring_events

    def _with_news(self, events: Events) -> Events:
        for index, (key, _) in enumerate(events):
            if key.fd == self._doorbell:
                linux.drain_eventfd(self._doorbell)
                return events[:index] + events[index + 1 :] + self._news()
        return events + self._news()
