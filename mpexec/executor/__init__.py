"""One call, N ranks, N replies: the executors, and the function that picks one."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from mpexec.config import WorkerSpec, split_options
from mpexec.errors import ConfigError
from mpexec.executor.base import Executor, make_spec

if TYPE_CHECKING:
    from mpexec.executor.ray import RayExecutor

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "uni", "mp", "ray")


def build_executor(agent: Callable[..., Any] | WorkerSpec, backend: str = "auto", **options: Any) -> Executor:
    """Make the executor that fits.

    "auto" takes `RayExecutor` where a cluster is named (`address`, or `RAY_ADDRESS`) or this machine has too few GPUs
    for the ranks, `UniExecutor` for one rank, else `MPExecutor`; it logs (level INFO) which and why.

    Args:
        agent: A `ModelAgent` class or a callable that makes one, or a whole `WorkerSpec`.
        backend: "auto", "uni", "mp" or "ray". "mp" warns as constructing `MPExecutor` does; "auto" is silent.
        options: Fields of `WorkerSpec`, and those of `RayOptions` where Ray is what is taken.

    Raises:
        ConfigError: An unknown backend, "uni" with more than one rank, "ray" without Ray, or a bad option.
        StartupError: A rank did not become ready.
    """
    spec, chosen, ray_options = _choose(agent, backend, options)
    if chosen == "ray":
        return _ray_executor()(spec, **ray_options)
    if chosen == "uni":
        from mpexec.executor.uni import UniExecutor

        return UniExecutor(spec)
    from mpexec.executor.mp import DEPRECATED, MPExecutor

    if backend == "mp":
        warnings.warn(DEPRECATED, DeprecationWarning, stacklevel=2)
    return MPExecutor(spec, _warn=False)


def build_executor_async(
    agent: Callable[..., Any] | WorkerSpec, backend: str = "auto", **options: Any
) -> Coroutine[Any, Any, Executor]:
    """As `build_executor`, without blocking the loop. Cancelling it ends the ranks that were started."""
    spec, chosen, ray_options = _choose(agent, backend, options)
    if chosen == "ray":
        return _ray_executor().create_async(spec, **ray_options)
    if chosen == "uni":
        from mpexec.executor.uni import UniExecutor

        return UniExecutor.create_async(spec)
    from mpexec.executor.mp import DEPRECATED, MPExecutor

    if backend == "mp":
        warnings.warn(DEPRECATED, DeprecationWarning, stacklevel=2)
    return MPExecutor.create_quietly(spec)


def _choose(
    agent: Callable[..., Any] | WorkerSpec, backend: str, options: Mapping[str, Any]
) -> tuple[WorkerSpec, str, dict[str, Any]]:
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}: use one of {', '.join(BACKENDS)}")
    own, ray_options = split_options(options)
    spec = make_spec(agent, {"world_size": 1, **own} if not isinstance(agent, WorkerSpec) else own)
    chosen, why = choose_backend(spec, backend, address=ray_options.get("address"))
    if ray_options and chosen != "ray":
        raise ConfigError(f"options {sorted(ray_options)} are for backend='ray', but the executor is {chosen!r}: {why}")
    logger.info("executor: %s, because %s", chosen, why)
    return spec, chosen, ray_options


def choose_backend(spec: WorkerSpec, backend: str = "auto", *, address: str | None = None) -> tuple[str, str]:
    """The backend for a spec, and the reason in words."""
    if backend != "auto":
        return backend, "it was asked for"
    if address is not None:
        return "ray", f"the address of a cluster was given: {address}"
    if os.environ.get("RAY_ADDRESS"):
        return "ray", f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']}"
    if spec.device == "cuda" and spec.world_size > (devices := local_devices()):
        return "ray", f"{spec.world_size} ranks need a GPU each, and this machine has {devices}"
    if spec.world_size == 1:
        return "uni", "one rank needs no process of its own"
    return "mp", f"{spec.world_size} ranks need a process each"


def local_devices() -> int:
    """CUDA devices that this process may use, counted without importing torch."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([device for device in shown.split(",") if device.strip() and device.strip() != "-1"])
    return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])


def _ray_executor() -> type[RayExecutor]:
    try:
        from mpexec.executor.ray import RayExecutor
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise ConfigError(str(missing)) from missing
    return RayExecutor


__all__ = ["BACKENDS", "Executor", "build_executor", "build_executor_async", "choose_backend"]
