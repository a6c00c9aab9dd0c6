"""The processes of one executor, from launch to the last one reaped."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import MpexecError, SerializationError, TransportError
from mpexec.executor.starting import StartAbort, StartWatch
from mpexec.messages import Ready, unpicklable
from mpexec.processes import Death, Monitor, RankPlan, RankProcess, end_processes, launch, rank_environment
from mpexec.transport.frame import dumps
from mpexec.worker.main import LinkFacts

logger = logging.getLogger(__name__)

_ENTRY = "mpexec.worker.main:rank_main"


class RankGroup:
    """All rank processes of one executor and the thread that watches them.

    Attributes:
        processes: Index = rank; empty before `launch`.
        ready: What each rank reported when it was ready.
        owner_pid: The process that made the group; in a forked child it does nothing.
        rungs: What it took to end each rank: "exited", "asked", "TERM", "KILL" or "unkillable".
    """

    _grace_share = 0.4  # of the time to end all; then a rank that was asked to exit ends itself

    def __init__(self, spec: WorkerSpec, abort: StartAbort | None = None) -> None:
        self.spec = spec
        self.processes: list[RankProcess] = []
        self.ready: list[Ready] = []
        self.rungs: dict[int, str] = {}
        self._start = StartWatch(spec, abort)
        self._end_lock = threading.Lock()
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
                env=rank_environment(rank, spec.world_size, env_of(spec, rank), threads=spec.threads_per_rank()),
                fds=fds_of(rank),
                title=f"mpexec-rank{rank}",
            )
            for rank in spec.topology.ranks
        ]
        self._start_processes(plans, payload)

    def _start_processes(self, plans: list[RankPlan], payload: bytes) -> None:
        """Fill `processes` and watch them."""
        self.processes = launch(
            plans,
            start_method=self.spec.start_method,
            entry=_ENTRY,
            payload=payload,
            allow_unsafe_fork=self.spec.allow_unsafe_fork,
        )
        self._watch(self.processes)

    def _watch(self, processes: Sequence[RankProcess]) -> None:
        if self._monitor is None:  # not before a rank is started: "fork" is refused where threads run, and this is one
            self._monitor = Monitor()
        for process in processes:
            self._monitor.watch(process, self._message, self._death)

    @property
    def monitor(self) -> Monitor:
        """Watches lanes, logs and ends; there is one from `launch` on."""
        assert self._monitor is not None
        return self._monitor

    def _message(self, rank: int, message: Any, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        self._start.pass_on("message", rank, message)

    def _death(self, death: Death) -> None:
        self._start.pass_on("death", death.rank, death)

    def await_ready(self) -> None:
        """Wait until every rank is ready. On a failure the caller ends the processes.

        Raises:
            StartupError: With the first failing rank's error as cause; `init_timeout` counts from the last progress.
        """
        self.ready = self._start.await_ready()

    def attach(self, on_message: Callable[[int, tuple[Any, ...]], None], on_death: Callable[[Death], None]) -> None:
        """From now on, news goes to the executor; what has come meanwhile goes there first."""
        self._start.attach(on_message, on_death)

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
                grace = (deadline.remaining() or 0.0) * self._grace_share
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


def env_of(spec: WorkerSpec, rank: int) -> dict[str, str | None]:
    """The user's variables for a rank, None removes."""
    return {**spec.env, **(spec.env_per_rank[rank] if spec.env_per_rank else {})}


def _pickled_spec(spec: WorkerSpec) -> bytes:
    try:
        return dumps(spec)
    except Exception as error:  # pickling runs code of the user's classes
        failed: MpexecError = unpicklable(spec, error, "the agent's class or arguments")
        assert isinstance(failed, SerializationError)
        raise failed from error
