"""Agents and callables that the contract tests run in ranks."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Any

from mpexec import BaseWorker, ModelAgent


class MyError(Exception):
    """An ordinary exception of the user's, importable on both sides."""


class NeedsArgumentsError(Exception):
    """Pickles, but cannot be rebuilt: its constructor wants what pickle does not pass."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class RefusesPicklingError(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle of me")


class HoldsALockError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class HasNoTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text of me")


@dataclass(frozen=True)
class FrozenError(Exception):
    """Takes no attributes: neither a cause nor notes."""

    code: int = 3


class RootError(BaseException):
    """Derives from BaseException, as pytest's own outcomes and some frameworks' cancellations do."""


class OutOfMemoryError(RuntimeError):
    """Stands for torch.OutOfMemoryError: a subclass of RuntimeError with a long text."""


UNREBUILDABLE = {
    "init with arguments": lambda: NeedsArgumentsError(1, 2),
    "reduce raises": lambda: RefusesPicklingError("hm"),
    "holds a lock": lambda: HoldsALockError("hm"),
    "refuses attributes": lambda: FrozenError(3),
}

ORDINARY = {
    "ValueError": lambda: ValueError("v", 1),
    "KeyError": lambda: KeyError("missing"),
    "StopIteration": lambda: StopIteration(7),
    "TimeoutError": lambda: TimeoutError("late"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "/nowhere"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "MyError": lambda: MyError("mine"),
    "OutOfMemoryError": lambda: OutOfMemoryError("CUDA out of memory"),
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError("a"), MyError("b")]),
}


class RefusesUnpickling:
    """Pickles, but cannot be rebuilt where the flag is not set."""

    def __reduce__(self) -> Any:
        return _refuse, (os.getpid(),)


def _refuse(pid: int) -> Any:
    if pid != os.getpid():
        raise MyError("not in this process")
    return RefusesUnpickling()


def whoami(worker: BaseWorker) -> tuple[int, int]:
    """A callable in place of a method name."""
    return worker.rank, worker.world_size


def pin(worker: BaseWorker, core: int) -> None:
    """Let this rank run on one core only."""
    os.sched_setaffinity(0, {core})


def block_until_stop_is_asked_for(worker: BaseWorker, path: str) -> None:
    """Block the rank's thread until the request to stop has arrived in its process, or the file exists."""
    server: Any = worker._put_output.__self__  # type: ignore[attr-defined]
    server = getattr(server, "_thread", server)
    while not (getattr(server, "drop_until", 0) or os.path.exists(path)):
        time.sleep(0.002)


def add_to_rank(worker: BaseWorker, number: int, *, times: int = 1) -> int:
    return (worker.rank + number) * times


class Agent(ModelAgent):
    """What most contract tests need."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.events: dict[str, asyncio.Event] = {}
        self.kept: Any = None
        self.made_in_instance = lambda: "instance"

    # -- values

    def echo(self, value: Any = None) -> Any:
        return value

    def rank_and(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self.rank, args, kwargs

    def where(self) -> int:
        return self.rank

    @classmethod
    def name_of_class(cls) -> str:
        return cls.__name__

    @staticmethod
    def three() -> int:
        return 3

    def _private(self) -> None:
        self.log.append("private")

    not_a_method = 5

    # -- order

    def note(self, value: Any) -> Any:
        self.log.append(value)
        return value

    async def note_async(self, value: Any) -> Any:
        self.log.append(("start", value))
        await asyncio.sleep(0)
        self.log.append(("end", value))
        return value

    def take_log(self) -> list[Any]:
        log, self.log = self.log, []
        return log

    async def hold(self, name: str) -> str:
        """Wait until `let_go(name)`; noted in the log if cancelled."""
        event = self.events.setdefault(name, asyncio.Event())
        self.log.append(("held", name))
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.log.append(("cancelled", name))
            raise
        self.log.append(("went", name))
        return name

    def let_go(self, name: str) -> None:
        self.events.setdefault(name, asyncio.Event()).set()

    async def until_noted(self, entry: Any) -> None:
        """Return once the log has `entry`."""
        while entry not in self.log:
            await asyncio.sleep(0.001)

    def wait_for_file(self, path: str, value: Any = None) -> Any:
        """Block this rank's thread until the file exists."""
        self.log.append(("waits", value))
        while not os.path.exists(path):
            time.sleep(0.002)
        return value

    async def doze(self, seconds: float, value: Any = None) -> Any:
        await asyncio.sleep(seconds)
        return value

    # -- failures

    def fail(self, kind: str, ranks: tuple[int, ...] | None = None) -> str:
        if ranks is None or self.rank in ranks:
            raise {**ORDINARY, **UNREBUILDABLE, "str raises": lambda: HasNoTextError("hm")}[kind]()
        return "fine"

    async def fail_async(self, kind: str, ranks: tuple[int, ...] | None = None) -> str:
        await asyncio.sleep(0)
        return self.fail(kind, ranks)

    def fail_with_cause(self) -> None:
        try:
            {}["inner key"]
        except KeyError as inner:
            raise MyError("outer") from inner

    def fail_with_rank(self) -> None:
        raise MyError(f"rank {self.rank}")

    def fail_with_note(self) -> None:
        error = MyError("noted")
        error.add_note("a note of the user's")
        raise error

    def fail_below_exception(self) -> None:
        raise RootError("below Exception")

    async def fail_below_exception_async(self) -> None:
        raise RootError("below Exception")

    def fail_cancelled(self) -> None:
        raise asyncio.CancelledError("raised by hand")

    def exit_in_method(self) -> None:
        sys.exit(3)

    async def exit_in_coroutine(self) -> None:
        sys.exit(3)

    def lock(self, ranks: tuple[int, ...] | None = None) -> Any:
        return threading.Lock() if ranks is None or self.rank in ranks else "fine"

    def refuses_unpickling(self) -> Any:
        return RefusesUnpickling()

    def lost_peer(self) -> None:
        raise ConnectionResetError("Connection reset by peer")

    # -- data

    def checksum(self, data: Any) -> int:
        return zlib.crc32(data)

    def keep_checksum(self, index: int, data: bytes, checksum: int) -> None:
        """Check order and content of a stream of messages; rank 1 is slow at times."""
        if len(self.log) != index or zlib.crc32(data) != checksum:
            raise MyError(f"message {index} came as number {len(self.log)}, or torn")
        self.log.append(index)
        if self.rank == 1 and index % 50 == 0:
            time.sleep(0.002)

    def big(self, count: int, fill: int = 1) -> bytes:
        return bytes([fill]) * count


