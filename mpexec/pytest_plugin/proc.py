"""What /proc says of processes, descriptors and shared memory; for the look at what a test leaves behind."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterable
from typing import Any


def children_of(pid: int) -> set[int]:
    """Children and grandchildren of a process, zombies too."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for task in list_folder(f"/proc/{waiting.pop()}/task", whole=True):
            with contextlib.suppress(OSError, ValueError), open(f"{task}/children") as file:
                new = {int(child) for child in file.read().split()} - found
                found |= new
                waiting.extend(new)
    return found


def state_of(pid: int) -> tuple[str, int]:
    """The kernel's letter for its state and its parent's pid; ("", 0) if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)


def is_gone(pid: int) -> bool:
    """True if there is no such process, or only what its parent has still to reap."""
    return state_of(pid)[0] in ("", "Z", "X")


def await_gone(pids: Iterable[int], seconds: float) -> set[int]:
    """Wait until the processes have ended, by pidfd; those that have not in time."""
    end = time.monotonic() + seconds
    left = set()
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
                left.add(pid)
        finally:
            os.close(fd)
    return {pid for pid in left if not is_gone(pid)}


def describe_process(pid: int) -> str:
    """Pid, name, state and command line, as far as they can still be read."""
    facts = [str(pid)]
    for name in ("comm", "cmdline", "wchan"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}") as file:
            facts.append(f"{name}={file.read().replace(chr(0), ' ').strip()[:100]!r}")
    state, parent = state_of(pid)
    return " ".join([*facts, f"state={state} parent={parent}"] if state else facts)


def open_descriptors() -> dict[int, str]:
    """Every descriptor of this process and what it refers to."""
    found = {}
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                link = os.readlink(entry.path)
                if link != f"/proc/{os.getpid()}/fd":
                    found[int(entry.name)] = link
    return found


def list_folder(folder: str, *, whole: bool = False) -> list[str]:
    """Names in a folder, with `whole` as paths; none if it is gone."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [f"{folder}/{name}" for name in names] if whole else names


def is_used_by_others(path: str, ours: set[int]) -> bool:
    """True if a process that is not among `ours` has the file open or mapped."""
    for name in list_folder("/proc"):
        if not name.isdigit() or int(name) in ours:
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/maps") as file:
            if path in file.read():
                return True
        for link in list_folder(f"/proc/{name}/fd", whole=True):
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith(path):
                    return True
    return False


# -- what may outlive a test -------------------------------------------------------------------------------------------


def _fork_servers() -> list[Any]:
    module = sys.modules.get("mpexec.processes.fork_server")
    return [server for server in list(module._servers.values()) if server.owner == os.getpid()] if module else []


def _helpers() -> list[tuple[Any, Any]]:
    """Pid and descriptor of the processes that `multiprocessing` starts once and keeps to the end."""
    found = []
    for name, helper, pid, fd in (
        ("multiprocessing.resource_tracker", "_resource_tracker", "_pid", "_fd"),
        ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid", "_forkserver_alive_fd"),
    ):
        owner = getattr(sys.modules.get(name), helper, None)
        found.append((getattr(owner, pid, None), getattr(owner, fd, None)))
    return found


def server_pids() -> set[int]:
    """Processes that serve the whole session: fork servers of mpexec, helpers of `multiprocessing`."""
    return {server.pid for server in _fork_servers()} | {pid for pid, _ in _helpers() if pid is not None}


def server_fds() -> set[int]:
    """Descriptors of this process that belong to those."""
    found = {fd for _, fd in _helpers() if fd is not None}
    for server in _fork_servers():
        found |= {owned.fd for owned in (server._death_write, server._pidfd) if not owned.closed}
        if not server.lane.closed:
            found.add(server.lane.fileno())
    return found
