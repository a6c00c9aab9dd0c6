"""Large arrays and tensors to two ranks and back from one, against a copy within one process."""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.bench import fresh
from tests.bench.agents import BufferAgent, checksum, make_buffer
from tests.bench.settings import Settings
from tests.bench.stats import Row

MIB = 1 << 20
SIZES = {1: 60, 16: 20, 256: 6}  # MiB: timed calls in one repeat
BARS = {("numpy", 16): 0.6, ("numpy", 256): 0.75, ("tensor", 16): 0.4, ("tensor", 256): 0.4}
KINDS = ("numpy", "tensor")

Figures = dict[str, dict[str, float]]


def run(settings: Settings) -> list[Row]:
    """Down and up, both kinds, all sizes; N=2."""
    sizes = {1: 10, 16: 4} if settings.quick else SIZES
    results: list[Figures] = []
    for repeat in range(settings.repeats):
        settings.say(f"payload, repeat {repeat + 1}")
        results.append(fresh.call(drive, sizes=list(sizes.items())))
    rows = []
    for size in sizes:
        for kind in KINDS:
            for way, text in (("down", "to 2 ranks"), ("up", "from 1 rank")):
                figures = [result[f"{kind} {way} {size}"] for result in results]
                cold = statistics.median(figure["cold"] for figure in figures)
                rows.append(
                    Row(
                        f"{size:>3} MiB {kind:6} {text}",
                        [figure["warm"] for figure in figures],
                        "ms",
                        [figure["memcpy"] for figure in figures],
                        BARS.get((kind, size)),
                        "speed",
                        note=f"first call {cold:.1f} ms",
                    )
                )
    return rows


# -- in the driver processes ---------------------------------------------------------------------------------------


def drive(sizes: list[tuple[int, int]]) -> Figures:
    """All figures of one repeat, in ms: the median warm call, the median copy between its calls, the first call."""
    from mpexec import MPExecutor

    figures: Figures = {}
    with MPExecutor(BufferAgent, world_size=2, init_process_group=False) as executor:
        for size, calls in sizes:
            for kind in KINDS:
                figures[f"{kind} down {size}"] = _down(executor, kind, size * MIB, calls)
                figures[f"{kind} up {size}"] = _up(executor, kind, size * MIB, calls)
    return figures


def _down(executor: Any, kind: str, nbytes: int, calls: int) -> dict[str, float]:
    buffer = make_buffer(kind, nbytes, 1)

    def call() -> None:
        executor.collective_rpc("touch", (buffer,))

    figures = _timed(call, nbytes, calls)
    changed = make_buffer(kind, nbytes, 77)
    expected = checksum(changed)
    found = executor.collective_rpc("checksum", (changed,))
    if found != [expected] * 2:
        raise RuntimeError(f"{kind}, {nbytes} bytes: the ranks see {found}, not {expected}")
    return figures


def _up(executor: Any, kind: str, nbytes: int, calls: int) -> dict[str, float]:
    executor.collective_rpc("keep", (kind, nbytes, 5))

    def call() -> None:
        buffer = executor.collective_rpc("give", ranks=0, reply_ranks=0)
        float(buffer[0])
        float(buffer[-1])

    figures = _timed(call, nbytes, calls)
    expected = executor.collective_rpc("keep", (kind, nbytes, 99), reply_ranks=0)
    found = checksum(executor.collective_rpc("give", ranks=0, reply_ranks=0))
    if found != expected:
        raise RuntimeError(f"{kind}, {nbytes} bytes: rank 0 sent {expected}, the driver sees {found}")
    executor.collective_rpc("keep", (kind, 4096, 0))
    return figures


def _timed(call: Any, nbytes: int, calls: int) -> dict[str, float]:
    """Time `call` and, by turns, a copy of as many bytes; both warm."""
    import numpy as np

    source = np.ones(nbytes // 4, dtype=np.float32)
    target = np.zeros_like(source)
    cold = _ms(call)
    for _ in range(2):
        call()
        np.copyto(target, source)
    copies, samples = [], []
    for _ in range(calls):
        copies.append(_ms(lambda: np.copyto(target, source)))
        samples.append(_ms(call))
    return {"cold": cold, "warm": statistics.median(samples), "memcpy": statistics.median(copies)}


def _ms(action: Any) -> float:
    start = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start) / 1e6
