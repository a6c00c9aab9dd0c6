"""The facts of a process's end, and the kernel's count of memory kills behind the out-of-memory hint."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mpexec.transport import linux

_EXIT_CODE = 49  # field of `/proc/PID/stat`, counted from the one behind the name


class ExitStatus(NamedTuple):
    """How a process ended; both None when nobody could tell."""

    exit_code: int | None
    signal_number: int | None


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a rank's process.

    Attributes:
        exit_code: Exit status; None when a signal ended it, or when the status is not known.
        signal_name: For example "SIGKILL"; None when it exited by itself, or when the status is not known.
        sent_by_us: This driver had sent that signal.
        at_ns: `time.monotonic_ns()` when the end was seen.
        last_lines: What it wrote last to stdout and stderr, oldest first, at most 200 lines.
        out_of_memory: SIGKILL that we did not send, and the kernel has killed for memory since the rank was started.
        node: Where it ran, in the words of the cluster; "" for this machine.
        reason: What the cluster says of its end.
    """

    rank: int
    pid: int
    exit_code: int | None
    signal_name: str | None
    sent_by_us: bool
    at_ns: int
    last_lines: tuple[str, ...]
    out_of_memory: bool
    node: str = ""
    reason: str = ""

    def describe(self) -> str:
        """What happened, as the end of a sentence: "exited with code 3", "killed by SIGSEGV (not by mpexec)"."""
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        if self.reason:
            return f"on node {self.node} ended: {self.reason}"
        if self.signal_name is None:
            return "ended; its exit status is not known (whoever started it, or another part of the program, took it)"
        if self.sent_by_us:
            return f"killed by {self.signal_name} (sent by mpexec)"
        if self.out_of_memory:
            hint = "; likely out of memory: the kernel's count of memory kills grew meanwhile"
        elif self.signal_name == "SIGKILL":
            hint = "; if nobody else sent it, look for 'out of memory' in the kernel log"
        else:
            hint = ""
        return f"killed by {self.signal_name} (not by mpexec{hint})"


def signal_name(number: int) -> str:
    """The name of a signal, real-time signals included."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def reap(pidfd: int) -> ExitStatus | None:
    """Take the exit status of a child that has ended; None if it has not. Never waits.

    A child whose status somebody else took, or that is not ours, gives a status of unknowns.
    """
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return ExitStatus(None, None)
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return ExitStatus(result.si_status, None)
    return ExitStatus(None, result.si_status)


def read_status(pid: int, pidfd: int) -> ExitStatus:
    """The exit status of a process that has ended and is another one's child; unknowns where nobody can tell.

    Until its parent takes the status, `/proc` shows it; afterwards the pidfd does (Linux 6.15 and newer). Never waits.
    """
    status = _zombie_status(pid, pidfd)
    if status is None:
        status = linux.pidfd_exit_status(pidfd)
    if status is None:
        return ExitStatus(None, None)
    number = os.WTERMSIG(status)
    return ExitStatus(None, number) if number else ExitStatus(os.WEXITSTATUS(status), None)


def _zombie_status(pid: int, pidfd: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        signal.pidfd_send_signal(pidfd, 0)  # after the reading: the number was still its own
    except OSError:
        return None
    return int(fields[_EXIT_CODE]) if fields[0] == "Z" and len(fields) > _EXIT_CODE else None


def memory_kills() -> int | None:
    """How many processes of this control group the kernel has killed for memory; None where it does not say.

    Where no control group can be read, the count of the whole machine.
    """
    for path, key in _counters():
        with contextlib.suppress(OSError, ValueError), open(path) as counters:
            for line in counters:
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
    return None


def _counters() -> Iterator[tuple[str, str]]:
    """Files that may hold the count, the narrowest first, for both versions of control groups."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                yield f"/sys/fs/cgroup{path}/memory.events", "oom_kill"
            elif "memory" in controllers.split(","):
                yield f"/sys/fs/cgroup/memory{path}/memory.oom_control", "oom_kill"
    # the path above is that of the host; inside a container its group is mounted at the root
    yield "/sys/fs/cgroup/memory.events", "oom_kill"
    yield "/sys/fs/cgroup/memory/memory.oom_control", "oom_kill"
    yield "/proc/vmstat", "oom_kill"
