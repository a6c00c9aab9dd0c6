"""What a test must not leave behind: processes, descriptors, threads, tasks, names, settings, and noise on stderr.

Every test is compared with the moment before it. What ends by itself (a process that dies, a thread that returns) is
waited for by event and within a bound; what is clean at once costs about a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOUND_S = 3.0
MARKER = "MPEXEC_TEST_SESSION"
NOISE = re.compile(
    r"leaked|never retrieved|Exception ignored|was destroyed but it is pending|was never awaited|could not acquire lock"
)
_PYTEST_VARIABLES = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION")
_OURS = re.compile(r"^mpexec")
_own_marker = ""
_inherited = b""
_foreign: set[str] = set()


def mark_session() -> Path:
    """Mark every process that comes from this session, and give its temporary files a folder of their own.

    The marker is an environment variable: it survives double forks and the death of everything in between, which a
    tree of parents and children does not.
    """
    global _own_marker, _inherited
    with open("/proc/self/environ", "rb") as file:
        _inherited = file.read() + b"\0"
    _own_marker = f"{os.getpid()}-{time.monotonic_ns()}"
    os.environ[MARKER] = _own_marker
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # what pytest keeps, it keeps where it was
    folder = Path(tempfile.mkdtemp(prefix="mpexec-tests-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return folder


def remove_session(folder: Path) -> None:
    """Undo `mark_session`."""
    os.environ.pop(MARKER, None)
    os.environ.pop("TMPDIR", None)
    tempfile.tempdir = None
    shutil.rmtree(folder, ignore_errors=True)


# -- processes ---------------------------------------------------------------------------------------------------------


def children_of(pid: int) -> set[int]:
    """Children and grandchildren of a process, zombies too."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for task in _listdir(f"/proc/{waiting.pop()}/task", whole=True):
            with contextlib.suppress(OSError, ValueError), open(f"{task}/children") as file:
                new = {int(child) for child in file.read().split()} - found
                found |= new
                waiting.extend(new)
    return found


def marked() -> set[int]:
    """Processes that were started with this session's marker in their environment."""
    wanted = f"{MARKER}={_own_marker}\0".encode()
    found: set[int] = set()
    for name in _listdir("/proc"):
        if not name.isdigit() or name in _foreign or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environ = file.read() + b"\0"
        except OSError:
            continue
        if wanted in environ:
            found.add(int(name))
        elif environ != _inherited:  # a process of ours between fork and exec shows what we were started with
            _foreign.add(name)
    return found


def is_gone(pid: int) -> bool:
    """True if there is no such process, or only what its parent has still to reap."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


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
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        state, parent = file.read().rpartition(")")[2].split()[:2]
        facts.append(f"state={state} parent={parent}")
    return " ".join(facts)


def _fork_servers() -> list[Any]:
    module = sys.modules.get("mpexec.processes.fork_server")
    return [server for server in list(module._servers.values()) if server.owner == os.getpid()] if module else []


def fork_server_fds() -> set[int]:
    """Descriptors that belong to fork servers, the one thing that may outlive an executor."""
    found = set()
    for server in _fork_servers():
        for owned in (server._death_write, server._pidfd):
            if not owned.closed:
                found.add(owned.fd)
        if not server.lane.closed:
            found.add(server.lane.fileno())
    return found


# -- Ray ---------------------------------------------------------------------------------------------------------------


def _ray() -> Any:
    """Ray, if this process is connected to a cluster."""
    module = sys.modules.get("ray")
    return module if module is not None and module.is_initialized() else None


def ray_processes() -> set[int]:
    """The processes of the cluster that this process has started: its workers come and go as Ray likes."""
    if _ray() is None:
        return set()
    found: set[int] = set()
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            if "/ray/" in file.read():
                found |= {pid} | children_of(pid)
    return found


def ray_holdings() -> set[str]:
    """What this process holds of the cluster: actors that are not dead, placement groups that are not removed."""
    if _ray() is None:
        return set()
    from ray._private.state import actors
    from ray.util import placement_group_table

    held = {f"actor {name}" for name, facts in actors().items() if facts["State"] != "DEAD"}
    groups = placement_group_table().items()
    return held | {f"placement group {name}" for name, facts in groups if facts["state"] != "REMOVED"}


# -- descriptors, names, settings --------------------------------------------------------------------------------------


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


def _listdir(folder: str, *, whole: bool = False) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [f"{folder}/{name}" for name in names] if whole else names


def _used_by_others(path: str) -> bool:
    """True if a process that is not of this session has the file open or mapped."""
    ours = marked() | children_of(os.getpid()) | {os.getpid()}
    for name in _listdir("/proc"):
        if not name.isdigit() or int(name) in ours:
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/maps") as file:
            if path in file.read():
                return True
        for link in _listdir(f"/proc/{name}/fd", whole=True):
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith(path):
                    return True
    return False


def _temporary_names() -> set[str]:
    return {name for name in _listdir(tempfile.gettempdir()) if not name.startswith("pytest-of-")}


def signal_handlers() -> dict[int, Any]:
    """The handler of every signal."""
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def environment() -> dict[str, str]:
    """The variables, without those that pytest itself changes."""
    return {name: value for name, value in os.environ.items() if name not in _PYTEST_VARIABLES}


def our_threads() -> set[threading.Thread]:
    """Threads that carry this package's name."""
    return {thread for thread in threading.enumerate() if _OURS.match(thread.name)}


