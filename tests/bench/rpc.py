"""Round trips with a tiny argument and all replies, against N Pipes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.bench import fresh
from tests.bench.agents import EchoAgent
from tests.bench.load import busy_cores
from tests.bench.pipes import pipe_workers
from tests.bench.settings import Settings, in_turn
from tests.bench.stats import Row, quantile

_PACE_NS = 5_000_000
_LIMIT_NS = 4_000_000_000  # no series takes longer than this, however busy the machine is

P50_BARS = {2: 0.40, 4: 0.50}
P99_BARS = {2: 0.65, 4: 1.0}
ASYNC_BARS = {2: 0.6, 4: 0.7}
PACED_BAR = 1.6
BUSY_BAR = 2.0

Figures = dict[str, float]
Call = Callable[[Any], Any]


def run(settings: Settings) -> list[Row]:
    """Everything at every world size, and N=2 once more beside busy cores."""
    rows = []
    for world_size in settings.world_sizes:
        settings.say(f"rpc, N={world_size}")
        rows += _rows_of(world_size, _measure(settings, world_size))
    settings.say("rpc, N=2 beside one compute process per core")
    with busy_cores():
        busy = _measure(settings, 2, only_sync=True)
    rows.append(_row("N=2 busy cores p50", busy, "sync p50", BUSY_BAR))
    rows.append(_row("N=2 busy cores p99", busy, "sync p99", None))
    return rows


def _measure(settings: Settings, world_size: int, *, only_sync: bool = False) -> dict[str, list[Figures]]:
    figures: dict[str, list[Figures]] = {"mpexec": [], "pipes": []}
    drivers = {"mpexec": drive_mpexec, "pipes": drive_pipes}
    paced = 0 if only_sync else settings.paced_calls
    for repeat in range(settings.repeats):
        for peer in in_turn(list(drivers), repeat):
            result = fresh.call(drivers[peer], world_size=world_size, calls=settings.calls, paced=paced)
            figures[peer].append(result)
    return figures


def _rows_of(world_size: int, figures: dict[str, list[Figures]]) -> list[Row]:
    name = f"N={world_size}"
    rows = [
        _row(f"{name} back to back p50", figures, "sync p50", P50_BARS.get(world_size)),
        _row(f"{name} back to back p99", figures, "sync p99", P99_BARS.get(world_size)),
        _row(f"{name} async p50", figures, "async p50", ASYNC_BARS.get(world_size), other="sync p50"),
        _row(f"{name} async p99", figures, "async p99", None, other="sync p99"),
        _row(f"{name} one call every 5 ms p50", figures, "paced p50", PACED_BAR if world_size > 1 else None),
        _row(f"{name} one call every 5 ms p99", figures, "paced p99", None),
    ]
    ticks = [result["ticks"] for result in figures["mpexec"]]
    gap = max(result["longest gap"] for result in figures["mpexec"])
    rows.insert(
        4,
        Row(
            f"{name} async: turns of a 1 ms ticker", ticks, "1/s", bar=200, kind="value", at_least=True,
            note=f"longest gap {gap:.1f} ms",
        ),
    )  # fmt: skip
    return rows


def _row(name: str, figures: dict[str, list[Figures]], key: str, bar: float | None, other: str = "") -> Row:
    return Row(
        name,
        [result[key] for result in figures["mpexec"]],
        "us",
        [result[other or key] for result in figures["pipes"]],
        bar,
    )


# -- in the driver processes ---------------------------------------------------------------------------------------


def drive_pipes(world_size: int, calls: int, paced: int) -> Figures:
    """The figures of N Pipes."""
    with pipe_workers(world_size) as call:
        if call(1) != [1] * world_size:
            raise RuntimeError("the pipes do not answer as they should")
        return _series(call, calls, paced)


def drive_mpexec(world_size: int, calls: int, paced: int) -> Figures:
    """The figures of an MPExecutor with ranks that have not loaded torch."""
    with _executor(world_size) as executor:
        if executor.collective_rpc("echo", (1,)) != [1] * world_size:
            raise RuntimeError("the executor does not answer as it should")
        figures = _series(lambda value: executor.collective_rpc("echo", (value,)), calls, paced)
        if paced:
            figures |= asyncio.run(_async_series(executor, calls))
        return figures


@contextlib.contextmanager
def _executor(world_size: int) -> Iterator[Any]:
    from mpexec import MPExecutor

    with MPExecutor(EchoAgent, world_size=world_size, init_process_group=False) as executor:
        yield executor


def _series(call: Call, calls: int, paced: int) -> Figures:
    _back_to_back(call, calls // 5)
    figures = _summary("sync", _back_to_back(call, calls))
    if paced:
        figures |= _summary("paced", _paced(call, paced))
    return figures


def _back_to_back(call: Call, calls: int) -> list[int]:
    samples = []
    end = time.perf_counter_ns() + _LIMIT_NS
    for number in range(calls):
        start = time.perf_counter_ns()
        call(number)
        now = time.perf_counter_ns()
        samples.append(now - start)
        if now > end:
            break
    return samples


def _paced(call: Call, calls: int) -> list[int]:
    samples = []
    due = time.perf_counter_ns()
    for number in range(calls):
        due += _PACE_NS
        time.sleep(max(0, due - time.perf_counter_ns()) / 1e9)
        start = time.perf_counter_ns()
        call(number)
        samples.append(time.perf_counter_ns() - start)
    return samples


async def _async_series(executor: Any, calls: int) -> Figures:
    """As `_back_to_back`, while another task of the loop wants a turn every millisecond."""
    samples: list[int] = []
    turns: list[int] = []

    async def tick() -> None:
        while True:
            turns.append(time.perf_counter_ns())
            await asyncio.sleep(0.001)

    for number in range(calls // 5):
        await executor.collective_rpc_async("echo", (number,))
    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)
    began = time.perf_counter_ns()
    for number in range(calls):
        start = time.perf_counter_ns()
        await executor.collective_rpc_async("echo", (number,))
        now = time.perf_counter_ns()
        samples.append(now - start)
        if now - began > _LIMIT_NS:
            break
    over = time.perf_counter_ns()
    ticker.cancel()
    moments = [*turns, over]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return _summary("async", samples) | {
        "ticks": len(turns) / ((over - began) / 1e9),
        "longest gap": max(gaps) / 1e6,
    }


def _summary(name: str, samples_ns: list[int]) -> Figures:
    return {f"{name} p50": quantile(samples_ns, 0.5) / 1e3, f"{name} p99": quantile(samples_ns, 0.99) / 1e3}
