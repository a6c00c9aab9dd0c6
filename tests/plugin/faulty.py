"""Agents and a worker in which the fixture `faults` finds its points. Imported in ranks."""

from __future__ import annotations

from typing import Any

from mpexec import BaseWorker, ModelAgent


class Agent(ModelAgent):
    """Well-behaved."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def echo(self, value: Any = None) -> Any:
        """The value, and this rank."""
        return value, self.rank

    async def echo_async(self, value: Any = None) -> Any:
        """As `echo`, as a coroutine."""
        return value, self.rank

    def outer(self) -> Any:
        """Calls a method that no caller from outside can."""
        return self._inner()

    def _inner(self) -> int:
        return self.rank


class LoopAgent(ModelAgent):
    """Has a forward loop."""

    def forward(self, inputs: Any) -> Any:
        return inputs


class Worker(BaseWorker):
    """Has a method of its own."""

    def of_worker(self) -> int:
        return self.rank


def make_agent(name: str) -> Agent:
    """An agent whose class the driver does not see."""
    return Agent(name)