class Arrays(Agent):
    """Numpy arrays and torch tensors."""

    def write_on(self, array: Any, ranks: tuple[int, ...], value: int) -> float:
        if self.rank in ranks:
            array.reshape(-1)[0] = value
        return float(array.reshape(-1)[0])

    def try_to_write(self, array: Any) -> str:
        try:
            array[0] = 1
        except (ValueError, RuntimeError) as error:
            return type(error).__name__
        return "written"

    def facts(self, array: Any) -> dict[str, Any]:
        """What an argument looks like in here."""
        facts = {"type": type(array).__name__, "shape": tuple(array.shape), "dtype": str(array.dtype)}
        if hasattr(array, "flags"):
            facts["writeable"] = bool(array.flags.writeable)
        else:
            facts["requires_grad"] = array.requires_grad
        return facts

    def sum(self, array: Any) -> float:
        return float(array.sum())

    def keep(self, array: Any) -> None:
        self.kept = array

    def kept_sum(self) -> float:
        return float(self.kept.sum())

    def drop(self) -> None:
        self.kept = None

    def numpy_of(self, count: int, fill: float) -> Any:
        import numpy

        return numpy.full(count, fill, dtype=numpy.float32)

    def tensor_of(self, shape: tuple[int, ...], fill: float, dtype: str = "float32") -> Any:
        import torch

        return torch.full(shape, fill, dtype=getattr(torch, dtype))


class Stream(ModelAgent):
    """Overrides `forward`: inputs come out as outputs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: asyncio.Event | None = None
        self.seen: list[Any] = []

    async def preprocess(self, inputs: Any) -> Any:
        await asyncio.sleep(0)
        return inputs

    async def forward(self, inputs: Any) -> Any:
        if inputs == "hold":
            self.gate = asyncio.Event()
            await self.gate.wait()
        if isinstance(inputs, tuple) and inputs[0] == "fail" and self.rank == inputs[1]:
            raise MyError(f"forward on rank {self.rank}")
        if inputs == "unpicklable":
            return threading.Lock()
        self.seen.append(inputs)
        return inputs

    async def inputs_seen(self, count: int) -> list[Any]:
        """The inputs that `forward` has had, once it has had so many: ranks other than 0 may lag behind the outputs."""
        while len(self.seen) < count:
            await asyncio.sleep(0.001)
        return list(self.seen)

    def echo(self, value: Any) -> Any:
        return value

    async def hold(self) -> None:
        await asyncio.Event().wait()

    def fail(self) -> None:
        raise MyError("notified")

    def lost_peer(self) -> None:
        raise ConnectionResetError("Connection reset by peer")


class Tasks(Agent):
    """Has a background task of its own, which fails, returns or is cancelled when asked to."""

    def _open(self, tasks: Any) -> None:
        super()._open(tasks)
        self.asked = asyncio.Event()
        self.kind = ""
        self.task = tasks.start(self._background(), name="mine")

    async def _background(self) -> None:
        try:
            await self.asked.wait()
        except asyncio.CancelledError:
            self.log.append("background cancelled")
            raise
        if self.kind == "lost peer":
            raise ConnectionResetError("Connection reset by peer")
        if self.kind == "fail":
            raise MyError(f"background of rank {self.rank}")

    def end_background(self, kind: str, ranks: tuple[int, ...]) -> None:
        if self.rank in ranks:
            self.kind = kind
            self.asked.set()

    def cancel_background(self, ranks: tuple[int, ...]) -> None:
        if self.rank in ranks:
            self.task.cancel()

    def has_background(self) -> bool:
        return not self.task.done()


class FailsToBuild(ModelAgent):
    def build_model(self) -> None:
        raise MyError("cannot build")


class BuildsForLong(Agent):
    """Takes three seconds, in thirty parts, and tells of each."""

    def build_model(self) -> None:
        for part in range(30):
            time.sleep(0.1)
            self.report_progress(f"part {part}")


class FailsToStart(Agent):
    def start(self) -> None:
        raise MyError("cannot start")


class StopsItsStart(Agent):
    def start(self) -> None:
        raise StopIteration(3)


class Worker(BaseWorker):
    """A worker class of the user's, whose names win over the agent's."""

    def where(self) -> str:
        return f"worker {self.rank}"

    def only_here(self) -> int:
        return self.rank
