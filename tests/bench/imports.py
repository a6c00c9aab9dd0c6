"""What importing mpexec costs, and what a running executor has pulled into the driver."""

from __future__ import annotations

import subprocess
import sys

from tests.bench import fresh
from tests.bench.settings import Settings
from tests.bench.stats import Row

BAR = 0.2
HEAVY = ("torch", "zmq", "ray", "transformers")
STATEMENTS = ("import mpexec", "from mpexec import MPExecutor, ModelAgent")


def run(settings: Settings) -> list[Row]:
    """Each statement in interpreters that have imported nothing else."""
    settings.say("imports")
    rows = []
    for statement in STATEMENTS:
        _seconds_of(statement)  # so that the bytecode is there
        seconds = [_seconds_of(statement) for _ in range(settings.repeats)]
        rows.append(Row(statement, seconds, "s", bar=BAR, kind="value"))
    loaded = fresh.call(drive_running)
    text = ", ".join(loaded) or "none of " + ", ".join(HEAVY)
    rows.append(
        Row("heavy modules of a driver that calls", [float(len(loaded))], "modules", bar=0, kind="value", note=text)
    )
    return rows


def _seconds_of(statement: str) -> float:
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=fresh.ROOT,
        env=fresh.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise fresh.BenchError(f"{statement!r} failed:\n{done.stderr}")
    return float(done.stdout)


# -- in the driver process -----------------------------------------------------------------------------------------


def drive_running() -> list[str]:
    """The heavy modules that a driver with a running executor has loaded."""
    from mpexec import MPExecutor
    from tests.bench.agents import TorchAgent

    with MPExecutor(TorchAgent, world_size=2) as executor:
        executor.collective_rpc("echo", (1,))
        return [name for name in HEAVY if name in sys.modules]
