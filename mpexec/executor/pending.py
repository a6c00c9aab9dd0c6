"""Calls in flight: which ranks are missing, what came back, and when a call is over.

A call is over when every rank has answered or is dead, or some time after its first failure, whichever is first. Only
then are root cause and further failures told apart, because the first news of a failure is often a consequence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from mpexec.deadline import Deadline
from mpexec.errors import (
    ExecutorBrokenError,
    ExecutorStoppedError,
    RPCTimeoutError,
    SerializationError,
    attach_others,
)
from mpexec.messages import Failure

logger = logging.getLogger(__name__)

_MS = 1_000_000
_LOST_PEER_HOLD_NS = 50 * _MS  # a lost-peer error may be the first news of a death that the kernel still works on
_SUSPECT_HOLD_NS = 60_000 * _MS  # of a rank on another machine: a cluster takes its time to miss a node
_FIRST_REPORT_NS = 60_000 * _MS


class _Ending:
    """One rank's failure, with what is needed to rank it as a cause."""

    __slots__ = ("at_ns", "consequence", "error", "rank")

    def __init__(self, error: BaseException, rank: int, at_ns: int, consequence: bool) -> None:
        self.error = error
        self.rank = rank
        self.at_ns = at_ns
        self.consequence = consequence

    @property
    def order(self) -> tuple[bool, int]:
        """Root causes first: real errors before consequences, then the earlier one."""
        return self.consequence, self.at_ns


