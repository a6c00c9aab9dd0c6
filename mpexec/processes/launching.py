"""Starting all ranks of a group, by any of the three start methods."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from mpexec.config import StartMethod
from mpexec.deadline import Deadline
from mpexec.errors import ConfigError, StartupError
from mpexec.processes.boot import refuse_while_importing_main
from mpexec.processes.fork_server import start_ranks
from mpexec.processes.ladder import end_processes
from mpexec.processes.process import RankProcess
from mpexec.processes.start import RankPlan, boot_message, fork, spawn

_START_SECONDS = 600.0


def launch(
    plans: Sequence[RankPlan],
    *,
    start_method: StartMethod,
    entry: str,
    payload: bytes,
    allow_unsafe_fork: bool = False,
    preload: Sequence[str] | None = None,
    deadline: Deadline | None = None,
) -> list[RankProcess]:
    """Start one process for each plan, all at the same time, and return before any has reached its entry.

    Args:
        entry: "module:function", called in each rank's main thread with a `Boot`.
        preload: Modules that a fork server imports before it forks; None means torch, torch.distributed and the module
            of the entry. Other start methods ignore it.
        deadline: For a fork server to be ready, ten minutes unless given.

    Raises:
        ConfigError: "fork" from a process with threads or with torch imported.
        StartupError: A process could not be started; those that had been are gone.
    """
    refuse_while_importing_main()
    if start_method == "fork" and not allow_unsafe_fork:
        _refuse_unsafe_fork()
    deadline = Deadline.after(_START_SECONDS) if deadline is None else deadline
    messages = [boot_message(plan, start_method, entry, payload) for plan in plans]
    started: list[RankProcess] = []
    rank: int | None = None
    try:
        if start_method == "forkserver":
            modules = _default_preload(entry) if preload is None else tuple(preload)
            start_ranks(plans, messages, modules, deadline, started)
        else:
            start_one = spawn if start_method == "spawn" else fork
            for plan, message in zip(plans, messages, strict=True):
                rank = plan.rank
                started.append(start_one(plan, message))
    except BaseException as error:
        end_processes(started, Deadline.after(0.0), ask=None)
        for process in started:
            process.close()
        if isinstance(error, OSError):
            who = "a rank" if rank is None else f"rank {rank}"
            raise StartupError(f"{who} could not be started: {error}", rank=rank, phase="spawn") from error
        raise
    return started


def _default_preload(entry: str) -> tuple[str, ...]:
    return "torch", "torch.distributed", entry.partition(":")[0]


def _refuse_unsafe_fork() -> None:
    threads = max(threading.active_count(), len(os.listdir("/proc/self/task")))
    reason = "torch is imported" if "torch" in sys.modules else f"{threads} threads are running" if threads > 1 else ""
    if reason:
        raise ConfigError(
            f"start_method='fork' is not safe here: {reason}, and a forked copy may hang on a lock that another thread "
            "held. Use 'spawn' or 'forkserver', or allow_unsafe_fork=True."
        )
