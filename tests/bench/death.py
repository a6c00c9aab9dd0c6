"""SIGKILL of rank 1 while the driver waits for rank 0, against a process that watches a pidfd of rank 1.

Two start methods, because a process that was spawned has private memory to free and takes about twice as long to end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from tests.bench import fresh
from tests.bench.agents import TorchAgent
from tests.bench.settings import Settings
from tests.bench.stats import Row

BAR = 1.5
STATES = {"idle": ("wait_for_nothing", ()), "stuck": ("sleep", (60.0,))}

Figures = dict[str, list[tuple[float, float]]]


def run(settings: Settings) -> list[Row]:
    """As many kills of forked as of spawned ranks."""
    per_repeat = -(-settings.kills // settings.repeats)
    rows = []
    for method in ("forkserver", "spawn"):
        figures: Figures = {state: [] for state in STATES}
        for repeat in range(settings.repeats):
            settings.say(f"death, {method}, repeat {repeat + 1}")
            for state, pairs in fresh.call(drive, start_method=method, kills=per_repeat).items():
                figures[state] += pairs
        for state, pairs in figures.items():
            rows.append(
                Row(
                    f"rank 0 {state}, {method}",
                    [told for told, _ in pairs],
                    "ms",
                    [seen for _, seen in pairs],
                    BAR,
                    note=f"{len(pairs)} kills",
                )
            )
    return rows


# -- in the driver processes ---------------------------------------------------------------------------------------


def drive(start_method: str, kills: int) -> Figures:
    """Pairs of ms from the kill to the error in the caller, and to the end as the observer sees it."""
    observer = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.observer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    figures: Figures = {state: [] for state in STATES}
    for _ in range(kills):
        for state in STATES:
            figures[state].append(_kill(observer, start_method, state))
    observer.communicate()
    return figures


def _kill(observer: subprocess.Popen[str], start_method: Any, state: str) -> tuple[float, float]:
    from mpexec import MPExecutor, WorkerDiedError

    assert observer.stdin is not None
    assert observer.stdout is not None
    method, args = STATES[state]
    with MPExecutor(TorchAgent, world_size=2, start_method=start_method) as executor:
        if executor.collective_rpc("has_gloo") != [True, True]:
            raise RuntimeError("the ranks have no process group")
        print(executor.pids[1], file=observer.stdin, flush=True)
        try:
            executor.collective_rpc(method, args, ranks=0, timeout=30.0)
            raise RuntimeError("the call returned although a rank was killed")
        except WorkerDiedError as error:
            told = time.monotonic_ns()
            if error.rank != 1:
                raise RuntimeError(f"rank 1 was killed, the error names rank {error.rank}") from error
        killed, seen = (int(word) for word in observer.stdout.readline().split())
    return (told - killed) / 1e6, (seen - killed) / 1e6
