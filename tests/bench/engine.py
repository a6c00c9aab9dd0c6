"""Tokens a second of the engine, against a bare loop over the same agent and against transformers' own `generate`.

All have two ranks and the bundled model, and give the same tokens. They are there all the time; one is at work.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from tests.bench import fresh
from tests.bench.settings import Settings, in_turn
from tests.bench.stats import Figures, Row
from tests.bench.torchrun import Peer, torchrun

BARS = {1: 0.92, 8: 0.95}  # by batch
FASTER = 1.0

_PEERS = ("engine", "bare", "transformers")
_PROMPT = 12  # tokens of each, so that `generate` needs no padding
_LIMIT_S = 900.0


def run(settings: Settings) -> list[Row]:
    """Batches of 1 and 8."""
    runs = 2 if settings.quick else max(7, settings.repeats)
    new_tokens = 20 if settings.quick else 200
    settings.say(f"engine, three peers, {runs} runs of each by turns")
    figures = fresh.call(drive, timeout=_LIMIT_S, runs=runs, new_tokens=new_tokens)
    rows = []
    for batch, bar in BARS.items():
        ours, bare, theirs = ([one[str(batch)] for one in figures[peer]] for peer in _PEERS)
        rows += [
            Row(f"tp 2, batch {batch}, against the bare loop", ours, "token/s", bare, bar, at_least=True),
            Row(f"tp 2, batch {batch}, against generate", ours, "token/s", theirs, FASTER, at_least=True),
        ]
    return rows


# -- in the driver process -----------------------------------------------------------------------------------------


def drive(runs: int, new_tokens: int) -> dict[str, list[Figures]]:
    """Tokens a second of each peer, by batch, in each run."""
    from mpexec import Engine, EngineConfig

    with contextlib.ExitStack() as opened:
        engine = Engine.from_pretrained(tp=2, config=EngineConfig(max_slots=8))
        opened.callback(engine.release)
        others = {peer: opened.enter_context(torchrun(peer)) for peer in _PEERS[1:]}
        return asyncio.run(_take_turns(engine, others, runs, new_tokens))


async def _take_turns(engine: Any, others: dict[str, Peer], runs: int, new_tokens: int) -> dict[str, list[Figures]]:
    figures: dict[str, list[Figures]] = {peer: [] for peer in _PEERS}
    expected: dict[int, list[list[int]]] = {}
    async with engine:
        for number in range(-1, runs):  # the first one warms up
            for peer in in_turn(list(_PEERS), number):
                speeds: Figures = {}
                for batch in BARS:
                    prompts = [[1 + (17 * row + 5 * at) % 2000 for at in range(_PROMPT)] for row in range(batch)]
                    task = (prompts, new_tokens if number >= 0 else 10)
                    took = await _ask(others[peer], task) if peer in others else await _ask_engine(engine, *task)
                    _check(peer, took[1], expected.setdefault(batch, took[1]), task[1])
                    speeds[str(batch)] = batch * task[1] / took[0]
                if number >= 0:
                    figures[peer].append(speeds)
                else:
                    expected.clear()
    return figures


def _check(peer: str, tokens: list[list[int]], expected: list[list[int]], new_tokens: int) -> None:
    """A peer that does less, or something else, would be fast for no good reason."""
    if [len(row) for row in tokens] != [new_tokens] * len(expected):
        raise RuntimeError(f"{peer} gave {[len(row) for row in tokens]} tokens, not {new_tokens} each")
    if tokens != expected:
        raise RuntimeError(f"{peer} gave other tokens: {tokens} in place of {expected}")


async def _ask_engine(engine: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    from mpexec import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)

    async def read(prompt: list[int]) -> list[int]:
        return [token async for piece in engine.generate(prompt, params) for token in piece.token_ids]

    began = time.perf_counter()
    tokens = await asyncio.gather(*map(read, prompts))
    return time.perf_counter() - began, tokens


async def _ask(peer: Peer, task: Any) -> tuple[float, list[list[int]]]:
    seconds, tokens = await asyncio.to_thread(peer.ask, task)
    return seconds, tokens
