"""The torch profiler on one rank. Both functions are sent to the ranks as callables, and run where the steps run."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

from mpexec.errors import ConfigError
from mpexec.worker.base_worker import BaseWorker

_running: weakref.WeakKeyDictionary[BaseWorker, Any] = weakref.WeakKeyDictionary()
_QUIET = ("KINETO_LOG_LEVEL", "99")  # else it says on stderr that it has begun


def start_profile(worker: BaseWorker, record_shapes: bool, with_stack: bool) -> None:
    """Record every operator that this thread runs, and on CUDA every kernel, until `stop_profile`.

    Raises:
        ConfigError: This rank records already, or its process has no torch.
    """
    if worker in _running:
        raise ConfigError("the ranks are being profiled already: stop that first")
    try:
        # Not `torch.profiler`, whose start imports eight hundred modules and takes a second.
        from torch.autograd import profiler
    except ModuleNotFoundError:
        raise ConfigError("torch is not installed: there is nothing to profile") from None
    device = "cuda" if worker.device.startswith("cuda") else None
    recorder = profiler.profile(use_device=device, use_kineto=True, record_shapes=record_shapes, with_stack=with_stack)
    before = os.environ.get(_QUIET[0])
    os.environ.setdefault(*_QUIET)
    try:
        recorder.__enter__()
    finally:
        if before is None:
            del os.environ[_QUIET[0]]
    _running[worker] = recorder


def discard_profile(worker: BaseWorker) -> None:
    """End the recording, if there is one, and forget it."""
    recorder = _running.pop(worker, None)
    if recorder is not None:
        recorder.__exit__(None, None, None)


def stop_profile(worker: BaseWorker) -> bytes:
    """End the recording and return it as a chrome trace.

    Raises:
        ConfigError: This rank does not record.
    """
    recorder = _running.pop(worker, None)
    if recorder is None:
        raise ConfigError("the ranks are not being profiled")
    recorder.__exit__(None, None, None)
    with tempfile.TemporaryDirectory(prefix="mpexec-trace-") as folder:
        file = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(file))
        return file.read_bytes()
