"""Tokens a second of several engines in one process, by turns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

from tests.bench.settings import in_turn
from tests.bench.stats import Figures, quantile

PROMPTS = (
    "In the beginning",
    "And it came to pass",
    "Blessed are they that",
    "The words of the king",
    "And the people said",
    "Then he answered",
    "Now these are the names of",
    "Behold,",
)
NEW_TOKENS = 100

Answer = tuple[list[int], str]  # the token ids and the text


async def take_turns(engines: dict[str, Any], runs: int, new_tokens: int, alone: int) -> dict[str, list[Figures]]:
    """Start the engines and give the figures of runs by turns; one engine is at work at a time.

    Args:
        engines: By the name of the peer. All must give the same answers.
        runs: For each engine, after a short one that warms it up.
        new_tokens: For each of several prompts at once.
        alone: New tokens for one prompt alone.
    """
    figures: dict[str, list[Figures]] = {peer: [] for peer in engines}
    expected: list[Answer] = []
    async with contextlib.AsyncExitStack() as started:
        for engine in engines.values():
            await started.enter_async_context(engine)
        for engine in engines.values():
            await _one_run(engine, 10, 10)
        for number in range(runs):
            for peer in in_turn(list(engines), number):
                result, answers = await _one_run(engines[peer], new_tokens, alone)
                expected = expected or answers
                if answers != expected:
                    raise RuntimeError(_difference(peer, answers, expected))
                figures[peer].append(result)
    return figures


async def _one_run(engine: Any, new_tokens: int, alone: int) -> tuple[Figures, list[Answer]]:
    """Its figures and every answer, which must have as many tokens as it should."""
    began = time.perf_counter_ns()
    together = await asyncio.gather(*(_read(engine, prompt, new_tokens) for prompt in PROMPTS))
    seconds = (time.perf_counter_ns() - began) / 1e9
    single = await _read(engine, PROMPTS[0], alone)
    answers = []
    for pieces, wanted in [*((pieces, new_tokens) for pieces in together), (single, alone)]:
        token_ids = [token for _, piece in pieces for token in piece.token_ids]
        if len(token_ids) != wanted or pieces[-1][1].finish_reason != "length":
            raise RuntimeError(f"{len(token_ids)} tokens, not {wanted}: {pieces[-1]}")
        answers.append((token_ids, "".join(piece.text for _, piece in pieces)))
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(single)]
    tokens = new_tokens * len(PROMPTS)
    return {
        "tokens": tokens / seconds,
        "pieces": sum(len(pieces) for pieces in together) / tokens,
        "p50": quantile(gaps, 0.5) / 1e3,
        "p99": quantile(gaps, 0.99) / 1e3,
    }, answers


def _difference(peer: str, answers: list[Answer], expected: list[Answer]) -> str:
    here, there = next((here, there) for here, there in zip(answers, expected, strict=True) if here != there)
    return f"the engine {peer!r} says {here}; the first answer to this prompt was {there}"


async def _read(engine: Any, prompt: str, new_tokens: int) -> list[tuple[int, Any]]:
    """When each piece of an answer came, in ns, and the piece."""
    from mpexec import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    return [(time.perf_counter_ns(), piece) async for piece in engine.generate(prompt, params)]
