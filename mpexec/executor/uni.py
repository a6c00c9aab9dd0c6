"""UniExecutor: one rank, on one thread of the driver's own process, behind the same calls and verbs."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.errors import ConfigError, ExecutorStoppedError, MpexecError, RPCTimeoutError, StartupError
from mpexec.executor.base import Method, State
from mpexec.executor.gated import GatedExecutor
from mpexec.executor.measures import Measures, RankMeasures
from mpexec.executor.pending import PendingCall, broken_error, first_line
from mpexec.messages import Call, Failure
from mpexec.worker.base_worker import BaseWorker
from mpexec.worker.rendezvous import choose_device
from mpexec.worker.threaded import WorkerThread

logger = logging.getLogger(__name__)


class UniExecutor(GatedExecutor):
    """One rank in this process: no fork, no pickling, arguments and values pass by reference.

    Methods run on one worker thread. On a deadline the thread cannot be ended: the executor is BROKEN, the error shows
    that thread's stack, and `describe()` names the thread that was left behind. See `Executor` for the calls and verbs.

    Args:
        agent: A `ModelAgent` class or a callable that makes one, or a whole `WorkerSpec`.
        options: Fields of `WorkerSpec`; `world_size` must be 1. Fields about processes have no meaning here.

    Raises:
        ConfigError: More than one rank, or another value that cannot work.
        StartupError: The agent could not be built; its error is the cause.
    """

    def __init__(self, agent: Callable[..., Any] | WorkerSpec, **options: Any) -> None:
        if not isinstance(agent, WorkerSpec):
            options.setdefault("world_size", 1)
        super().__init__(agent, **options)
        if self.world_size != 1:
            raise ConfigError(f"UniExecutor runs one rank, not {self.world_size}: use build_executor or MPExecutor")
        self._enter(State.STARTING)
        self._worker_stopping: concurrent.futures.Future[None] | None = None
        self._thread = WorkerThread("mpexec-uni", self._report)
        self._build()
        self._enter(State.READY)

    def _build(self) -> None:
        phase = ["build agent"]
        failure: list[BaseException] = []
        over = threading.Event()

        def report(text: str) -> None:
            phase[0] = text

        def make() -> BaseWorker:
            device = choose_device(self.spec, 0, 1)
            worker: BaseWorker = (self.spec.worker_cls or BaseWorker)(
                self.spec, rank=0, local_rank=0, device=device, put_output=self._outputs.put, report=report
            )
            worker.build_model()
            return worker

        def done(error: BaseException | None) -> None:
            if error is not None:
                failure.append(error)
            over.set()

        self._thread.build(make, done)
        finished = over.wait(self.spec.init_timeout)
        if finished and not failure:
            assert self._thread.worker is not None
            self._methods = self._thread.worker.method_names()
            return
        self._enter(State.BROKEN)
        self._thread.leave()
        error = StartupError(
            f"rank 0 failed in phase {phase[0]!r}: {type(failure[0]).__name__}: {failure[0]}"
            if finished
            else f"no end of phase {phase[0]!r} after {self.spec.init_timeout:g} s (init_timeout)\n"
            f"{self._thread.stack()}",
            rank=0,
            phase=phase[0],
        )
        error.__cause__ = failure[0] if failure else None
        raise error

    # -- calls ---------------------------------------------------------------------------------------------------

    def _post(
        self,
        pending: PendingCall,
        method: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        reply_ranks: tuple[int, ...] | None,
        args_per_rank: Sequence[tuple[Any, ...]] | None,
    ) -> None:
        with self._lock:
            if self._thread.loop.is_closed():
                raise ExecutorStoppedError("the executor was released meanwhile")
            pending.call_id = self._calls.next_id()
            self._calls.by_id[pending.call_id] = pending
            own = args if args_per_rank is None else args_per_rank[0]
            call = Call(pending.call_id, method, own, kwargs or {}, reply_ranks)
            self._thread.post(call.call_id, lambda: call)
        if not self._usable:
            self._end_late(pending)

    def _report(self, call: Call, value: Any, error: BaseException | None) -> None:
        pending = self._calls.get(call.call_id)
        if pending is None:
            self._calls.late += 1
        elif error is None:
            with self._lock:
                pending.accept(0, value)
        else:
            failure = Failure.of(error, call_id=call.call_id, rank=0, method=call.name, dumps=_never_pickled)
            with self._lock:
                pending.fail(0, _as_failure(error, failure), at_ns=failure.at_ns)  # no peers: never a consequence

    def _wait(self, pending: PendingCall) -> None:
        if self._thread.is_current:
            raise MpexecError(
                "a method of the agent cannot wait for a call to its own executor: it would wait for itself"
            )
        super()._wait(pending)

    def _abandon(self, pending: PendingCall) -> None:
        if self._finish_abandoned(pending):
            self._thread.cancel(pending.call_id)

    # -- failures ------------------------------------------------------------------------------------------------

    def _on_deadline(self, pending: PendingCall) -> None:
        stack = self._thread.stack()
        error = RPCTimeoutError(
            f"{pending.method!r} (call {pending.call_id}): no answer by the deadline.\nStack of its thread:\n{stack}",
            method=pending.method,
            missing_ranks=(0,),
            stacks={0: stack},
        )
        self._break(error, lambda other: error if other is pending else broken_error(error))

    def _states_text(self) -> str:
        return f"\n{self._thread.stack()}"

    def _stop_others(self, background: PendingCall) -> None:
        self._thread.drop_until = self._calls.last_id
        self._ask_to_stop()

    def _ask_to_stop(self) -> concurrent.futures.Future[None]:
        stopping = self._thread.stop()
        self._worker_stopping = stopping

        def over(_: object) -> None:
            with self._changed:
                self._changed.notify_all()

        stopping.add_done_callback(over)
        return stopping

    def _unstopped_ranks(self) -> bool:
        stopping = self._worker_stopping
        return stopping is not None and not stopping.done()

    # -- verbs -----------------------------------------------------------------------------------------------------

    def _stop_ranks(self) -> None:
        self._end_calls()
        stopping = self._ask_to_stop()
        if self._thread.is_current:  # a method of the agent stops its own executor
            stopping.add_done_callback(lambda _: self._enter_stopped())
            return
        try:
            stopping.result(self.spec.stop_timeout * 0.5)
        except TimeoutError:
            self._break(RPCTimeoutError(f"the worker thread did not stop\n{self._thread.stack()}", missing_ranks=(0,)))
            return
        except Exception as failed:  # the agent's own clean-up; the tasks are gone all the same
            logger.warning("the agent failed while it stopped: %s", first_line(failed))
        self._enter_stopped()

    def _enter_stopped(self) -> None:
        with self._state_lock:
            if self._state in (State.READY, State.RUNNING):
                self._enter(State.STOPPED)

    def _end_calls(self) -> None:
        with self._lock:
            self._thread.drop_until = self._calls.last_id
            self._end_calls_stopped()

    def _release_ranks(self) -> None:
        if self._state in (State.READY, State.RUNNING):
            self._stop_once()
        with self._state_lock:
            if self._state is State.RELEASED:
                return
            broken = self._state is State.BROKEN
            self._enter(State.RELEASED)
        self._end_calls()
        self._thread.leave()
        ended = self._thread.join(0.1 if broken else self.spec.stop_timeout * 0.5)
        self._callbacks.close()
        if not (ended or self._thread.is_current):
            logger.warning("thread left behind in a call that does not end: %s", self._thread.name)

    # -- what people see ---------------------------------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        """The driver's own process id."""
        return (os.getpid(),)

    def describe(self) -> dict[str, Any]:
        """State, root cause and one row for rank 0; `abandoned_thread` names the thread that a deadline left behind."""
        current = self._thread.current
        call, since = current if current is not None else (None, self._thread.forward_since)
        method = call.name if call is not None else "forward" if since else None
        stuck = self._state in (State.BROKEN, State.RELEASED) and self._thread.is_alive
        row = {
            "rank": 0,
            "pid": self.pids[0],
            "state": "running" if self._thread.is_alive else "gone",
            "method": method,
            "call_id": None if call is None else call.call_id,
            "seconds": None if method is None else round((time.monotonic_ns() - since) / 1e9, 3),
            "exit": None,
        }
        return {
            **self._describe_self("uni"),
            "abandoned_thread": self._thread.name if stuck else None,
            "ranks": [row],
        }

    def measures(self) -> Measures:
        """How long methods took on the worker thread; there is no transport to measure."""
        return Measures(ranks=(RankMeasures(0, self._thread.durations.read()),))

    def check_health(self) -> bool:
        """True while calls can make progress."""
        return self._state in (State.READY, State.RUNNING, State.STOPPED) and self._thread.is_alive

    def rank_stacks(self) -> dict[int, str]:
        """The worker thread's stack."""
        return {} if self._state is State.RELEASED else {0: self._thread.stack()}


def _never_pickled(value: Any) -> bytes:
    raise TypeError("the exception is at hand")


def _as_failure(error: BaseException, failure: Failure) -> BaseException:
    """The original exception as a rank's: same notes and cause as from another process."""
    return failure.to_exception(error if isinstance(error, Exception) else None)
