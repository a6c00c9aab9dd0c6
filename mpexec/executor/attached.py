"""The processes of a launched job as the ranks of one executor: how the job becomes one, and their group."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import ConfigError, WrongStateError
from mpexec.executor.base import make_spec
from mpexec.executor.group import RankGroup, env_of
from mpexec.executor.starting import StartAbort
from mpexec.processes import Death, RankPlan, refuse_while_importing_main
from mpexec.processes.attached import AttachedProcess
from mpexec.processes.environment import read_at_import
from mpexec.processes.launched import LaunchedJob
from mpexec.processes.meeting import Invitation, Meeting
from mpexec.processes.start import hand_over
from mpexec.worker.attached import check_place, serve_as_rank

logger = logging.getLogger(__name__)

_used: set[str] = set()  # jobs that this process has been the driver of


def enter_job(
    agent: Callable[..., Any] | WorkerSpec, driver_is_rank: bool, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Take this process's part in its job: a worker serves and does not return.

    Returns:
        In the driver, and where there is no job, the options with which to make the executor.

    Raises:
        ConfigError: See `MPExecutor.attach`; in every process of the job, before any waits for another.
    """
    refuse_while_importing_main()
    job = LaunchedJob.find(os.environ)
    if job is None:
        if "world_size" not in options and not isinstance(agent, WorkerSpec):
            raise ConfigError(
                "world_size is missing: this is no job of a launcher, which would tell the number of ranks"
            )
        return dict(options)
    check_place()
    world_size = _world_size(job, driver_is_rank, agent, options)
    spec = make_spec(agent, {**options, "world_size": world_size})
    for rank in spec.topology.ranks:
        if not (driver_is_rank and rank == 0):  # that one is started in the ordinary way
            _check_env(spec, rank)
    if job.rank > 0:
        serve_as_rank(job, spec.init_timeout)
    if job.key in _used:
        raise WrongStateError(
            "MPExecutor.attach works once in a job: its workers end when they are released", state="RELEASED"
        )
    _used.add(job.key)
    group = functools.partial(AttachedGroup, job=job, driver_is_rank=driver_is_rank)
    return {**options, "world_size": world_size, "_group": group}


def _world_size(
    job: LaunchedJob, driver_is_rank: bool, agent: Callable[..., Any] | WorkerSpec, options: Mapping[str, Any]
) -> int:
    """The number of ranks that the job gives."""
    ranks = job.world_size if driver_is_rank else job.world_size - 1
    if ranks == 0:
        raise ConfigError(
            "the job has one process, which is the driver, and so there is no rank. Start one process more than ranks "
            "(--nproc-per-node), or give driver_is_rank=True."
        )
    asked = options.get("world_size", agent.world_size if isinstance(agent, WorkerSpec) else None)
    if asked not in (None, ranks):
        raise ConfigError(
            f"world_size={asked!r}, but a job of {job.world_size} processes gives {ranks} "
            f"{'rank' if ranks == 1 else 'ranks'} with driver_is_rank={driver_is_rank}. Leave world_size out, or start "
            "another number of processes (--nproc-per-node)."
        )
    return ranks


def _check_env(spec: WorkerSpec, rank: int) -> None:
    """Refuse variables that are read when a process starts: the ranks have started already."""
    wanted = {name: value or "" for name, value in env_of(spec, rank).items() if os.environ.get(name) != value}
    if late := sorted(read_at_import(wanted)):
        raise ConfigError(
            f"env sets {', '.join(late)}, which is read when a process starts, and the ranks of a job have started. "
            "Give it to the launcher (mpexec run --env NAME=VALUE)."
        )


class AttachedGroup(RankGroup):
    """As `RankGroup`; its ranks are processes of a job, and rank 0 a child of the driver where that is asked for."""

    _grace_share = 0.25  # well before the first signal, which the launcher would take for a failure

    def __init__(self, spec: WorkerSpec, abort: StartAbort | None, *, job: LaunchedJob, driver_is_rank: bool) -> None:
        super().__init__(spec, abort)
        self._job = job
        self._own = 1 if driver_is_rank else 0
        self._is_ending = False

    def _start_processes(self, plans: list[RankPlan], payload: bytes) -> None:
        deadline = Deadline.after(self.spec.init_timeout)
        if self._own:
            super()._start_processes(plans[: self._own], payload)  # it takes longest
        with Meeting(self._job, self._own) as meeting:
            if not meeting.wait(deadline, self.processes):
                return  # the others are let go; `await_ready` has the news of the rank that was lost, and raises
            for other, plan in zip(self._job.others, plans[self._own :], strict=True):
                process, death_read = meeting.take(other)
                self.processes.append(process)
                _invite(process, plan, payload, death_read.fd)
                death_read.close()
        self._watch(self.processes[self._own :])

    def _death(self, death: Death) -> None:
        if not self._is_ending and death.rank >= self._own:
            # At once: the launcher is about to end the driver too, before an error of its own could reach anybody.
            logger.error("rank %d (pid %d) %s; launchers end the job then", death.rank, death.pid, death.describe())
        super()._death(death)

    def end(self, deadline: Deadline, *, ask: bool = True) -> dict[int, str]:
        """As `RankGroup.end`, but always asks: a process that is ended by a signal is a failure to its launcher."""
        self._is_ending = True
        return super().end(deadline, ask=True)


def _invite(process: AttachedProcess, plan: RankPlan, payload: bytes, death_fd: int) -> None:
    invitation = Invitation(plan.rank, payload, os.getpid(), tuple(plan.fds), plan.env)
    hand_over(process.lane, invitation, {"death": death_fd, **plan.fds})
