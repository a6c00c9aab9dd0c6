"""Starting the processes of all ranks: as new interpreters, from a fork server, or as forks of this process."""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from mpexec.config import StartMethod
from mpexec.errors import ConfigError
from mpexec.processes.boot import BootMessage, arm_parent_death
from mpexec.processes.environment import apply_changes
from mpexec.processes.logs import RankLog
from mpexec.processes.process import RankProcess
from mpexec.transport.lane import ControlLane, LaneClosed, lane_pair
from mpexec.transport.linux import OwnedFd, pidfd_open

# The whole program of a new interpreter. It must find this package even where it is not installed, so the driver's
# search path comes first over the control socket. End of file there means that the driver is gone.
_STUB = """\
import signal
signal.pthread_sigmask(signal.SIG_SETMASK, ())
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
import marshal, os, sys
control, death = int(sys.argv[1]), int(sys.argv[2])
first = os.read(control, 1 << 20)
if not first:
    os._exit(0)
sys.path[:], module = marshal.loads(first)
__import__(module, fromlist=['main']).main(control, death)
"""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank needs beyond entry and payload.

    Attributes:
        env: Changes to this process's environment, None removes; in place before anything of the rank is imported.
        fds: Descriptors to hand over, by name; they stay the caller's.
        title: Name of the process in `top`, at most 15 bytes.
        label: What its lines of output begin with, in brackets; its rank unless given.
    """

    rank: int
    env: Mapping[str, str | None] = field(default_factory=dict)
    fds: Mapping[str, int] = field(default_factory=dict)
    title: str = ""
    label: str = ""


def boot_message(plan: RankPlan, start_method: StartMethod, entry: str, payload: bytes) -> BootMessage:
    """What the child needs to become the rank."""
    return BootMessage(
        rank=plan.rank,
        entry=entry,
        payload=payload,
        title=plan.title or f"mpexec rank {plan.rank}",
        driver_pid=os.getpid(),
        fd_names=tuple(plan.fds),
        # a spawned rank gets its environment from exec
        environ=None if start_method == "spawn" else apply_changes(os.environ, plan.env),
        preparation=None if start_method == "fork" else _preparation_data(f"rank {plan.rank}"),
        working_directory=_working_directory() if start_method == "forkserver" else None,
    )


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def main_is_importable() -> bool:
    """True if ranks import this program's `__main__`, so that its classes can be pickled by name.

    False for a script on stdin, `python -c`, a notebook and an interactive session.
    """
    return bool(_main_module_data())


def _main_module_data() -> dict[str, str]:
    """How a new interpreter finds `__main__`; empty where it cannot. Same rules as `multiprocessing.spawn`."""
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if path is None:
        return {}
    path = os.path.normpath(os.path.join(_original_directory(), path))
    # "<stdin>", or a script that was removed meanwhile
    return {"init_main_from_path": path} if os.path.isfile(path) else {}


def _original_directory() -> str:
    from multiprocessing import process

    return getattr(process, "ORIGINAL_DIR", None) or os.sep


def search_path() -> list[str]:
    """`sys.path` as it must be in another process: an empty entry means where this one was started."""
    return [entry or _original_directory() for entry in sys.path if isinstance(entry, str)]


def _preparation_data(name: str) -> dict[str, Any]:
    """What `multiprocessing.spawn.prepare` takes.

    Not from `multiprocessing.spawn.get_preparation_data`: that would settle the program's start method for good.
    """
    import multiprocessing
    from multiprocessing import process

    data: dict[str, Any] = {
        "name": name,
        "authkey": bytes(process.current_process().authkey),
        "sys_path": search_path(),
        "sys_argv": list(getattr(sys, "argv", [""])),
        "orig_dir": _original_directory(),
        **_main_module_data(),
    }
    start_method = multiprocessing.get_start_method(allow_none=True)
    if start_method is not None:
        data["start_method"] = start_method
    return data


@dataclass(slots=True)
class Wires:
    """The descriptors of one rank before it exists: ours, and the four that it will inherit."""

    lane: ControlLane
    log: RankLog
    death_write: OwnedFd
    control: OwnedFd
    death_read: OwnedFd

    @classmethod
    def open(cls, plan: RankPlan, stack: ExitStack) -> Wires:
        """Make them; `stack` closes all of them unless it is emptied first."""
        lane, control = lane_pair()
        stack.callback(lane.close)
        stack.callback(control.close)
        log = RankLog(plan.rank, plan.label)
        stack.callback(log.close)
        death_read, death_write = death_pipe()
        stack.callback(death_read.close)
        stack.callback(death_write.close)
        return cls(lane, log, death_write, control, death_read)

    def child_ends(self) -> tuple[int, int, int, int]:
        """Control, death pipe, stdout, stderr."""
        stdout, stderr = self.log.write_ends()
        return self.control.fd, self.death_read.fd, stdout.fd, stderr.fd

    def close_child_ends(self) -> None:
        """Close our copies, once the rank has its own."""
        self.control.close()
        self.death_read.close()
        self.log.close_write_ends()


def death_pipe() -> tuple[OwnedFd, OwnedFd]:
    """Read and write end of a pipe that is never written: its hang-up tells of this process's end."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    return OwnedFd(read_end), OwnedFd(write_end)


