"""One run of `mpexec generate`: load, generate all prompts together, print them in order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import click

from mpexec.agent.steps import TokenLogprobs
from mpexec.cli.loading import STOP_TIMEOUT_S, AnyEngine, Loading
from mpexec.cli.output import StdoutWriter
from mpexec.cli.progress import ProgressLine, progress
from mpexec.cli.report import complain, tell
from mpexec.config import EngineConfig
from mpexec.engine.engine import SamplingParams
from mpexec.errors import ConfigError
from mpexec.tasks import cancel_async_tasks

_LOWEST = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class Answer:
    """One prompt and what has been generated so far; `changed` is set with every piece."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    failure: BaseException | None = None
    ended_at: float = 0.0  # of the last piece, monotonic
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        """What has been generated so far."""
        return "".join(self.pieces)

    async def pieces_async(self) -> AsyncIterator[str]:
        """All pieces, those that are there and those that will come.

        Raises:
            BaseException: What ended the generation early.
        """
        shown = 0
        while True:
            while shown < len(self.pieces):
                yield self.pieces[shown]
                shown += 1
            if self.failure is not None:
                raise self.failure
            if self.finish_reason is not None:
                return
            self.changed.clear()
            await self.changed.wait()

    async def whole_async(self) -> None:
        """Wait for the end."""
        async for _ in self.pieces_async():
            pass

    def as_json(self) -> str:
        """The answer as one line."""
        shown: dict[str, Any] = {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": list(self.prompt_token_ids),
            "finish_reason": self.finish_reason,
        }
        if self.logprobs:
            shown["logprobs"] = [_plain(one) for one in self.logprobs]
        return json.dumps(shown, ensure_ascii=False)


def _plain(token: TokenLogprobs) -> dict[str, Any]:
    return {
        "chosen": max(token.chosen, _LOWEST),
        "top": [{"token_id": token_id, "logprob": max(value, _LOWEST)} for token_id, value in token.top],
    }


@dataclass(slots=True, kw_only=True)
class Job:
    """Everything about one run that has been checked before any rank starts."""

    answers: list[Answer]
    params: SamplingParams
    loading: Loading
    stream: bool
    as_json: bool
    max_slots: int = 8

    @classmethod
    def prepare(
        cls,
        prompts: list[str],
        model: str | None,
        *,
        tp: int,
        sampling: dict[str, Any],
        stream: bool,
        as_json: bool,
        max_slots: int = 8,
        **options: Any,
    ) -> Job:
        """Check model and prompts; `sampling` are fields of `SamplingParams`, `options` those of `Loading`.

        Raises:
            ConfigError: Names the value and the remedy.
        """
        params = SamplingParams(**sampling)
        loading = Loading.prepare(model, tp, **options)
        answers = []
        for number, prompt in enumerate(prompts, 1):
            try:
                answers.append(Answer(prompt, loading.plan.encode(prompt)))
            except ConfigError as bad:
                raise ConfigError(f"prompt {number} of {len(prompts)}: {bad}") from bad
        return cls(answers=answers, params=params, loading=loading, stream=stream, as_json=as_json, max_slots=max_slots)

    def engine_config(self) -> EngineConfig:
        """As many slots, and as much room in them, as this run can use."""
        longest = max(len(answer.prompt_token_ids) for answer in self.answers)
        return EngineConfig(
            max_slots=min(self.max_slots, len(self.answers)),
            max_queue=len(self.answers),
            max_length=self.loading.room_for(longest + self.params.max_new_tokens),
            stop_timeout=STOP_TIMEOUT_S,
        )

    async def run_async(self) -> None:
        """Load, generate, print; the ranks have been released when this returns or raises.

        Raises:
            ReaderGoneError: Nobody reads stdout any more.
            ToldError: A rank or the engine failed while generating; the message has been printed.
            StartupError: A rank did not become ready.
        """
        writer = StdoutWriter()

        def tell_aside(line: str) -> None:
            complain(f"\n{line}" if writer.is_inside_line else line)

        async with self.loading.engine_async(self.engine_config(), tell_aside) as engine:
            try:
                await self._serve(engine, writer)
            except Exception:
                if writer.is_inside_line:
                    tell("")
                raise

    async def _serve(self, engine: AnyEngine, writer: StdoutWriter) -> None:
        began = time.monotonic()
        streams_to_terminal = writer.is_terminal and self.stream and not self.as_json  # the text shows the progress
        with progress(self._count(), shown=not streams_to_terminal) as line:
            tasks = [asyncio.create_task(self._generate(engine, answer, line)) for answer in self.answers]
            try:
                for number, answer in enumerate(self.answers, 1):
                    await self._print(writer, number, answer, line)
            finally:
                await cancel_async_tasks(tasks)
        if cut := self._cut():
            complain(cut)
        seconds = max(answer.ended_at for answer in self.answers) - began
        tokens = sum(len(answer.token_ids) for answer in self.answers)
        complain(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s")

    def _count(self) -> str:
        """How far it is, for people."""
        done = sum(answer.finish_reason is not None for answer in self.answers)
        tokens = sum(len(answer.token_ids) for answer in self.answers)
        return f"{done}/{len(self.answers)} prompts, {tokens} tokens"

    def _cut(self) -> str | None:
        """What to say of answers that had to end before they were as long as they might; None where there are none."""
        most, limit = self.params.max_new_tokens, self.engine_config().max_length
        cut = sum(answer.finish_reason == "length" and len(answer.token_ids) < most for answer in self.answers)
        which = "" if len(self.answers) == 1 else f"{cut} of {len(self.answers)} answers "
        return f"{which}cut at the context limit of {limit} tokens" if cut else None

    async def _generate(self, engine: AnyEngine, answer: Answer, line: ProgressLine) -> None:
        try:
            async for output in engine.generate(answer.prompt_token_ids, self.params):
                answer.pieces.append(output.text)
                answer.token_ids += output.token_ids
                answer.logprobs += output.logprobs or ()
                answer.finish_reason = output.finish_reason
                answer.ended_at = time.monotonic()
                answer.changed.set()
                line.update(self._count())
        except Exception as failure:  # raised where the answer is read
            answer.failure = failure
            answer.changed.set()

    async def _print(self, writer: StdoutWriter, number: int, answer: Answer, line: ProgressLine) -> None:
        if self.as_json or not self.stream:
            await answer.whole_async()
        with line.hidden() if writer.is_terminal else nullcontext():
            if self.as_json:
                await writer.write_json_async(answer.as_json())
                return
            await writer.write_async(self._title(writer, number, answer))
            async for piece in answer.pieces_async():
                await writer.write_async(piece)
            await writer.write_async("\n" if number == len(self.answers) else "\n\n")

    def _title(self, writer: StdoutWriter, number: int, answer: Answer) -> str:
        """Before an answer: its header among several. A lone prompt is repeated for a person: the text reads on."""
        if len(self.answers) > 1:
            header = f"[{number}/{len(self.answers)}] {answer.prompt}"
            return (click.style(header, bold=True) if writer.is_terminal else header) + "\n"
        return click.style(answer.prompt, bold=True) if writer.is_terminal else ""
