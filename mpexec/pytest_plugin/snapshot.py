"""The state of the process before a test, and what is new after it: processes, threads, descriptors, settings, noise.

What ends by itself (a process that dies, a thread that returns) is waited for by event and within a bound; what is
clean at once costs about a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import functools
import gc
import logging
import os
import re
import select
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mpexec.pytest_plugin.proc import (
    await_gone,
    children_of,
    describe_process,
    is_used_by_others,
    list_folder,
    open_descriptors,
    server_fds,
    server_pids,
    state_of,
)

BOUND_S = 3.0
NOISE = re.compile(
    r"leaked|never retrieved|Exception ignored|was destroyed but it is pending|was never awaited|could not acquire lock"
)
REMEDIES = {
    "process": "end it and wait for it before the test ends; it has been killed now",
    "zombie": "wait for it: process.wait() or os.waitpid",
    "thread": "join it, or close what has started it",
    "descriptor": "close it, or use `with`",
    "shared memory": "unlink it",
    "environment": "use monkeypatch.setenv or delenv",
    "signal handler": "put it back: signal.signal(...)",
    "task": "await it, or cancel it and await that",
    "noise": "await or close the object that is named",
}
_UNRELEASED = "release the executor or engine it belongs to: use mp_executor, `with`, or release()"
_PYTEST_VARIABLES = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION")


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that is left: its kind, a key of `REMEDIES` or another word, and what is known of it."""

    kind: str
    what: str

    def __str__(self) -> str:
        remedy = REMEDIES.get(self.kind)
        if self.kind in ("process", "thread") and "mpexec" in self.what:
            remedy = _UNRELEASED
        return f"{self.kind} {self.what}" + (f"; {remedy}" if remedy else "")


