"""RayExecutor: one Ray actor per rank, on one machine or several, behind the same calls, verbs and failure contract."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

from mpexec.config import RayOptions, WorkerSpec, split_options
from mpexec.deadline import Deadline
from mpexec.errors import ConfigError, ExecutorStoppedError, TransportError, attach_others
from mpexec.executor.base import Method, State
from mpexec.executor.gated import GatedExecutor
from mpexec.executor.settings import kept_settings

try:
    with kept_settings():
        import ray
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("RayExecutor needs Ray: pip install 'mpexec[ray]'", name="ray") from missing

from mpexec.executor.pending import (
    PendingCall,
    broken_error,
    timeout_error,
    undecodable_error,
)
from mpexec.executor.ray_cluster import check_session, join_cluster, leave_cluster, watch_session, within
from mpexec.executor.ray_group import RayGroup, RayRank
from mpexec.executor.ray_placement import place
from mpexec.executor.stacks import collect_stacks
from mpexec.executor.starting import StartAbort, died_error, lost_at_start
from mpexec.executor.threads import in_thread
from mpexec.messages import Failure
from mpexec.processes import Death
from mpexec.transport.channel import CALL, DONE, FAILED, PLAIN_CALL, PLAIN_DONE
from mpexec.transport.frame import decode, dump_plain, encode, is_plain, load_plain
from mpexec.worker.ray_rank import EXITED, HEAD, INLINE, Body, Record

logger = logging.getLogger(__name__)

_BROKEN_END_S = 1.0
_STACKS_S = 0.25
_NEWS_S = 1.0
_RAY_S = 5.0  # for what Ray's head node has to do; it is local, or gone


class RayExecutor(GatedExecutor):
    """One Ray actor per rank, in a placement group.

    An actor or a node that dies is a failure like the death of a process: it reaches every caller with Ray's reason.
    See `Executor` for the calls and the verbs, `WorkerSpec` and `RayOptions` for the options.

    Args:
        agent: A `ModelAgent` class or a callable that makes one inside each rank, or a whole `WorkerSpec`.
        options: Fields of `WorkerSpec` and of `RayOptions`; `start_method`, `ring_bytes` and `allow_unsafe_fork` have
            no meaning here.

    Raises:
        ConfigError: A value that cannot work.
        SerializationError: The agent's class or arguments cannot be pickled.
        StartupError: There is no room, or a rank did not become ready; its error is the cause. Nothing is left behind.
    """

    @classmethod
    async def create_async(cls, *args: Any, **options: Any) -> Self:
        """Construct without blocking the loop. Cancelling it ends the ranks that were started, and waits for that."""
        abort = StartAbort()
        return await in_thread(
            lambda: cls(*args, **options, _abort=abort),
            name="mpexec-create",
            abandoned=lambda made: made.release(),
            cancel=abort.ask,
        )

    def __init__(self, agent: Callable[..., Any] | WorkerSpec, **options: Any) -> None:
        abort: StartAbort = options.pop("_abort", None) or StartAbort()
        fields, placing = split_options(options)
        self.options = RayOptions(**placing)
        super().__init__(agent, **fields)
        if self.spec.shared_views:
            raise ConfigError("shared_views=True: Ray's object store is read-only; use MPExecutor for shared memory")
        if any("CUDA_VISIBLE_DEVICES" in env for env in (self.spec.env, *self.spec.env_per_rank)):
            raise ConfigError("env has CUDA_VISIBLE_DEVICES: Ray shows each rank its own device; leave it out")
        self._enter(State.STARTING)
        self._send_lock = threading.Lock()
        self._last_sent = dict.fromkeys(self._all_ranks, 0)
        self._output_run = 0
        self._ender: threading.Thread | None = None
        with contextlib.ExitStack() as stack:
            self._group = self._open(stack, abort)
            self._methods = frozenset.intersection(*(rank.ready.methods for rank in self._group.ranks if rank.ready))
            self._pids = tuple(rank.pid for rank in self._group.ranks)
            self._attach(stack)
            stack.callback(self._callbacks.close)
            with self._state_lock:
                if self._state is State.BROKEN:  # a rank died in the moment after it had become ready
                    raise lost_at_start(self._root)
                self._enter(State.READY)
            self._opened = stack.pop_all()
        self._finalizer = weakref.finalize(self, _release_forgotten, self._group, self._opened)
        self._finalizer.atexit = False  # at the end of the interpreter `_release_all` comes first
        _executors.add(self)

    def _open(self, stack: contextlib.ExitStack, abort: StartAbort) -> RayGroup:
        """Join the cluster, find room, make the actors, wait until they are ready; `stack` undoes it all."""
        spec, options = self.spec, self.options
        self._session = join_cluster(options.address, spec.world_size * options.cpus_per_rank)
        stack.callback(within, _RAY_S, leave_cluster, "leave the cluster")
        aborted = threading.Event()
        abort.attach(aborted.set)
        placement = place(spec, options, self._session, lambda: not aborted.is_set())
        stack.callback(within, _RAY_S, placement.remove, "remove the placement group")
        group = RayGroup(spec, options, self._session, abort)
        stack.callback(group.close)
        stack.callback(lambda: group.end(Deadline.after(min(2.0, spec.stop_timeout))))
        try:
            group.launch(placement)
            group.await_ready()
        except BaseException:
            group.end(Deadline.after(min(2.0, spec.stop_timeout)), ask=False)
            raise
        return group

    def _attach(self, stack: contextlib.ExitStack) -> None:
        """Hear of news and deaths from now on; the group does not keep the executor alive."""
        self_ref = weakref.ref(self)

        def on_news(rank: int, news: tuple[Any, ...]) -> None:
            if (executor := self_ref()) is not None and news[0] == "output":
                executor._on_output(news[1], news[2])

        def on_death(death: Death) -> None:
            if (executor := self_ref()) is not None:
                executor._on_death(death)

        def on_lost() -> None:  # what is pending never ends by itself
            if (executor := self_ref()) is not None:
                executor._break(TransportError("this process has left the Ray cluster: ray.shutdown() was called"))

        self._group.attach(on_news, on_death)
        stack.callback(watch_session(self._session, on_lost))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, each on its own node, index = rank; they stay readable after the end."""
        return self._pids

    # -- sending ---------------------------------------------------------------------------------------------------

    def _post(
        self,
        pending: PendingCall,
        method: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        reply_ranks: tuple[int, ...] | None,
        args_per_rank: Sequence[tuple[Any, ...]] | None,
    ) -> None:
        what = f"the arguments of {pending.method!r}"
        if args_per_rank is None:
            one = _pack((method, args, kwargs or {}, reply_ranks), what)
            bodies = dict.fromkeys(pending.ranks, one)
        else:
            bodies = {
                rank: _pack((method, own, kwargs or {}, reply_ranks), what)
                for rank, own in zip(pending.ranks, args_per_rank, strict=True)
            }
        with self._send_lock:
            if self._state is State.RELEASED:
                raise ExecutorStoppedError("the executor was released meanwhile")
            pending.call_id = self._calls.next_id()
            self._calls.by_id[pending.call_id] = pending
            before = {rank: self._last_sent[rank] for rank in bodies}
            now = dict.fromkeys(bodies, pending.call_id)
            try:
                self._last_sent.update(now)
                self._send(pending.call_id, before, bodies)
            except BaseException as error:
                self._last_sent.update(now)  # a Ctrl-C may have come before it
                self._send_again(pending.call_id, before, bodies, error)
                raise
        if not self._usable:
            self._end_late(pending)

    def _send(self, call_id: int, before: dict[int, int], bodies: dict[int, tuple[int, Any]]) -> None:
        self_ref = weakref.ref(self)

        def on_reply(rank: int, future: Any) -> None:
            if (executor := self_ref()) is not None:
                executor._on_reply(rank, call_id, future)

        check_session(self._session)
        ranks = self._group.ranks
        for rank, (kind, body) in bodies.items():
            head = HEAD.pack(before[rank], call_id, kind)
            content = (head + body,) if isinstance(body, bytes) else (head, body)
            answer = ranks[rank].actor.call.remote(*content).future()
            answer.add_done_callback(lambda future, rank=rank: on_reply(rank, future))

    def _send_again(self, call_id: int, before: dict[int, int], bodies: dict[int, Any], error: BaseException) -> None:
        """A Ctrl-C came while a call was sent, and nobody knows how far. Ranks wait for every call, and know it by its
        id: send it again, from a thread that no Ctrl-C interrupts.
        """

        def again() -> None:
            try:
                self._send(call_id, before, bodies)
            except Exception as failed:  # Ray has been shut down, or is broken
                self._break(_lost_ray(failed))

        if isinstance(error, Exception):
            self._break(_lost_ray(error))
        else:
            threading.Thread(target=again, name="mpexec-send", daemon=True).start()

    def _abandon(self, pending: PendingCall) -> None:
        if self._finish_abandoned(pending) and self._usable:
            for rank in pending.missing:
                self._tell(rank, "cancel", pending.call_id)

    def _tell(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method of the actor itself; None if Ray has been shut down."""
        try:
            check_session(self._session)
            return getattr(self._group.ranks[rank].actor, method).remote(*args).future()
        except Exception as error:  # whatever Ray raises when it is gone
            logger.debug("rank %d was not told to %s: %s", rank, method, error)
            return None

    # -- receiving -------------------------------------------------------------------------------------------------

    def _on_reply(self, rank: int, call_id: int, future: Any) -> None:
        error = future.exception()
        if error is not None:
            self._on_no_reply(rank, error)
            return
        record: Record | bytes | None = future.result()
        if record is None:
            return
        if isinstance(record, bytes):
            record = record[0], record[1:], [], []
        if record[0] == EXITED:
            self._group.exited(rank, load_plain(record[1]))
            return
        pending = self._calls.get(call_id)
        if pending is None:
            self._calls.late += 1
            return
        try:
            value = _open(record)
        except BaseException as failed:  # unpickling runs user code, which may raise anything, on Ray's thread
            with self._lock:
                pending.fail(rank, undecodable_error(failed, rank, pending.method))
            return
        with self._lock:
            if record[0] == FAILED:
                self._accept_failure(pending, value)
            else:
                pending.accept(rank, value)

    def _accept_failure(self, pending: PendingCall, failure: Failure) -> None:
        near = self._group.ranks[failure.rank].is_near  # then its clock is ours
        pending.fail(
            failure.rank,
            failure.to_exception(),
            consequence=failure.lost_peer,
            at_ns=failure.at_ns if near else None,
        )
        if failure.lost_peer:
            self._look_for_dead(pending)

    def _on_no_reply(self, rank: int, error: BaseException) -> None:
        if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError):
            self._group.lose(rank, error)
            return
        # It may be the answer that was lost, and the news of the death of its rank on the way.
        timer = threading.Timer(_NEWS_S, lambda: self._break(_lost_ray(error)))
        timer.daemon = True
        timer.start()

    def _look_for_dead(self, pending: PendingCall) -> None:
        """A lost peer is a consequence, and the news of a death takes its time: hear whether the others live."""
        if pending.done or pending.suspects:
            return
        pending.suspects = frozenset(rank for rank in pending.missing if not self._group.ranks[rank].surely_lives())
        for rank in pending.suspects:
            answer = self._tell(rank, "ping")
            if answer is not None:
                answer.add_done_callback(lambda future, rank=rank: self._on_pong(pending, rank, future))

    def _on_pong(self, pending: PendingCall, rank: int, future: Any) -> None:
        if future.exception() is None:
            with self._lock:
                pending.clear(rank)

    def _on_output(self, run: int, record: Record) -> None:
        if run != self._output_run:
            return
        try:
            value = _open(record)
        except BaseException as error:  # as above
            self._background_failed(undecodable_error(error, 0, "forward"))
            return
        if isinstance(value, Failure):
            self._background_failed(value.to_exception())
        else:
            self._outputs.put(value)

    # -- failures --------------------------------------------------------------------------------------------------

    def _on_death(self, death: Death) -> None:
        with self._lock:
            if self._state is State.BROKEN and self._root is not None and not death.sent_by_us:
                known = getattr(self._root, "others", None)
                attach_others(self._root, [*(known.exceptions if known else ()), died_error(death, None)])
            if self._state in (State.BROKEN, State.RELEASED):
                return
            waiting = (p for p in self._calls.in_flight() if death.rank in p.missing and p is not self._background)
            first = next(waiting, None)
            method = self._method_in(death.rank) or (first.method if first is not None else None)
            states = self._states_text()
            root = died_error(death, method, states)
            self._break(root, lambda pending: root if pending is first else died_error(death, method, states))

    def _method_in(self, rank: int) -> str | None:
        busy = self._group.ranks[rank].busy
        if busy is None or (self._background is not None and busy[0] == self._background.call_id):
            return None
        return self._calls.method_of(busy[0])

    def _end_broken(self) -> None:
        group, seconds = self._group, min(_BROKEN_END_S, self.spec.stop_timeout)
        self._ender = threading.Thread(
            target=lambda: group.end(Deadline.after(seconds)), name="mpexec-end", daemon=True
        )
        self._ender.start()

    def _on_deadline(self, pending: PendingCall) -> None:
        threading.Thread(target=self._time_out, args=(pending,), name="mpexec-stacks", daemon=True).start()

    def _time_out(self, pending: PendingCall) -> None:
        missing = pending.missing
        try:
            stacks = self._stacks(missing)
        except Exception as failed:  # whatever it is, the call ends
            logger.warning("no stacks could be taken", exc_info=failed)
            stacks = dict.fromkeys(missing, f"<no stack: {failed}>")
        with self._lock:
            if not pending.done:  # it may have been stopped or abandoned meanwhile
                error = timeout_error(pending, missing, stacks, self._states_text())
                self._break(error, lambda other: error if other is pending else broken_error(error))

    def _stacks(self, missing: tuple[int, ...]) -> dict[int, str]:
        """Stacks of ranks here are taken from outside, those of others are asked for."""
        ranks = self._group.ranks
        answers = {rank: self._tell(rank, "stacks") for rank in missing if not ranks[rank].is_near}
        deadline = Deadline.after(_STACKS_S)
        stacks = collect_stacks({rank: ranks[rank] for rank in missing if ranks[rank].is_near})
        for rank, answer in answers.items():
            try:
                stacks[rank] = answer.result(deadline.remaining())
            except Exception:  # it does not answer, or has ended, or Ray has
                where = ranks[rank].place
                stacks[rank] = f"<no stack: the rank on node {where.address if where else '?'} did not answer>"
        return dict(sorted(stacks.items()))

    # -- verbs -----------------------------------------------------------------------------------------------------

    def _tell_to_stop(self) -> None:
        """Tell every rank to stop its tasks and to drop the calls sent so far; does not wait."""
        last_id = self._calls.last_id
        for rank in self._all_ranks:
            token = self._told_to_stop(rank)
            answer = self._tell(rank, "stop", last_id)
            if answer is not None:
                answer.add_done_callback(lambda future, rank=rank, token=token: self._on_stopped(rank, token, future))

    def _on_stopped(self, rank: int, token: int, future: Any) -> None:
        if future.exception() is not None:
            return  # it has ended, and is told of elsewhere
        run, text = future.result()
        if text:
            logger.warning("rank %d failed while it stopped: %s", rank, text)
        if rank == self.topology.output_rank:
            self._output_run = max(self._output_run, run)
        self._has_stopped(rank, token)

    def _stop_others(self, background: PendingCall) -> None:
        self._tell_to_stop()

    def _stop_ranks(self) -> None:
        deadline = Deadline.after(self.spec.stop_timeout)
        self._end_calls_stopped()
        self._tell_to_stop()
        stuck = self._await_stop(deadline.share(0.7))
        if not stuck or self._state in (State.BROKEN, State.RELEASED):
            return
        logger.warning("ranks %s do not stop: %s", stuck, self._states_text())
        self._break(ExecutorStoppedError(f"ranks {stuck} did not stop within stop_timeout and were ended"))
        self._group.end(deadline)

    def _release_ranks(self) -> None:
        with self._state_lock:
            stopping, first = self._stopping, self._state is not State.RELEASED
            if first:
                self._enter(State.RELEASED)
        if not first:
            return
        deadline = Deadline.after(self.spec.stop_timeout)
        if stopping:
            with self._changed:
                self._changed.wait_for(lambda: not self._stopping, deadline.remaining())
        self._end_calls_stopped()
        self._group.end(deadline)
        if self._ender is not None:
            self._ender.join(deadline.remaining())
        self._finalizer.detach()
        self._opened.close()

    # -- what people see -------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """State, root cause, counters and a row for every rank: node, alive, method, seconds in it, exit, rung.

        What a rank is at is known of calls that take longer than a fiftieth of a second.
        """
        return {**self._describe_self("ray"), "ranks": [self._describe_rank(rank) for rank in self._group.ranks]}

    def _describe_rank(self, rank: RayRank) -> dict[str, Any]:
        busy = None if rank.death is not None else rank.busy
        return {
            "rank": rank.rank,
            "pid": rank.pid,
            "node": rank.place.address if rank.place is not None else None,
            "node_id": rank.place.node_id if rank.place is not None else None,
            "state": rank.state(),
            **(rank.ready.facts if rank.ready is not None else {}),
            "exit": None if rank.death is None else rank.death.describe(),
            "ended_by": self._group.rungs.get(rank.rank),
            "call_id": None if busy is None else busy[0],
            "method": None if busy is None else self._calls.method_of(busy[0]),
            "seconds": None if busy is None else round((time.monotonic_ns() - busy[1]) / 1e9, 3),
        }

    def _states_text(self) -> str:
        return "; ".join(self._state_phrase(rank) for rank in self._group.ranks)

    def _state_phrase(self, rank: RayRank) -> str:
        row = self._describe_rank(rank)
        doing = f" in {row['method']!r} for {row['seconds']} s" if row["call_id"] else " idle"
        if rank.death is not None:
            doing = f" {rank.death.describe()}"
        elif row["state"] != "running":
            doing += f" ({row['state']})"
        return f"rank {rank.rank} (pid {rank.pid} on {row['node']}){doing}"

    def rank_stacks(self) -> dict[int, str]:
        """As `Executor.rank_stacks`; a rank on another machine is asked, and has a second to answer."""
        return {} if self._state is State.RELEASED else self._stacks(self._all_ranks)

    def check_health(self) -> bool:
        """True while calls can make progress: the state allows them, and no rank is known to be dead or stopped."""
        if self._state not in (State.READY, State.RUNNING, State.STOPPED):
            return False
        return all(rank.state() in ("running", "uninterruptible") for rank in self._group.ranks)


def _pack(content: tuple[Any, ...], what: str) -> tuple[int, Any]:
    """The kind and the body of a call. What is large goes into the object store, once for all ranks of a node.

    Ray keeps an object for as long as a call that was given it runs, or a view of it lives.
    """
    method, args, kwargs, _ = content
    if type(method) is str and is_plain(args) and is_plain(tuple(kwargs.values())):
        payload = dump_plain(content, INLINE)
        if payload is not None:
            return PLAIN_CALL, payload
    frame = encode(content, what, main_by_value=True)
    if not frame.buffers and len(frame.payload) <= INLINE:
        return CALL, frame.payload
    body: Body = frame.payload, [pickle.PickleBuffer(buffer) for buffer in frame.buffers]
    return CALL, ray.put(body)


def _open(record: Record) -> Any:
    """The value of a record, in memory of its own: it outlives the object store."""
    kind, payload, buffers, private = record
    if kind == PLAIN_DONE:
        return load_plain(payload)
    if kind not in (DONE, FAILED):
        raise TransportError(f"a rank sent a record of unknown kind {kind}")
    copies = [bytearray(buffer) if own else bytes(buffer) for buffer, own in zip(buffers, private, strict=True)]
    return decode(payload, [memoryview(copy) for copy in copies])


def _lost_ray(error: BaseException) -> TransportError:
    lost = TransportError(f"Ray did not carry a call: {type(error).__name__}: {error}")
    lost.__cause__ = error
    return lost


def _release_forgotten(group: RayGroup, opened: contextlib.ExitStack) -> None:
    """Release an executor that was collected."""
    if os.getpid() != group.owner_pid:
        return

    def release() -> None:
        group.end(Deadline.after(min(group.spec.stop_timeout, 2.0)))
        opened.close()

    # Whoever runs the collector may hold a lock, or be the thread of Ray's whose news this waits for.
    threading.Thread(target=release, name="mpexec-release", daemon=True).start()


_executors: weakref.WeakSet[RayExecutor] = weakref.WeakSet()


@atexit.register  # later than Ray's own, and so before it
def _release_all() -> None:
    for executor in list(_executors):
        executor.release()
