"""gloo groups that cost nothing while they idle.

gloo's own thread looks round every 10 ms, which makes two idle ranks use 0.2 to 0.5 % of a core. The thread inherits
the timer slack of the one that makes its device, so a device made with a long slack has a thread that wakes ten times
less often; data that arrives wakes it at once as before. torch makes the device itself, just before it polls the store,
and that polling must not be late: so the device is made here, and handed over as torch's own tests do it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from mpexec.transport.linux import timer_slack

_SLACK_NS = 90_000_000


@contextlib.contextmanager
def patient_devices() -> Iterator[None]:
    """Groups that torch makes meanwhile, on this thread, get devices with patient threads; later ones are torch's own.

    A torch that has no such constructor makes its groups as ever.
    """
    import torch.distributed.distributed_c10d as c10d

    original: Any = c10d.ProcessGroupGloo
    if not (hasattr(original, "_Options") and hasattr(original, "create_device")):
        yield
        return

    class PatientGloo(original):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = original._Options()
            options._timeout = timeout
            with timer_slack(_SLACK_NS):
                names = os.environ["GLOO_SOCKET_IFNAME"].split(",")
                options._devices = [original.create_device(interface=name) for name in names]
            super().__init__(store, rank, size, options)

    PatientGloo.__name__ = PatientGloo.__qualname__ = original.__name__
    c10d.ProcessGroupGloo = PatientGloo  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = original  # type: ignore[misc]
