"""What this machine is like, as far as mpexec cares: facts that are read, without judgement."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from mpexec.cli.child import run_python

_TORCH_S = 60.0  # to import torch and to ask for its devices, on a machine that is busy
_TORCH_FACTS = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    "devices": [
        {"name": torch.cuda.get_device_name(index), "free": free, "total": total}
        for index in range(torch.cuda.device_count() if cuda else 0)
        for free, total in [torch.cuda.mem_get_info(index)]
    ],
}))
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory: of the machine, free for new programs, and what this control group may use (None: no limit)."""

    total: int
    available: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of the machine, those that this process may use, and its control group's quota in cores (None: none)."""

    total: int
    usable: int
    quota: float | None


def read_cores() -> Cores:
    """The cores of this moment."""
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), _cpu_quota(Path("/sys/fs/cgroup"), _own_group()))


def read_memory() -> Memory:
    """The memory of this moment."""
    kilobytes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        kilobytes[name] = int(value.split()[0])
    limit = _memory_limit(Path("/sys/fs/cgroup"), _own_group())
    return Memory(kilobytes["MemTotal"] * 1024, kilobytes["MemAvailable"] * 1024, limit)


def read_limits() -> tuple[int, int]:
    """How many descriptors a process may open: the soft and the hard limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def read_versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """The installed versions of distributions; None for those that are not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def read_torch() -> dict[str, Any]:
    """What torch says of itself and of its devices, in a process of its own; {"error": ...} where it does not."""
    try:
        done = run_python(_TORCH_FACTS, capture_output=True, timeout=_TORCH_S)
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch takes more than {_TORCH_S:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1]}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def has_gpu_driver() -> bool:
    """True where the kernel has a driver for NVIDIA's or AMD's devices."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()


def kernel_release() -> str:
    """For example "6.1.0-18-amd64"."""
    return platform.release()


# -- kernel calls ------------------------------------------------------------------------------------------------------


def _try_memfd() -> None:
    """A memory file, mapped, with a hole, opened again by another process's way (as the ranks' rendezvous does)."""
    from mpexec.transport import linux

    with linux_fd(linux.memfd_create("mpexec-doctor", 8192)) as fd:
        mapping = linux.Mapping(fd, 8192)
        mapping.view()[:4] = b"mpex"
        linux.punch_hole(fd, 4096, 4096)
        with open(f"/proc/self/fd/{fd}", "rb") as again:
            if again.read(4) != b"mpex":
                raise OSError("a mapped page and the file differ")


def _try_eventfd() -> None:
    from mpexec.transport import linux

    with linux_fd(linux.eventfd()) as fd:
        linux.ring_eventfd(fd)
        linux.drain_eventfd(fd)


def _try_pidfd() -> None:
    from mpexec.transport import linux

    with linux_fd(linux.pidfd_open(os.getpid())) as fd:
        linux.pidfd_send_signal(fd, 0)


def _try_death_pipe() -> None:
    """The pipe by which the kernel ends the ranks of a driver that is gone."""
    import fcntl

    readable, writable = os.pipe()
    try:
        f_setsig = 10
        fcntl.fcntl(readable, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(readable, f_setsig, signal.SIGURG)  # it never comes: both ends are closed in order below
        fcntl.fcntl(readable, fcntl.F_SETFL, fcntl.fcntl(readable, fcntl.F_GETFL) | os.O_ASYNC)
        fcntl.fcntl(readable, fcntl.F_SETFL, fcntl.fcntl(readable, fcntl.F_GETFL) & ~os.O_ASYNC)
    finally:
        os.close(readable)
        os.close(writable)


def _try_send_fds() -> None:
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [0])
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        for fd in fds:
            os.close(fd)


def _try_waitid() -> None:
    """The end of a child by its pidfd, with its exit status still there to be read."""
    if not hasattr(os, "P_PIDFD"):
        raise OSError("this Python was built without waitid on pidfds")


@contextlib.contextmanager
def linux_fd(fd: int) -> Any:
    """A descriptor for the length of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


PROBES: Mapping[str, Callable[[], None]] = {
    "memfd_create": _try_memfd,
    "eventfd": _try_eventfd,
    "pidfd_open": _try_pidfd,
    "waitid on pidfds": _try_waitid,
    "F_SETSIG on a pipe": _try_death_pipe,
    "SCM_RIGHTS": _try_send_fds,
}


# -- control groups ----------------------------------------------------------------------------------------------------


def _own_group() -> str:
    """This process's control group (version 2) as a path from the root of its mount."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line[3:].lstrip("/")
    return ""


def _files(root: Path, group: str, name: str) -> list[Path]:
    """A group's file and those of the groups above it, which bound it as well."""
    at = root / group
    folders = [at, *at.parents]
    return [folder / name for folder in folders[: folders.index(root) + 1]]


def _cpu_quota(root: Path, group: str) -> float | None:
    quotas = []
    for file in _files(root, group, "cpu.max"):
        with contextlib.suppress(OSError, ValueError):
            most, period = file.read_text().split()
            if most != "max":
                quotas.append(int(most) / int(period))
    with contextlib.suppress(OSError, ValueError):  # version 1
        most_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        if most_us > 0:
            quotas.append(most_us / int((root / "cpu/cpu.cfs_period_us").read_text()))
    return min(quotas, default=None)


def _memory_limit(root: Path, group: str) -> int | None:
    limits = []
    for file in [*_files(root, group, "memory.max"), root / "memory/memory.limit_in_bytes"]:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(file.read_text()))  # "max" is no number
    return min((limit for limit in limits if limit < 1 << 60), default=None)
