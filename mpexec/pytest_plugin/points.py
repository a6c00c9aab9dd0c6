"""Where a rank misbehaves: on the entry into or the return from a named method. Runs in ranks, without pytest."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpexec.agent.base import ModelAgent
from mpexec.config import WorkerSpec
from mpexec.errors import ConfigError
from mpexec.pytest_plugin.misdeeds import Fault, misbehave, misbehave_async
from mpexec.worker.base_worker import BaseWorker


@dataclass(frozen=True, slots=True)
class ArmedWorker:
    """Stands for a worker's class: makes the worker, and has the faults lie in wait before its agent is built."""

    worker_cls: type[BaseWorker] | None
    faults: tuple[Fault, ...]

    def __call__(self, spec: WorkerSpec, *, rank: int, **seat: Any) -> BaseWorker:
        """Make the worker of one rank."""
        worker_cls = self.worker_cls or BaseWorker
        mine = [fault for fault in self.faults if fault.rank == rank]
        workers_own = [fault for fault in mine if _is_own(worker_cls, fault.point)]
        agents_own = tuple(fault for fault in mine if fault not in workers_own)
        worker = worker_cls(
            spec.with_changes(agent=_ArmedAgent(spec.agent, agents_own)) if agents_own else spec, rank=rank, **seat
        )
        for fault in workers_own:
            _lay(worker, fault)
        return worker


@dataclass(frozen=True, slots=True)
class _ArmedAgent:
    """Stands for the agent: its `build_model` may be the first point, so the agent is armed as soon as it is made."""

    agent: Callable[..., Any]
    faults: tuple[Fault, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        agent = self.agent(*args, **kwargs)
        if isinstance(agent, ModelAgent):  # the worker refuses anything else in its own words
            for fault in self.faults:
                _lay(agent, fault)
        return agent


def arm(worker: BaseWorker, fault: Fault) -> None:
    """Have a fault lie in wait in a rank that is ready; called there by `collective_rpc`.

    Raises:
        ConfigError: Neither worker nor agent has a method of that name.
    """
    _lay(worker if _is_own(type(worker), fault.point) else worker.agent, fault)


def commit(worker: BaseWorker, fault: Fault) -> None:
    """Commit a fault at once; called in the rank by `notify`."""
    misbehave(fault)


def _is_own(worker_cls: type[BaseWorker], name: str) -> bool:
    """True for a method that the user's worker class brings; those of `BaseWorker` do the same for the agent."""
    return getattr(worker_cls, name, None) is not getattr(BaseWorker, name, None)


def _lay(owner: Any, fault: Fault) -> None:
    method = getattr(owner, fault.point, None)
    if not callable(method) or fault.point.startswith("__"):
        own = sorted(name for name in vars(type(owner)) if callable(getattr(owner, name)) and name[0] != "_")
        raise ConfigError(
            f"{fault}: {type(owner).__name__} has no method {fault.point!r}. A point is the name of a method of the "
            f"agent or worker: build_model, forward, start, stop_async, or one of its own ({', '.join(own)})",
            fault_point=fault.point,
        )
    setattr(owner, fault.point, _with_fault(method, fault))


def _with_fault(method: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    """The method, but for the one time at which the fault is due."""
    passes = itertools.count(1)

    def is_due(moment: str) -> bool:
        return bool(moment) and next(passes) == fault.nth

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_due(fault.at):
            misbehave(fault)
        value = method(*args, **kwargs)
        return misbehave(fault, value) if is_due(fault.after) else value

    @functools.wraps(method)
    async def watched_async(*args: Any, **kwargs: Any) -> Any:
        if is_due(fault.at):
            await misbehave_async(fault)
        value = await method(*args, **kwargs)
        return await misbehave_async(fault, value) if is_due(fault.after) else value

    return watched_async if inspect.iscoroutinefunction(method) else watched
