"""UniExecutor: one rank, on one thread of the driver's own process, behind the same calls and verbs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import ConfigError, ExecutorStoppedError, MpexecError, RPCTimeoutError, StartupError
from mpexec.executor.base import Executor, Method, State
from mpexec.executor.outputs import OutputWait
from mpexec.executor.pending import PendingCall, broken_error, first_line, stopped_by_error, stopped_error
from mpexec.messages import Call, Failure
from mpexec.worker.base_worker import BaseWorker
from mpexec.worker.dispatch import Dispatcher
from mpexec.worker.rendezvous import choose_device

logger = logging.getLogger(__name__)

_POLL_FREE = -1.0


class UniExecutor(Executor):
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
        self._lock = threading.RLock()
        self._worker: BaseWorker | None = None
        self._dispatcher: Dispatcher | None = None
        self._own_loop = asyncio.SelectorEventLoop()
        self._drop_until = 0
        self._queue: deque[Call] = deque()
        self._is_running = False
        self._worker_stopping: concurrent.futures.Future[None] | None = None
        self._current: tuple[Call, int] | None = None
        self._thread = threading.Thread(target=self._run_loop, name="mpexec-uni", daemon=True)
        self._thread.start()
        self._build()
        self._enter(State.READY)

    # -- the worker thread ---------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._own_loop)
        while True:
            try:
                self._own_loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt) as leaving:
                # Of a coroutine: the loop lets these through. In this process they are a failure of their call.
                logger.debug("a coroutine ended with %r", leaving)
        self._own_loop.close()

    def _build(self) -> None:
        phase = ["build agent"]
        failure: list[BaseException] = []
        done = threading.Event()

        def report(text: str) -> None:
            phase[0] = text

        def build() -> None:
            try:
                device = choose_device(self.spec, 0)
                worker = (self.spec.worker_cls or BaseWorker)(
                    self.spec, rank=0, local_rank=0, device=device, put_output=self._outputs.put, report=report
                )
                worker.build_model()
                self._worker = worker
                self._dispatcher = Dispatcher(worker, self._report, exits_pass=False)
            except BaseException as error:
                failure.append(error)
            finally:
                done.set()

        self._own_loop.call_soon_threadsafe(build)
        finished = done.wait(self.spec.init_timeout)
        if finished and not failure:
            assert self._worker is not None
            self._methods = self._worker.method_names()
            return
        self._enter(State.BROKEN)
        self._own_loop.call_soon_threadsafe(self._own_loop.stop)
        error = StartupError(
            f"rank 0 failed in phase {phase[0]!r}: {type(failure[0]).__name__}: {failure[0]}"
            if finished
            else f"no end of phase {phase[0]!r} after {self.spec.init_timeout:g} s (init_timeout)\n{self._stack()}",
            rank=0,
            phase=phase[0],
        )
        error.__cause__ = failure[0] if failure else None
        raise error

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
            if self._own_loop.is_closed():
                raise ExecutorStoppedError("the executor was released meanwhile")
            pending.call_id = self._calls.next_id()
            self._calls.by_id[pending.call_id] = pending
            own = args if args_per_rank is None else args_per_rank[0]
            self._queue.append(Call(pending.call_id, method, own, kwargs or {}, reply_ranks))
            self._own_loop.call_soon_threadsafe(self._run_queue)
        if not self._usable:  # the state changed meanwhile: whoever ended the calls may have missed this one
            with self._lock:
                if pending is self._background and self._root is None:
                    pending.conclude()
                else:
                    pending.end_with(stopped_error(pending) if self._root is None else broken_error(self._root))

    def _run_queue(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._run_next()

    def _run_next(self) -> None:
        """Run one call, the next one a turn of the loop later: a coroutine's first step comes before it."""
        if not self._queue:
            self._is_running = False
            return
        call = self._queue.popleft()
        try:
            if call.call_id > self._drop_until and self._dispatcher is not None:
                self._current = (call, time.monotonic_ns())
                self._dispatcher.run(call)
        finally:
            self._current = None
            self._own_loop.call_soon(self._run_next)

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

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, pending: PendingCall) -> None:
        if threading.current_thread() is self._thread:
            raise MpexecError(
                "a method of the agent cannot wait for a call to its own executor: it would wait for itself"
            )
        gate = threading.Lock()
        gate.acquire()
        pending.gate = gate
        while not pending.done:
            expiry = pending.next_expiry()
            left = _POLL_FREE if expiry is None else max(0.0, (expiry - time.monotonic_ns()) / 1e9)
            if not gate.acquire(timeout=left) and not pending.done:
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
                expiry = waiting.next_expiry()
                seconds = None if expiry is None else max(0.0, (expiry - time.monotonic_ns()) / 1e9)
                timer = None if seconds is None else loop.call_later(seconds, woken.set)
                try:
                    await woken.wait()
                finally:
                    if timer is not None:
                        timer.cancel()
                if not waiting.done and expiry is not None and time.monotonic_ns() >= expiry:
                    assert isinstance(waiting, PendingCall)
                    self._expire(waiting)
        finally:
            waiting.unwatch(changed)

    def _leave_unwaited(self, pending: PendingCall, *, covered: bool = False) -> None:
        left = pending.deadline.remaining()
        if left is None:
            return
        timer = threading.Timer(left, lambda: self._expire(pending))
        timer.daemon = True
        timer.start()
        pending.on_done(lambda _: timer.cancel())

    def _expire(self, pending: PendingCall) -> None:
        now = time.monotonic_ns()
        with self._lock:
            if pending.failed:
                pending.settle(now)
        if pending.done:
            return
        if pending.deadline.expired:
            stack = self._stack()
            error = RPCTimeoutError(
                f"{pending.method!r} (call {pending.call_id}): no answer by the deadline.\nStack of its thread:\n"
                f"{stack}",
                method=pending.method,
                missing_ranks=(0,),
                stacks={0: stack},
            )
            self._break(error, pending)
        elif pending.report_due(now):
            logger.warning("waiting for %r (call %d):\n%s", pending.method, pending.call_id, self._stack())

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "<the thread has ended>" if frame is None else "".join(traceback.format_stack(frame)).rstrip()

    def _abandon(self, pending: PendingCall) -> None:
        if pending.done or self._calls.get(pending.call_id) is not pending:
            return
        with self._lock:
            pending.finish(ExecutorStoppedError(f"{pending.method!r} was abandoned by its caller"))
        if self._dispatcher is not None and not self._own_loop.is_closed():
            self._own_loop.call_soon_threadsafe(self._dispatcher.cancel, pending.call_id)

    # -- failures ------------------------------------------------------------------------------------------------

    def _break(self, root: RPCTimeoutError, guilty: PendingCall) -> None:
        with self._lock:
            if self._state in (State.BROKEN, State.RELEASED):
                return
            self._root = root
            self._enter(State.BROKEN)
            self._outputs.fail(root)
            if self._background is not None:
                self._background.end_with(root)
            self._calls.end_all(lambda pending: root if pending is guilty else broken_error(root))

    def _background_failed(self, error: BaseException) -> None:
        with self._lock:
            self._fail_background(error)

    def _background_over(self, background: PendingCall) -> None:
        error = background.error
        if error is None or self._state is not State.RUNNING:
            return
        self._outputs.fail(error)
        self._enter(State.STOPPED)
        self._drop_until = self._calls.last_id
        self._calls.end_all(lambda pending: stopped_by_error(pending, error))
        self._ask_to_stop()

    async def _stop_worker(self) -> None:
        assert self._worker is not None
        assert self._dispatcher is not None
        await self._worker.stop_async()
        await self._dispatcher.await_method("wait_tasks", 1.0)
        await self._dispatcher.cancel_all()

    def _ask_to_stop(self) -> concurrent.futures.Future[None]:
        stopping = asyncio.run_coroutine_threadsafe(self._stop_worker(), self._own_loop)
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

    def _start_ranks(self) -> None:
        self._outputs.reset()
        start = self._begin("start", (), None, None, None, (), None)
        try:
            self._wait(start)
            start.outcome()
        except BaseException:
            self._abandon(start)
            raise
        background, earlier = self._new_background(), self._background
        with self._state_lock:
            self._check_alive()
            self._enter(State.RUNNING)
            self._background = background
        self._post(background, "wait_tasks", (), None, (), None)
        if earlier is not None and earlier.error is not None and not earlier.call_id:
            self._background_failed(earlier.error)

    def _stop_ranks(self) -> None:
        self._end_calls()
        stopping = self._ask_to_stop()
        if threading.current_thread() is self._thread:  # a method of the agent stops its own executor
            stopping.add_done_callback(lambda _: self._enter_stopped())
            return
        try:
            stopping.result(self.spec.stop_timeout * 0.5)
        except TimeoutError:
            error = RPCTimeoutError(f"the worker thread did not stop\n{self._stack()}", missing_ranks=(0,))
            self._break(error, PendingCall(0, "stop", (), (), Deadline(None), None))
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
            background = self._background
            self._drop_until = self._calls.last_id
            self._outputs.fail(ExecutorStoppedError("the executor was stopped"))
            self._calls.end_all(
                stopped_error,
                but=background,
            )
            if background is not None:
                background.conclude()

    def _release_ranks(self) -> None:
        if self._state in (State.READY, State.RUNNING):
            self._stop_once()
        with self._state_lock:
            if self._state is State.RELEASED:
                return
            broken = self._state is State.BROKEN
            self._enter(State.RELEASED)
        self._end_calls()
        if not self._own_loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._leave(), self._own_loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(0.1 if broken else self.spec.stop_timeout * 0.5)
        self._callbacks.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            logger.warning("thread left behind in a call that does not end: %s", self._thread.name)

    async def _leave(self) -> None:
        worker, dispatcher = self._worker, self._dispatcher
        try:
            if worker is not None and dispatcher is not None:
                await self._stop_worker()
                worker.release()
        except Exception:  # the agent's own clean-up must not keep the thread from ending
            logger.exception("releasing the agent failed")
        finally:
            self._own_loop.stop()

    # -- what people see ---------------------------------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        """The driver's own process id."""
        return (os.getpid(),)

    def describe(self) -> dict[str, Any]:
        """State, root cause and one row for rank 0; `abandoned_thread` names the thread that a deadline left behind."""
        current = self._current
        call, since = current if current is not None else (None, 0)
        stuck = self._state in (State.BROKEN, State.RELEASED) and self._thread.is_alive()
        row = {
            "rank": 0,
            "pid": self.pids[0],
            "state": "running" if self._thread.is_alive() else "gone",
            "method": None if call is None else call.name,
            "call_id": None if call is None else call.call_id,
            "seconds": None if call is None else round((time.monotonic_ns() - since) / 1e9, 3),
            "exit": None,
        }
        return {
            "kind": "uni",
            "state": self._state.name,
            "root_cause": None if self._root is None else first_line(self._root),
            "calls_in_flight": len(self._calls),
            "late_replies": self._calls.late,
            "abandoned_thread": self._thread.name if stuck else None,
            "ranks": [row],
        }

    def check_health(self) -> bool:
        """True while calls can make progress."""
        return self._state in (State.READY, State.RUNNING, State.STOPPED) and self._thread.is_alive()


def _never_pickled(value: Any) -> bytes:
    raise TypeError("the exception is at hand")


def _as_failure(error: BaseException, failure: Failure) -> BaseException:
    """The original exception as a rank's: same notes and cause as from another process."""
    return failure.to_exception(error if isinstance(error, Exception) else None)
