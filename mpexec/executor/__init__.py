"""One call, N ranks, N replies: the executors, and the function that picks one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.errors import ConfigError
from mpexec.executor.base import Executor, make_spec

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "uni", "mp")


def build_executor(agent: Callable[..., Any] | WorkerSpec, backend: str = "auto", **options: Any) -> Executor:
    """Make the executor that fits.

    "auto" takes `UniExecutor` for one rank and `MPExecutor` for more, and logs (level INFO) which and why.

    Args:
        agent: A `ModelAgent` class or a callable that makes one, or a whole `WorkerSpec`.
        backend: "auto", "uni" or "mp". "mp" warns as constructing `MPExecutor` does; "auto" is silent.
        options: Fields of `WorkerSpec`.

    Raises:
        ConfigError: An unknown backend, "uni" with more than one rank, or a bad option.
        StartupError: A rank did not become ready.
    """
    spec, chosen = _choose(agent, backend, options)
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
    spec, chosen = _choose(agent, backend, options)
    if chosen == "uni":
        from mpexec.executor.uni import UniExecutor

        return UniExecutor.create_async(spec)
    from mpexec.executor.mp import DEPRECATED, MPExecutor

    if backend == "mp":
        warnings.warn(DEPRECATED, DeprecationWarning, stacklevel=2)
    return MPExecutor.create_quietly(spec)


def _choose(agent: Callable[..., Any] | WorkerSpec, backend: str, options: Mapping[str, Any]) -> tuple[WorkerSpec, str]:
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}: use one of {', '.join(BACKENDS)}")
    spec = make_spec(agent, {"world_size": 1, **options} if not isinstance(agent, WorkerSpec) else options)
    chosen, why = choose_backend(spec, backend)
    logger.info("executor: %s, because %s", chosen, why)
    return spec, chosen


def choose_backend(spec: WorkerSpec, backend: str = "auto") -> tuple[str, str]:
    """The backend for a spec, and the reason in words."""
    if backend != "auto":
        return backend, "it was asked for"
    if spec.world_size == 1:
        return "uni", "one rank needs no process of its own"
    return "mp", f"{spec.world_size} ranks need a process each"


__all__ = ["BACKENDS", "Executor", "build_executor", "build_executor_async", "choose_backend"]
