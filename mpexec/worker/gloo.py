"""gloo groups that cost nothing while they idle.

gloo's own thread looks round every 10 ms, which makes two idle ranks use 0.2 to 0.5 % of a core. The thread inherits
the timer slack of the one that makes its device, so a device made with a long slack has a thread that wakes a dozen
times less often; data that arrives wakes it at once as before. torch makes the device itself, just before it polls the
store, and that polling must not be late: so the device is made here, and handed over as torch's own tests do it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from mpexec.transport.linux import timer_slack

logger = logging.getLogger(__name__)

_SLACK_NS = 120_000_000


@contextlib.contextmanager
def patient_devices() -> Iterator[None]:
    """Groups that torch makes meanwhile, on this thread, get devices with patient threads; later ones are torch's own.

    A torch that does it otherwise makes its groups as ever.
    """
    import torch.distributed.distributed_c10d as c10d

    original: Any = getattr(c10d, "ProcessGroupGloo", None)
    if original is None:
        yield
        return

    class PatientGloo(original):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, **options: Any) -> None:
            patient = _patient_options(original, **options)
            if patient is None:
                super().__init__(store, rank, size, **options)
            else:
                super().__init__(store, rank, size, patient)

    PatientGloo.__name__ = PatientGloo.__qualname__ = original.__name__
    c10d.ProcessGroupGloo = PatientGloo  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = original  # type: ignore[misc]


def _patient_options(gloo: Any, **given: Any) -> Any:
    """Options with a device on the one interface that was chosen; None for what torch is to do by itself."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(interface) < 2 or "," in interface or given.keys() != {"timeout"}:
        return None
    try:
        options = gloo._Options()
        options._timeout = given["timeout"]
        with timer_slack(_SLACK_NS):
            options._devices = [gloo.create_device(interface=interface)]
    except (AttributeError, TypeError):
        logger.debug("this torch makes its gloo devices otherwise", exc_info=True)
        return None
    return options
