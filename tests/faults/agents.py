"""Agents that misbehave at a moment of the test's choice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

from faults.misdeeds import Explosive, announce, hang_in_c, hang_in_python, misbehave

from mpexec import ModelAgent
from mpexec.tasks import TaskSet


class FaultyAgent(ModelAgent):
    """Well-behaved but for one rank, one manner and one moment.

    Args:
        culprit: The rank that misbehaves.
        manner: How; see `misdeeds.misbehave`.
        moment: When; "" means only in the methods below, which are told so by their callers.
    """

    def __init__(self, culprit: int = -1, manner: str = "", moment: str = "") -> None:
        self.culprit = culprit
        self.manner = manner
        self.moment = moment
        self.misdeeds = 0

    def _is_due(self, moment: str) -> bool:
        return self.moment == moment and self.rank == self.culprit

    def build_model(self) -> None:
        if self._is_due("build"):
            misbehave(self.manner)

    def echo(self, value: Any) -> Any:
        """The value, and this rank."""
        return value, self.rank

    def in_sync_method(self) -> Any:
        return misbehave(self.manner) if self.rank == self.culprit else self.rank

    async def in_async_method(self) -> Any:
        await asyncio.sleep(0)
        return misbehave(self.manner) if self.rank == self.culprit else self.rank

    def in_reply(self) -> Any:
        if self.rank != self.culprit:
            return self.rank
        return misbehave(self.manner) if self.manner == "big_reply" else [0, Explosive(self.manner)]

    def later(self) -> None:
        """Misbehave once the rank is idle again."""
        if self.rank == self.culprit:
            asyncio.get_running_loop().call_soon(self._misbehave_when_idle)

    def _misbehave_when_idle(self) -> None:
        self.misdeeds += 1
        misbehave(self.manner)

    def count_misdeeds(self) -> int:
        return self.misdeeds

    # -- collectives ---------------------------------------------------------------------------------------------------

    def add_up(self, number: int) -> int:
        """The sum over all ranks of number + rank."""
        import torch
        import torch.distributed as dist

        total = torch.tensor([number + self.rank])
        dist.all_reduce(total)
        return int(total)

    def in_all_reduce(self, announced: str) -> Any:
        """Join an all-reduce, all but the culprit, who misbehaves once the others sit in it.

        Args:
            announced: Path of a file in which the peer writes its pid just before it joins.
        """
        if self.rank != self.culprit:
            with open(announced + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(announced + ".new", announced)
            return self.add_up(0)
        _await_sleeper(announced)
        return misbehave(self.manner)

    # -- background tasks ----------------------------------------------------------------------------------------------

    def _open(self, tasks: TaskSet) -> None:
        super()._open(tasks)
        self._go = asyncio.Event()
        tasks.start(self._work(), name="work")

    async def _work(self) -> None:
        await self._go.wait()
        misbehave(self.manner)
        await asyncio.Event().wait()

    def go(self) -> None:
        """Let the culprit's background task misbehave."""
        if self.rank == self.culprit:
            self._go.set()

    async def stop_async(self) -> None:
        await super().stop_async()
        if self._is_due("stop"):
            misbehave(self.manner)

    def reply_when_stopped(self) -> Any:
        """A value that is on its way while `stop` is called."""
        if self.rank == self.culprit:
            time.sleep(0.05)
            return misbehave(self.manner)
        return self.rank


class OutputAgent(ModelAgent):
    """Its outputs are what `misbehave` returns."""

    def forward(self, inputs: Any) -> Any:
        return misbehave(inputs)


class HostAgent(ModelAgent):
    """What the ranks of the drivers under test do; every method that waits announces itself in a named pipe first."""

    def echo(self, value: Any) -> Any:
        """The value, and this rank."""
        return value, self.rank

    def add_up(self, number: int) -> int:
        """The sum over all ranks of number + rank."""
        import torch
        import torch.distributed as dist

        total = torch.tensor([number + self.rank])
        dist.all_reduce(total)
        return int(total)

    def start_children(self) -> tuple[int, int]:
        """Start two processes that would live for ever: a child, and one whose parent is gone at once."""
        child = subprocess.Popen(["sleep", "1000"])
        orphan = subprocess.run(["sh", "-c", "sleep 1000 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, check=True)
        return child.pid, int(orphan.stdout)

    def idle(self, path: str) -> None:
        announce(path)

    def sleep(self, path: str) -> None:
        announce(path)
        hang_in_python()

    def hold_interpreter(self, path: str) -> None:
        announce(path)
        hang_in_c()

    def wait_in_all_reduce(self, path: str) -> None:
        """Wait in a collective that rank 0 never joins."""
        announce(path)
        if self.rank:
            self.add_up(0)
        hang_in_python()

    def chatter(self) -> None:
        """Write lines from a thread for ever."""
        threading.Thread(target=_chatter, daemon=True).start()

    def raise_error(self, error: BaseException) -> None:
        """Raise it on the last rank."""
        if self.rank == self.world_size - 1:
            raise error

    def end(self) -> None:
        """End the last rank as the kernel's out-of-memory killer would."""
        if self.rank == self.world_size - 1:
            misbehave("sigkill")

    def environment(self, *names: str) -> dict[str, str | None]:
        """Variables of this rank."""
        return {name: os.environ.get(name) for name in names}

    def marker(self, module: str) -> bool:
        """True if the driver's mark on a module is seen here: then this is a copy of the driver."""
        return hasattr(sys.modules.get(module), "mark_of_the_driver")


def _chatter() -> None:
    number = 0
    while True:
        print("line", number, flush=True)
        number += 1
        time.sleep(0.0005)


def _await_sleeper(announced: str) -> None:
    """Return when the announced process waits in the kernel: it sits in the collective."""
    end = time.monotonic() + 30.0
    asleep = 0
    while asleep < 5:
        assert time.monotonic() < end, "the peer never came"
        os.sched_yield()
        try:
            with open(announced) as file, open(f"/proc/{file.read()}/stat") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        asleep = asleep + 1 if state == "S" else 0
