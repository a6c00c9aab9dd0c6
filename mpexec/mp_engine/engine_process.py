"""The process of one engine as its maker sees it: started, watched, ended."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import select
import threading
from collections.abc import Callable
from typing import Any

from mpexec.deadline import Deadline
from mpexec.engine.engine import ModelPlan
from mpexec.errors import StartupError, WorkerDiedError
from mpexec.executor.starting import StartAbort
from mpexec.mp_engine.engine_main import EnginePlan
from mpexec.mp_engine.frames import unbox_error
from mpexec.mp_engine.sockets import SocketFolder
from mpexec.processes import Death, Monitor, RankPlan, RankProcess, end_processes, launch
from mpexec.transport.linux import OwnedFd, pidfd_open

logger = logging.getLogger(__name__)

_RANKS_S = 2.0
_ENTRY = "mpexec.mp_engine.engine_main:engine_main"


class EngineProcess:
    """The process of one engine, from launch to the last descriptor.

    Attributes:
        address: Where it listens.
        plan: Its model.
        rank_pids: Processes of its ranks, index = rank.
        rank_nodes: Nodes of its ranks, index = rank; empty where all are on this machine.
        death: The facts of its end, once it has ended.
    """

    def __init__(self, plan: EnginePlan, folder: SocketFolder | None, timeout: float, abort: StartAbort | None) -> None:
        self._folder = folder
        self._news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._on_death: Callable[[], None] | None = None
        self.death: Death | None = None
        self._closed = False
        self._rank_pidfds: list[OwnedFd] = []
        self._stop_timeout = plan.stop_timeout
        self._owner = os.getpid()
        if abort is not None:
            abort.attach(lambda: self._news.put(("abort", None)))
        rank_plan = RankPlan(rank=0, title="mpexec-engine", label="engine")
        (self._process,) = launch([rank_plan], start_method="spawn", entry=_ENTRY, payload=pickle.dumps(plan))
        self._monitor = Monitor()
        try:
            self._monitor.watch(self._process, self._message, self._died)
            self._await_ready(Deadline.after(timeout), timeout)
        except BaseException:
            self.end(Deadline.after(min(2.0, plan.stop_timeout)), ask=False)
            raise

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def _message(self, _: int, message: Any, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        self._news.put((message[0], message[1:]))

    def _died(self, death: Death) -> None:
        with self._lock:
            self.death = death
            told = self._on_death
        self._news.put(("death", death))
        if told is not None:
            told()

    def on_death(self, tell: Callable[[], None] | None) -> None:
        """Have `tell` called, in another thread, when the process ends; at once if it has. None takes it back."""
        with self._lock:
            self._on_death = tell
            known = self.death is not None
        if known and tell is not None:
            tell()

    def _await_ready(self, deadline: Deadline, timeout: float) -> None:
        phase = "spawn"
        while True:
            try:
                kind, news = self._news.get(timeout=deadline.remaining())
            except queue.Empty:
                raise StartupError(
                    f"the engine process was not ready within {timeout:g} s (start_timeout), in phase {phase!r}",
                    phase=phase,
                ) from None
            if kind == "phase":
                (phase,) = news
                logger.info("engine process: %s", phase)
            elif kind == "ready":
                self.address, facts, tp, max_length, self.rank_pids, self.rank_nodes, pids_here = news
                self._rank_pidfds = [OwnedFd(pidfd_open(pid)) for pid in pids_here]
                self.plan = ModelPlan.of_facts(facts, tp, max_length)
                return
            else:
                raise self._start_error(kind, news, phase)

    def _start_error(self, kind: str, news: Any, phase: str) -> BaseException:
        if kind == "abort":
            return StartupError("the start was cancelled by its caller", phase="start")
        if kind == "death":
            error = StartupError(
                f"the engine process (pid {news.pid}) {news.describe()} in phase {phase!r}", phase=phase
            )
            error.__cause__ = died_error(news)
            return error
        if len(news) == 1:  # the engine could not be made: its error, as in process
            return unbox_error(news[0])
        failed_phase, failure = news  # before the entry: as for a rank
        error = StartupError(f"the engine process failed in phase {failed_phase!r}: {failure.text}", phase=failed_phase)
        error.__cause__ = failure.to_exception()
        return error

    def end(self, deadline: Deadline, *, ask: bool = True) -> None:
        """End the process within the deadline and free everything; again, or in a forked child, changes nothing."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        rungs = end_processes([self._process], deadline, ask=_ask_to_exit if ask else None)
        self.death = self._process.death or self.death
        if self._folder is not None:  # before anything is waited for: the caller may lose patience
            self._folder.remove()
        self._await_ranks(Deadline.after(_RANKS_S))
        if ask and rungs.get(0) not in ("exited", "asked"):
            logger.warning("the engine process did not leave when asked: %s", rungs.get(0))
        self._monitor.unwatch(self._process)
        self._monitor.stop()
        self._process.close()

    def _await_ranks(self, deadline: Deadline) -> None:
        """The kernel ends the ranks of an engine that was killed, a few milliseconds later."""
        poller = select.poll()
        waiting = {pidfd.fd: pidfd for pidfd in self._rank_pidfds}
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while waiting and (ready := poller.poll(deadline.poll_ms())):
            for fd, _ in ready:
                poller.unregister(fd)
                del waiting[fd]
        if waiting:
            logger.warning("%d ranks of the engine outlive it", len(waiting))
        for pidfd in self._rank_pidfds:
            pidfd.close()


def _ask_to_exit(process: RankProcess) -> None:
    process.lane.send(("exit",))


def died_error(death: Death) -> WorkerDiedError:
    """The error for an engine process that has ended."""
    lines = "".join(f"\n  {line}" for line in death.last_lines[-10:])
    return WorkerDiedError(
        f"the engine process (pid {death.pid}) {death.describe()}" + (f"\nIts last lines:{lines}" if lines else ""),
        pid=death.pid,
        exit_code=death.exit_code,
        signal_name=death.signal_name,
        last_lines=death.last_lines,
    )
