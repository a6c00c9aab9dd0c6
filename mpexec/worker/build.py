"""Making a rank's worker, however its process came to be: device, threads, process group, agent, model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.worker.base_worker import BaseWorker
from mpexec.worker.rendezvous import choose_device, set_threads


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits.

    Attributes:
        local_rank: Its place among the executor's ranks on its machine.
        device_index: Index of its CUDA device among those that its process sees.
        devices_needed: CUDA devices that its process must see for "auto" to choose CUDA.
    """

    rank: int
    local_rank: int
    device_index: int
    devices_needed: int


def build_worker(
    spec: WorkerSpec,
    seat: Seat,
    *,
    join: Callable[[str], None],
    put_output: Callable[[Any], None],
    report: Callable[[str], None],
) -> tuple[BaseWorker, dict[str, Any]]:
    """Make the worker and let it build its model.

    Args:
        spec: What to run.
        seat: Where this rank sits.
        join: Sets up `torch.distributed` on the device it is given; called where the spec asks for a group.
        put_output: Sends one output to the driver.
        report: Tells the driver how far the start is.

    Returns:
        The worker, and facts for `describe`.
    """
    threads = 0
    if spec.init_process_group or spec.device == "cuda":
        report("import torch")
        import torch  # noqa: F401
    report("device")
    device = choose_device(spec, seat.device_index, seat.devices_needed)
    if "torch" in sys.modules:
        threads = set_threads(spec)
    if spec.init_process_group and spec.world_size > 1:
        report("rendezvous")
        join(device)
    streams = sys.stdout, sys.stderr
    worker: BaseWorker = (spec.worker_cls or BaseWorker)(
        spec, rank=seat.rank, local_rank=seat.local_rank, device=device, put_output=put_output, report=report
    )
    worker.build_model()
    sys.stdout, sys.stderr = streams  # some libraries silence ranks above 0 by replacing them
    return worker, {"device": device, "threads": threads, "python": sys.version.split()[0]}
