"""`mpexec run` against torchrun, by turns: how soon the script runs, and how soon a failure is over."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import fresh
from tests.bench.settings import Settings, in_turn
from tests.bench.stats import Row

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
# Torch keeps a process for a while after its last line, under either launcher; `os._exit` would hide that from both.
_FAIL = """\
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if dist.get_rank() == 1:
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
    seconds: dict[tuple[str, str], list[float]] = {(name, how): [] for name in _LAUNCHERS for how in _FAILURES}
    for repeat in range(settings.repeats):
        settings.say(f"run, failures, repeat {repeat + 1}")
        for how in _FAILURES:
            for name in in_turn(list(_LAUNCHERS), repeat):
                seconds[name, how].append(time_failure(name, size, how))
    return [
        Row(
            f"N={size} one rank: {how}, others in all-reduce, to the exit",
            *(seconds["mpexec", how], "s", seconds["torchrun", how], FAILURE_BAR),
        )
        for how in _FAILURES
    ]


def time_start(name: str, size: int) -> float:
    """Seconds from the start of a launcher until the script's last rank has imported torch."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic_ns()
        done, _ = _launch(name, size, Path(folder), _START)
        if done.returncode:
            raise fresh.BenchError(f"{name} failed: {done.stderr[-2000:]}")
        return (max(int(Path(folder, str(rank)).read_text()) for rank in range(size)) - began) / 1e9


def time_failure(name: str, size: int, how: str) -> float:
    """Seconds from the failure of rank 1 until the launcher has exited."""
    with tempfile.TemporaryDirectory() as folder:
        done, ended = _launch(name, size, Path(folder), _FAIL, how)
        expected = _FAILURES[how] if name == "mpexec" else 1
        if done.returncode != expected or (name == "mpexec" and "mpexec: rank 1 (local rank 1" not in done.stderr):
            raise fresh.BenchError(f"{name} exited with {done.returncode}, not {expected}: {done.stderr[-2000:]}")
        return (ended - int(Path(folder, "failed").read_text())) / 1e9


def _launch(name: str, size: int, folder: Path, body: str, *args: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run a script in `folder` to the launcher's end; and when that was, in monotonic nanoseconds."""
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
    done = subprocess.run(
        [*command, str(script), str(folder), *args],
        cwd=fresh.ROOT, env=fresh.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    return done, time.monotonic_ns()
