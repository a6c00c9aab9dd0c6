"""Time to the first reply, with torch and gloo in the ranks and no torch in the driver."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tests.bench import fresh
from tests.bench.settings import Settings, in_turn
from tests.bench.stats import Row

SPAWN_BAR = 1.15
FORK_SERVER_BAR = 0.6
SECOND_BAR = 0.10

Figures = dict[str, float]


def run(settings: Settings) -> list[Row]:
    """Bare and mpexec's spawn at N=2 and 4, and the fork server, cold, at 4."""
    sizes = (2,) if settings.quick else (2, 4)
    forked = sizes[-1]
    peers: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
    for size in sizes:
        peers[f"bare {size}"] = (drive_bare, {"world_size": size})
        peers[f"spawn {size}"] = (drive_mpexec, {"world_size": size, "start_method": "spawn"})
    peers["forkserver"] = (drive_mpexec, {"world_size": forked, "start_method": "forkserver"})
    figures: dict[str, list[Figures]] = {name: [] for name in peers}
    for repeat in range(settings.repeats):
        settings.say(f"startup, repeat {repeat + 1}")
        for name in in_turn(list(peers), repeat):
            function, arguments = peers[name]
            figures[name].append(fresh.call(function, **arguments))

    def first(name: str) -> list[float]:
        return [figure["first"] for figure in figures[name]]

    def second(size: int) -> list[float]:
        return [figure[f"second {size}"] for figure in figures["forkserver"]]

    rows = [
        Row(f"N={size} spawn, against bare spawn", first(f"spawn {size}"), "s", first(f"bare {size}"), SPAWN_BAR)
        for size in sizes
    ]
    rows.append(
        Row(
            f"N={forked} fork server, against spawn", first("forkserver"), "s", first(f"spawn {forked}"),
            FORK_SERVER_BAR if forked == 4 else None, note="the fork server's own start included",
        )
    )  # fmt: skip
    rows += [
        Row(f"N={size} second executor by fork server", second(size), "s", bar=SECOND_BAR, kind="value")
        for size in (2, forked)[: len(sizes)]
    ]
    return rows


# -- in the driver processes ---------------------------------------------------------------------------------------


def drive_bare(world_size: int) -> Figures:
    """Processes of `multiprocessing` that import torch and say so over a Pipe."""
    start = time.perf_counter()
    from tests.bench.pipes import hear_each, spawned  # imports multiprocessing, which counts

    with spawned(import_torch, *[()] * world_size) as pipes:
        hear_each(pipes)
        return {"first": time.perf_counter() - start}


def import_torch(pipe: Any) -> None:
    """What a bare child does."""
    import torch  # noqa: F401

    pipe.send(True)


def drive_mpexec(world_size: int, start_method: Any) -> Figures:
    """Seconds from before `import mpexec` to the first reply; by the fork server also those of later executors."""
    start = time.perf_counter()
    figures = {"first": _first_reply(world_size, start_method) - start}
    if start_method == "forkserver":
        for size in (2, world_size):
            start = time.perf_counter()
            figures[f"second {size}"] = _first_reply(size, start_method) - start
    if "torch" in sys.modules:
        raise RuntimeError("the driver has imported torch")
    return figures


def _first_reply(world_size: int, start_method: Any) -> float:
    """Build an executor, hear from every rank, release it; the `perf_counter` of the reply."""
    from mpexec import MPExecutor
    from tests.bench.agents import TorchAgent

    executor = MPExecutor(TorchAgent, world_size=world_size, start_method=start_method)
    try:
        replies = executor.collective_rpc("has_gloo")
        now = time.perf_counter()
    finally:
        executor.release()
    if replies != [True] * world_size:
        raise RuntimeError(f"the ranks have no process group: {replies}")
    return now
