"""The future of a submitted call, and the thread on which its users' callbacks run."""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class CallFuture(concurrent.futures.Future[Any]):
    """A future that is resolved by whoever drains the replies, and whose callbacks run elsewhere.

    The draining thread may be anybody's and must not wait; a callback may do as it likes, wait for another future too.

    Args:
        callbacks: Where callbacks run.
    """

    def __init__(self, callbacks: Callbacks) -> None:
        super().__init__()
        self._callbacks = callbacks
        self.abandon: Callable[[], None] | None = None

    def cancel(self) -> bool:
        """Abandon the call, unless it is over: its coroutines are cancelled, a sync method runs to its end unheard."""
        cancelled = super().cancel()
        if cancelled and self.abandon is not None:
            self.abandon()
        return cancelled

    def _invoke_callbacks(self) -> None:
        if self._done_callbacks:  # type: ignore[attr-defined]  # the hook that `Future` itself calls
            self._callbacks.post(super()._invoke_callbacks)  # type: ignore[misc]


class Callbacks:
    """One thread for users' callbacks, made on first use."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal handler of the user's may stop the executor in the midst of it
        self._closed = False
        self._thread: threading.Thread | None = None

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` soon, one after another, and return; after `close`, at once."""
        with self._lock:
            if self._closed:
                work()
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpexec-callbacks", daemon=True)
                self._thread.start()
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("a callback failed")
            del work  # it holds its future, and that the executor

    def close(self) -> None:
        """End the thread after the work that it has; may be called on the thread itself."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        if thread is not threading.current_thread():
            thread.join(1.0)
