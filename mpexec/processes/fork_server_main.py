"""The fork server's own process: it imports modules once, then forks ranks and tells how they end."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import sys
import traceback
from typing import NoReturn

from mpexec.deadline import Deadline
from mpexec.processes.boot import arm_parent_death
from mpexec.processes.death import reap
from mpexec.processes.forked import become_rank
from mpexec.transport.lane import ControlLane, LaneClosed
from mpexec.transport.linux import OwnedFd, pidfd_open, set_process_title

# What every rank imports in its first steps.
_ALWAYS = ("multiprocessing.spawn", "faulthandler", "random")


def main(control: int, death_fd: int) -> NoReturn:
    """Entry of the process, called by the stub; ends when the driver closes the lane or ends itself."""
    os.set_inheritable(control, False)
    os.set_inheritable(death_fd, False)
    arm_parent_death(death_fd, os.getpgrp())
    set_process_title("mpexec forks")
    lane = ControlLane(control)
    try:
        modules, (driver_pidfd,) = lane.recv(Deadline.after(None))
        _preload(modules)
        _Server(lane, driver_pidfd, death_fd).serve()
    except LaneClosed:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # not sys.exit: nothing of the preloaded modules has to be undone
    os._exit(0)


def _preload(modules: tuple[str, ...]) -> None:
    for name in (*_ALWAYS, *modules):
        try:
            importlib.import_module(name)
        except Exception as error:  # a rank that needs the module reports the same error with all facts
            sys.stderr.write(f"mpexec fork server: cannot preload {name}: {type(error).__name__}: {error}\n")
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.stderr.write(
            f"mpexec fork server: preloading {', '.join(modules)} left {threads - 1} extra threads running; "
            "forked ranks may hang on their locks. Use start_method='spawn' with these modules.\n"
        )
    # The collector would write to every object's header, and so copy the pages that ranks share.
    gc.collect()
    gc.freeze()


class _Server:
    """Requests in, forks and exit statuses out; one thread."""

    def __init__(self, lane: ControlLane, driver_pidfd: int, death_fd: int) -> None:
        self._lane = lane
        self._driver = driver_pidfd
        self._death_fd = death_fd
        self._ranks: dict[int, tuple[OwnedFd, ControlLane]] = {}
        self._poller = select.poll()
        for fd in (lane.fileno(), driver_pidfd):
            self._poller.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Until the driver has ended; raises `LaneClosed` when it closes the lane."""
        while True:
            for fd, _ in self._poller.poll():
                if fd == self._driver:
                    return
                if fd == self._lane.fileno():
                    self._take_requests()
                else:
                    self._tell_end(fd)

    def _take_requests(self) -> None:
        while (request := self._lane.try_recv()) is not None:
            _, (*rank_fds, status) = request
            try:
                self._fork(rank_fds, ControlLane(status))
            finally:
                for fd in rank_fds:
                    os.close(fd)

    def _fork(self, rank_fds: list[int], status: ControlLane) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            status.send((0, str(error)))
            status.close()
            return
        if pid == 0:
            # all that has an owner is closed by now: the lane, and pidfds and status lanes of the other ranks
            os.close(self._driver)
            os.close(self._death_fd)
            become_rank(*rank_fds)
        with contextlib.suppress(OSError):  # the child, which does the same, was faster
            os.setpgid(pid, pid)
        arm_parent_death(rank_fds[1], pid)
        pidfd = OwnedFd(pidfd_open(pid))
        self._ranks[pidfd.fd] = pidfd, status
        self._poller.register(pidfd.fd, select.POLLIN)
        with contextlib.suppress(LaneClosed):  # the driver gave up; the rank sees that by itself
            status.send((pid, ""), [pidfd.fd])

    def _tell_end(self, fd: int) -> None:
        pidfd, status = self._ranks[fd]
        result = reap(fd)
        if result is None:
            return
        self._poller.unregister(fd)
        del self._ranks[fd]
        with contextlib.suppress(LaneClosed):  # the driver has closed this rank
            status.send(tuple(result))
        status.close()
        pidfd.close()
