"""Programs that check many sentences in one cluster, and what became of each.

A cluster takes seconds to start, so that one serves a whole file. The program says in a line of JSON how each check
came out; to the tests each is one of theirs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import leaks
import pytest
import ray
from ray.util import state

from mpexec import RayExecutor
from on_ray.agents import Agent

FOLDER = Path(__file__).parent
MARKER = "MPEXEC_ON_RAY"
SECONDS = 200.0
GONE_S = 3.0
OPTIONS = {"world_size": 2, "device": "cpu", "init_process_group": False, "init_timeout": 60.0}

Check = Callable[[], Any]


# -- in the program ----------------------------------------------------------------------------------------------------

_made: list[RayExecutor] = []


def make(agent: Any = Agent, **options: Any) -> RayExecutor:
    """An executor of two ranks on this program's cluster; it is released after the check at the latest."""
    executor = RayExecutor(agent, **{**OPTIONS, **options})
    _made.append(executor)
    return executor


def adopt(executor: RayExecutor) -> RayExecutor:
    """As if `make` had made it."""
    _made.append(executor)
    return executor


class Checks:
    """The checks of one program, in order. Used as a decorator; `over` makes one of each case."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self._slow: set[str] = set()

    def __call__(self, check: Check) -> Check:
        self._checks[check.__name__] = check
        return check

    def over(self, *cases: tuple[Any, ...], slow: Iterable[tuple[Any, ...]] = ()) -> Callable[..., Any]:
        """One check of each case; those in `slow` show little that the others do not."""

        def add(check: Callable[..., Any]) -> Callable[..., Any]:
            for case in cases:
                self._checks[_name(check, case)] = partial(check, *case)
            self._slow |= {_name(check, case) for case in slow}
            assert self._slow <= self._checks.keys()
            return check

        return add

    @property
    def sentences(self) -> list[Any]:
        """All of them, as parameters of a test."""
        return [pytest.param(name, marks=[pytest.mark.slow] if name in self._slow else []) for name in self._checks]

    def run(self, cluster: contextlib.AbstractContextManager[Any], *, watched: bool = True) -> None:
        """Run those that the command line names, or all; `watched` looks for what each leaves in the cluster."""
        faulthandler.dump_traceback_later(SECONDS * 0.95, exit=True)
        chosen = sys.argv[1:] or list(self._checks)
        with cluster:
            for name in chosen:
                _say(name, self._checks[name], watched)
        faulthandler.cancel_dump_traceback_later()


def _name(check: Callable[..., Any], case: tuple[Any, ...]) -> str:
    return f"{check.__name__}[{'-'.join(str(part) for part in case)}]"


def _say(name: str, check: Check, watched: bool) -> None:
    began, facts, failure = time.monotonic(), None, ""
    try:
        with _nothing_left() if watched else contextlib.nullcontext():
            facts = check()
    except BaseException:  # each check is heard of, and the next one runs
        failure = traceback.format_exc()
    seconds = round(time.monotonic() - began, 2)
    print(json.dumps({"check": name, "facts": facts, "failure": failure, "seconds": seconds}), flush=True)


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """Release what `make` has made, and see that the cluster and this process are as they were before."""
    actors, groups = _live_actors(), _live_groups()
    environment, handlers, descriptors = dict(os.environ), _handlers(), _our_descriptors()
    pids: list[int] = []
    try:
        yield
    finally:
        while _made:
            executor = _made.pop()
            pids += executor.pids
            executor.release()
    assert ray.is_initialized(), "the user's own connection to the cluster is gone"
    assert not (left := leaks.await_gone(pids, GONE_S)), f"ranks still run: {left}"
    await_none(lambda: _live_actors() - actors, "actors")
    await_none(lambda: _live_groups() - groups, "placement groups")
    await_none(_our_threads, "threads")
    await_none(lambda: _our_descriptors() - descriptors, "descriptors")
    assert dict(os.environ) == environment
    assert _handlers() == handlers


def await_none(find: Callable[[], Any], what: str, seconds: float = GONE_S) -> None:
    """Wait until there are none; what a remote service tells has no event to wait for."""
    end = time.monotonic() + seconds
    while left := find():
        assert time.monotonic() < end, f"{what} left: {left}"
        time.sleep(0.02)


def cluster_address() -> str:
    """Of the cluster that this process is connected to; others may run on this machine."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def _live_actors() -> set[str]:
    rows = state.list_actors(address=cluster_address(), limit=10_000)
    return {row.actor_id for row in rows if row.state != "DEAD"}


