"""One rank of a job: a plain process with the user's command, watched, and dead as soon as the launcher is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from string import Template

from mpexec.launcher import startup
from mpexec.launcher.console import Console, Outlet, RankOutput
from mpexec.launcher.job import Job, Std
from mpexec.processes.environment import apply_changes, rank_environment
from mpexec.processes.process import RankProcess
from mpexec.processes.start import death_pipe, popen_group
from mpexec.transport.lane import lane_pair
from mpexec.transport.linux import OwnedFd, memfd_create, pidfd_open

# What runs before the command, in the same process: it sees to it that the kernel kills the process group when the
# launcher ends (mpexec.processes.boot.arm_parent_death, without an import), and looks whether it has ended already.
_STUB = """\
import fcntl, os, select, sys
death = int(sys.argv[1])
fcntl.fcntl(death, fcntl.F_SETOWN, -os.getpid())
fcntl.fcntl(death, 10, 9)
fcntl.fcntl(death, fcntl.F_SETFL, fcntl.fcntl(death, fcntl.F_GETFL) | os.O_ASYNC)
poller = select.poll()
poller.register(death, 0)
if poller.poll(0):
    os._exit(0)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""
_STREAMS = {"stdout": Std.OUT, "stderr": Std.ERR}


class Rank:
    """A rank from its start to the last of its descriptors.

    Attributes:
        process: Its process; `process.rank` is the rank in the whole job.
    """

    def __init__(self, job: Job, local_rank: int, *, attempt: int, port: int, console: Console, folder: Path | None):
        """Start it.

        Args:
            folder: Where its files go, None if it has none.

        Raises:
            OSError: No process could be started, or a file could not be made.
        """
        self.local_rank = local_rank
        with ExitStack() as stack:
            self._error_file = OwnedFd(memfd_create("mpexec-error", 0))
            stack.callback(self._error_file.close)
            error_path = f"/proc/{os.getpid()}/fd/{self._error_file.fd}"
            if folder is not None:
                folder.mkdir(parents=True)
                error_path = str(folder / "error.json")
            self._error_path = error_path
            variables = job.rank_variables(local_rank, port, attempt, error_path)
            threads = 1 if job.nproc > 1 else None
            environ = apply_changes(os.environ, rank_environment(local_rank, job.nproc, variables, threads=threads))
            if job.is_python:
                startup.add_to(environ)
            output = RankOutput(
                int(variables["RANK"]), _outlets(job, local_rank, int(variables["RANK"]), console, folder)
            )
            stack.callback(output.close)
            self.process = _start(job.command, environ, output, stack)
            stack.pop_all()

    def recorded_error(self) -> str:
        """The traceback that `torch.distributed.elastic`'s `@record` wrote, "" if there is none."""
        try:
            with open(self._error_path, encoding="utf-8", errors="backslashreplace") as file:
                message = json.load(file)["message"]
        except (OSError, ValueError, KeyError, TypeError):  # the file is the script's to write
            return ""
        if isinstance(message, dict):
            extra = message.get("extraInfo")
            message = (extra.get("py_callstack") if isinstance(extra, dict) else None) or message.get("message", "")
        return str(message).strip()

    def close(self) -> None:
        """Write what is left of its output and close everything; again changes nothing."""
        self.process.close()
        self._error_file.close()


def _start(command: tuple[str, ...], environ: dict[str, str], output: RankOutput, stack: ExitStack) -> RankProcess:
    death_read, death_write = death_pipe()
    stack.callback(death_read.close)
    stack.callback(death_write.close)
    lane, theirs = lane_pair()  # a script has no use for a control lane: this one is closed from the start
    stack.callback(lane.close)
    theirs.close()
    stdout, stderr = output.write_ends()
    pid = popen_group(
        # isolated, and without site: it is there for ten milliseconds
        [sys.executable, "-I", "-S", "-c", _STUB, str(death_read.fd), *command],
        (death_read.fd,),
        environ,
        stdin=_stdin(),
        stdout=stdout.fd,
        stderr=stderr.fd,
    )
    process = RankProcess(output.rank, pid, OwnedFd(pidfd_open(pid)), lane, output, death_write)
    output.close_write_ends()
    death_read.close()
    return process


def _stdin() -> int | None:
    """The launcher's own, except a terminal, from which only its foreground group may read."""
    try:
        os.fstat(0)
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if os.isatty(0) else None


def _outlets(job: Job, local_rank: int, rank: int, console: Console, folder: Path | None) -> dict[str, Outlet]:
    to_file, teed = job.streams_to_file(local_rank), job.tee.get(local_rank, Std.NONE)
    shown = job.shown is None or local_rank in job.shown
    prefix = Template(job.line_prefix).safe_substitute(role_name=job.role, rank=rank, local_rank=local_rank)
    return {
        name: Outlet(
            console=console if shown and (std in teed or std not in to_file) else None,
            prefix=prefix if std in teed else "",
            # closed by `RankOutput.close`
            file=open(folder / f"{name}.log", "wb") if folder is not None and std in to_file else None,
        )
        for name, std in _STREAMS.items()
    }
