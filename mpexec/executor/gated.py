"""What executors share whose replies come on other threads: a waiting thread has a gate, a waiting loop an event.

`MPExecutor` does not belong here: whoever waits for one of its calls reads the replies itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.errors import ExecutorStoppedError
from mpexec.executor.base import Executor, State
from mpexec.executor.outputs import OutputWait
from mpexec.executor.pending import PendingCall, broken_error, stopped_error

logger = logging.getLogger(__name__)

_FOR_EVER = -1.0  # to `Lock.acquire`


class GatedExecutor(Executor):
    """An executor whose calls are ended by other threads, under one lock.

    The lock is re-entrant: ending a call tells others, and they may end calls in turn.
    """

    def __init__(self, agent: Callable[..., Any] | WorkerSpec, **options: Any) -> None:
        super().__init__(agent, **options)
        self._lock = threading.RLock()

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, pending: PendingCall) -> None:
        gate = threading.Lock()
        gate.acquire()
        pending.gate = gate
        while not pending.done:
            left = _seconds_until(pending.next_expiry())
            if not gate.acquire(timeout=_FOR_EVER if left is None else left) and not pending.done:
                self._expire(pending)

    async def _wait_async(self, waiting: PendingCall | OutputWait) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def changed() -> None:
            try:
                loop.call_soon_threadsafe(woken.set)
            except RuntimeError:  # the loop is closed, and its waiter gone with it
                logger.debug("a loop that had waited is closed")

        waiting.watch(changed)
        try:
            while not waiting.done:
                woken.clear()
                left = _seconds_until(waiting.next_expiry())
                timer = None if left is None else loop.call_later(left, woken.set)
                try:
                    await woken.wait()
                finally:
                    if timer is not None:
                        timer.cancel()
                if not waiting.done and isinstance(waiting, PendingCall):
                    self._expire(waiting)
        finally:
            waiting.unwatch(changed)

    def _leave_unwaited(self, pending: PendingCall, *, covered: bool = False) -> None:
        _Alarm(pending, self._expire)

    def _expire(self, pending: PendingCall) -> None:
        """Time has changed something for a call: its grace is over, its deadline has passed, or a report is due."""
        now = time.monotonic_ns()
        with self._lock:
            if pending.failed:
                pending.settle(now)
            if pending.done:
                return
            late = pending.deadline.expired and not pending.timed_out
            pending.timed_out = pending.timed_out or late
        if late:
            self._on_deadline(pending)
        elif pending.report_due(now):
            logger.warning("waiting for %r (call %d): %s", pending.method, pending.call_id, self._states_text())

    def _on_deadline(self, pending: PendingCall) -> None:
        """Break the executor with an `RPCTimeoutError`, now or within a moment; answers change nothing any more."""
        raise NotImplementedError

    # -- failures ------------------------------------------------------------------------------------------------

    def _break(self, root: BaseException, error_for: Callable[[PendingCall], BaseException] | None = None) -> None:
        with self._lock:
            with self._state_lock:
                if self._state in (State.BROKEN, State.RELEASED):
                    return
                self._root = root
                self._enter(State.BROKEN)
        try:
            self._tell_broken(root, error_for)
        except BaseException:  # a Ctrl-C: nobody else would tell those that wait
            threading.Thread(target=self._tell_broken, args=(root, error_for), name="mpexec-tell", daemon=True).start()
            raise

    def _tell_broken(
        self, root: BaseException, error_for: Callable[[PendingCall], BaseException] | None = None
    ) -> None:
        """Tell everybody who waits; once more changes nothing."""
        with self._lock:
            self._outputs.fail(root)
            if self._background is not None:
                self._background.end_with(root)
            self._calls.end_all(error_for or (lambda pending: broken_error(root)))
        self._end_broken()

    def _end_broken(self) -> None:
        """The executor is broken, and everybody has been told: end what can be ended. Does not wait."""

    def _end_late(self, pending: PendingCall) -> None:
        """The state changed between the check and the sending: whoever ended the calls may have missed this one."""
        with self._lock:
            if pending is self._background and self._root is None:
                pending.conclude()
            else:
                pending.end_with(stopped_error(pending) if self._root is None else broken_error(self._root))

    def _background_failed(self, error: BaseException) -> None:
        with self._lock:
            self._fail_background(error)

    def _end_calls_stopped(self) -> None:
        with self._lock:
            super()._end_calls_stopped()

    def _finish_abandoned(self, pending: PendingCall) -> bool:
        """End a call whose caller has gone; False if it is over already."""
        if pending.done or self._calls.get(pending.call_id) is not pending:
            return False
        with self._lock:
            pending.finish(ExecutorStoppedError(f"{pending.method!r} was abandoned by its caller"))
        return True


class _Alarm:
    """Sees to the expiries of a call that nobody waits for. It has a timer only while there is something to come."""

    def __init__(self, pending: PendingCall, expire: Callable[[PendingCall], None]) -> None:
        self._pending = pending
        self._expire = expire
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        pending.watch(self._set)
        self._set()

    def _set(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            left = None if self._pending.done else _seconds_until(self._pending.next_expiry())
            if left is not None:
                self._timer = threading.Timer(left, self._fire)
                self._timer.daemon = True
                self._timer.start()

    def _fire(self) -> None:
        self._expire(self._pending)
        self._set()


def _seconds_until(moment: int | None) -> float | None:
    return None if moment is None else max(0.0, (moment - time.monotonic_ns()) / 1e9)
