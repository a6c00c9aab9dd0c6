"""The processes of one executor, from launch to the last one reaped."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import MpexecError, SerializationError, StartupError, TransportError, WorkerDiedError, attach_others
from mpexec.messages import Failure, Ready, unpicklable
from mpexec.processes import Death, Monitor, RankPlan, RankProcess, end_processes, launch, rank_environment
from mpexec.transport.frame import dumps
from mpexec.worker.main import LinkFacts

logger = logging.getLogger(__name__)

_ENTRY = "mpexec.worker.main:rank_main"
_SETTLE_S = 1.0  # after a start has failed: news that may name the root cause


class StartAbort:
    """Ends the start of a group from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = False
        self._tell: Callable[[], None] | None = None

    def attach(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when the start is to end, at once if that has been asked already."""
        with self._lock:
            self._tell = tell
            asked = self._asked
        if asked:
            tell()

    def ask(self) -> None:
        """End the start, now or when it begins; one that is over is not touched."""
        with self._lock:
            self._asked = True
            tell = self._tell
        if tell is not None:
            tell()


class RankGroup:
    """All rank processes of one executor and the thread that watches them.

    Attributes:
        processes: Index = rank; empty before `launch`.
        ready: What each rank reported when it was ready.
        owner_pid: The process that made the group; in a forked child it does nothing.
        rungs: What it took to end each rank: "exited", "asked", "TERM", "KILL" or "unkillable".
    """

    def __init__(self, spec: WorkerSpec, abort: StartAbort | None = None) -> None:
        self.spec = spec
        self.processes: list[RankProcess] = []
        self.ready: list[Ready] = []
        self.rungs: dict[int, str] = {}
        self._news: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._on_message: Callable[[int, tuple[Any, ...]], None] | None = None
        self._on_death: Callable[[Death], None] | None = None
        self._end_lock = threading.Lock()
        self._news_lock = threading.Lock()
        if abort is not None:
            abort.attach(lambda: self._news.put(("abort", -1, None)))
        self.owner_pid = os.getpid()
        self._monitor: Monitor | None = None

    # -- start ---------------------------------------------------------------------------------------------------

    def launch(self, link_facts: LinkFacts, fds_of: Callable[[int], dict[str, int]]) -> None:
        """Start all ranks and return; `await_ready` comes next.

        Raises:
            StartupError: A process could not be started.
            SerializationError: The spec cannot be pickled.
        """
        spec = self.spec
        payload = pickle.dumps((link_facts, _pickled_spec(spec)))
        plans = [
            RankPlan(
                rank=rank,
                env=rank_environment(rank, spec.world_size, _env_of(spec, rank), threads=spec.threads_per_rank()),
                fds=fds_of(rank),
                title=f"mpexec-rank{rank}",
            )
            for rank in spec.topology.ranks
        ]
        self.processes = launch(
            plans,
            start_method=spec.start_method,
            entry=_ENTRY,
            payload=payload,
            allow_unsafe_fork=spec.allow_unsafe_fork,
        )
        # Only now: "fork" is refused where threads run, and this is one.
        self._monitor = Monitor()
        for process in self.processes:
            self._monitor.watch(process, self._message, self._death)

    @property
    def monitor(self) -> Monitor:
        """Watches lanes, logs and ends; there is one from `launch` on."""
        assert self._monitor is not None
        return self._monitor

    def _message(self, rank: int, message: Any, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        with self._news_lock:  # `attach` takes what came before it, and nothing falls between
            if self._on_message is None:
                self._news.put(("message", rank, message))
                return
        self._on_message(rank, message)

    def _death(self, death: Death) -> None:
        with self._news_lock:
            if self._on_death is None:
                self._news.put(("death", death.rank, death))
                return
        self._on_death(death)

    def await_ready(self) -> None:
        """Wait until every rank is ready. On a failure the caller ends the processes.

        Raises:
            StartupError: With the first failing rank's error as cause; `init_timeout` counts from the last progress.
        """
        ready: dict[int, Ready] = {}
        phases = dict.fromkeys(self.spec.topology.ranks, "spawn")
        clocks = dict.fromkeys(phases, Deadline.after(self.spec.init_timeout))
        while len(ready) < self.spec.world_size:
            waiting = [rank for rank in phases if rank not in ready]
            late = min((clocks[rank] for rank in waiting), key=lambda deadline: deadline.at_ns or 0)
            try:
                kind, rank, news = self._news.get(timeout=late.remaining())
            except queue.Empty:
                raise self._startup_timeout(waiting, phases) from None
            if kind == "abort":
                raise StartupError("the start was cancelled by its caller", phase="start")
            if kind == "death" or news[0] == "failed":
                raise self._startup_failure(kind, rank, news, phases)
            clocks[rank] = Deadline.after(self.spec.init_timeout)
            if news[0] == "ready":
                ready[rank] = news[1]
            else:
                phases[rank] = news[1]
                logger.info("rank %d: %s", rank, news[1])
        self.ready = [ready[rank] for rank in sorted(ready)]

    def _startup_timeout(self, waiting: list[int], phases: dict[int, str]) -> StartupError:
        states = ", ".join(f"rank {rank} in phase {phases[rank]!r}" for rank in waiting)
        return StartupError(
            f"no progress for {self.spec.init_timeout:g} s (init_timeout): {states}. "
            "A build_model that takes longer may call report_progress, or give a longer init_timeout.",
            rank=waiting[0],
            phase=phases[waiting[0]],
        )

    def _startup_failure(self, kind: str, rank: int, news: Any, phases: dict[int, str]) -> StartupError:
        """Name the root cause: news that comes within a moment of the first may come before it in rank."""
        first = [(kind, rank, news)]
        settle = Deadline.after(_SETTLE_S)
        while not _tells_root_cause(*first[-1]):
            try:
                item = self._news.get(timeout=settle.remaining())
            except queue.Empty:
                break
            if item[0] == "abort":
                break
            if item[0] == "death" or item[2][0] == "failed":
                first.append(item)
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._news.get_nowait()
                if item[0] == "death" or (item[0] != "abort" and item[2][0] == "failed"):
                    first.append(item)
        errors = [
            self._error_of(*item, phases) for item in sorted(first, key=lambda item: not _tells_root_cause(*item))
        ]
        root = errors[0]
        attach_others(root, [error for error in errors[1:] if error.rank != root.rank])
        return root

    def _error_of(self, kind: str, rank: int, news: Any, phases: dict[int, str]) -> StartupError:
        if kind == "death":
            phase = phases[rank]
            cause: BaseException = died_error(news, phase)
            text = f"rank {rank} (pid {news.pid}) {news.describe()} in phase {phase!r}"
            return _with_cause(StartupError(text + _tail(news.last_lines), rank=rank, phase=phase), cause)
        _, phase, failure = news
        assert isinstance(failure, Failure)
        cause = failure.to_exception()
        text = f"rank {rank} failed in phase {phase!r}: {failure.type_name}: {failure.text}"
        return _with_cause(StartupError(text, rank=rank, phase=phase), cause)

    def attach(self, on_message: Callable[[int, tuple[Any, ...]], None], on_death: Callable[[Death], None]) -> None:
        """From now on, news goes to the executor; what has come meanwhile goes there first."""
        with self._news_lock:
            self._on_message, self._on_death = on_message, on_death
        with contextlib.suppress(queue.Empty):
            while True:
                kind, rank, news = self._news.get_nowait()
                if kind == "death":
                    on_death(news)
                elif kind == "message":
                    on_message(rank, news)

    # -- end -----------------------------------------------------------------------------------------------------

    def tell(self, rank: int, message: tuple[Any, ...]) -> bool:
        """Send one control message; False if the rank is gone or does not listen."""
        try:
            self.processes[rank].lane.send(message)
        except (TransportError, OSError) as error:
            logger.debug("control message not sent: rank=%d message=%s error=%s", rank, message[0], error)
            return False
        return True

    def end(self, deadline: Deadline, *, ask: bool = True) -> dict[int, str]:
        """End every rank, asked first, and reap it; again, or in a forked child of the driver, changes nothing.

        Args:
            deadline: For all rungs together.
            ask: False begins with SIGTERM: for ranks that are not ready, which nobody would hear.
        """
        with self._end_lock:
            if self.processes and os.getpid() == self.owner_pid and len(self.rungs) < len(self.processes):
                grace = (deadline.remaining() or 0.0) * 0.4
                self.rungs = end_processes(
                    self.processes,
                    deadline,
                    ask=(lambda process: process.lane.send(("exit", grace))) if ask else None,
                )
                if ask and (
                    hard := {rank: rung for rank, rung in self.rungs.items() if rung not in ("exited", "asked")}
                ):
                    logger.warning("ranks did not leave when asked: %s", hard)
            return self.rungs

    def close(self) -> None:
        """Stop the watching thread and close all descriptors; after `end`."""
        if os.getpid() != self.owner_pid:
            return
        if self._monitor is not None:
            for process in self.processes:
                self._monitor.unwatch(process)
            self._monitor.stop()
        for process in self.processes:
            process.close()


def died_error(death: Death, method: str | None, states: str = "") -> WorkerDiedError:
    """The error for a rank whose process has ended; `states`, what all ranks were at, becomes a note."""
    where = f" in {method!r}" if method else " outside any call"
    error = WorkerDiedError(
        f"rank {death.rank} (pid {death.pid}) {death.describe()}{where}{_tail(death.last_lines)}",
        rank=death.rank,
        pid=death.pid,
        exit_code=death.exit_code,
        signal_name=death.signal_name,
        method=method,
        last_lines=death.last_lines,
    )
    if states:
        error.add_note(f"all ranks: {states}")
    return error


def _tail(lines: tuple[str, ...], most: int = 10) -> str:
    if not lines:
        return ""
    return "\nIts last lines:\n" + "\n".join(f"  {line}" for line in lines[-most:])


def _with_cause(error: StartupError, cause: BaseException) -> StartupError:
    error.__cause__ = cause
    return error


def _tells_root_cause(kind: str, rank: int, news: Any) -> bool:
    """False for what looks like a consequence of another rank's end."""
    if kind == "death":
        return not news.sent_by_us and not (news.exit_code == 1 and not news.last_lines)
    return not news[2].lost_peer


def _env_of(spec: WorkerSpec, rank: int) -> dict[str, str | None]:
    return {**spec.env, **(spec.env_per_rank[rank] if spec.env_per_rank else {})}


def _pickled_spec(spec: WorkerSpec) -> bytes:
    try:
        return dumps(spec)
    except Exception as error:  # pickling runs code of the user's classes
        failed: MpexecError = unpicklable(spec, error, "the agent's class or arguments")
        assert isinstance(failed, SerializationError)
        raise failed from error
