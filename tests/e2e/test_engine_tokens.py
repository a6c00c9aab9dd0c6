"""Tokens of the engine against transformers' own `generate`, for prompts that join and leave at different steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import Reference, check_equal, small_model_that_speaks

from mpexec import Engine, EngineConfig, SamplingParams
from mpexec.engine.engine import GenerationOutput
from mpexec.models import default_model_path

PROMPTS = 32
CONTEXT = 64
VOCABULARY = 2048  # of the bundled model, whose tokenizer the others borrow

FAMILIES = ("bundled", "llama", "mistral", "qwen2", "qwen3")
CASES = [
    pytest.param(family, ranks, marks=[] if (family, ranks) == ("bundled", 1) else pytest.mark.slow)
    for family in FAMILIES
    for ranks in (1, 2, 4)
]


def prompt(number: int) -> list[int]:
    """Of one to 40 tokens, another one for each number."""
    source = torch.Generator().manual_seed(number)
    return torch.randint(1, VOCABULARY, (1 + 11 * number % 40,), generator=source).tolist()


def new_tokens(number: int) -> int:
    return 2 + 7 * number % 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    made: dict[str, tuple[Path, Reference]] = {}

    def get(family: str) -> tuple[Path, Reference]:
        if family not in made:
            bundled = family == "bundled"
            path = default_model_path() if bundled else small_model_that_speaks(family, tmp_path_factory.mktemp(family))
            made[family] = (path, Reference(path))
        return made[family]

    return get


async def read(engine: Engine, token_ids: list[int], params: SamplingParams) -> list[GenerationOutput]:
    return [output async for output in engine.generate(token_ids, params, wait=True)]


async def read_by_and_by(engine: Engine, params: Callable[[int], SamplingParams]) -> list[list[GenerationOutput]]:
    """The answers of all prompts; each one joins when the one before has got a few of its tokens."""
    tasks: list[asyncio.Task[list[GenerationOutput]]] = []

    async def read_one(number: int, has_some: asyncio.Event) -> list[GenerationOutput]:
        outputs, tokens = [], 0
        async for output in engine.generate(prompt(number), params(number), wait=True):
            outputs.append(output)
            tokens += len(output.token_ids)
            if tokens > number % 4:
                has_some.set()
        has_some.set()
        return outputs

    for number in range(PROMPTS):
        has_some = asyncio.Event()
        tasks.append(asyncio.create_task(read_one(number, has_some)))
        await has_some.wait()
    return await asyncio.gather(*tasks)


def ids(outputs: list[GenerationOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text(outputs: list[GenerationOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family, ranks", CASES)
async def test_tokens_equal_generate_whoever_joins_and_leaves(
    family: str, ranks: int, models: Callable[[str], tuple[Path, Reference]], one_thread: None
) -> None:
    path, reference = models(family)
    config = EngineConfig(max_slots=4, max_length=CONTEXT, prefill_chunk=CONTEXT)
    engine = await Engine.from_pretrained_async(path, ranks, config=config, start_method="forkserver")
    async with engine:
        await check_greedy_and_stops(engine, reference)
        await check_context_limit(engine, reference)
        await check_seeds(engine)


async def check_greedy_and_stops(engine: Engine, reference: Reference) -> None:
    greedy = await read_by_and_by(engine, lambda n: SamplingParams(max_new_tokens=new_tokens(n), ignore_eos=True))
    wanted = [reference.generate(prompt(n), new_tokens(n)) for n in range(PROMPTS)]
    stops = [text(outputs)[len(text(outputs)) // 2 :][:3] or "never" for outputs in greedy]
    for n, outputs in enumerate(greedy):
        check_equal(ids(outputs), wanted[n], f"prompt {n}")
        assert outputs[-1].finish_reason == "length"
    stopped = await read_by_and_by(
        engine, lambda n: SamplingParams(max_new_tokens=new_tokens(n), ignore_eos=True, stop=stops[n])
    )
    for n, outputs in enumerate(stopped):
        assert text(outputs) == text(greedy[n]).partition(stops[n])[0]
        if ids(greedy[n]) == wanted[n][0] and text(greedy[n]).isascii():
            # Where a text ends inside a character, transformers looks at bytes that are no text yet.
            until_stop = reference.generate(prompt(n), new_tokens(n), stop=stops[n])
            check_equal(ids(outputs), until_stop, f"prompt {n} with stop {stops[n]!r}")


async def check_context_limit(engine: Engine, reference: Reference) -> None:
    numbers = (3, 7, 20)
    answers = await asyncio.gather(
        *(read(engine, prompt(n), SamplingParams(max_new_tokens=500, ignore_eos=True)) for n in numbers)
    )
    for n, outputs in zip(numbers, answers, strict=True):
        assert (len(prompt(n)) + len(ids(outputs)), outputs[-1].finish_reason) == (CONTEXT, "length")
        check_equal(ids(outputs), reference.generate(prompt(n), CONTEXT - len(prompt(n))), f"prompt {n} to the limit")


async def check_seeds(engine: Engine) -> None:
    def params(n: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.9, seed=n, top_k=50, top_p=0.9)

    together = await read_by_and_by(engine, params)
    for n in range(0, PROMPTS, 4):
        assert ids(await read(engine, prompt(n), params(n))) == ids(together[n])
    assert len({tuple(ids(await read(engine, [5, 6], params(seed)))) for seed in range(4)}) > 1
