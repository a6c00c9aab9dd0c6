"""Outputs that the agents push: taken in order, by threads of the pump put in, awaited on any loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class OutputWait:
    """Somebody who waits for one output, or for room to send one more input. Fits `Inbox.wait_async`."""

    __slots__ = ("_changed", "done", "error", "is_sender", "value", "waited")

    def __init__(self, *, is_sender: bool) -> None:
        self.is_sender = is_sender
        self.done = False
        self.waited = 0
        self.value: Any = None
        self.error: BaseException | None = None
        self._changed: Callable[[], None] | None = None

    def watch(self, changed: Callable[[], None]) -> None:
        """Ask to be told when it is done."""
        self._changed = changed

    def unwatch(self, changed: Callable[[], None]) -> None:
        """Undo `watch`."""
        self._changed = None

    def next_expiry(self) -> int | None:
        """Never: an output may take as long as it likes; what ends the wait otherwise is a failure or a stop."""
        return None

    def finish(self, value: Any, error: BaseException | None) -> None:
        """Hand over the outcome."""
        self.value, self.error, self.done = value, error, True
        changed = self._changed
        if changed is not None:
            changed()


class Outputs:
    """The queue of outputs of one executor, bounded by the inputs in flight.

    Args:
        limit: Inputs whose output has not been taken, at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._ready: deque[Any] = deque()
        self._takers: deque[OutputWait] = deque()
        self._senders: deque[OutputWait] = deque()
        self._in_flight = 0
        self._position = 0
        self._error: BaseException | None = None

    def reset(self) -> None:
        """Begin anew, after `start`."""
        with self._lock:
            self._ready.clear()
            self._in_flight = 0
            self._error = None

    def put(self, value: Any, position: int = 0) -> None:
        """One output has come.

        Args:
            value: The output.
            position: Where it stood in its ring. A record that a Ctrl-C has had read twice counts once.
        """
        with self._lock:
            if position and position <= self._position:
                return
            self._position = max(position, self._position)
            taker = self._next(self._takers)
            if taker is None:
                self._ready.append(value)
                return
        taker.finish(value, None)
        self._taken()

    @staticmethod
    def _next(waiting: deque[OutputWait]) -> OutputWait | None:
        return waiting.popleft() if waiting else None

    def _taken(self) -> None:
        with self._lock:
            self._in_flight -= 1
            sender = self._next(self._senders)
            if sender is not None:
                self._in_flight += 1
        if sender is not None:
            sender.finish(None, None)

    def fail(self, error: BaseException) -> None:
        """No more will come: whoever waits, and whoever comes, gets `error`. Outputs that came stay takeable."""
        with self._lock:
            self._error = self._error or error
            waiting = [*self._takers, *self._senders]
            self._takers.clear()
            self._senders.clear()
        for one in waiting:
            one.finish(None, error)

    def take(self) -> OutputWait:
        """Ask for the next output."""
        wait = OutputWait(is_sender=False)
        with self._lock:
            if self._ready:
                wait.value, wait.done = self._ready.popleft(), True
            elif self._error is not None:
                wait.error, wait.done = self._error, True
            else:
                self._takers.append(wait)
        if wait.done and wait.error is None:
            self._taken()
        return wait

    def make_room(self) -> OutputWait:
        """Ask to send one more input."""
        wait = OutputWait(is_sender=True)
        with self._lock:
            if self._error is not None:
                wait.error, wait.done = self._error, True
            elif self._in_flight < self._limit:
                self._in_flight += 1
                wait.done = True
            else:
                self._senders.append(wait)
        return wait

    def withdraw(self, wait: OutputWait) -> None:
        """Somebody stopped waiting. What had been handed over already goes to the next: the output, or the room."""
        with self._lock:
            for waiting in (self._takers, self._senders):
                if wait in waiting:
                    waiting.remove(wait)
                    return
        if not wait.done or wait.error is not None:
            return
        if wait.is_sender:
            self._taken()
            return
        with self._lock:
            self._in_flight += 1
            taker = self._next(self._takers)
            if taker is None:
                self._ready.appendleft(wait.value)
        if taker is not None:
            taker.finish(wait.value, None)
            self._taken()
