"""How the ranks of one executor find each other: a file store on anonymous memory, without a port or a name."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.errors import ConfigError
from mpexec.worker.gloo import patient_devices


def choose_device(spec: WorkerSpec, local_rank: int) -> str:
    """This rank's device: "cpu" or "cuda:<local_rank>".

    Raises:
        ConfigError: "cuda" was asked for and torch sees too few devices.
    """
    if spec.device == "cpu" or (spec.device == "auto" and not spec.init_process_group):
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= spec.world_size:
        torch.cuda.set_device(local_rank)
        return f"cuda:{local_rank}"
    if spec.device == "cuda":
        raise ConfigError(f"device='cuda' with {spec.world_size} ranks, but torch sees {count} CUDA devices here")
    return "cpu"


def set_threads(spec: WorkerSpec) -> int:
    """Give torch this rank's share of the cores; an OMP_NUM_THREADS of the user's wins."""
    import torch

    wanted = os.environ.get("OMP_NUM_THREADS", "")
    asked = int(wanted) if wanted.isdigit() else 0
    torch.set_num_threads(spec.threads or asked or spec.threads_per_rank())
    return torch.get_num_threads()


def join_process_group(spec: WorkerSpec, rank: int, device: str, store_fd: int) -> None:
    """Set up `torch.distributed` among the ranks; returns when all have joined.

    The store is a file on a memfd that all ranks inherited. gloo is bound to loopback unless an interface was chosen.
    """
    import torch.distributed as dist

    if device == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(  # type: ignore[attr-defined]  # missing from the stubs only
        f"/proc/self/fd/{store_fd}", spec.world_size
    )
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
