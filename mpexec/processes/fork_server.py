"""The driver's side of fork servers: one for each interpreter, environment and list of preloaded modules."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from mpexec.deadline import Deadline
from mpexec.errors import StartupError
from mpexec.processes.boot import BootMessage, arm_parent_death
from mpexec.processes.death import ExitStatus, reap
from mpexec.processes.environment import fork_server_environment, read_at_import
from mpexec.processes.process import RankProcess
from mpexec.processes.start import (
    RankPlan,
    Wires,
    death_pipe,
    hand_over,
    interpreter_command,
    popen_group,
    send_search_path,
)
from mpexec.transport.lane import ControlLane, LaneClosed, LaneTimeout, lane_pair
from mpexec.transport.linux import OwnedFd, pidfd_open, pidfd_send_signal

_STATUS_SECONDS = 1.0
_END_SECONDS = 1.0

_Key = tuple[tuple[str, ...], frozenset[tuple[str, str]], tuple[str, ...]]


class ForkServer:
    """A process with modules preloaded that forks ranks on request, and dies with this one."""

    def __init__(self, environ: dict[str, str], modules: Sequence[str]) -> None:
        """Start it; it queues requests while it imports `modules`.

        Raises:
            OSError: No process could be started.
        """
        self.owner = os.getpid()
        # True once it has failed to tell an exit status in time: nobody waits for that again.
        self.silent = False
        with ExitStack() as stack:
            self.lane, control = lane_pair()
            stack.callback(self.lane.close)
            stack.callback(control.close)
            death_read, self._death_write = death_pipe()
            stack.callback(death_read.close)
            stack.callback(self._death_write.close)
            send_search_path(self.lane, "mpexec.processes.fork_server_main")
            command = interpreter_command(control.fd, death_read.fd)
            self.pid = popen_group(command, (control.fd, death_read.fd), environ)
            arm_parent_death(death_read.fd, self.pid)
            self._pidfd = OwnedFd(pidfd_open(self.pid))
            stack.pop_all()
            control.close()
            death_read.close()
        ourselves = pidfd_open(self.owner)
        try:
            with suppress(LaneClosed):  # seen by the first request
                self.lane.send((*modules, *_loaded_here()), [ourselves])
        finally:
            os.close(ourselves)

    def is_usable(self) -> bool:
        """True while it lives, in the process that started it."""
        return os.getpid() == self.owner and not self.lane.closed and not self._ends_within(0.0)

    def end(self) -> None:
        """End and reap it, within two seconds; ranks that it forked live on. Again changes nothing."""
        if os.getpid() != self.owner or self._pidfd.closed:
            return
        self.lane.close()
        if not self._ends_within(_END_SECONDS):
            pidfd_send_signal(self._pidfd.fd, signal.SIGKILL)
            self._ends_within(_END_SECONDS)
        reap(self._pidfd.fd)
        self._death_write.close()
        self._pidfd.close()

    def _ends_within(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._pidfd.fd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))


def _loaded_here() -> list[str]:
    """Modules of this package that this process has loaded: ranks need them too when they import its `__main__`."""
    package = __name__.partition(".")[0]
    return sorted(name for name in sys.modules if name.startswith(f"{package}."))


_servers: dict[_Key, ForkServer] = {}
_lock = threading.RLock()


def _forget_in_child() -> None:
    """The servers belong to the parent; so does a lock that another thread held at the fork."""
    global _lock
    _lock = threading.RLock()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def shutdown_fork_server() -> None:
    """End all fork servers of this process; the next launch starts another one. Again changes nothing."""
    with _lock:
        servers = list(_servers.values())
        _servers.clear()
    for server in servers:
        server.end()


atexit.register(shutdown_fork_server)


def _server_for(environ: dict[str, str], modules: tuple[str, ...]) -> ForkServer:
    """A running server for ranks with `environ`; those found dead are removed."""
    command = interpreter_command()
    key = (tuple(command), frozenset(read_at_import(environ).items()), modules)
    with _lock:
        server = _servers.get(key)
        if server is not None and server.is_usable():
            return server
        if server is not None:
            server.end()
        server = _servers[key] = ForkServer(fork_server_environment(environ), modules)
        return server


def start_ranks(
    plans: Sequence[RankPlan],
    messages: Sequence[BootMessage],
    modules: tuple[str, ...],
    deadline: Deadline,
    started: list[RankProcess],
) -> None:
    """Let fork servers start all ranks; each is appended to `started` as soon as it exists.

    Raises:
        StartupError: A server died, did not answer by the deadline, or could not fork.
    """
    with ExitStack() as stack:
        requests = [_request(plan, message, modules, stack) for plan, message in zip(plans, messages, strict=True)]
        for request in requests:
            started.append(request(deadline))
        stack.pop_all()


def _request(
    plan: RankPlan, message: BootMessage, modules: tuple[str, ...], stack: ExitStack
) -> Callable[[Deadline], RankProcess]:
    """Ask for one rank; the function given back waits for it."""
    assert message.environ is not None
    wires = Wires.open(plan, stack)
    status, theirs = lane_pair()
    stack.callback(status.close)
    stack.callback(theirs.close)
    fds = [*wires.child_ends(), theirs.fd]
    server = _send_request(message.environ, modules, fds, plan.rank)
    wires.close_child_ends()
    theirs.close()

    def await_fork(deadline: Deadline) -> RankProcess:
        pid, pidfd = _receive_fork(status, plan.rank, deadline)
        take = _status_taker(server, status)
        process = RankProcess(plan.rank, pid, pidfd, wires.lane, wires.log, wires.death_write, take)
        hand_over(wires.lane, message, plan.fds)
        return process

    return await_fork


def _send_request(environ: dict[str, str], modules: tuple[str, ...], fds: list[int], rank: int) -> ForkServer:
    for _ in range(2):
        server = _server_for(environ, modules)
        # closed: it died since it was looked at, or another thread shut it down; then there is a new one
        with suppress(LaneClosed):
            server.lane.send("fork", fds)
            return server
    raise StartupError("the fork server died at once", rank=rank, phase="fork server")


def _receive_fork(status: ControlLane, rank: int, deadline: Deadline) -> tuple[int, OwnedFd]:
    """Pid and pidfd of the rank. The server opens the pidfd: it is the parent, so it cannot meet a reused number."""
    try:
        (pid, trouble), fds = status.recv(deadline)
    except LaneClosed as error:
        raise StartupError(
            f"the fork server died before it started rank {rank}; what it wrote is on stderr",
            rank=rank,
            phase="fork server",
        ) from error
    except LaneTimeout as error:
        raise StartupError(
            f"the fork server did not start rank {rank} in time", rank=rank, phase="fork server"
        ) from error
    if trouble:
        raise StartupError(f"the fork server could not start rank {rank}: {trouble}", rank=rank, phase="fork server")
    return pid, OwnedFd(fds[0])


def _status_taker(server: ForkServer, status: ControlLane) -> Callable[[int], ExitStatus]:
    def take(_: int) -> ExitStatus:
        """Only the parent can know how a process ended. Waits a second for its word, once in the life of a server."""
        try:
            (code, number), _fds = status.recv(Deadline.after(0.0 if server.silent else _STATUS_SECONDS))
        except LaneTimeout:
            server.silent = True
            return ExitStatus(None, None)
        except LaneClosed:
            return ExitStatus(None, None)
        finally:
            status.close()
        return ExitStatus(code, number)

    return take
