"""The script of test_attach.py: run as a program or as a job, told by its first argument what the driver is to do.

The driver prints one JSON object with what it found. A worker prints what it sees when it has been let go.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import time
import warnings
from typing import Any

from mpexec import ModelAgent, MpexecError, MPExecutor

RANK = os.environ.get("RANK")
OPTIONS: dict[str, Any] = {"device": "cpu", "init_process_group": False, "init_timeout": 30.0}


class MyError(Exception):
    """A class of the script itself."""


class Agent(ModelAgent):
    def __init__(self, kind: str = "", rank: int = 0) -> None:
        super().__init__()
        self.kind, self.at = kind, rank

    def build_model(self) -> None:
        if self.kind and self.rank == self.at:
            self.do(self.kind, self.rank)

    def where(self) -> tuple[int, int, int]:
        return self.rank, self.world_size, os.getpid()

    def variables(self) -> list[str | None]:
        return [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "WORD", "TORCHELASTIC_RUN_ID")]

    def total(self, part: Any) -> float:
        return float(part.sum())

    def doubled(self, part: Any) -> Any:
        return 2 * part

    def do(self, kind: str, rank: int) -> None:
        """The rank does it, the others are busy meanwhile."""
        if self.rank != rank:
            time.sleep(60)
        elif kind == "raise":
            raise MyError("as asked")
        elif kind == "exit":
            sys.exit(7)
        elif kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "sleep":
            time.sleep(60)

    def do_at(self, kind: str, rank: int) -> None:
        """The rank does it, the others nothing."""
        if self.rank == rank:
            self.do(kind, rank)

    def stick(self, path: str) -> None:
        """Sit in C without giving the interpreter away."""
        with open(f"{path}{self.rank}", "w"):
            ctypes.PyDLL(None).sleep(60)

    def fail(self) -> None:
        if self.rank == self.world_size - 1:
            raise MyError("as asked")


class Found(dict[str, Any]):
    """What the driver found; printed at its end."""

    def error(self, error: BaseException, began: float | None = None) -> None:
        self["error"] = type(error).__name__
        self["text"] = str(error)
        self["cause"] = type(error.__cause__).__name__
        facts = ("rank", "signal_name", "exit_code", "method", "missing_ranks", "phase")
        self |= {name: getattr(error, name) for name in facts if hasattr(error, name)}
        self["stacks"] = {str(rank): text for rank, text in getattr(error, "stacks", {}).items()}
        if began is not None:
            self["seconds"] = time.monotonic() - began


def attach(**options: Any) -> Any:
    return MPExecutor.attach(Agent, **{**OPTIONS, **options})


def work(found: Found, *, driver_is_rank: bool = False, **options: Any) -> None:
    import numpy as np

    with attach(driver_is_rank=driver_is_rank, **options) as executor:
        found["where"] = [one[:2] for one in executor.collective_rpc("where")]
        found["pids"] = executor.pids
        halves = np.arange(400_000, dtype=np.float64).reshape(2, -1)
        found["totals"] = executor.collective_rpc("total", args_per_rank=[(halves[0],), (halves[1],)])
        found["back"] = [float(part.sum()) for part in executor.collective_rpc("doubled", (halves[0],))]
        found["same"] = {one[2] for one in executor.collective_rpc("where")} == set(executor.pids)
        try:
            executor.collective_rpc("fail")
        except MyError as error:
            found["caught"], found["notes"] = str(error), error.__notes__
        found["after"] = len(executor.collective_rpc("where"))
        found["kind"] = executor.describe()["kind"]


def variables(found: Found) -> None:
    with attach(env={"WORD": "said"}) as executor:
        found["variables"] = executor.collective_rpc("variables")


def misdeed(found: Found, kind: str, timeout: float | None = None) -> None:
    """Rank 1 does it in a call, while rank 0 is busy."""
    executor = attach(stop_timeout=4.0)
    began = time.monotonic()
    try:
        executor.collective_rpc("do", (kind, 1), timeout=timeout)
    except (MpexecError, MyError) as error:
        found.error(error, began)
    executor.release()
    found["rungs"] = [row["ended_by"] for row in executor.describe()["ranks"]]


def build(found: Found, kind: str, driver_is_rank: bool = False) -> None:
    """Rank 1 does it while it builds its model."""
    try:
        attach(agent_args=(kind, 1), driver_is_rank=driver_is_rank).release()
    except MpexecError as error:
        found.error(error)


def build_first(found: Found, kind: str) -> None:
    """Rank 0, the driver's own child, does it while it builds its model."""
    began = time.monotonic()
    try:
        attach(agent_args=(kind, 0), driver_is_rank=True).release()
    except MpexecError as error:
        found.error(error, began)


