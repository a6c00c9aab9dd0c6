"""A process of a launched job that serves as a rank: it joins its driver, and goes back to its script when let go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import NoReturn

from mpexec.deadline import Deadline
from mpexec.errors import StartupError, WrongStateError
from mpexec.processes.boot import Boot, arm_parent_death, disarm_parent_death, hung_up
from mpexec.processes.launched import LaunchedJob
from mpexec.processes.meeting import PHASE, Invitation, wait_for_lane
from mpexec.transport.lane import ControlLane, LaneClosed, LaneTimeout
from mpexec.worker.main import build_rank, serve_rank

_MARGIN_S = 5.0


def check_place() -> None:
    """Raise where a process of a job cannot serve; called in all of them, so that all say the same.

    Raises:
        WrongStateError: This is not the main thread, or an event loop runs in it.
    """
    if threading.current_thread() is not threading.main_thread():
        raise WrongStateError("call MPExecutor.attach in the main thread: in a worker it serves there", state="NEW")
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise WrongStateError(
            "call MPExecutor.attach before the event loop runs: in a worker it serves on a loop of its own. The "
            "executor belongs to no loop, and can be used on any later.",
            state="NEW",
        )


def serve_as_rank(job: LaunchedJob, init_timeout: float) -> NoReturn:
    """Become a rank of process 0's executor, serve, and end.

    Raises:
        SystemExit: 0 when let go by the driver; else the code with which a method has ended the rank.
        StartupError: The driver did not come before `init_timeout`, or did not go on.
        BaseException: What kept the rank from becoming ready; the driver has been told.
    """
    lane = wait_for_lane(job, Deadline.after(init_timeout))
    try:
        # The driver's own deadline for the others comes first, so that it can say who is missing.
        boot, env = _accept(lane, Deadline.after(init_timeout + _MARGIN_S))
        with _as_rank(boot, env):
            code = serve_rank(build_rank(boot, attached=True))
    finally:
        lane.hang_up()  # last: for the driver this process is its launcher's from here on
    raise SystemExit(code)


def _accept(lane: ControlLane, deadline: Deadline) -> tuple[Boot, Mapping[str, str | None]]:
    try:
        invitation, fds = lane.recv(deadline)
    except LaneClosed:
        raise SystemExit(0) from None  # the driver has given up, and says why itself
    except LaneTimeout:
        raise StartupError(
            "process 0 of the job waits for other processes, which had not called MPExecutor.attach when init_timeout "
            "had passed",
            phase=PHASE,
        ) from None
    if not isinstance(invitation, Invitation):  # it is told to exit
        raise SystemExit(0)
    driver_pidfd, death_fd, *rest = fds
    boot = Boot(
        rank=invitation.rank,
        lane=lane,
        payload=invitation.payload,
        fds=dict(zip(invitation.fd_names, rest, strict=True)),
        driver_pid=invitation.driver_pid,
        driver_pidfd=driver_pidfd,
        death_fd=death_fd,
        forked=False,
    )
    return boot, invitation.env


@contextlib.contextmanager
def _as_rank(boot: Boot, env: Mapping[str, str | None]) -> Iterator[None]:
    """This process dies with the driver, leaves Ctrl-C to it, and has a rank's environment; then all is as before."""
    # The launcher has everything else that this process may have started; the group may be its own.
    arm_parent_death(boot.death_fd, os.getpid(), alone=True)
    if hung_up(boot.death_fd):  # the driver died before the line above: no signal will come
        raise SystemExit(0)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = {name: os.environ.get(name) for name in (*env, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    streams = sys.stdout, sys.stderr
    _set_variables(env)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams  # also where the model's building has failed half-way
        _set_variables(before)
        # Stacks go on being written: the driver may ask until the lane is hung up, and the signal's default is deadly.
        disarm_parent_death(boot.death_fd)
        os.close(boot.death_fd)
        signal.signal(signal.SIGINT, signal.SIG_DFL if interrupt is None else interrupt)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
