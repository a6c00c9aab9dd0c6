"""When a call in flight is over, and which of several failures is the root cause."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mpexec.deadline import Deadline
from mpexec.errors import ExecutorBrokenError, ExecutorStoppedError, WorkerDiedError
from mpexec.executor.pending import (
    CallTable,
    PendingCall,
    broken_error,
    open_gate,
    stopped_by_error,
    stopped_error,
)
from mpexec.messages import Failure

MS = 1_000_000
SECOND = 1000 * MS


class Clock:
    def __init__(self) -> None:
        self.now = 100 * SECOND

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", clock)
    return clock


def call(ranks: int = 3, grace: float | None = 1.0, timeout: float | None = None, **options: Any) -> PendingCall:
    everyone = tuple(range(ranks))
    wanted = options.pop("reply_ranks", everyone)
    pending = PendingCall(1, "forward", everyone, wanted, Deadline.after(timeout), grace)
    for name, value in options.items():
        setattr(pending, name, value)
    return pending


def enter(table: CallTable, pending: PendingCall) -> None:
    """Put a call into the table under a fresh id."""
    pending.call_id = table.next_id()
    table.by_id[pending.call_id] = pending


def test_values_are_ordered_by_rank_whatever_the_order_of_arrival() -> None:
    pending = call()
    for rank in (2, 0, 1):
        assert not pending.done
        pending.accept(rank, f"value {rank}")
    assert pending.done
    assert pending.outcome() == ["value 0", "value 1", "value 2"]


def test_only_wanted_values_are_in_the_outcome_and_a_bare_one_stands_alone() -> None:
    some, bare, nobody = call(reply_ranks=(0, 2)), call(reply_ranks=(1,), bare=True), call(reply_ranks=())
    for pending in (some, bare, nobody):
        for rank in range(3):
            pending.accept(rank, rank)
    assert (some.outcome(), bare.outcome(), nobody.outcome()) == ([0, 2], 1, [])


def test_a_failure_ends_the_call_when_the_last_rank_has_answered(clock: Clock) -> None:
    pending = call()
    pending.accept(0, None)
    pending.fail(1, ValueError("x"))
    assert not pending.done
    pending.accept(2, None)
    assert pending.done
    assert not pending.stuck
    with pytest.raises(ValueError, match="x"):
        pending.outcome()


def test_a_rank_that_is_missing_when_the_grace_is_over_counts_as_stuck(clock: Clock) -> None:
    pending = call()
    pending.fail(1, ValueError("x"))
    assert pending.next_expiry() == clock.now + SECOND
    assert not pending.settle(clock.now + SECOND - 1)
    assert pending.settle(clock.now + SECOND)
    assert pending.stuck
    assert pending.missing == (0, 2)
    assert isinstance(pending.error, ValueError)


def test_the_grace_runs_from_the_first_failure(clock: Clock) -> None:
    pending = call()
    pending.fail(1, ValueError("first"))
    started = clock.now
    clock.now += SECOND // 2
    pending.fail(2, KeyError("second"))
    assert pending.next_expiry() == started + SECOND


def test_without_a_grace_the_call_waits_for_every_rank(clock: Clock) -> None:
    pending = call(grace=None)
    pending.fail(1, ValueError("x"))
    assert pending.next_expiry() is None
    assert not pending.settle(clock.now + 10**6 * SECOND)
    pending.accept(0, None)
    pending.accept(2, None)
    assert pending.done


def test_a_grace_of_nothing_ends_the_call_at_the_first_failure(clock: Clock) -> None:
    pending = call(grace=0)
    pending.fail(1, ValueError("x"))
    assert pending.done
    assert pending.stuck


# -- root cause ------------------------------------------------------------------------------------------------------


def test_a_lost_peer_error_is_held_for_50_ms(clock: Clock) -> None:
    pending = call(1)
    pending.fail(0, ConnectionResetError("x"), consequence=True)
    assert not pending.done
    assert pending.next_expiry() == clock.now + 50 * MS
    assert not pending.settle(clock.now + 50 * MS - 1)
    assert pending.settle(clock.now + 50 * MS)
    assert isinstance(pending.error, ConnectionResetError)


def test_a_death_within_the_hold_is_the_root_cause_and_the_lost_peer_is_in_others(clock: Clock) -> None:
    pending = call(2)
    pending.fail(0, ConnectionResetError("consequence"), consequence=True)
    clock.now += 10 * MS
    pending.end_with(WorkerDiedError("root", rank=1))
    assert isinstance(pending.error, WorkerDiedError)
    assert pending.error.others is not None
    assert [type(other) for other in pending.error.others.exceptions] == [ConnectionResetError]


def test_a_real_error_ends_the_hold(clock: Clock) -> None:
    pending = call(2)
    pending.fail(0, ConnectionResetError("x"), consequence=True)
    pending.fail(1, ValueError("root"))
    assert pending.done
    assert isinstance(pending.error, ValueError)


def test_a_hold_longer_than_the_grace_wins(clock: Clock) -> None:
    pending = call(2, grace=0)
    pending.fail(0, ConnectionResetError("x"), consequence=True)
    assert pending.next_expiry() == clock.now + 50 * MS
    assert pending.settle(clock.now + 50 * MS)


def test_real_errors_come_before_consequences_and_ties_go_by_time(clock: Clock) -> None:
    pending = call(4)
    pending.fail(0, ConnectionResetError("a"), consequence=True, at_ns=1)
    pending.fail(1, ValueError("late"), at_ns=30)
    pending.fail(2, KeyError("early"), at_ns=20)
    pending.fail(3, ConnectionResetError("b"), consequence=True, at_ns=2)
    assert isinstance(pending.error, KeyError)
    others = pending.error.others  # type: ignore[attr-defined]
    assert [str(other) for other in others.exceptions] == ["late", "a", "b"]


def test_a_real_failure_that_came_before_a_death_stays_the_root_cause(clock: Clock) -> None:
    pending = call(2)
    pending.fail(0, ValueError("first"))
    pending.end_with(WorkerDiedError("later", rank=1))
    assert isinstance(pending.error, ValueError)
    assert [type(other) for other in pending.error.others.exceptions] == [WorkerDiedError]  # type: ignore[attr-defined]


def test_a_failure_of_a_rank_arrives_as_its_exception(clock: Clock) -> None:
    pending = call(1)
    pending.accept_failure(Failure.of(ValueError("x"), call_id=1, rank=0, method="forward"))
    assert isinstance(pending.error, ValueError)


def test_what_comes_after_the_end_changes_nothing(clock: Clock) -> None:
    pending = call(2)
    pending.finish(ValueError("x"))
    pending.accept(0, "late")
    pending.fail(1, KeyError("late"))
    pending.end_with(KeyError("late"))
    pending.finish(None)
    with pytest.raises(ValueError, match="x"):
        pending.outcome()


def test_answers_after_the_deadline_do_not_turn_a_time_out_into_a_value(clock: Clock) -> None:
    pending = call(2, timeout=1.0)
    assert pending.next_expiry() == clock.now + SECOND
    pending.timed_out = True
    pending.accept(0, None)
    pending.accept(1, None)
    pending.fail(1, ValueError("x"))
    assert not pending.done


# -- who is told -----------------------------------------------------------------------------------------------------


def test_everybody_is_told_once(clock: Clock) -> None:
    pending = call(1)
    told: list[str] = []
    pending.closer = lambda _: told.append("closer")
    pending.on_done(lambda _: told.append("callback"))
    pending.watch(lambda: told.append("watcher"))
    pending.accept(0, None)
    assert told == ["closer", "callback", "watcher"]
    pending.finish(None)
    assert len(told) == 3
    pending.on_done(lambda _: told.append("late"))
    assert told[3:] == ["late"]


def test_a_call_whose_end_was_interrupted_stays_known_and_everybody_is_told_the_next_time(clock: Clock) -> None:
    """Ctrl-C may hit the thread that drains for others; the record that ended the call is then read once more."""
    table, pending = CallTable(), call(1)
    enter(table, pending)
    pending.forget = table.close
    told: list[str] = []

    def interrupted(_: PendingCall) -> None:
        if not told:
            told.append("interrupted")
            raise KeyboardInterrupt

    pending.closer = interrupted
    pending.on_done(lambda _: told.append("callback"))
    with pytest.raises(KeyboardInterrupt):
        pending.accept(0, 5)
    assert table.get(pending.call_id) is pending
    pending.accept(0, 5)
    assert told == ["interrupted", "callback"]
    assert len(table) == 0


def test_a_watcher_that_left_is_not_told(clock: Clock) -> None:
    pending = call(1)
    told: list[int] = []

    def changed() -> None:
        told.append(1)

    pending.watch(changed)
    pending.unwatch(changed)
    pending.unwatch(changed)
    pending.accept(0, None)
    assert told == []


def test_a_thread_at_the_gate_is_let_through_and_opening_again_is_harmless(clock: Clock) -> None:
    pending = call(1)
    gate = threading.Lock()
    gate.acquire()
    pending.gate = gate
    pending.accept(0, None)
    assert gate.acquire(blocking=False)
    gate.release()
    open_gate(gate)


@pytest.mark.parametrize("first, then", [("fail", "accept"), ("accept", "fail")])
def test_a_waiter_is_told_when_its_next_expiry_comes_sooner(clock: Clock, first: str, then: str) -> None:
    """Both ways in which a thread or a loop may wait until an expiry that is no longer the next one."""
    pending = call(2)
    told: list[int | None] = []
    pending.watch(lambda: told.append(pending.next_expiry()))
    for what in (first, then):
        gate = pending.gate = threading.Lock()
        gate.acquire()
        before = pending.next_expiry()
        if what == "fail":
            pending.fail(1, ConnectionResetError("x"), consequence=True)
        else:
            pending.accept(0, None)
        if pending.next_expiry() != before:
            assert told[-1] == pending.next_expiry()
            assert gate.acquire(blocking=False)
    assert pending.next_expiry() == clock.now + 50 * MS


def test_the_first_failure_is_announced_once(clock: Clock) -> None:
    pending = call()
    announced: list[PendingCall] = []
    pending.on_failure = announced.append
    pending.fail(0, ValueError("a"))
    pending.fail(1, ValueError("b"))
    assert announced == [pending]


def test_a_callback_added_while_the_call_ends_is_called_once() -> None:
    for _ in range(300):
        pending = call(1)
        told: list[int] = []
        together = threading.Barrier(2)

        def add(pending: PendingCall = pending, told: list[int] = told, together: Any = together) -> None:
            together.wait()
            pending.on_done(lambda _: told.append(1))

        thread = threading.Thread(target=add)
        thread.start()
        together.wait()
        pending.accept(0, None)
        thread.join()
        assert told == [1]


def test_long_waits_without_a_timeout_are_reported_at_each_doubling(clock: Clock) -> None:
    pending = call()
    assert pending.next_expiry() is None
    pending.waited = True
    began = clock.now
    reports = []
    for _ in range(4):
        moment = pending.next_expiry()
        assert moment is not None
        assert not pending.report_due(moment - 1)
        clock.now = moment
        assert pending.report_due(clock.now)
        reports.append((clock.now - began) // SECOND)
    assert reports == [60, 120, 240, 480]


# -- the table -------------------------------------------------------------------------------------------------------


def test_ids_ascend_and_calls_are_found_until_they_are_closed() -> None:
    table = CallTable()
    first, second = call(), call()
    for pending in (first, second):
        enter(table, pending)
    assert first.call_id < second.call_id == table.last_id
    assert table.get(first.call_id) is first
    assert table.in_flight() == [first, second]
    table.close(first)
    table.close(first)
    assert table.get(first.call_id) is None
    assert len(table) == 1


def test_ending_all_spares_one_and_remembers_the_methods() -> None:
    table = CallTable()
    calls = [call() for _ in range(3)]
    for pending in calls:
        pending.closer = table.close
        enter(table, pending)
    table.end_all(stopped_error, but=calls[1])
    assert [pending.done for pending in calls] == [True, False, True]
    assert isinstance(calls[0].error, ExecutorStoppedError)
    assert table.method_of(calls[0].call_id) == "forward"


def test_errors_of_ended_calls_carry_their_root_cause() -> None:
    root = ValueError("first line\nsecond line")
    broken, stopped = broken_error(root), stopped_by_error(call(), root)
    assert isinstance(broken, ExecutorBrokenError)
    assert broken.__cause__ is stopped.__cause__ is root
    assert "first line" in str(broken)
    assert "second line" not in str(broken)


def lose_peer(pending: PendingCall, rank: int) -> None:
    pending.fail(rank, ConnectionResetError("Connection reset by peer"), consequence=True)


def test_a_lost_peer_is_not_believed_while_a_missing_rank_may_be_dead(clock: Clock) -> None:
    pending = call(suspects=frozenset({1, 2}))
    lose_peer(pending, 0)
    clock.now += 59 * SECOND
    assert not pending.settle(clock.now)
    pending.end_with(WorkerDiedError("rank 1 died", rank=1))
    assert isinstance(pending.error, WorkerDiedError)
    assert [type(other) for other in pending.error.others.exceptions] == [ConnectionResetError]  # type: ignore[union-attr]


def test_a_lost_peer_is_believed_when_the_others_have_shown_that_they_live(clock: Clock) -> None:
    pending = call(suspects=frozenset({1, 2}))
    lose_peer(pending, 0)
    clock.now += 2 * SECOND  # the grace is over by then
    pending.clear(1)
    assert not pending.done
    pending.clear(2)
    assert pending.done
    assert type(pending.error) is ConnectionResetError


def test_a_rank_that_shows_no_sign_of_life_holds_a_call_for_a_minute(clock: Clock) -> None:
    pending = call(suspects=frozenset({1}))
    lose_peer(pending, 0)
    assert pending.next_expiry() == clock.now + 60 * SECOND
    clock.now += 60 * SECOND
    assert pending.settle(clock.now)
    assert pending.stuck


def test_a_suspect_that_answers_is_none(clock: Clock) -> None:
    pending = call(suspects=frozenset({1, 2}))
    lose_peer(pending, 0)
    pending.accept(1, None)
    pending.accept(2, None)
    clock.now += 60 * MS
    assert pending.settle(clock.now)
    assert not pending.stuck


def test_a_call_whose_deadline_has_passed_has_no_further_expiry(clock: Clock) -> None:
    pending = call(timeout=1.0)
    clock.now += 2 * SECOND
    assert pending.next_expiry() is not None
    pending.timed_out = True
    assert pending.next_expiry() is None
