"""A job from its first attempt to its exit code."""

from __future__ import annotations

import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

from mpexec.errors import ConfigError, StartupError
from mpexec.launcher.console import Console, tell
from mpexec.launcher.group import Ending, Group
from mpexec.launcher.job import DEFAULT_PORT, Job
from mpexec.launcher.port import reserve_port
from mpexec.launcher.rank import Rank
from mpexec.launcher.report import describe_failure, exit_code_of
from mpexec.launcher.signals import Signals
from mpexec.processes.monitor import Monitor


def launch_job(job: Job) -> int:
    """Run all ranks to their end, restarts included, and return the exit code. Only in the main thread of a program.

    It takes over the signals of `job.signals` meanwhile, writes to descriptors 1 and 2, and prints the root cause of a
    failure last.

    Raises:
        ConfigError: The port is taken, or the log folder cannot be made; no rank was started.
        StartupError: A process could not be started; those that had been are gone.
    """
    folder = _log_folder(job)
    with Signals(job.signals) as signals:
        console = Console(lambda: signals.post(signal.SIGPIPE))
        for attempt in range(job.max_restarts + 1):
            last = attempt == job.max_restarts
            ending = _attempt(job, attempt, last, folder, console, signals)
            if ending.root is None or last or ending.signal_number is not None:
                break
    return exit_code_of(ending)


def _log_folder(job: Job) -> Path | None:
    """A new folder for this run, as torchrun names it; None if nothing goes to files."""
    if job.log_dir is None and not job.writes_files:
        return None
    try:
        if job.log_dir is not None:
            Path(job.log_dir).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{job.run_id}_", dir=job.log_dir))
    except OSError as error:
        where = job.log_dir or tempfile.gettempdir()
        raise ConfigError(f"no folder for the logs of run {job.run_id!r} in {where}: {error.strerror}") from error
    if job.log_dir is None:
        tell(f"mpexec: output of the ranks is in {folder}")
    return folder


def _attempt(job: Job, attempt: int, last: bool, folder: Path | None, console: Console, signals: Signals) -> Ending:
    """Start all ranks, wait for their end, and tell of a failure once all their output is written."""
    with ExitStack() as stack:
        port = _port(job, stack)
        monitor = Monitor("mpexec-logs")
        stack.callback(monitor.stop)
        ranks = []
        for local_rank in range(job.nproc):
            files = None if folder is None else folder / f"attempt_{attempt}" / str(local_rank)
            try:
                rank = Rank(job, local_rank, attempt=attempt, port=port, console=console, folder=files)
            except OSError as error:
                raise StartupError(f"local rank {local_rank} could not be started: {error}", phase="spawn") from error
            stack.callback(rank.close)
            stack.callback(_finish_output, monitor, rank)
            ranks.append(rank)
            _pump(monitor, rank)
        ending = Group(ranks, signals, job.grace).run()
        signals.leave_at_once = True
        for rank in ranks:
            _finish_output(monitor, rank)
        if ending.root is not None and ending.signal_number is None:
            restart = "" if last else f"; restart {attempt + 1} of {job.max_restarts}"
            tell(describe_failure(ending, ending.root, ranks, restart))
        signals.leave_at_once = False
        return ending


def _port(job: Job, stack: ExitStack) -> int:
    """The port of this attempt's rendezvous; what this machine gives out is kept until the attempt is over."""
    if job.nnodes > 1:
        return DEFAULT_PORT if job.master_port is None else job.master_port
    return int(stack.enter_context(reserve_port(job.master_port or 0)).getsockname()[1])


def _pump(monitor: Monitor, rank: Rank) -> None:
    """Have the monitor's thread write the rank's output; it may wait there for whoever reads ours."""
    log = rank.process.log
    for fd in log.read_ends():

        def pump(fd: int = fd) -> None:
            if not log.pump(fd):
                monitor.remove(fd)

        monitor.add(fd, pump)


def _finish_output(monitor: Monitor, rank: Rank) -> None:
    """Write all that the rank has written so far, however long its reader takes; again changes nothing."""
    log = rank.process.log
    for fd in log.read_ends():
        monitor.remove(fd)
    log.drain(final=True)
    log.show()