class PendingCall:
    """One call in flight. Its methods are called by whoever drains the replies, one at a time.

    Attributes:
        done: True once `values` or `error` are final.
        waited: How many threads and tasks wait for it; at 0 the monitor sees to its expiries.
        stuck: It ended although some rank had not answered: that rank counts as stuck.
        reports: Waiting for it long without a timeout is worth a log line.
        timed_out: The deadline has passed; answers that come while stacks are collected change nothing any more.
        suspects: Missing ranks of which nobody knows whether they live. As long as there are any, errors that look like
            a lost peer are not taken for the root cause, for a minute at most.
        bare: The caller named one reply rank as an integer and gets its value without a list.
        closer: Called as the first thing when the call is over, in the thread that drains.
        forget: Called after everybody but its waiter has been told: takes the call out of the table. A Ctrl-C before
            that leaves it there, so that it is ended once more.
        on_failure: Called once, when the first rank has failed.
    """

    # Defaults on the class: a call is made a hundred thousand times a second, and most of these never change.
    error: BaseException | None = None
    done = False
    stuck = False
    timed_out = False
    bare = False
    reports = True
    waited = 0
    gate: threading.Lock | None = None
    closer: Callable[[PendingCall], None] | None = None
    forget: Callable[[PendingCall], None] | None = None
    on_failure: Callable[[PendingCall], None] | None = None
    suspects: frozenset[int] = frozenset()
    _failures: tuple[_Ending, ...] = ()
    _first_failure_ns = 0
    _on_done: list[Callable[[PendingCall], None]] | None = None
    _watchers: list[Callable[[], None]] | None = None
    _announced = False
    _report_ns = 0
    _step_ns = _FIRST_REPORT_NS

    def __init__(
        self,
        call_id: int,
        method: str,
        ranks: tuple[int, ...],
        reply_ranks: tuple[int, ...],
        deadline: Deadline,
        grace: float | None,
    ) -> None:
        self.call_id = call_id
        self.method = method
        self.ranks = ranks
        self.reply_ranks = reply_ranks
        self.deadline = deadline
        self.values: dict[int, Any] = {}  # by rank; every rank that has finished is in it
        self._grace = grace

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have neither finished nor failed."""
        failed = {ending.rank for ending in self._failures}
        return tuple(rank for rank in self.ranks if rank not in self.values and rank not in failed)

    def accept(self, rank: int, value: Any) -> None:
        """A rank has finished."""
        values = self.values
        values[rank] = value
        if self._failures:
            if not (self.missing or self.settle(time.monotonic_ns())):
                self._wake_waiter()  # there is a sooner expiry now
        elif len(values) == len(self.ranks) and not self.timed_out:
            self.finish(None)

    def accept_failure(self, failure: Failure) -> None:
        """A rank has failed."""
        self.fail(failure.rank, failure.to_exception(), consequence=failure.lost_peer, at_ns=failure.at_ns)

    def fail(self, rank: int, error: BaseException, *, consequence: bool = False, at_ns: int | None = None) -> None:
        """Note a failure of a rank; the call ends later, see `settle`."""
        now = time.monotonic_ns()
        self._failures = (*self._failures, _Ending(error, rank, at_ns or now, consequence))
        if not self._first_failure_ns:
            self._first_failure_ns = now
            if self.on_failure is not None:
                self.on_failure(self)
        if not self.settle(now):
            self._wake_waiter()

    def clear(self, rank: int) -> None:
        """A suspect has shown that it lives."""
        self.suspects -= {rank}
        if not self.settle(time.monotonic_ns()):
            self._wake_waiter()

    def _wake_waiter(self) -> None:
        """Its thread or loop sleeps until the old expiry, and there may be a sooner one now."""
        if self.gate is not None:
            open_gate(self.gate)
        self._changed()

    @property
    def failed(self) -> bool:
        """True once any rank has failed."""
        return bool(self._failures)

    def settle(self, now: int) -> bool:
        """End the call if it is over at monotonic time `now` (ns); True if it is."""
        if self.done or self.timed_out:
            return self.done
        if self._failures:
            held = now < self._held_until()
            if self.missing:
                if self._grace is None or now < self._grace_end(self._grace) or held:
                    return False
                self.stuck = True
            elif held:
                return False
            self.finish(self._root_cause())
            return True
        if self.missing:
            return False
        self.finish(None)
        return True

    def _grace_end(self, grace: float) -> int:
        return self._first_failure_ns + int(grace * 1e9)

    def _held_until(self) -> int:
        if not all(ending.consequence for ending in self._failures):
            return 0
        unknown = bool(self.suspects) and not self.suspects.isdisjoint(self.missing)
        return self._first_failure_ns + (_SUSPECT_HOLD_NS if unknown else _LOST_PEER_HOLD_NS)

    def _root_cause(self) -> BaseException:
        ordered = sorted(self._failures, key=lambda ending: ending.order)
        root = ordered[0].error
        attach_others(root, [ending.error for ending in ordered[1:]])
        return root

    def end_with(self, error: BaseException) -> None:
        """End the call now: `error` is the root cause, unless a real failure of a rank had come first."""
        if self.done:
            return
        real = [ending for ending in self._failures if not ending.consequence]
        if real:
            root = min(real, key=lambda ending: ending.order).error
            attach_others(root, [e.error for e in self._failures if e.error is not root] + [error])
        else:
            root = error
            attach_others(root, [ending.error for ending in self._failures])
        self.finish(root)

    def conclude(self) -> None:
        """End the call now: with the root cause of its failures if it has any, else normally."""
        self.finish(self._root_cause() if self._failures else None)

    def finish(self, error: BaseException | None) -> None:
        """Make the outcome final and wake whoever waits for it; one that was interrupted can be called again."""
        if self._announced:
            return
        if not self.done:
            self.error = error
            self.done = True
        try:
            if self.closer is not None:
                self.closer(self)
            while self._on_done:
                try:
                    callback = self._on_done.pop(0)
                except IndexError:  # `on_done`, in another thread, took its callback back
                    break
                callback(self)
            if self.forget is not None:
                self.forget(self)
        finally:  # whatever happens above, a Ctrl-C included, nobody is left waiting
            if self.gate is not None:
                open_gate(self.gate)
            if self._watchers:
                self._changed()
        self._announced = True

    def on_done(self, callback: Callable[[PendingCall], None]) -> None:
        """Call `callback(self)` when the call is over, in the thread that drains; at once if it is over already."""
        if self._on_done is None:
            self._on_done = []
        self._on_done.append(callback)
        if self.done:
            try:
                self._on_done.remove(callback)
            except ValueError:  # `finish`, in another thread, has taken it
                return
            callback(self)

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed()` whenever the call is over or its next expiry has changed."""
        if self._watchers is None:
            self._watchers = []
        self._watchers.append(changed)

    def unwatch(self, changed: Callable[[], None]) -> None:
        """Undo `watch`."""
        if self._watchers and changed in self._watchers:
            self._watchers.remove(changed)

    def _changed(self) -> None:
        for changed in tuple(self._watchers or ()):
            changed()

    def next_expiry(self) -> int | None:
        """Monotonic ns of the next moment at which time alone changes something; None if there is none."""
        if self.timed_out:
            return None
        moments = []
        if self._failures:
            if not self.missing:
                moments.append(self._held_until())
            elif self._grace is not None:
                moments.append(max(self._grace_end(self._grace), self._held_until()))
        if self.deadline.at_ns is not None:
            moments.append(self.deadline.at_ns)
        elif self.waited and self.reports:
            if not self._report_ns:
                self._report_ns = time.monotonic_ns() + self._step_ns
            moments.append(self._report_ns)
        return min(moments, default=None)

    def report_due(self, now: int) -> bool:
        """True after 60 s of waiting without a timeout, and again at each doubling."""
        if self.deadline.at_ns is not None or not self._report_ns or now < self._report_ns:
            return False
        self._report_ns = now + self._step_ns
        self._step_ns *= 2
        return True

    def outcome(self) -> Any:
        """The values by rank, or the error raised."""
        if self.error is not None:
            raise self.error
        if self.bare:
            return self.values[self.reply_ranks[0]]
        return list(map(self.values.__getitem__, self.reply_ranks))