def stuck(found: Found, path: str, kind: str) -> None:
    executor = attach(stop_timeout=1.0)
    executor.submit_rpc("stick", (path,))
    while not all(os.path.exists(f"{path}{rank}") for rank in (0, 1)):
        time.sleep(0.005)
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    executor.release()
    found["seconds"] = time.monotonic() - began
    found["rungs"] = [row["ended_by"] for row in executor.describe()["ranks"]]


def meet(found: Found, seconds: float = 30.0) -> None:
    try:
        attach(init_timeout=seconds).release()
    except MpexecError as error:
        found.error(error)


def wait_for_another(found: Found, path: str = "") -> None:
    """Process 1 has met the driver, which waits for process 2 yet: it makes a file then, or ends."""
    from mpexec.worker import attached

    wait_for_lane = attached.wait_for_lane

    def met(*args: Any) -> Any:
        lane = wait_for_lane(*args)
        if not path:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(path, "w"):
            return lane

    attached.wait_for_lane = met
    meet(found)


def twice(found: Found) -> None:
    attach().release()
    try:
        attach()
    except MpexecError as error:
        found.error(error)


def linger(found: Found) -> None:
    """The script's own end in a worker takes longer than the driver waits for anything."""
    try:
        attach(stop_timeout=0.4).release()
    finally:
        if RANK != "0":
            time.sleep(1.2)


def stacks(found: Found, path: str) -> None:
    """The driver asks for stacks when rank 1 has died and rank 0 has gone back to its script."""
    try:
        executor = attach()
        try:
            executor.collective_rpc("do_at", ("die", 1))
        except MpexecError as error:
            found.error(error)
        until_there(f"{path}left")
        found["stacks"] = executor.rank_stacks()
        with open(f"{path}asked", "w"):
            executor.release()
    finally:
        if RANK == "1":
            with open(f"{path}left", "w"):
                until_there(f"{path}asked")


def until_there(path: str) -> None:
    end = time.monotonic() + 30
    while not os.path.exists(path) and time.monotonic() < end:
        time.sleep(0.005)


def wait(found: Found, path: str) -> None:
    with attach() as executor:
        with open(path, "w") as file:
            file.write(" ".join(map(str, (os.getpid(), *executor.pids))))
        threading.Event().wait(60)


def again(found: Found, path: str) -> None:
    """The first attempt fails when it has been attached."""
    with attach() as executor:
        found["where"] = [one[:2] for one in executor.collective_rpc("where")]
        if not os.path.exists(path):
            with open(path, "w"):
                raise SystemExit(3)


def see() -> None:
    """What a worker sees at its end."""
    handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sys.stdout.write(f"{json.dumps({'worker': RANK, 'now': os.environ['RANK'], 'handler': handler})}\n")
    sys.stdout.flush()


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    name, *args = sys.argv[1:]
    found = Found()
    if RANK not in (None, "0"):
        atexit.register(see)
    try:
        globals()[name](found, **{key: json.loads(value) for key, _, value in (arg.partition("=") for arg in args)})
    except KeyboardInterrupt:
        found["interrupted"] = True
        raise
    finally:
        if RANK in (None, "0"):
            sys.stdout.write(f"{json.dumps(found)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
