"""What a test of ours must not leave behind, beyond what the plugin sees: orphans, temporary files, Ray's things."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpexec.pytest_plugin import snapshot
from mpexec.pytest_plugin.proc import (
    await_gone,
    children_of,
    describe_process,
    is_gone,
    list_folder,
    open_descriptors,
)
from mpexec.pytest_plugin.snapshot import NOISE, Leak

__all__ = [
    "NOISE",
    "Snapshot",
    "await_gone",
    "children_of",
    "describe_process",
    "is_gone",
    "mark_session",
    "marked",
    "open_descriptors",
    "remove_session",
]

MARKER = "MPEXEC_TEST_SESSION"
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


def marked() -> set[int]:
    """Processes that were started with this session's marker in their environment."""
    wanted = f"{MARKER}={_own_marker}\0".encode()
    found: set[int] = set()
    for name in list_folder("/proc"):
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


# -- the comparison ----------------------------------------------------------------------------------------------------


class Snapshot(snapshot.Snapshot):
    """The state of the process and of the machine before a test of ours."""

    def __init__(self) -> None:
        super().__init__()
        self._temporary = _temporary_names()
        self._ray_holdings = ray_holdings()

    def processes(self) -> set[int]:
        """Also those whose parents have gone."""
        return super().processes() | marked()

    def threads(self) -> set[threading.Thread]:
        """Threads that carry this package's name; what other threads the tests use is their own business."""
        return {thread for thread in threading.enumerate() if _OURS.match(thread.name)}

    def overlooks(self, pid: int) -> bool:
        """Ray's workers come and go as it likes."""
        return pid in ray_processes()

    def overlooks_descriptor(self, link: str) -> bool:
        """Ray keeps connections to workers, and closes them when it likes."""
        return link.startswith("socket:") and _ray() is not None

    def more(self, end: float) -> Iterable[Leak]:
        """Temporary files, and what is held of a Ray cluster."""
        for name in sorted(_temporary_names() - self._temporary):
            yield Leak("temporary file", name)
        while (new := ray_holdings() - self._ray_holdings) and time.monotonic() < end:
            select.select([], [], [], 0.05)  # the cluster's table sends no event
        for name in sorted(new):
            yield Leak("Ray", name)


def _temporary_names() -> set[str]:
    return {name for name in list_folder(tempfile.gettempdir()) if not name.startswith("pytest-of-")}
