"""One daemon thread that waits for descriptors and calls back; it costs nothing while nothing happens."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from mpexec.errors import WrongStateError
from mpexec.processes.death import Death
from mpexec.processes.process import RankProcess
from mpexec.transport import linux
from mpexec.transport.lane import LaneClosed

logger = logging.getLogger(__name__)

_STOP_SECONDS = 2.0
# Messages taken in one turn, so that one chatty rank cannot hold the thread.
_TURN_MESSAGES = 64


class _OwnedEpoll(linux.OwnedFd):
    """An epoll set that forked children close: theirs is the same set, and a change there would be one here."""

    __slots__ = ("epoll",)

    def __init__(self) -> None:
        self.epoll = select.epoll()
        super().__init__(self.epoll.fileno())

    def close(self) -> None:
        self._fd = -1
        self.epoll.close()


class _Watch:
    """A callback and the turn of the loop in which it was added."""

    __slots__ = ("callback", "turn")

    def __init__(self, callback: Callable[[], None], turn: int) -> None:
        self.callback = callback
        self.turn = turn


class Monitor:
    """Calls back on its own thread when a descriptor is readable or hung up, and at times that it is told.

    Callbacks run one after another. One that raises is logged and removed; the others and the thread go on. In a child
    forked later, every method does nothing.
    """

    def __init__(self, name: str = "mpexec-monitor") -> None:
        """Start the thread."""
        self._owner = os.getpid()
        # Re-entrant: a finalizer that the collector runs on the holding thread may remove a descriptor.
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._watches: dict[int, _Watch] = {}
        self._running_fd = -1
        self._turn = 0
        self._timer: tuple[Callable[[], int | None], Callable[[], None]] | None = None
        self._stopping = False
        self._logs: Monitor | None = None
        self._epoll = _OwnedEpoll()
        self._bell = linux.OwnedFd(linux.eventfd())
        self._epoll.epoll.register(self._bell.fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def add(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback()` whenever `fd` is readable or hung up, until it is removed.

        The callback must not wait, and must bear to find nothing to read.

        Raises:
            WrongStateError: The monitor was stopped.
        """
        if self._foreign():
            return
        with self._lock:
            if self._stopping:
                raise WrongStateError("the monitor was stopped", state="STOPPED")
            self._watches[fd] = _Watch(callback, self._turn)
            try:
                self._epoll.epoll.register(fd, select.EPOLLIN)
            except BaseException:
                del self._watches[fd]
                raise

    def remove(self, fd: int) -> None:
        """Forget `fd`, before its owner closes it; a number that was never added is ignored.

        When this returns, the callback does not run and will not run again. Only on the monitor's own thread it may be
        the one that is running. A callback that does not return is waited for two seconds, then logged and left.
        """
        if self._foreign():
            return
        with self._lock:
            if self._watches.pop(fd, None) is not None and not self._epoll.closed:
                # closed too early by its owner: then the kernel has forgotten it already
                with contextlib.suppress(OSError):
                    self._epoll.epoll.unregister(fd)
            if threading.current_thread() is not self._thread:
                if not self._idle.wait_for(lambda: self._running_fd != fd, _STOP_SECONDS):
                    logger.warning("a callback of the monitor does not return: name=%s fd=%d", self._thread.name, fd)

    def set_timer(self, next_at: Callable[[], int | None], fire: Callable[[], None]) -> None:
        """Call `fire()` on the thread once `next_at()`, in monotonic nanoseconds, has passed; None means not now.

        `next_at` is asked again after every wake-up; after a change of its answer, call `wake`.
        """
        self._timer = (next_at, fire)
        self.wake()

    def wake(self) -> None:
        """Let the thread look at its timer again."""
        if self._foreign():
            return
        with self._lock:
            if not self._bell.closed:
                linux.ring_eventfd(self._bell.fd)

    def stop(self, timeout: float = _STOP_SECONDS) -> None:
        """End the thread; no callback runs afterwards. Again changes nothing; also works on the thread itself.

        Waits at most `timeout` seconds for a callback that is still running, then logs which thread was left behind.
        """
        if self._foreign():
            return
        with self._lock:
            self._stopping = True
            logs, self._logs = self._logs, None
        self.wake()
        if logs is not None:
            logs.stop(timeout)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("monitor thread still in a callback: name=%s waited=%.1fs", self._thread.name, timeout)

    def watch(
        self,
        process: RankProcess,
        on_message: Callable[[int, Any, list[int]], None],
        on_death: Callable[[Death], None],
    ) -> None:
        """Watch a rank's lane, output and end.

        `on_message(rank, message, descriptors)` is called for each control message, in order; the descriptors are the
        callee's to close. `on_death(death)` is called once, after the last message; by then only the rank's output is
        still watched. Before the process is closed, call `unwatch` or `stop`.

        Output is read and shown by a second thread, because whoever reads the driver's own stdout may be slow, and news
        of a death must not wait for that.
        """
        if self._foreign():
            return
        _RankWatch(self, self._log_monitor(), process, on_message, on_death)

    def unwatch(self, process: RankProcess) -> None:
        """Stop watching a rank, before its descriptors are closed."""
        for fd in (process.lane.fileno(), process.pidfd.fd):
            self.remove(fd)
        logs = self._logs
        for fd in process.log.read_ends() if logs is not None else ():
            assert logs is not None
            logs.remove(fd)

    def _log_monitor(self) -> Monitor:
        with self._lock:
            if self._stopping:
                raise WrongStateError("the monitor was stopped", state="STOPPED")
            if self._logs is None:
                self._logs = Monitor("mpexec-logs")
            return self._logs

    def _foreign(self) -> bool:
        return os.getpid() != self._owner

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._serve(self._wait())
        finally:
            with self._lock:
                self._stopping = True
                self._watches.clear()
                self._epoll.close()
                self._bell.close()
            _running.discard(self)

    def _wait(self) -> list[int]:
        """Sleep until something is readable or the timer is due; the descriptors that are ready."""
        timeout = self._seconds_to_timer()
        ready = self._epoll.epoll.poll(timeout)
        with self._lock:
            self._turn += 1
        return [fd for fd, _ in ready]

    def _serve(self, ready: list[int]) -> None:
        for fd in ready:
            if self._stopping:
                return
            if fd == self._bell.fd:
                linux.drain_eventfd(fd)
            else:
                self._call(fd)
        if self._seconds_to_timer() == 0 and self._timer is not None:
            self._guard(self._timer[1], "timer")

    def _call(self, fd: int) -> None:
        with self._lock:
            watch = self._watches.get(fd)
            # Added during this turn: the number is that of another descriptor than the one that was ready.
            if watch is None or watch.turn == self._turn:
                return
            self._running_fd = fd
        try:
            if not self._guard(watch.callback, f"descriptor {fd}"):
                self._forget(fd, watch)
        finally:
            with self._lock:
                self._running_fd = -1
                self._idle.notify_all()

    def _guard(self, callback: Callable[[], None], what: str) -> bool:
        """True if the callback did not raise."""
        try:
            callback()
        except BaseException:  # SystemExit too: it would end this thread without a word
            logger.exception("a callback of the monitor raised and is removed: %s", what)
            if what == "timer":
                self._timer = None
            return False
        return True

    def _forget(self, fd: int, watch: _Watch) -> None:
        with self._lock:
            if self._watches.get(fd) is watch:
                self.remove(fd)

    def _seconds_to_timer(self) -> float | None:
        """0 when it is due, None when there is none."""
        timer = self._timer
        if timer is None:
            return None
        try:
            at_ns = timer[0]()
        except Exception:
            logger.exception("the monitor's timer raised and is removed")
            self._timer = None
            return None
        return None if at_ns is None else max(0, at_ns - time.monotonic_ns()) / 1e9