class _LoopNoise(logging.Handler):
    """What asyncio says through logging when nobody retrieves an error or a task is lost."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@dataclass
class Snapshot:
    """The state of the process and of the machine before a test; `leaks` tells what is new since."""

    processes: set[int] = field(default_factory=lambda: children_of(os.getpid()) | marked())
    descriptors: dict[int, str] = field(default_factory=open_descriptors)
    threads: set[threading.Thread] = field(default_factory=our_threads)
    shared_memory: set[str] = field(default_factory=lambda: set(_listdir("/dev/shm")))
    temporary: set[str] = field(default_factory=_temporary_names)
    environment: dict[str, str] = field(default_factory=environment)
    handlers: dict[int, Any] = field(default_factory=signal_handlers)
    ray_holdings: set[str] = field(default_factory=ray_holdings)
    noise: _LoopNoise = field(default_factory=_LoopNoise)

    def __post_init__(self) -> None:
        logging.getLogger("asyncio").addHandler(self.noise)

    def close(self) -> None:
        """Stop listening."""
        logging.getLogger("asyncio").removeHandler(self.noise)

    def leaks(self, stderr: str = "", bound: float = BOUND_S) -> list[str]:
        """One line for everything that is left; waits up to `bound` seconds for what is about to end.

        Processes that are left are killed, so that the next test begins clean.
        """
        end = time.monotonic() + bound
        found = self._process_leaks(end) if self._settle(end) else []
        found += [f"thread {thread.name!r} still runs" for thread in self._new_threads()]
        found += [f"descriptor {fd} -> {link}" for fd, link in self._new_descriptors().items()]
        found += [f"/dev/shm/{name}" for name in self._new_shared_memory(end)]
        found += [f"temporary file {name}" for name in sorted(_temporary_names() - self.temporary)]
        found += self._new_ray_holdings(end)
        found += self._changed_settings()
        found += [f"asyncio said: {text}" for text in self.noise.texts if NOISE.search(text)]
        found += [f"on stderr: {line}" for line in stderr.splitlines() if NOISE.search(line)]
        return found

    def _settle(self, end: float) -> bool:
        """Wait for what is about to end; False if nothing is new.

        What nobody refers to any more is collected, again after each wait: a thread that ends may have held it.
        """
        if not (self._new_descriptors() or self._new_threads() or self._new_processes()):
            return False
        while time.monotonic() < end:
            gc.collect()
            if not (self._new_descriptors() or self._new_threads()):
                break
            threads = list(self._new_threads())
            for thread in threads:
                thread.join(0.1 / len(threads))
            if not threads:  # a descriptor sends no event when it is closed
                select.select([], [], [], 0.02)
        return True

    def _new_processes(self) -> set[int]:
        servers = {server.pid for server in _fork_servers()}
        new = (children_of(os.getpid()) | marked()) - self.processes - servers
        return new - ray_processes() if new else new

    def _process_leaks(self, end: float) -> list[str]:
        new = self._new_processes()
        if not new:
            return []
        left = await_gone(new, max(0.0, end - time.monotonic()))
        found = [f"process {describe_process(pid)}" for pid in sorted(left)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        zombies = children_of(os.getpid()) - left - self.processes - {server.pid for server in _fork_servers()}
        return found + [f"zombie {describe_process(pid)}" for pid in sorted(zombies) if self._is_our_zombie(pid)]

    @staticmethod
    def _is_our_zombie(pid: int) -> bool:
        """Only what this process itself has to reap; a fork server reaps its ranks in its own time."""
        try:
            with open(f"/proc/{pid}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            return False
        return state == "Z" and int(parent) == os.getpid()

    def _new_threads(self) -> set[threading.Thread]:
        return {thread for thread in our_threads() - self.threads if thread.is_alive()}

    def _new_descriptors(self) -> dict[int, str]:
        allowed = fork_server_fds()
        is_rays = (
            "socket:" if _ray() is not None else "\0"
        )  # it keeps connections to workers, and closes them when it likes
        return {
            fd: link
            for fd, link in open_descriptors().items()
            if self.descriptors.get(fd) != link and fd not in allowed and not link.startswith(is_rays)
        }

    def _new_shared_memory(self, end: float) -> list[str]:
        """Names that stay; another program's are its own business as long as it lives, or come and go."""
        new = set(_listdir("/dev/shm")) - self.shared_memory
        while new and time.monotonic() < end:
            new = {name for name in new if os.path.exists(f"/dev/shm/{name}")}
            new = {name for name in new if not _used_by_others(f"/dev/shm/{name}")}
            if new:
                select.select([], [], [], 0.05)  # a name sends no event when it goes
        return sorted(new)

    def _new_ray_holdings(self, end: float) -> list[str]:
        while (new := ray_holdings() - self.ray_holdings) and time.monotonic() < end:
            select.select([], [], [], 0.05)  # the cluster's table sends no event
        return sorted(new)

    def _changed_settings(self) -> list[str]:
        found = []
        now = environment()
        for name in sorted(now.keys() | self.environment.keys()):
            if now.get(name) != self.environment.get(name):
                found.append(f"os.environ[{name!r}] was {self.environment.get(name)!r} and is {now.get(name)!r}")
        for number, handler in signal_handlers().items():
            before = self.handlers[number]
            if handler != before and getattr(before, "__module__", "") != "pytest_timeout":  # unset when a test fails
                found.append(f"handler of signal {number} was {before!r} and is {handler!r}")
        return found


# -- tasks -------------------------------------------------------------------------------------------------------------


def guard_tasks(test: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The test, followed by a look at the loop: whatever task it began must have ended, or do so within a second."""

    @functools.wraps(test)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        before = asyncio.all_tasks()
        result = await test(*args, **kwargs)
        left = asyncio.all_tasks() - before
        if left:
            _, left = await asyncio.wait(left, timeout=1.0)
        assert not left, f"tasks still run: {sorted(task.get_name() for task in left)}"
        return result

    return guarded
