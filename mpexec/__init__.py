"""mpexec: one PyTorch model, split over several processes, driven from one Python program that hears of every failure.

Every name here is loaded on first use: `import mpexec` takes a few milliseconds, and torch stays out of the driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpexec.agent.base import ModelAgent
    from mpexec.config import EngineConfig, Topology, WorkerSpec
    from mpexec.engine.blocking import BlockingEngine
    from mpexec.engine.engine import Engine, SamplingParams
    from mpexec.errors import (
        ConfigError,
        ConnectionLostError,
        EngineStoppedError,
        ExecutorBrokenError,
        ExecutorStoppedError,
        MpexecError,
        QueueFullError,
        RemoteError,
        RemoteTraceback,
        RPCTimeoutError,
        SerializationError,
        StartupError,
        TaskEndedError,
        TransportError,
        WorkerDiedError,
        WrongStateError,
    )
    from mpexec.executor import build_executor
    from mpexec.executor.base import Executor, State
    from mpexec.executor.mp import MPExecutor
    from mpexec.executor.ray import RayExecutor
    from mpexec.executor.uni import UniExecutor
    from mpexec.mp_engine.engine_client import EngineClient
    from mpexec.mp_engine.zmq_engine import ZMQEngine
    from mpexec.processes import shutdown_fork_server
    from mpexec.worker.base_worker import BaseWorker

__version__ = "0.1.0"

_HOMES = {
    "agent.base": ("ModelAgent",),
    "config": ("EngineConfig", "Topology", "WorkerSpec"),
    "engine.blocking": ("BlockingEngine",),
    "engine.engine": ("Engine", "SamplingParams"),
    "errors": (
        "ConfigError", "ConnectionLostError", "EngineStoppedError", "ExecutorBrokenError", "ExecutorStoppedError",
        "MpexecError", "QueueFullError", "RPCTimeoutError", "RemoteError", "RemoteTraceback", "SerializationError",
        "StartupError", "TaskEndedError", "TransportError", "WorkerDiedError", "WrongStateError",
    ),
    "executor": ("build_executor",),
    "executor.base": ("Executor", "State"),
    "executor.mp": ("MPExecutor",),
    "executor.ray": ("RayExecutor",),
    "executor.uni": ("UniExecutor",),
    "mp_engine.engine_client": ("EngineClient",),
    "mp_engine.zmq_engine": ("ZMQEngine",),
    "processes": ("shutdown_fork_server",),
    "worker.base_worker": ("BaseWorker",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BaseWorker",
    "BlockingEngine",
    "ConfigError",
    "ConnectionLostError",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "EngineStoppedError",
    "Executor",
    "ExecutorBrokenError",
    "ExecutorStoppedError",
    "MPExecutor",
    "ModelAgent",
    "MpexecError",
    "QueueFullError",
    "RPCTimeoutError",
    "RayExecutor",
    "RemoteError",
    "RemoteTraceback",
    "SamplingParams",
    "SerializationError",
    "StartupError",
    "State",
    "TaskEndedError",
    "Topology",
    "TransportError",
    "UniExecutor",
    "WorkerDiedError",
    "WorkerSpec",
    "WrongStateError",
    "ZMQEngine",
    "build_executor",
    "shutdown_fork_server",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'mpexec' has no attribute {name!r}")
    value = getattr(import_module(f"mpexec.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