class Snapshot:
    """The state as of now; `leaks` tells what is new since. A subclass may look at more, or overlook more."""

    def __init__(self) -> None:
        self._allowed: list[tuple[str, str]] = []
        self._tasks: set[str] = set()
        self._processes = self.processes()
        self._descriptors = open_descriptors()
        self._threads = self.threads()
        self._shared_memory = set(list_folder("/dev/shm"))
        self._environment = _environment()
        self._handlers = _signal_handlers()
        self._noise = _LoopNoise()
        logging.getLogger("asyncio").addHandler(self._noise)

    def close(self) -> None:
        """Stop listening."""
        logging.getLogger("asyncio").removeHandler(self._noise)

    # -- what a subclass may change ------------------------------------------------------------------------------------

    def processes(self) -> set[int]:
        """Processes that come from this one."""
        return children_of(os.getpid())

    def threads(self) -> set[threading.Thread]:
        """Threads that have to end. Those of a loop's default executor end with their loop."""
        return {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}

    def overlooks(self, pid: int) -> bool:
        """True for a process that may stay."""
        return False

    def overlooks_descriptor(self, link: str) -> bool:
        """True for a descriptor that may stay; `link` is what it refers to."""
        return False

    def more(self, end: float) -> Iterable[Leak]:
        """Further leaks; waits until `end` (monotonic seconds) for what is about to go."""
        return ()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def watch_tasks(self, test: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """The test, followed by a look at the loop: a task that it began must end within a second after it."""

        @functools.wraps(test)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            before = asyncio.all_tasks()
            result = await test(*args, **kwargs)
            left = asyncio.all_tasks() - before
            if left:
                _, left = await asyncio.wait(left, timeout=1.0)
            self._tasks |= {repr(task.get_name()) for task in left}
            return result

        return watched

    # -- the comparison ------------------------------------------------------------------------------------------------

    def allow(self, kind: str, matching: str = "*") -> None:
        """Overlook leaks of this kind whose description matches a pattern of the shell's."""
        self._allowed.append((kind, matching))

    def _is_allowed(self, leak: Leak) -> bool:
        return any(kind == leak.kind and fnmatch.fnmatchcase(leak.what, matching) for kind, matching in self._allowed)

    def leaks(self, stderr: str = "") -> list[Leak]:
        """All that is left and not allowed; waits up to `BOUND_S` seconds for what is about to end.

        Processes that are left are killed, so that the next test begins clean.

        Args:
            stderr: What the test wrote there and through logging.
        """
        end = time.monotonic() + BOUND_S
        found = self._process_leaks(end) if self._settle(end) else []
        found += [_thread_leak(thread) for thread in self._new_threads()]
        found += _in_short([_descriptor_leak(fd, link) for fd, link in self._new_descriptors().items()])
        found += [Leak("shared memory", f"/dev/shm/{name}") for name in self._new_shared_memory(end)]
        found += self.more(end)
        found += self._changed_settings()
        found += [Leak("task", f"{name} still runs") for name in sorted(self._tasks)]
        found += self._noise_leaks(stderr)
        return [leak for leak in found if not self._is_allowed(leak)]

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
        new = self.processes() - self._processes - server_pids()
        return {pid for pid in new if not self.overlooks(pid) and not self._is_allowed(_process_leak(pid))}

    def _process_leaks(self, end: float) -> list[Leak]:
        new = self._new_processes()
        left = await_gone(new, max(0.0, end - time.monotonic())) if new else set()
        found = [_process_leak(pid) for pid in sorted(left)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Only what this process itself has to reap; a fork server reaps its ranks in its own time.
        zombies = [pid for pid in sorted(new - left) if state_of(pid) == ("Z", os.getpid())]
        return found + [Leak("zombie", describe_process(pid)) for pid in zombies]

    def _new_threads(self) -> set[threading.Thread]:
        new = {thread for thread in self.threads() - self._threads if thread.is_alive()}
        return {thread for thread in new if not self._is_allowed(_thread_leak(thread))}

    def _new_descriptors(self) -> dict[int, str]:
        servers = server_fds()
        return {
            fd: link
            for fd, link in open_descriptors().items()
            if self._descriptors.get(fd) != link
            and fd not in servers
            and not self.overlooks_descriptor(link)
            and not self._is_allowed(_descriptor_leak(fd, link))
        }

    def _new_shared_memory(self, end: float) -> list[str]:
        """Names that stay; another program's are its own business as long as it lives, or come and go."""
        new = set(list_folder("/dev/shm")) - self._shared_memory
        while True:
            ours = self.processes() | {os.getpid()}
            new = {name for name in new if _is_of_this_user(f"/dev/shm/{name}")}
            new = {name for name in new if not is_used_by_others(f"/dev/shm/{name}", ours)}
            if not new or time.monotonic() >= end:
                return sorted(new)
            select.select([], [], [], 0.05)  # a name sends no event when it goes

    def _noise_leaks(self, stderr: str) -> list[Leak]:
        said = [text for text in self._noise.texts if NOISE.search(text)]
        found = [Leak("noise", f"of asyncio: {' '.join(text.split())}") for text in said]
        firsts = [text.splitlines()[0] for text in said]  # these are in the captured log too
        lines = [line for line in stderr.splitlines() if NOISE.search(line) and not any(map(line.count, firsts))]
        return found + [Leak("noise", f"on stderr: {line}") for line in lines]

    def _changed_settings(self) -> list[Leak]:
        found = []
        now = _environment()
        for name in sorted(now.keys() | self._environment.keys()):
            if now.get(name) != self._environment.get(name):
                was = f"{name} was {self._environment.get(name)!r} and is {now.get(name)!r}"
                found.append(Leak("environment", was))
        for number, handler in _signal_handlers().items():
            before = self._handlers[number]
            if handler != before and getattr(before, "__module__", "") != "pytest_timeout":  # unset when a test fails
                found.append(Leak("signal handler", f"of {_signal_name(number)} was {before!r} and is {handler!r}"))
        return found


class _LoopNoise(logging.Handler):
    """What asyncio says through logging when nobody retrieves an error or a task is lost."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _process_leak(pid: int) -> Leak:
    return Leak("process", describe_process(pid))


def _thread_leak(thread: threading.Thread) -> Leak:
    return Leak("thread", f"{thread.name!r} still runs")


def _descriptor_leak(fd: int, link: str) -> Leak:
    return Leak("descriptor", f"{fd} -> {link}")


def _is_of_this_user(path: str) -> bool:
    """True if there is such a file and it is ours: of another user's processes /proc does not show what they use."""
    with contextlib.suppress(OSError):
        return os.stat(path, follow_symlinks=False).st_uid == os.geteuid()
    return False


def _in_short(descriptors: list[Leak]) -> list[Leak]:
    """An executor that is left has twenty of them: the first three will do."""
    if len(descriptors) <= 4:
        return descriptors
    shown = ", ".join(leak.what for leak in descriptors[:3])
    return [Leak("descriptor", f"{shown} and {len(descriptors) - 3} more")]


def _environment() -> dict[str, str]:
    """The variables, without those that pytest itself changes."""
    return {name: value for name, value in os.environ.items() if name not in _PYTEST_VARIABLES}


def _signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