def _live_groups() -> set[str]:
    rows = state.list_placement_groups(address=cluster_address(), limit=10_000)
    return {row.placement_group_id for row in rows if row.state != "REMOVED"}


def _our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("mpexec")}


def _our_descriptors() -> set[tuple[int, str]]:
    wanted = ("anon_inode:[pidfd]", "/memfd:mpexec")
    return {(fd, link) for fd, link in leaks.open_descriptors().items() if link.startswith(wanted)}


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


@contextlib.contextmanager
def local_cluster(**options: Any) -> Iterator[None]:
    """A cluster of one node, as a user's program would start it."""
    ray.init(address="local", include_dashboard=True, log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def on_log(logger: str, text: str, act: Callable[[], Any]) -> Iterator[threading.Event]:
    """Call `act` at the first line of this logger that has the text; the event tells that it has been called."""
    called = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage() and not called.is_set():
                called.set()
                act()

    source, listener = logging.getLogger(logger), Listener()
    before = source.level
    source.addHandler(listener)
    source.setLevel(logging.INFO)
    try:
        yield called
    finally:
        source.removeHandler(listener)
        source.setLevel(before)


# -- around the program ------------------------------------------------------------------------------------------------


class Program:
    """A program of this folder, run from beginning to end or until it is killed.

    Its temporary files have a folder of their own: Ray puts sockets there, whose paths must be short.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="mpx", dir="/tmp")
        self._family: set[int] = set()
        root = FOLDER.parents[1]
        with open(f"{self._folder}/stderr", "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-B", str(FOLDER / script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
                    "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
                    "TMPDIR": self._folder,
                    "RAY_TMPDIR": self._folder,
                    "RAY_AUTH_MODE": "disabled",
                    "RAY_USAGE_STATS_ENABLED": "0",
                    MARKER: self._folder,
                },
                start_new_session=True,
            )

    def lines(self) -> Iterator[Any]:
        """What it says, until its end. What Ray says of dead workers there is passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("{", "[")):
                yield json.loads(line)

    def hear(self) -> Any:
        """The next thing that it says."""
        for said in self.lines():
            return said
        raise AssertionError(f"it ended: {self.stderr}")

    def end(self, seconds: float = SECONDS) -> int:
        """Wait for its end; the exit status."""
        return self.process.wait(seconds)

    @property
    def stderr(self) -> str:
        """All that it and its ranks wrote there."""
        return Path(f"{self._folder}/stderr").read_text(errors="replace")

    def family(self) -> set[int]:
        """Every process that has come from it, also those that have left its session, itself excepted.

        Those that change their title may lose the marker with it: what has been seen once is remembered.
        """
        wanted = f"{MARKER}={self._folder}\0".encode()
        self._family |= leaks.children_of(self.process.pid)
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self.process.pid:
                with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read() + b"\0":
                        self._family.add(int(name))
        return {pid for pid in self._family if not leaks.is_gone(pid)}

    def close(self) -> None:
        """Kill whatever is left of it, and remove its files."""
        if self.process.poll() is None:
            self.family()
            self.process.kill()
        self.process.wait()
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leaks.await_gone(self.family(), GONE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Outcomes:
    """How the checks of one program came out, and how it ended."""

    def __init__(self, script: str, names: Iterable[str]) -> None:
        program = Program(script, *names)
        try:
            self._said = {}
            for said in program.lines():
                self._said[said["check"]] = said
                program.family()
            self.status = program.end()
            self.left = [leaks.describe_process(pid) for pid in leaks.await_gone(program.family(), 2 * GONE_S)]
            self.stderr = program.stderr
        finally:
            program.close()

    def check(self, name: str) -> Any:
        """Fail as the check has failed; its facts."""
        assert name in self._said, f"the program ended before, with status {self.status}:\n{self.stderr[-4000:]}"
        said = self._said[name]
        print(f"{name}: {said['seconds']} s, {said['facts']}")
        if said["failure"]:
            pytest.fail(said["failure"], pytrace=False)
        return said["facts"]

    def check_end(self) -> None:
        """The program ended well, its cluster and all else with it, and nothing was said about leaks."""
        assert self.status == 0, self.stderr[-4000:]
        assert not self.left
        assert not leaks.NOISE.search(self.stderr), self.stderr[-4000:]
        assert "Traceback" not in self.stderr, self.stderr[-4000:]


def outcomes_of(script: str, request: pytest.FixtureRequest) -> Outcomes:
    """Run a program with the checks that this session has selected."""
    module, names = request.module.__name__, []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module.__name__ == module and hasattr(item, "callspec"):
            names.append(item.callspec.params["sentence"])
    return Outcomes(script, names)
