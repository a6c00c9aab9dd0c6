"""MPExecutor: one process per rank on this machine, shared memory between, and a failure contract with numbers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self

from mpexec.config import WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import (
    ExecutorStoppedError,
    TransportError,
    attach_others,
)
from mpexec.executor.base import Executor, Method, State
from mpexec.executor.group import RankGroup
from mpexec.executor.inbox import Inbox, Waitable
from mpexec.executor.link import Link
from mpexec.executor.measures import Measures, RankMeasures
from mpexec.executor.outbox import Outbox
from mpexec.executor.outputs import OutputWait
from mpexec.executor.pending import (
    PendingCall,
    broken_error,
    timeout_error,
    undecodable_error,
)
from mpexec.executor.stacks import ProcessStacks, collect_stacks
from mpexec.executor.starting import StartAbort, died_error, lost_at_start
from mpexec.executor.threads import in_thread
from mpexec.messages import Failure
from mpexec.processes import Death, refuse_while_importing_main
from mpexec.transport.channel import DONE, FAILED, OUTPUT, PLAIN_DONE, Receiver
from mpexec.transport.frame import load_plain
from mpexec.transport.ring import Record
from mpexec.worker.main import LinkFacts

logger = logging.getLogger(__name__)

_BROKEN_END_S = 1.0

DEPRECATED = (
    "MPExecutor is driven best through mpexec.build_executor(...), which picks the executor; "
    "RayExecutor is the way to several machines. MPExecutor itself stays and keeps its contract."
)


class MPExecutor(Executor):
    """One process per rank on this machine.

    A rank's death, also by SIGKILL, reaches every caller at once. See `Executor` for the calls and the verbs, and
    `WorkerSpec` for the options.

    Args:
        agent: A `ModelAgent` class or a callable that makes one inside each rank, or a whole `WorkerSpec`.
        options: Fields of `WorkerSpec`: world_size, worker_cls, agent_args, agent_kwargs, start_method, device, env,
            init_timeout, stop_timeout, failure_grace, ...

    Raises:
        ConfigError: A value that cannot work.
        SerializationError: The agent's class or arguments cannot be pickled.
        StartupError: A rank did not become ready; its error is the cause. Nothing is left behind.
    """

    @classmethod
    def create_async(cls, *args: Any, **options: Any) -> Coroutine[Any, Any, Self]:
        """Construct without blocking the loop. Cancelling it ends the ranks that were started, and waits for that."""
        # Not a coroutine function: the warning belongs to the line that calls it.
        warnings.warn(DEPRECATED, DeprecationWarning, stacklevel=2)
        return cls.create_quietly(*args, **options)

    @classmethod
    async def create_quietly(cls, *args: Any, **options: Any) -> Self:
        """As `create_async`, without the warning: for those who come through `build_executor`."""
        abort = StartAbort()
        return await in_thread(
            lambda: cls(*args, **options, _warn=False, _abort=abort),
            name="mpexec-create",
            abandoned=lambda made: made.release(),
            cancel=abort.ask,
        )

    @classmethod
    def attach(cls, agent: Callable[..., Any] | WorkerSpec, *, driver_is_rank: bool = False, **options: Any) -> Self:
        """The executor over the processes of a launched job (`mpexec run`, torchrun); without a job an ordinary one.

        In a job, every process calls this, with the same arguments. Process 0 becomes the driver and gets the executor
        back. All others become its ranks and do not return: they serve until they are released, then end by
        `SystemExit(0)`, so that the script's own `finally` blocks and exit handlers run. A rank whose model cannot be
        built raises that error. Once in a job; in the main thread, before an event loop runs.

        Args:
            agent: As for the constructor.
            driver_is_rank: Rank 0 of the executor is a process that the driver starts itself, so that a job of N
                processes gives N ranks; otherwise it gives N - 1.
            options: As for the constructor. `world_size` may be left out in a job; without one it is needed. `env` is
                set while a process serves; what is read at its start is the launcher's to set.

        Raises:
            ConfigError: A job on several machines, or whose size contradicts the options.
            StartupError: A process did not come before `init_timeout`, or failed; all that had come are let go.
            WrongStateError: This job has been attached before.
        """
        from mpexec.executor.attached import enter_job

        job_options = enter_job(agent, driver_is_rank, options)  # does not return in a worker
        warnings.warn(DEPRECATED, DeprecationWarning, stacklevel=2)
        return cls(agent, **job_options, _warn=False)

    def __init__(self, agent: Callable[..., Any] | WorkerSpec, **options: Any) -> None:
        if options.pop("_warn", True):
            warnings.warn(DEPRECATED, DeprecationWarning, stacklevel=2)
        abort: StartAbort | None = options.pop("_abort", None)
        make_group: Callable[[WorkerSpec, StartAbort | None], RankGroup] = options.pop("_group", RankGroup)
        super().__init__(agent, **options)
        refuse_while_importing_main()
        self._enter(State.STARTING)
        self._trim_planned = False
        self._is_freed = False
        self._ender: threading.Thread | None = None
        with contextlib.ExitStack() as stack:
            self._link = Link(self.spec, stack)
            self._outbox = Outbox(self._link, self._calls)
            self._inbox = Inbox(self._link.board, [link.replies for link in self._link.ranks], self._outbox, self)
            stack.callback(self._inbox.close)
            self._group = make_group(self.spec, abort)
            stack.callback(self._group.close)
            stack.callback(self._group.end, Deadline.after(self.spec.init_timeout))
            self._start_processes()
            stack.callback(self._callbacks.close)
            with self._state_lock:
                if self._state is State.BROKEN:  # a rank died in the moment after it had become ready
                    raise lost_at_start(self._root)
                self._enter(State.READY)
            self._opened = stack.pop_all()
        # Neither the monitor's thread nor the finalizer holds the executor itself: an executor that nobody refers to is
        # released, as one that lives to the end of the interpreter is.
        self._finalizer = weakref.finalize(self, _release_forgotten, weakref.ref(self), self._group, self._opened)

    def _start_processes(self) -> None:
        facts = LinkFacts(self._link.generation, self.world_size, self.spec.shared_views)
        try:
            self._group.launch(facts, lambda rank: self._link.fds(rank, self._inbox.bells))
            self._group.await_ready()
        except BaseException:
            self._group.end(Deadline.after(min(2.0, self.spec.stop_timeout)), ask=False)
            raise
        self._methods = frozenset.intersection(*(ready.methods for ready in self._group.ready))
        self._pids = tuple(process.pid for process in self._group.processes)
        inbox, self_ref = self._inbox, weakref.ref(self)

        def on_message(rank: int, message: tuple[Any, ...]) -> None:
            if (executor := self_ref()) is not None:
                executor._on_control(rank, message)

        def on_death(death: Death) -> None:
            if (executor := self_ref()) is not None:
                inbox.post(lambda: executor._on_death(death))

        def next_at() -> int | None:
            return executor._next_unwaited_expiry() if (executor := self_ref()) is not None else None

        def fire() -> None:
            if (executor := self_ref()) is not None:
                executor._expire_unwaited()

        self._group.attach(on_message, on_death)
        self._group.monitor.add(inbox.bells[2].fd, inbox.on_monitor_bell)
        self._group.monitor.set_timer(next_at, fire)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, index = rank; they stay readable after the end."""
        return self._pids

    # -- sending -------------------------------------------------------------------------------------------------

    def _post(
        self,
        pending: PendingCall,
        method: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        reply_ranks: tuple[int, ...] | None,
        args_per_rank: Sequence[tuple[Any, ...]] | None,
    ) -> None:
        content = (method, args, kwargs or {}, reply_ranks)
        outbox = self._outbox
        everyone = pending.ranks is self._all_ranks
        try:
            plain = outbox.pack_plain(content) if everyone and args_per_rank is None else None
            parcels = outbox.pack(pending, content, args_per_rank, everyone) if plain is None else ()
            if pending.waited:
                self._inbox.claim(threading.get_ident())  # before a fast rank can wake somebody else for its reply
            outbox.send(pending, plain, parcels)
        except (ValueError, OSError) as error:
            if self._state is not State.RELEASED:
                raise
            raise ExecutorStoppedError("the executor was released meanwhile") from error
        if parcels and parcels[0][0].buffers and not self._trim_planned:
            self._trim_planned = True
            self._group.monitor.wake()  # it sleeps, and there is a time now at which to give memory back
        if not self._usable:
            self._end_late(pending)

    def _end_late(self, pending: PendingCall) -> None:
        """The state changed between the check and the sending: whoever ended the calls may have missed this one."""
        if pending is self._background and self._root is None:
            self._inbox.post(lambda: pending.finish(None))
            return
        root = self._root
        error = broken_error(root) if root is not None else ExecutorStoppedError(f"{pending.method!r} was stopped")
        self._inbox.post(lambda: pending.end_with(error))

    # -- receiving -----------------------------------------------------------------------------------------------

    def on_record(self, rank: int, receiver: Receiver, record: Record) -> None:
        """Hand one record of a rank to whom it belongs."""
        kind = record.kind
        if kind == OUTPUT:
            self._on_output(receiver, record)
            return
        pending = self._calls.by_id.get(record.call_id)
        if pending is None:
            receiver.forget(record)
            self._calls.late += 1
        elif kind == PLAIN_DONE:
            pending.accept(rank, load_plain(record.payload))
        else:
            self._on_answer(pending, rank, receiver, record)

    def _on_answer(self, pending: PendingCall, rank: int, receiver: Receiver, record: Record) -> None:
        try:
            value = receiver.open(record)
        except Exception as error:  # unpickling runs user code, and a class may be missing here
            pending.fail(rank, undecodable_error(error, rank, pending.method))
            return
        if record.kind == DONE:
            pending.accept(rank, value)
        elif record.kind == FAILED and isinstance(value, Failure):
            pending.accept_failure(value)
        else:
            raise TransportError(f"rank {rank} sent a record of unknown kind {record.kind}")

    def _on_output(self, receiver: Receiver, record: Record) -> None:
        try:
            value = receiver.open(record)
        except Exception as error:  # as above
            self._background_failed(undecodable_error(error, 0, "forward"))
            return
        if isinstance(value, Failure):
            self._background_failed(value.to_exception())
        else:
            self._outputs.put(value, receiver.ring.tail + 1)

    def on_corrupt(self, rank: int, error: TransportError) -> None:
        """A reader that missed something must not continue."""
        error.add_note(f"in the reply ring of rank {rank}")
        self._break(error)

    def _on_control(self, rank: int, message: tuple[Any, ...]) -> None:
        if message[0] == "stopped":
            _, token, text = message
            if text:
                logger.warning("rank %d failed while it stopped: %s", rank, text)
            self._has_stopped(rank, token)

    def _tell_to_stop(self, last_id: int) -> None:
        """Tell every rank to stop its tasks and to drop the calls up to `last_id`; does not wait."""
        for rank in self._all_ranks:
            token = self._told_to_stop(rank)
            if not self._group.tell(rank, ("stop", token, last_id)):
                logger.debug("rank %d could not be told to stop", rank)

    def _on_death(self, death: Death) -> None:
        """A rank's process has ended; in the pump, after its last replies have been read."""
        if self._state is State.BROKEN and self._root is not None and _is_news(death):
            known = getattr(self._root, "others", None)
            attach_others(self._root, [*(known.exceptions if known else ()), died_error(death, None)])
        if self._state in (State.BROKEN, State.RELEASED):
            return
        self._link.drop_rank(death.rank)
        waiting = (p for p in self._calls.in_flight() if death.rank in p.missing and p is not self._background)
        first = next(waiting, None)
        method = self._method_in(death.rank) or (first.method if first is not None else None)
        states = self._states_text()
        root = died_error(death, method, states)
        # The call that the rank was in gets the root cause itself, the others an error of their own that says the same.
        self._break(root, lambda pending: root if pending is first else died_error(death, method, states))

    def _method_in(self, rank: int) -> str | None:
        call_id, _ = self._link.ranks[rank].progress()
        if self._background is not None and call_id == self._background.call_id:
            return None
        return self._calls.method_of(call_id) if call_id else None

    # -- failures ------------------------------------------------------------------------------------------------

    def _break(self, root: BaseException, error_for: Callable[[PendingCall], BaseException] | None = None) -> None:
        """The executor cannot go on: end every call, then the ranks. The first root cause stays.

        Args:
            root: The root cause.
            error_for: Makes the error of each call in flight; an `ExecutorBrokenError` where it is not given.
        """
        with self._state_lock:
            if self._state in (State.BROKEN, State.RELEASED):
                return
            self._root = root
            self._enter(State.BROKEN)
        self._outputs.fail(root)
        background = self._background
        if background is not None:
            background.end_with(root)
        self._calls.end_all(error_for or (lambda pending: broken_error(root)))
        self._ender = threading.Thread(target=self._end_ranks, name="mpexec-end", daemon=True)
        self._ender.start()

    def _end_ranks(self) -> None:
        # Nothing of value is left to wait for: a rank that is not stuck leaves in milliseconds.
        self._group.end(Deadline.after(min(_BROKEN_END_S, self.spec.stop_timeout)))

    def _background_failed(self, error: BaseException) -> None:
        self._inbox.post(lambda: self._fail_background(error))

    def _stop_others(self, background: PendingCall) -> None:
        """The first rank's background tasks have failed: the others are to stop theirs."""
        self._tell_to_stop(self._outbox.last_id())

    def expire(self, waiting: Waitable) -> None:
        """Time has changed something for a call: its grace is over, its deadline has passed, or a report is due."""
        assert isinstance(waiting, PendingCall)
        self._inbox.pump()  # what has come is judged before the clock is
        pending, now = waiting, time.monotonic_ns()
        if pending.failed:
            self._inbox.post(lambda: _settle(pending, now))
        if pending.done:
            return
        if pending.deadline.expired:
            pending.timed_out = True
            missing = pending.missing
            stacks = collect_stacks({rank: self._stacks_of(rank) for rank in missing})
            self._inbox.post(lambda: self._time_out(pending, missing, stacks))
        elif pending.report_due(now):
            logger.warning("waiting for %r (call %d): %s", pending.method, pending.call_id, self._states_text())

    def _stacks_of(self, rank: int) -> ProcessStacks:
        signum = self._group.ready[rank].stack_signal
        return ProcessStacks(self._group.processes[rank], self._link.ranks[rank], signum)

    def _time_out(self, pending: PendingCall, missing: tuple[int, ...], stacks: dict[int, str]) -> None:
        if pending.done:  # stopped or abandoned while the stacks were collected
            return
        error = timeout_error(pending, missing, stacks, self._states_text())
        self._break(error, lambda other: error if other is pending else broken_error(error))

    def _next_unwaited_expiry(self) -> int | None:
        moments = [pending.next_expiry() for pending in self._calls.in_flight() if not pending.waited]
        moments.append(self._link.sender.pool.next_trim())
        return min((moment for moment in moments if moment is not None), default=None)

    def _expire_unwaited(self) -> None:
        now = time.monotonic_ns()
        trim_at = self._link.sender.pool.next_trim()
        if trim_at is not None and trim_at <= now:
            self._link.sender.pool.trim()
        self._trim_planned = trim_at is not None
        for pending in self._calls.in_flight():
            moment = None if pending.waited else pending.next_expiry()
            if moment is not None and moment <= now:
                self.expire(pending)

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, pending: PendingCall) -> None:
        self._inbox.wait(pending)

    async def _wait_async(self, waiting: PendingCall | OutputWait) -> None:
        await self._inbox.wait_async(waiting)

    def _leave_unwaited(self, pending: PendingCall, *, covered: bool = False) -> None:
        self._inbox.count_unwaited(1, covered=covered)
        pending.on_done(lambda _: self._inbox.count_unwaited(-1, covered=covered))
        if pending.deadline.at_ns is not None:
            self._group.monitor.wake()  # it sleeps until the soonest expiry that it knows
        pending.on_failure = lambda _: self._group.monitor.wake()
        if pending.failed:  # before that callback was there
            self._group.monitor.wake()

    def _give_up(self, begun: list[PendingCall]) -> None:
        self._inbox.let_go(threading.get_ident())
        super()._give_up(begun)

    def _abandon(self, pending: PendingCall) -> None:
        if pending.done or self._calls.get(pending.call_id) is not pending:
            return
        self._inbox.post(
            lambda: pending.finish(ExecutorStoppedError(f"{pending.method!r} was abandoned by its caller"))
        )
        if self._state in (State.READY, State.RUNNING, State.STOPPED):
            self._outbox.cancel(pending)

    # -- verbs ---------------------------------------------------------------------------------------------------

    def _start_ranks(self) -> None:
        self._inbox.pump()  # outputs of an earlier run are in the rings by now, and must not be taken for new ones
        super()._start_ranks()

    def _watch_background(self, background: PendingCall) -> None:
        self._inbox.count_unwaited(1, covered=True)
        background.on_done(lambda _: self._inbox.count_unwaited(-1, covered=True))

    def _stop_ranks(self) -> None:
        deadline = Deadline.after(self.spec.stop_timeout)
        last_id = self._outbox.last_id()
        self._inbox.post(self._end_calls_stopped)
        self._tell_to_stop(last_id)
        stuck = self._await_stop(deadline.share(0.7))
        if not stuck or self._state in (State.BROKEN, State.RELEASED):
            return
        logger.warning("ranks %s do not stop: %s", stuck, self._states_text())
        error = ExecutorStoppedError(f"ranks {stuck} did not stop within stop_timeout and were ended")
        self._inbox.post(lambda: self._break(error))
        self._group.end(deadline)

    def _release_ranks(self) -> None:
        with self._state_lock:
            stopping = self._stopping
            if self._state is not State.RELEASED:
                self._enter(State.RELEASED)
            if self._is_freed:
                return
        deadline = Deadline.after(self.spec.stop_timeout)
        if stopping:
            with self._changed:
                self._changed.wait_for(lambda: not self._stopping, deadline.remaining())
        self._inbox.post(self._end_calls_stopped)
        self._group.end(deadline)
        if self._ender is not None:
            self._ender.join(deadline.remaining())
        self._finalizer.detach()
        self._opened.close()
        self._is_freed = True

    # -- what people see -----------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """State, root cause, counters and a row for every rank: alive, method, call id, seconds in it, exit, rung."""
        return {**self._describe_self("mp"), "ranks": [self._describe_rank(rank) for rank in self._all_ranks]}

    def _describe_rank(self, rank: int) -> dict[str, Any]:
        process = self._group.processes[rank]
        row: dict[str, Any] = {
            "rank": rank,
            "pid": process.pid,
            "state": process.state(),
            **self._group.ready[rank].facts,
        }
        death = process.death
        row["exit"] = None if death is None else death.describe()
        row["ended_by"] = self._group.rungs.get(rank)
        if self._state is not State.RELEASED:
            call_id, since = self._link.ranks[rank].progress()
            row["replies"] = self._link.ranks[rank].replies.ring.records
            row["call_id"] = call_id or None
            row["method"] = self._calls.method_of(call_id) if call_id else None
            if not call_id and (since := self._link.ranks[rank].forward_since()):
                row["method"] = "forward"
            row["seconds"] = round((time.monotonic_ns() - since) / 1e9, 3) if row["method"] else None
        return row

    def measures(self) -> Measures:
        """What driver and ranks have counted, read from shared memory; nothing of a released executor."""
        if self._state is State.RELEASED:
            return super().measures()
        spins, parks = self._inbox.waits
        ranks = tuple(self._measure_rank(rank) for rank in self._all_ranks)
        return Measures(self._link.sender.ring.fill, spins, parks, ranks)

    def _measure_rank(self, rank: int) -> RankMeasures:
        link = self._link.ranks[rank]
        return RankMeasures(rank, link.durations(), link.replies.ring.fill, *link.waits())

    def _states_text(self) -> str:
        """One short phrase for each rank; `describe` has it all."""
        return "; ".join(self._state_phrase(rank) for rank in self._all_ranks)

    def _state_phrase(self, rank: int) -> str:
        row, death = self._describe_rank(rank), self._group.processes[rank].death
        doing = f" in {row['method']!r} for {row['seconds']} s" if row.get("seconds") is not None else " idle"
        if death is not None:
            doing = f" ended ({death.signal_name or f'exit code {death.exit_code}'})"
        elif row["state"] != "running":
            doing += f" ({row['state']})"
        return f"rank {rank} (pid {row['pid']}){doing}"

    def show_output(self) -> None:
        """Write what the ranks have written so far to this process's own stdout and stderr, where it is not yet."""
        for process in self._group.processes:
            process.log.drain()
            process.log.show(wait=1.0)

    def check_health(self) -> bool:
        """True while calls can make progress: the state allows them, and every rank's process lives and runs."""
        if self._state not in (State.READY, State.RUNNING, State.STOPPED):
            return False
        return all(process.state() in ("running", "uninterruptible") for process in self._group.processes)

    def rank_stacks(self) -> dict[int, str]:
        """As `Executor.rank_stacks`; faulthandler writes them, so they come while a rank holds the interpreter, too."""
        if self._state is State.RELEASED:
            return {}
        return collect_stacks({rank: self._stacks_of(rank) for rank in self._all_ranks})


def _release_forgotten(executor_ref: weakref.ref[MPExecutor], group: RankGroup, opened: contextlib.ExitStack) -> None:
    """Release an executor that was collected, or that is still there when the interpreter ends."""
    if os.getpid() != group.owner_pid:
        return
    executor = executor_ref()
    if executor is not None:
        executor.release()  # its calls in flight end as with any release
        return
    group.end(Deadline.after(min(group.spec.stop_timeout, 2.0)))
    opened.close()


def _is_news(death: Death) -> bool:
    """True for an end that was not our doing: after a break, ranks leave because they are told to."""
    return death.signal_name is not None and not death.sent_by_us


def _settle(pending: PendingCall, now: int) -> None:
    pending.settle(now)
