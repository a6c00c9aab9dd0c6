"""One run of `mpexec bench`: load, send requests at each concurrency, take times, report."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpexec.cli.figures import Level, Setting, print_json, print_table
from mpexec.cli.loading import STOP_TIMEOUT_S, AnyEngine, Loading
from mpexec.cli.progress import ProgressLine, progress
from mpexec.cli.report import complain, printable
from mpexec.config import EngineConfig
from mpexec.engine.engine import SamplingParams
from mpexec.errors import ConfigError
from mpexec.tasks import cancel_async_tasks

_WARM_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything about one run that has been checked before any rank starts."""

    loading: Loading
    setting: Setting
    concurrency: tuple[int, ...]
    requests: int
    seed: int
    as_json: bool
    picture: Path | None
    max_slots: int | None = None

    @classmethod
    def prepare(
        cls,
        model: str | None,
        *,
        tp: int,
        prompt_tokens: int,
        max_new_tokens: int,
        concurrency: tuple[int, ...],
        requests: int,
        seed: int,
        as_json: bool,
        picture: Path | None,
        max_slots: int | None = None,
        **options: Any,
    ) -> Bench:
        """Check the model, and that the requests fit into its context; `options` are those of `Loading`.

        Raises:
            ConfigError: Names the value and the remedy.
        """
        loading = Loading.prepare(model, tp, **options)
        if prompt_tokens + max_new_tokens > loading.plan.max_length:
            whose = "of --max-length" if loading.max_length else f"that {loading.plan.facts.path.name} allows together"
            raise ConfigError(
                f"--prompt-tokens {prompt_tokens} and --max-new-tokens {max_new_tokens} are more than the "
                f"{loading.plan.max_length} tokens {whose}"
            )
        name = printable(loading.plan.facts.path.resolve().name)
        where = (loading.executor, loading.dtype, loading.device)
        setting = Setting(name, tp, *where, prompt_tokens, max_new_tokens)
        return cls(
            loading=loading,
            setting=setting,
            concurrency=concurrency,
            requests=requests,
            seed=seed,
            as_json=as_json,
            picture=picture,
            max_slots=max_slots,
        )

    async def run_async(self) -> None:
        """Load, measure, print, draw; the ranks have been released when this returns or raises.

        Whatever ends it early, a Ctrl-C included, what was measured until then is printed first.

        Raises:
            ToldError: A rank or the engine failed; the message has been printed.
            StartupError: A rank did not become ready.
        """
        levels: list[Level] = []
        async with self.loading.engine_async(self._engine_config()) as engine:
            try:
                await self._measure_async(engine, levels)
            finally:
                self._report(levels)
        if self.picture is not None:
            self._draw(self.picture, levels)

    def _report(self, levels: list[Level]) -> None:
        shown = [level for level in levels if level.tokens]
        if shown and not self.as_json:
            print_table(self.setting, shown)
        elif shown and not shown[-1].is_whole:  # those before have been printed already
            print_json(self.setting, shown[-1])

    def _draw(self, picture: Path, levels: list[Level]) -> None:
        from mpexec.cli.plot import draw

        with progress(f"drawing {picture}"):
            draw(self.setting, levels, picture)
        complain(f"drawn: {picture}")

    def _engine_config(self) -> EngineConfig:
        most = max(self.concurrency)
        return EngineConfig(
            max_slots=self.max_slots or most,
            max_queue=most,
            max_length=self.loading.room_for(self.setting.prompt_tokens + self.setting.new_tokens),
            stop_timeout=STOP_TIMEOUT_S,
        )

    async def _measure_async(self, engine: AnyEngine, levels: list[Level]) -> None:
        draw = random.Random(self.seed)
        with progress("warming up") as line:
            warm = Level(max(self.concurrency), requests=max(self.concurrency), began=time.monotonic())
            await self._run_level(engine, warm, draw, min(_WARM_TOKENS, self.setting.new_tokens), ProgressLine())
            for number in self.concurrency:
                levels.append(level := Level(number, requests=max(number, self.requests), began=time.monotonic()))
                if not line.is_shown:
                    complain(f"{self._place(level)}: {level.requests} requests")
                await self._run_level(engine, level, draw, self.setting.new_tokens, line)
                if self.as_json:
                    with line.hidden():
                        print_json(self.setting, level)

    async def _run_level(
        self, engine: AnyEngine, level: Level, draw: random.Random, new_tokens: int, line: ProgressLine
    ) -> None:
        prompts = (self._prompt(draw) for _ in range(level.requests))
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        streams = [
            asyncio.create_task(self._stream(engine, level, prompts, params, line)) for _ in range(level.concurrency)
        ]
        try:
            await asyncio.gather(*streams)
        finally:
            await cancel_async_tasks(streams)
            level.ended = time.monotonic()

    async def _stream(
        self,
        engine: AnyEngine,
        level: Level,
        prompts: Iterator[tuple[int, ...]],
        params: SamplingParams,
        line: ProgressLine,
    ) -> None:
        """One of the streams that share the prompts: the next request follows as soon as one is answered."""
        for prompt in prompts:
            sent = before = time.monotonic()
            seen = 0
            async for output in engine.generate(prompt, params):
                now, count = time.monotonic(), len(output.token_ids)
                level.tokens += count
                if not count:
                    continue
                if not seen:
                    level.first_token_s.append(now - sent)
                else:  # tokens that come together have taken equal parts of the time
                    level.inter_token_s += [(now - before) / count] * count
                seen, before = seen + count, now
            level.end_to_end_s.append(time.monotonic() - sent)
            line.update(self._count(level))

    def _count(self, level: Level) -> str:
        done, speed = len(level.end_to_end_s), level.tokens_per_second()
        return f"{self._place(level)}: {done}/{level.requests} requests, {speed:.0f} tokens/s"

    def _place(self, level: Level) -> str:
        at = self.concurrency.index(level.concurrency) + 1
        return f"streams: {level.concurrency} ({at} of {len(self.concurrency)})"

    def _prompt(self, draw: random.Random) -> tuple[int, ...]:
        vocabulary = range(self.loading.plan.facts.vocab_size)
        return tuple(draw.choices(vocabulary, k=self.setting.prompt_tokens))  # at once: streams wait meanwhile
