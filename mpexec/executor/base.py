"""What every executor is: a state, a call surface, the verbs. How calls travel is the subclass's business."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

from mpexec.config import Topology, WorkerSpec
from mpexec.deadline import NEVER, Deadline
from mpexec.errors import ConfigError, ExecutorStoppedError, MpexecError, WrongStateError
from mpexec.executor import inspection
from mpexec.executor.future import Callbacks, CallFuture
from mpexec.executor.measures import Measures, RankMeasures
from mpexec.executor.outputs import Outputs, OutputWait
from mpexec.executor.pending import (
    CallTable,
    PendingCall,
    broken_error,
    first_line,
    stopped_by_error,
    stopped_error,
)
from mpexec.executor.threads import in_thread
from mpexec.messages import NOBODY_WAITS, method_name

logger = logging.getLogger(__name__)

Method = str | Callable[..., Any]
Ranks = int | range | tuple[int, ...] | list[int]


class State(enum.Enum):
    """States of an executor; the ranks are alive in READY, RUNNING and STOPPED."""

    NEW = "NEW"
    STARTING = "STARTING"
    READY = "READY"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    BROKEN = "BROKEN"
    RELEASED = "RELEASED"


_MOVES = {
    State.NEW: {State.STARTING, State.RELEASED},
    State.STARTING: {State.READY, State.BROKEN, State.RELEASED},
    State.READY: {State.RUNNING, State.STOPPED, State.BROKEN, State.RELEASED},
    State.RUNNING: {State.STOPPED, State.BROKEN, State.RELEASED},
    State.STOPPED: {State.RUNNING, State.BROKEN, State.RELEASED},
    State.BROKEN: {State.RELEASED},
    State.RELEASED: set(),
}
_SETTLE_S = 1.0
_ALIVE = frozenset({State.READY, State.RUNNING, State.STOPPED})


class Executor:
    """One call, N ranks, N replies. Thread-safe; belongs to no event loop.

    Construction returns when every rank is ready. `with` and `async with` start it on entry, and stop and release it on
    exit; a background failure is raised there if the block itself did not raise.

    Args:
        agent: A `ModelAgent` class or a callable that makes one inside each rank, or a whole `WorkerSpec`.
        options: Fields of `WorkerSpec`.

    Raises:
        ConfigError: A value that cannot work.
        StartupError: A rank did not become ready; nothing is left behind.
    """

    def __init__(self, agent: Callable[..., Any] | WorkerSpec, **options: Any) -> None:
        self._owner = os.getpid()
        _living.add(self)
        self.spec = make_spec(agent, options)
        self.topology: Topology = self.spec.topology
        self._state = State.NEW
        self._state_lock = threading.RLock()
        self._changed = threading.Condition(self._state_lock)
        self._start_lock = threading.Lock()
        self._release_lock = threading.RLock()
        self._root: BaseException | None = None
        self._calls = CallTable()
        self._methods: frozenset[str] = frozenset()
        self._background: PendingCall | None = None
        self._stopping = False
        self._awaiters = 0
        self._unstopped: dict[int, int] = {}  # ranks told to stop that have not answered: the token of each
        self._stop_tokens = itertools.count(1)
        self._usable = False  # the state allows calls; kept beside it because every call asks
        self._told = False  # a caller has been told why the executor is broken
        self._all_ranks = tuple(self.topology.ranks)
        self._grace = self.spec.failure_grace
        self._closer = self._closed_call
        self._callbacks = Callbacks()
        self._outputs = Outputs(self.spec.max_outputs)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, index = rank."""
        raise NotImplementedError

    def _enter(self, state: State) -> None:
        """Move to another state, here and nowhere else.

        Raises:
            WrongStateError: The move is not allowed.
        """
        with self._state_lock:
            if state not in _MOVES[self._state]:
                raise WrongStateError(f"cannot go from {self._state.name} to {state.name}", state=self._state.name)
            self._state = state
            self._usable = state in _ALIVE and not self._stopping
            self._changed.notify_all()
        if state is State.READY:
            inspection.offer(self)

    def _set_stopping(self, stopping: bool) -> None:
        with self._changed:
            self._stopping = stopping
            self._usable = self._state in _ALIVE and not stopping
            self._changed.notify_all()

    def _check_alive(self) -> None:
        """Raise what a call must raise when the ranks are not there to take it."""
        if not self._usable:
            raise self._why_unusable()

    def _why_unusable(self) -> MpexecError:
        state = self._state
        if os.getpid() != self._owner:
            return WrongStateError(
                f"this executor belongs to process {self._owner}; a forked child cannot use it", state=state.name
            )
        if state is State.BROKEN and self._root is not None:
            self._told = True
            return broken_error(self._root)
        if state is State.RELEASED:
            return ExecutorStoppedError("the executor has been released")
        if self._stopping:
            return ExecutorStoppedError("the executor stops")
        return WrongStateError(f"the executor is {state.name}", state=state.name)

    # -- calls ---------------------------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: Method,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        args_per_rank: Sequence[tuple[Any, ...]] | None = None,
        ranks: Ranks | None = None,
        reply_ranks: Ranks | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Run a method on ranks, wait for all of them, and give the values, ordered by rank. Blocks this thread.

        All ranks start calls in one total order. Sync methods run to their end in that order; coroutines start in it
        and overlap, and their order of progress differs between ranks: only sync methods, or one task per agent, may
        issue collectives.

        Args:
            method: A public method name of worker or agent, or a callable that takes the worker as first argument.
            args: Positional arguments, the same for every rank. Large arrays arrive as read-only views, tensors as
                private ones.
            kwargs: Keyword arguments, the same for every rank.
            args_per_rank: In place of `args`: one tuple per rank in `ranks`; each rank receives its own only.
            ranks: Who runs it; None is all.
            reply_ranks: Whose values return; None is all that run it, () is nobody, an integer gives that rank's bare
                value. Every rank reports completion in any case, so a failure is never lost.
            timeout: Seconds for the whole call, sending included; None waits, and logs every rank's state after 60 s
                and at each doubling.

        Raises:
            AttributeError: No such public method; nothing was sent.
            ConfigError: Bad ranks, sizes or timeout; nothing was sent.
            SerializationError: Something cannot be pickled; nothing else is disturbed.
            RPCTimeoutError: The deadline passed; the executor is BROKEN.
            WorkerDiedError: A rank's process ended; the executor is BROKEN.
            ExecutorStoppedError: `stop` or `release` was called meanwhile.
            ExecutorBrokenError: The executor was broken before.
            Exception: What the method raised on a rank, with `__cause__` a `RemoteTraceback` and further failures in
                `.others`. If every rank answered, the executor stays usable; else it is BROKEN.
        """
        begun: list[PendingCall] = []  # filled before anything is sent, so that a Ctrl-C at any moment can give it up
        try:
            pending = self._begin(method, args, kwargs, args_per_rank, ranks, reply_ranks, timeout, begun)
            self._wait(pending)
        except BaseException:
            self._give_up(begun)
            raise
        return self._outcome(pending)

    async def collective_rpc_async(
        self,
        method: Method,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        args_per_rank: Sequence[tuple[Any, ...]] | None = None,
        ranks: Ranks | None = None,
        reply_ranks: Ranks | None = None,
        timeout: float | None = None,
    ) -> Any:
        """As `collective_rpc`, on any event loop. Cancelling it abandons the call: its coroutines are cancelled on the
        ranks, a sync method runs to its end, its replies are dropped, and the executor stays usable.
        """
        pending = self._begin(method, args, kwargs, args_per_rank, ranks, reply_ranks, timeout)
        try:
            await self._wait_async(pending)
        except BaseException:
            self._abandon(pending)
            raise
        return self._outcome(pending)

    def submit_rpc(
        self,
        method: Method,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        args_per_rank: Sequence[tuple[Any, ...]] | None = None,
        ranks: Ranks | None = None,
        reply_ranks: Ranks | None = None,
        timeout: float | None = None,
    ) -> concurrent.futures.Future[Any]:
        """As `collective_rpc`, but returns a future at once. Cancelling the future abandons the call.

        Its done-callbacks run on a thread of the executor's own, one after another.
        """
        future = CallFuture(self._callbacks)
        pending = self._begin(method, args, kwargs, args_per_rank, ranks, reply_ranks, timeout)
        future.abandon = lambda: self._abandon(pending)

        def hand_over(done: PendingCall) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(done.outcome())
            except BaseException as error:
                future.set_exception(error)
            finally:
                future.abandon = None

        pending.on_done(hand_over)
        self._leave_unwaited(pending)
        return future

    def notify(
        self,
        method: Method,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        args_per_rank: Sequence[tuple[Any, ...]] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Run a method on ranks and return at once. Its failure reaches `wait_tasks`, as that of a background task."""
        pending = self._begin(method, args, kwargs, args_per_rank, ranks, (), None)
        pending.on_done(self._on_notified)
        self._leave_unwaited(pending)

    def _on_notified(self, pending: PendingCall) -> None:
        if pending.error is not None and not isinstance(pending.error, ExecutorStoppedError):
            self._background_failed(pending.error)

    def _check_running(self) -> None:
        """Raise what a call must raise that only makes sense between `start` and `stop`."""
        self._check_alive()
        if self._state is not State.RUNNING:
            error = self._background_error()
            if error is not None:
                raise error
            raise WrongStateError(f"the executor is {self._state.name}: start it first", state=self._state.name)

    def _outcome(self, pending: PendingCall) -> Any:
        try:
            return pending.outcome()
        except BaseException:
            self._told = self._told or self._state is State.BROKEN
            raise

    def _begin(
        self,
        method: Method,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        args_per_rank: Sequence[tuple[Any, ...]] | None,
        ranks: Ranks | None,
        reply_ranks: Ranks | None,
        timeout: float | None,
        waits: list[PendingCall] | None = None,
    ) -> PendingCall:
        """Check everything, open the call's entry and send it.

        Args:
            waits: Given if this thread is going to wait for the call; receives it before anything is sent.
        """
        if not self._usable:
            raise self._why_unusable()
        if type(method) is str:
            name = method
            if method not in self._methods:
                raise AttributeError(f"no rank has a public method {method!r}; nothing was sent")
        else:
            name = method_name(_check_callable(method))
        if type(args) is not tuple:
            raise ConfigError(f"args must be a tuple, not {args!r}; for one argument write args=(value,)")
        if kwargs is not None:
            kwargs = _check_kwargs(kwargs)
        deadline = NEVER if timeout is None else Deadline.after(timeout)
        chosen = self._all_ranks if ranks is None else self.topology.select(ranks)
        wanted = chosen if reply_ranks is None else self._check_reply_ranks(reply_ranks, chosen)
        if args_per_rank is not None:
            _check_scatter(args, args_per_rank, chosen)
        pending = PendingCall(0, name, chosen, wanted, deadline, self._grace)
        if reply_ranks is not None:
            pending.bare = isinstance(reply_ranks, int)
        if waits is not None:
            pending.waited = 1
            waits.append(pending)
        pending.closer = self._closer
        pending.forget = self._calls.close
        try:
            self._post(pending, method, args, kwargs, None if reply_ranks is None else wanted, args_per_rank)
        except BaseException:
            if waits is None:  # a Ctrl-C; whoever is going to wait gives it up himself
                self._abandon(pending)
            raise
        return pending

    def _check_reply_ranks(self, reply_ranks: Ranks, chosen: tuple[int, ...]) -> tuple[int, ...]:
        if reply_ranks is NOBODY_WAITS:
            return NOBODY_WAITS
        wanted = self.topology.select(reply_ranks, "reply_ranks")
        if extra := set(wanted) - set(chosen):
            raise ConfigError(f"reply_ranks={reply_ranks!r}: ranks {sorted(extra)} do not run the call ({chosen})")
        return wanted

    # -- what a subclass provides ----------------------------------------------------------------------------------

    def _post(
        self,
        pending: PendingCall,
        method: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        reply_ranks: tuple[int, ...] | None,
        args_per_rank: Sequence[tuple[Any, ...]] | None,
    ) -> None:
        """Give the call an id, enter it in the table, send it. Does not wait."""
        raise NotImplementedError

    def _closed_call(self, pending: PendingCall) -> None:
        """A call is over, and nobody has been told yet: one that left ranks in it breaks the executor."""
        if pending.stuck and pending.error is not None:
            with contextlib.suppress(Exception):  # a user's class may refuse notes
                pending.error.add_note(f"the other ranks did not answer; {self._states_text()}")
            self._break(pending.error)

    def _wait(self, pending: PendingCall) -> None:
        """Block this thread until the call is over."""
        raise NotImplementedError

    async def _wait_async(self, waiting: PendingCall | OutputWait) -> None:
        """Wait on this loop until the call is over, or the output there."""
        raise NotImplementedError

    def _leave_unwaited(self, pending: PendingCall, *, covered: bool = False) -> None:
        """See to it that the call ends although nobody waits for it; `covered` if any loop that waits will do."""
        raise NotImplementedError

    def _abandon(self, pending: PendingCall) -> None:
        """Forget a call whose caller has gone."""
        raise NotImplementedError

    def _give_up(self, begun: list[PendingCall]) -> None:
        """The thread that was to wait for a call goes away, perhaps before it was sent."""
        for pending in begun:
            self._abandon(pending)

    def _start_ranks(self) -> None:
        """Start the workers' background tasks and enter the background call that waits for them."""
        self._outputs.reset()
        start = self._begin("start", (), None, None, None, (), self.spec.init_timeout)
        try:
            self._wait(start)
            start.outcome()
        except BaseException:
            self._abandon(start)
            if self._state is not State.BROKEN:  # the tasks of other ranks may run
                self._stop_once()
            raise
        background, earlier = self._new_background(), self._background
        with self._state_lock:
            self._check_alive()
            self._enter(State.RUNNING)
            self._background = background
        self._post(background, "wait_tasks", (), None, (), None)
        self._watch_background(background)
        if earlier is not None and earlier.error is not None and not earlier.call_id:
            self._background_failed(earlier.error)  # of a call that had been notified before the start

    def _watch_background(self, background: PendingCall) -> None:
        """See to it that the background call ends although perhaps nobody waits for it."""
        self._leave_unwaited(background, covered=True)

    def _stop_ranks(self) -> None:
        """Stop the workers' background tasks, bounded by `stop_timeout`; never twice at once."""
        raise NotImplementedError

    def _release_ranks(self) -> None:
        """Free everything, bounded by `stop_timeout`."""
        raise NotImplementedError

    def _new_background(self) -> PendingCall:
        """The call that waits for the background tasks of all ranks; an executor that idles is no news."""
        pending = PendingCall(0, "wait_tasks", self._all_ranks, (), NEVER, self._grace)
        pending.reports = False
        pending.on_failure = self._stop_others
        pending.closer = self._background_over
        pending.forget = self._calls.close
        return pending

    def _stop_others(self, background: PendingCall) -> None:
        """The first rank's background tasks have failed: the others are to stop theirs."""
        raise NotImplementedError

    def _background_over(self, background: PendingCall) -> None:
        """The background call has ended; if it failed, everything stops."""
        error = background.error
        if error is None:
            return
        with self._state_lock:
            if self._state is not State.RUNNING:
                return
            if not background.stuck:
                self._enter(State.STOPPED)
        if background.stuck:
            self._break(error)
            return
        if not background.failed:
            self._stop_others(background)
        self._outputs.fail(error)
        self._calls.end_all(lambda pending: stopped_by_error(pending, error))

    def _break(self, root: BaseException, error_for: Callable[[PendingCall], BaseException] | None = None) -> None:
        """The executor cannot go on: end every call, then the ranks. The first root cause stays.

        Args:
            root: The root cause.
            error_for: Makes the error of each call in flight; an `ExecutorBrokenError` where it is not given.
        """
        raise NotImplementedError

    def _fail_background(self, error: BaseException) -> None:
        """End the background call with this error, unless a root cause came before it; then every other call with it.

        A call that was notified may fail because a background task has: its rank takes no inputs any more. That must
        not become the root cause, neither of the outputs nor of a later `wait_tasks`.
        """
        if self._state in (State.BROKEN, State.RELEASED):
            return
        background = self._background
        if background is None or self._state is not State.RUNNING:
            if background is not None and background.error is not None:
                return
            self._background = background = self._new_background()
        background.end_with(error)
        self._outputs.fail(background.error or error)

    def _background_failed(self, error: BaseException) -> None:
        """A background task, or a call that nobody waits for, has failed: everything stops."""
        raise NotImplementedError

    def _end_calls_stopped(self) -> None:
        """End every call, and the background without an error."""
        background = self._background
        self._outputs.fail(ExecutorStoppedError("the executor was stopped"))
        self._calls.end_all(stopped_error, but=background)
        if background is not None:
            background.conclude()

    def _states_text(self) -> str:
        """What the ranks are at, for people."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """State of the executor and of every rank, as plain data; never blocks, never raises."""
        raise NotImplementedError

    def measures(self) -> Measures:
        """What driver and ranks have counted, as far as it can be read without asking a rank; never blocks."""
        return Measures(ranks=tuple(RankMeasures(rank) for rank in self._all_ranks))

    def _describe_self(self, kind: str) -> dict[str, Any]:
        """What `describe` says of every kind of executor, its ranks apart."""
        background = self._background
        waits = background is not None and self._calls.get(background.call_id) is background
        return {
            "kind": kind,
            "state": self._state.name,
            "root_cause": None if self._root is None else first_line(self._root),
            "calls_in_flight": len(self._calls) - waits,
            "late_replies": self._calls.late,
        }

    def check_health(self) -> bool:
        """True while calls can make progress. Looks at processes and queues behind no call."""
        raise NotImplementedError

    def rank_stacks(self) -> dict[int, str]:
        """What every rank is doing right now: its Python stack as text, or the reason why there is none.

        Blocks a quarter of a second at most, and disturbs nothing; ranks of Ray on other machines may take longer.
        Empty once the executor has been released.
        """
        raise NotImplementedError

    # -- outputs ---------------------------------------------------------------------------------------------------

    async def forward_async(self, inputs: Any) -> None:
        """Hand one input to every rank's agent; returns when it is sent. At most `max_outputs` may be in flight.

        Raises:
            WrongStateError: The executor has not been started.
            BaseException: The failure that ended the background tasks.
        """
        self._check_running()
        room = self._outputs.make_room()
        await self._receive(room)
        try:
            pending = self._begin("set_forward_inputs", (inputs,), None, None, None, NOBODY_WAITS, None)
        except BaseException:
            self._outputs.withdraw(room)
            raise
        pending.on_done(self._on_notified)
        self._leave_unwaited(pending, covered=True)

    async def get_output_async(self) -> Any:
        """Wait for the next output of the output rank's agent, in the order of the inputs.

        Raises:
            WrongStateError: The executor has not been started.
            ExecutorStoppedError: The executor was stopped.
            BaseException: The failure that ended the background tasks.
        """
        wait = self._outputs.take()
        try:
            if not wait.done:
                self._check_running()
        except BaseException:
            self._outputs.withdraw(wait)
            raise
        await self._receive(wait)
        return wait.value

    async def _receive(self, wait: OutputWait) -> None:
        """Wait for an output or for room, and give it back where the wait is cancelled."""
        if not wait.done:
            try:
                await self._wait_async(wait)
            except BaseException:
                self._outputs.withdraw(wait)
                raise
        if wait.error is not None:
            raise wait.error

    # -- verbs -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the background tasks of every rank. Blocks until they run; again changes nothing.

        Raises:
            WrongStateError: It has been released.
            ExecutorBrokenError: A rank was lost before.
        """
        with self._start_lock:
            if not self._await_stopped(self.spec.stop_timeout):
                raise WrongStateError("a rank is still at its last stop: start again later", state=self._state.name)
            if self._state is State.RUNNING:
                return
            self._check_alive()
            self._calls.ended.clear()
            self._start_ranks()

    async def wait_tasks(self) -> None:
        """Wait until a background task of any rank fails, stop the others, and raise that error.

        Returns only after `stop`. May be awaited on several loops at once; an error that came before is raised at once.
        Cancelling one of several awaiters leaves the tasks alone; cancelling the last one stops them.

        Raises:
            BaseException: The root cause, with its own type and remote traceback.
        """
        background = self._background
        if background is None:
            self._check_alive()
            return
        self._awaiters += 1
        try:
            await self._wait_async(background)
        except asyncio.CancelledError:
            if self._awaiters == 1 and not background.done:  # the last one: nobody would hear of the tasks any more
                await asyncio.shield(in_thread(self._stop_once, name="mpexec-stop"))
            raise
        finally:
            self._awaiters -= 1
        # The stop that ended it, or that its failure has set off, is to be over, so that `start` may follow.
        await in_thread(lambda: self._await_stopped(_SETTLE_S), name="mpexec-settle")
        if background.error is not None:
            raise background.error

    def stop(self) -> None:
        """Stop the background tasks of every rank; calls in flight end with `ExecutorStoppedError`.

        May be called in any state, from any thread, twice, during a call. Bounded by `stop_timeout`: ranks that do not
        answer are ended, and the executor is BROKEN then. On the thread of an event loop that runs, it requests the
        stop and returns; `wait_tasks` ends then.

        Each rank stops after the step that it is in. Where steps meet in a collective, take their outputs first, as the
        engine does: a rank that has just begun one step more than its peers would wait for them, and be ended.
        """
        if self._state not in _ALIVE or os.getpid() != self._owner:  # in a forked child all of this is its parent's
            return
        if _on_running_loop():
            threading.Thread(target=self._stop_once, name="mpexec-stop", daemon=True).start()
        else:
            self._stop_once()

    def _stop_once(self) -> None:
        """Stop, or wait for the stop that another thread is at."""
        with self._changed:
            if self._stopping:
                self._changed.wait_for(lambda: not self._stopping, self.spec.stop_timeout)
                return
            if self._state not in _ALIVE:
                return
            self._set_stopping(True)
        try:
            self._stop_ranks()
        finally:
            self._set_stopping(False)

    def _await_stopped(self, seconds: float) -> bool:
        """Wait until no stop is under way; False if one still is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._state not in _ALIVE or not (self._stopping or self._unstopped_ranks()), seconds
            )

    def _unstopped_ranks(self) -> bool:
        """True while a rank that was told to stop has not said that it did."""
        return bool(self._unstopped)

    def _told_to_stop(self, rank: int) -> int:
        """A rank is told to stop; the token that its answer must have."""
        token = next(self._stop_tokens)
        with self._changed:
            self._unstopped[rank] = token
        return token

    def _has_stopped(self, rank: int, token: int) -> None:
        """A rank's answer to being told to stop; one to an earlier telling counts for nothing."""
        with self._changed:
            if self._unstopped.get(rank) == token:
                del self._unstopped[rank]
                self._changed.notify_all()

    def _await_stop(self, deadline: Deadline) -> list[int]:
        """Wait for the ranks that were told to stop, and enter STOPPED if all have; the ranks that have not."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is State.BROKEN or not self._unstopped, deadline.remaining())
            stuck = sorted(self._unstopped)
            if not stuck and self._state in (State.READY, State.RUNNING):
                self._enter(State.STOPPED)
            return stuck

    def release(self) -> None:
        """Free processes, memory and descriptors. Never raises for what is gone; works after a failure, and twice."""
        if os.getpid() != self._owner:
            return
        inspection.withdraw(self)
        with self._release_lock:  # a second caller returns when it is done, too
            self._release_ranks()

    @classmethod
    def create_async(cls, *args: Any, **options: Any) -> Coroutine[Any, Any, Self]:
        """Construct without blocking the loop. If it is cancelled, the executor is released as soon as it exists."""
        return in_thread(lambda: cls(*args, **options), name="mpexec-create", abandoned=lambda made: made.release())

    async def start_async(self) -> None:
        """As `start`, without blocking the loop."""
        await in_thread(self.start, name="mpexec-start")

    async def stop_async(self) -> None:
        """As `stop`; returns when everything has stopped, without blocking the loop."""
        await in_thread(self.stop, name="mpexec-stop")

    async def release_async(self) -> None:
        """As `release`, without blocking the loop."""
        await in_thread(self.release, name="mpexec-release")

    async def run(self) -> None:
        """start, wait_tasks, stop, release in one coroutine.

        Raises:
            BaseException: The first failure; everything has been released.
        """
        try:
            await self.start_async()
            await self.wait_tasks()
        finally:
            try:
                await self.stop_async()
            finally:
                await self.release_async()

    def _background_error(self) -> BaseException | None:
        return self._background.error if self._background is not None and not self._told else None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failure = self._background_error()
        try:
            self.stop()
            failure = failure or self._background_error()
        finally:
            self.release()
        if error is None and failure is not None:
            raise failure

    async def __aenter__(self) -> Self:
        try:
            await self.start_async()
        except BaseException:
            await self.release_async()
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failure = self._background_error()
        try:
            await self.stop_async()
            failure = failure or self._background_error()
        finally:
            await self.release_async()
        if error is None and failure is not None:
            raise failure


_living: weakref.WeakSet[Executor] = weakref.WeakSet()


def _disown_in_child() -> None:
    for executor in list(_living):
        executor._usable = False


os.register_at_fork(after_in_child=_disown_in_child)


def make_spec(agent: Callable[..., Any] | WorkerSpec, options: Mapping[str, Any]) -> WorkerSpec:
    """The spec meant by an executor's arguments.

    Raises:
        ConfigError: An unknown option, or a bad value.
    """
    unknown = set(options) - set(WorkerSpec.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"unknown options {sorted(unknown)}; the fields of WorkerSpec are the options")
    given = {name: value for name, value in options.items() if not (name == "agent_kwargs" and value is None)}
    if given.get("env", ...) is None:
        given["env"] = {}
    return agent.with_changes(**given) if isinstance(agent, WorkerSpec) else WorkerSpec(agent=agent, **given)


def _check_callable(method: Any) -> Callable[..., Any]:
    if not callable(method):
        raise ConfigError(f"method must be a name or a callable that takes the worker, not {method!r}")
    return method  # type: ignore[no-any-return]


def _check_kwargs(kwargs: Any) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ConfigError(f"kwargs must map names to values, not {kwargs!r}")
    return dict(kwargs)


def _check_scatter(args: tuple[Any, ...], args_per_rank: Sequence[tuple[Any, ...]], chosen: tuple[int, ...]) -> None:
    if args:
        raise ConfigError("give args or args_per_rank, not both")
    if (
        not isinstance(args_per_rank, Sequence)
        or len(args_per_rank) != len(chosen)
        or not all(type(own) is tuple for own in args_per_rank)
    ):
        raise ConfigError(f"args_per_rank must hold one tuple for each of the {len(chosen)} ranks {chosen}")


def _on_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
