"""How the ranks of one executor find each other.

On one machine by a file store on anonymous memory, without a port or a name; across machines by a TCP store on a socket
that rank 0 has bound.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.errors import ConfigError
from mpexec.worker.gloo import patient_devices


def choose_device(spec: WorkerSpec, index: int, needed: int) -> str:
    """This rank's device: "cpu" or "cuda:<index>".

    Args:
        spec: What to run.
        index: The device of this rank, among those that this process sees.
        needed: Devices that this process must see.

    Raises:
        ConfigError: "cuda" was asked for and torch sees too few devices.
    """
    if spec.device == "cpu" or (spec.device == "auto" and not spec.init_process_group):
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= needed:
        torch.cuda.set_device(index)
        return f"cuda:{index}"
    if spec.device == "cuda":
        raise ConfigError(f"device='cuda' needs {needed} CUDA devices here, but torch sees {count}")
    return "cpu"


def set_threads(spec: WorkerSpec) -> int:
    """Give torch this rank's share of the cores; an OMP_NUM_THREADS of the user's wins."""
    import torch

    wanted = os.environ.get("OMP_NUM_THREADS", "")
    asked = int(wanted) if wanted.isdigit() else 0
    torch.set_num_threads(spec.threads or asked or spec.threads_per_rank())
    return torch.get_num_threads()


def file_store(fd: int, spec: WorkerSpec) -> Any:
    """The store on a memfd that all ranks of this machine have inherited."""
    import torch.distributed as dist

    return dist.FileStore(f"/proc/self/fd/{fd}", spec.world_size)  # type: ignore[attr-defined]  # the stubs lack it


def tcp_store(address: tuple[str, int], spec: WorkerSpec, listening: int | None = None) -> Any:
    """The store behind a socket of rank 0.

    Args:
        address: Host and port of that socket.
        spec: How many ranks there are, and how long to wait for rank 0.
        listening: The descriptor of the bound, listening socket: on rank 0 only, which serves the store.
    """
    import torch.distributed as dist

    host, port = address
    return dist.TCPStore(  # type: ignore[attr-defined]  # as above
        host,
        port,
        spec.world_size,
        is_master=listening is not None,
        timeout=timedelta(seconds=spec.init_timeout),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def join_process_group(
    spec: WorkerSpec, rank: int, device: str, store: Any, *, interface: Callable[[], str] | None = None
) -> None:
    """Set up `torch.distributed` among the ranks; returns when all have joined.

    Args:
        interface: Names the network interface that reaches the other ranks; asked where the user has chosen none. None
            where all ranks are on this machine.
    """
    import torch.distributed as dist

    if device == "cpu":
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if interface is None else interface()
    elif interface is not None and "NCCL_SOCKET_IFNAME" not in os.environ:  # on one machine NCCL knows better ways
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface()}"  # exactly this one, not all that begin so
    with patient_devices() if device == "cpu" else contextlib.nullcontext():
        dist.init_process_group(
            backend="gloo" if device == "cpu" else "nccl",
            store=store,
            rank=rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=spec.collective_timeout),
        )


def leave_process_group() -> None:
    """Take NCCL's communicators down after a clean stop. Never called on a failure path, where peers may be gone.

    Where there is no CUDA, all groups are of gloo or the like and end with this process, which ends next: taking a
    gloo group down waits for its thread, once for each peer.
    """
    dist = _distributed()
    if dist is not None and (dist.get_backend() != "gloo" or sys.modules["torch"].cuda.is_initialized()):
        dist.destroy_process_group()


def abort_process_groups() -> None:
    """End collectives that this rank sits in, where the backend can: NCCL. gloo stays in them."""
    dist = _distributed()
    if dist is not None and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


def _distributed() -> Any:
    """`torch.distributed` if it has been imported and has a default group, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