class _RankWatch:
    """The callbacks of one watched rank."""

    def __init__(
        self,
        monitor: Monitor,
        logs: Monitor,
        process: RankProcess,
        on_message: Callable[[int, Any, list[int]], None],
        on_death: Callable[[Death], None],
    ) -> None:
        self._monitor = monitor
        self._logs = logs
        self._process = process
        self._on_message = on_message
        self._on_death = on_death
        self._lane_fd = process.lane.fileno()
        self._pidfd = process.pidfd.fd
        for fd in process.log.read_ends():
            self._add_log(fd)
        monitor.add(self._lane_fd, self._read_lane)
        monitor.add(self._pidfd, self._see_end)

    def _add_log(self, fd: int) -> None:
        def pump() -> None:
            if not self._process.log.pump(fd):
                self._logs.remove(fd)

        self._logs.add(fd, pump)

    def _read_lane(self, most: int = _TURN_MESSAGES) -> None:
        try:
            for _ in range(most):
                got = self._process.lane.try_recv()
                if got is None:
                    return
                self._on_message(self._process.rank, *got)
        except LaneClosed:
            # The end of the process itself is what the pidfd tells.
            self._monitor.remove(self._lane_fd)

    def _see_end(self) -> None:
        death = self._process.poll_death()
        if death is None:
            return
        self._monitor.remove(self._pidfd)
        try:
            self._read_lane(most=1 << 30)
        finally:
            self._monitor.remove(self._lane_fd)
            self._on_death(death)


_running: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that still ran while the interpreter is taken down could hold a stream's lock and abort the process."""
    for monitor in list(_running):
        monitor.stop()