def hand_over(lane: ControlLane, message: object, fds: Mapping[str, int]) -> None:
    """Send a rank its first message, with our pidfd ahead of `fds`.

    It need not have started; one that is dead already is seen by its pidfd.
    """
    ourselves = pidfd_open(os.getpid())
    try:
        with contextlib.suppress(LaneClosed):
            lane.send(message, [ourselves, *fds.values()])
    finally:
        os.close(ourselves)


def interpreter_command(*fds: int) -> list[str]:
    """The command line of a new interpreter with this one's flags, running the stub.

    Raises:
        ConfigError: This program is not run by an interpreter that could be started again.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise ConfigError("there is no Python interpreter to start ranks with: sys.executable is unset or frozen")
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", _STUB, *map(str, fds)]


def send_search_path(lane: ControlLane, module: str) -> None:
    """Send the packet that the stub reads: where to import from, and the module whose `main` goes on."""
    os.write(lane.fileno(), marshal.dumps((search_path(), module)))


def popen_group(command: list[str], fds: Sequence[int], environ: Mapping[str, str], **streams: Any) -> int:
    """Start `command` as leader of a new process group; the caller reaps it. Returns its pid once it runs.

    Its stdin is empty, unless `streams` has another one.
    """
    streams = {"stdin": subprocess.DEVNULL, **streams}
    popen = subprocess.Popen(command, pass_fds=tuple(fds), process_group=0, env=dict(environ), **streams)
    # Its end is ours to see and its status ours to take: this object must neither warn nor wait when it is collected.
    popen.returncode = 0
    return popen.pid


def spawn(plan: RankPlan, message: BootMessage) -> RankProcess:
    """Start a rank as a new interpreter."""
    with ExitStack() as stack:
        wires = Wires.open(plan, stack)
        control, death_read, stdout, stderr = wires.child_ends()
        send_search_path(wires.lane, "mpexec.processes.boot")
        pid = popen_group(
            interpreter_command(control, death_read),
            (control, death_read),
            apply_changes(os.environ, plan.env),
            stdout=stdout,
            stderr=stderr,
        )
        return _adopt(pid, wires, plan, message, stack)


def fork(plan: RankPlan, message: BootMessage) -> RankProcess:
    """Start a rank as a copy of this process; in the child it does not return."""
    from mpexec.processes.forked import become_rank

    with ExitStack() as stack:
        wires = Wires.open(plan, stack)
        # Copies without an owner: a forked child closes all that has one.
        copies = [os.dup(fd) for fd in wires.child_ends()]
        for fd in copies:
            stack.callback(os.close, fd)
        _flush()
        pid = os.fork()
        if pid == 0:
            become_rank(*copies)
        with contextlib.suppress(OSError):  # the child, which does the same, was faster
            os.setpgid(pid, pid)
        process = _adopt(pid, wires, plan, message, stack)
        for fd in copies:
            os.close(fd)
        return process


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def _adopt(pid: int, wires: Wires, plan: RankPlan, message: BootMessage, stack: ExitStack) -> RankProcess:
    """Make a `RankProcess` of a child just started; on failure the child is killed and reaped."""
    try:
        arm_parent_death(wires.death_read.fd, pid)
        pidfd = OwnedFd(pidfd_open(pid))
        process = RankProcess(plan.rank, pid, pidfd, wires.lane, wires.log, wires.death_write)
        hand_over(wires.lane, message, plan.fds)
    except BaseException:
        _kill_child(pid)
        raise
    stack.pop_all()
    wires.close_child_ends()
    return process


def _kill_child(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