def open_gate(gate: threading.Lock) -> None:
    """Let the thread at a gate pass; again changes nothing."""
    try:
        gate.release()
    except RuntimeError:  # opened already, by somebody else in the same moment
        logger.debug("gate was open already")


class CallTable:
    """All calls in flight of one executor.

    Attributes:
        by_id: The calls in flight.
        ended: Methods of the calls that were in flight when all were ended, for `describe`.
        late: Replies that came for no call: of abandoned, timed out or stopped ones. Counted and dropped.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, PendingCall] = {}
        self.ended: dict[int, str] = {}
        self.last_id = 0
        self.late = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def next_id(self) -> int:
        """A fresh call id. Ids ascend in the order of sending because they are taken under the send lock."""
        self.last_id += 1
        return self.last_id

    def get(self, call_id: int) -> PendingCall | None:
        """The call with this id, if it is still in flight."""
        return self.by_id.get(call_id)

    def close(self, pending: PendingCall) -> None:
        """Forget a call; its later replies are late."""
        self.by_id.pop(pending.call_id, None)

    def method_of(self, call_id: int) -> str | None:
        """The method of a call in flight, or of one that was in flight when all were ended."""
        pending = self.by_id.get(call_id)
        return pending.method if pending is not None else self.ended.get(call_id)

    def in_flight(self) -> list[PendingCall]:
        """The calls in flight, oldest first."""
        return list(self.by_id.values())

    def end_all(self, make_error: Callable[[PendingCall], BaseException], *, but: PendingCall | None = None) -> None:
        """End every call in flight, except `but`, with an error of its own."""
        for pending in self.in_flight():
            if pending is not but:
                self.ended[pending.call_id] = pending.method
                pending.end_with(make_error(pending))


def broken_error(root: BaseException) -> ExecutorBrokenError:
    """What every call gets once the executor is broken."""
    error = ExecutorBrokenError(f"the executor is broken since: {first_line(root)}")
    error.__cause__ = root
    return error


def first_line(error: BaseException) -> str:
    """Type and first line of an error; the whole is in the error itself."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def stopped_error(pending: PendingCall) -> ExecutorStoppedError:
    """What a call in flight gets when `stop` is called."""
    return ExecutorStoppedError(f"{pending.method!r} (call {pending.call_id}) was ended: the executor was stopped")


def stopped_by_error(pending: PendingCall, root: BaseException) -> ExecutorStoppedError:
    """What a call in flight gets when a background task fails and everything stops."""
    error = ExecutorStoppedError(
        f"{pending.method!r} (call {pending.call_id}) was ended: a background task failed: {first_line(root)}"
    )
    error.__cause__ = root
    return error


def timeout_error(
    pending: PendingCall, missing: tuple[int, ...], stacks: dict[int, str], states: str
) -> RPCTimeoutError:
    """What a call gets whose deadline has passed; `states` is what all ranks are at."""
    return RPCTimeoutError(
        f"{pending.method!r} (call {pending.call_id}): no answer from ranks {list(missing)} by the deadline.\n"
        f"{states}\n" + "\n".join(f"Stack of rank {rank}:\n{text}" for rank, text in stacks.items()),
        method=pending.method,
        missing_ranks=missing,
        stacks=stacks,
    )


def undecodable_error(error: BaseException, rank: int, method: str) -> SerializationError:
    """What a call gets whose answer from a rank cannot be rebuilt here."""
    failed = SerializationError(
        f"what rank {rank} sent for {method!r} cannot be rebuilt here: {type(error).__name__}: {error}",
        type_name=type(error).__name__,
        rank=rank,
    )
    failed.__cause__ = error
    return failed
