"""`mpexec run` against torchrun, by turns: how soon the script runs, and how soon a failure is over."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import fresh
from tests.bench.settings import Settings, in_turn
from tests.bench.stats import Figures, Row, columns

START_BAR = 0.7
FAILURE_BAR = 0.25

_LIMIT_S = 120.0
_LAUNCHERS = {
    "mpexec": ["mpexec", "run"],
    "torchrun": ["torch.distributed.run", "--standalone"],
}
# Exit code of `mpexec run`, by how rank 1 ends; torchrun's is 1 for each.
_FAILURES = {"kill": 137, "raise": 1, "exit": 3}
_START = """\
import time, sys, os, torch
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(str(time.monotonic_ns()))
"""
_FAIL = """\
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if dist.get_rank() == 1:
    open(os.path.join(sys.argv[1], "pid"), "w").write(str(os.getpid()))
    time.sleep(0.5)  # the others are in the next one by then
    open(os.path.join(sys.argv[1], "failed"), "w").write(str(time.monotonic_ns()))
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "exit":
        sys.exit(3)
    raise ValueError("too much")
dist.all_reduce(one)
"""


def run(settings: Settings) -> list[Row]:
    """N=2 and 4; a failure at 4."""
    return [*_starts(settings), *_failures(settings)]


def _starts(settings: Settings) -> list[Row]:
    sizes = (2,) if settings.quick else (2, 4)
    seconds: dict[tuple[str, int], list[float]] = {(name, size): [] for name in _LAUNCHERS for size in sizes}
    for repeat in range(settings.repeats):
        settings.say(f"run, starts, repeat {repeat + 1}")
        for size in sizes:
            for name in in_turn(list(_LAUNCHERS), repeat):
                seconds[name, size].append(time_start(name, size))
    return [
        Row(
            f"N={size} to the first line after import torch, in all ranks",
            *(seconds["mpexec", size], "s", seconds["torchrun", size], START_BAR),
        )
        for size in sizes
    ]


def _failures(settings: Settings) -> list[Row]:
    size = 2 if settings.quick else 4
    figures: dict[tuple[str, str], list[Figures]] = {(name, how): [] for name in _LAUNCHERS for how in _FAILURES}
    for repeat in range(settings.repeats):
        settings.say(f"run, failures, repeat {repeat + 1}")
        for how in _FAILURES:
            for name in in_turn(list(_LAUNCHERS), repeat):
                figures[name, how].append(time_failure(name, size, how))
    rows = []
    for how in _FAILURES:
        peers = {name: figures[name, how] for name in _LAUNCHERS}
        rows.append(
            Row(f"N={size} {how} in one rank, to the launcher's exit", *columns(peers, "told", "s"), FAILURE_BAR)
        )
        rows.append(Row(f"N={size} {how}: from the end of its process on", *columns(peers, "ended", "s")))
    return rows


def time_start(name: str, size: int) -> float:
    """Seconds from the start of a launcher until the script's last rank has imported torch."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic_ns()
        with _started(name, size, Path(folder), _START) as process:
            _, stderr = process.communicate(timeout=_LIMIT_S)
        if process.returncode:
            raise fresh.BenchError(f"{name} failed: {stderr[-2000:]}")
        return (max(int(Path(folder, str(rank)).read_text()) for rank in range(size)) - began) / 1e9


def time_failure(name: str, size: int, how: str) -> Figures:
    """Seconds until the launcher has exited: since rank 1's last statement, and since the end of its process.

    Between the two Python takes torch down, which neither launcher can change.
    """
    with tempfile.TemporaryDirectory() as folder, _started(name, size, Path(folder), _FAIL, how) as process:
        pidfd = os.pidfd_open(int(_await_text(process, Path(folder, "pid"))))
        try:
            select.select([pidfd], [], [], _LIMIT_S)
        finally:
            os.close(pidfd)
        gone = time.monotonic_ns()
        _, stderr = process.communicate(timeout=_LIMIT_S)
        told = time.monotonic_ns()
        expected = _FAILURES[how] if name == "mpexec" else 1
        if process.returncode != expected or (name == "mpexec" and "mpexec: rank 1 (local rank 1" not in stderr):
            raise fresh.BenchError(f"{name} exited with {process.returncode}, not {expected}: {stderr[-2000:]}")
        failed = int(Path(folder, "failed").read_text())
        return {"told": (told - failed) / 1e9, "ended": (told - gone) / 1e9}


def _await_text(process: subprocess.Popen[str], path: Path) -> str:
    """What a rank writes into a file, as soon as it is there."""
    end = time.monotonic() + _LIMIT_S
    while not (path.exists() and (text := path.read_text())):
        if process.poll() is not None:
            raise fresh.BenchError(f"the launcher ended too early: {process.communicate()[1][-2000:]}")
        if time.monotonic() > end:
            raise fresh.BenchError(f"no rank wrote {path.name} within {_LIMIT_S:g} s")
        time.sleep(0.001)
    return text


@contextlib.contextmanager
def _started(name: str, size: int, folder: Path, body: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher with a script in `folder`; it has ended afterwards, whatever happens."""
    script = folder / "script.py"
    script.write_text(body)
    command = [
        sys.executable,
        "-m",
        *_LAUNCHERS[name],
        "--nproc-per-node",
        str(size),
        "--log-dir",
        str(folder / "logs"),
    ]
    process = subprocess.Popen(
        [*command, str(script), str(folder), *args],
        cwd=fresh.ROOT, env=fresh.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
