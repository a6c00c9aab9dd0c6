"""One run of `mpexec generate`: load, generate all prompts together, print them in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import click

from mpexec.cli.interrupt import end_process_in
from mpexec.cli.output import StdoutWriter
from mpexec.cli.report import ReaderGoneError, ToldError, complain, describe_failure
from mpexec.config import EngineConfig, StartMethod
from mpexec.engine.engine import Engine, ModelPlan, SamplingParams
from mpexec.errors import ConfigError
from mpexec.executor import choose_backend
from mpexec.tasks import cancel_async_tasks

_STOP_TIMEOUT_S = 1.0  # after a failure has been told, the prompt must be back within two seconds
_FAILED_PATIENCE_S = 1.5
_SLOTS = 8
_IN_FLIGHT = 256  # prompts handed to the engine at once


AnyEngine = Any  # an `Engine`, or a `ZMQEngine`, which has its face and needs an extra


def engine_class(*, own_process: bool) -> Any:
    """The engine to load a model with.

    Raises:
        ConfigError: An engine in a process of its own needs packages that are not installed.
    """
    if not own_process:
        return Engine
    try:
        from mpexec.mp_engine.zmq_engine import ZMQEngine
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'mpexec[zmq]'") from error
    return ZMQEngine


def choose_executor(plan: ModelPlan, asked: str) -> str:
    """The executor for a model: "mp" or "ray".

    Raises:
        ConfigError: It is Ray's, and Ray is not installed.
    """
    chosen, why = choose_backend(plan.worker_spec(EngineConfig()), asked)
    if chosen != "ray":
        return "mp"  # processes also for one rank: importing torch here would hold up Ctrl-C
    if find_spec("ray") is None:
        raise ConfigError(
            f"Ray is not installed, and --executor is ray ({why}): pip install 'mpexec[ray]', or use --executor mp"
        )
    return chosen


@dataclass(slots=True)
class Answer:
    """One prompt and what has been generated so far; `changed` is set with every piece."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
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
        return json.dumps(
            {
                "prompt": self.prompt,
                "text": self.text,
                "token_ids": self.token_ids,
                "prompt_token_ids": list(self.prompt_token_ids),
                "finish_reason": self.finish_reason,
            },
            ensure_ascii=False,
        )


@dataclass(slots=True, kw_only=True)
class Job:
    """Everything about one run that has been checked before any rank starts; the executor is "mp" or "ray"."""

    answers: list[Answer]
    params: SamplingParams
    plan: ModelPlan
    executor: str
    ray_address: str | None
    start_method: StartMethod
    engine_process: bool
    stream: bool
    as_json: bool
    verbose: bool

    @classmethod
    def prepare(
        cls,
        prompts: list[str],
        model: str | None,
        *,
        tp: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        ignore_eos: bool,
        executor: str,
        **options: Any,
    ) -> Job:
        """Check model and prompts.

        Raises:
            ConfigError: Names the value and the remedy.
        """
        params = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos
        )
        plan = ModelPlan.read(model, tp, EngineConfig())
        answers = []
        for number, prompt in enumerate(prompts, 1):
            try:
                answers.append(Answer(prompt, plan.encode(prompt)))
            except ConfigError as bad:
                raise ConfigError(f"prompt {number} of {len(prompts)}: {bad}") from bad
        return cls(answers=answers, params=params, plan=plan, executor=choose_executor(plan, executor), **options)

    def engine_config(self) -> EngineConfig:
        """As many slots, and as much room in them, as this run can use."""
        longest = max(len(answer.prompt_token_ids) for answer in self.answers)
        return EngineConfig(
            max_slots=min(_SLOTS, len(self.answers)),
            max_queue=len(self.answers),
            max_length=min(self.plan.max_length, longest + self.params.max_new_tokens),
            stop_timeout=_STOP_TIMEOUT_S,
        )

    async def run_async(self) -> None:
        """Load, generate, print; the ranks have been released when this returns or raises.

        Raises:
            ReaderGoneError: Nobody reads stdout any more.
            ToldError: A rank or the engine failed while generating; the message has been printed.
            StartupError: A rank did not become ready.
        """
        # The choice of executor below is this command's, not its user's.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="mpexec")
        if self.verbose:
            logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        writer = StdoutWriter()
        with self._quiet_stdout():
            await self._load_and_serve(writer)

    async def _load_and_serve(self, writer: StdoutWriter) -> None:
        with progress(f"loading {self.plan.facts.path.name} on {self.plan.tp} ranks"):
            engine = await engine_class(own_process=self.engine_process).from_pretrained_async(
                self.plan.facts.path,
                self.plan.tp,
                config=self.engine_config(),
                **self._executor_options(),
            )
        try:
            await engine.start_async()
            self._tell_pids(engine)
            await self._serve(engine, writer)
        except (ReaderGoneError, OSError):
            raise
        except Exception as failure:
            # Told before the clean-up, and the clean-up is bounded: a rank that hangs must not delay either.
            end_process_in(_FAILED_PATIENCE_S, 1)
            complain(("\n" if writer.is_inside_line else "") + describe_failure(failure))
            raise ToldError(1) from failure
        finally:
            try:
                await engine.stop_async()
            finally:
                await engine.release_async()

    @contextmanager
    def _quiet_stdout(self) -> Iterator[None]:
        """Keep off stdout what Ray says there, which belongs to the answers; a failure's facts are in its error."""
        if self.executor != "ray":
            yield
            return
        os.environ.setdefault("RAY_LOG_TO_DRIVER", "1" if self.verbose else "0")
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stderr if self.verbose else nowhere):
            yield

    def _executor_options(self) -> dict[str, Any]:
        """What the engine's executor is made of."""
        if self.executor == "mp":
            return {"backend": "mp", "start_method": self.start_method}
        return {"backend": "ray", "address": self.ray_address}

    def _tell_pids(self, engine: AnyEngine) -> None:
        if self.verbose:
            nodes = engine.rank_nodes
            for rank, pid in enumerate(engine.rank_pids):
                complain(f"rank {rank} is process {pid}" + (f" on node {nodes[rank]}" if nodes else ""))

    async def _serve(self, engine: AnyEngine, writer: StdoutWriter) -> None:
        began = time.monotonic()
        tasks = [asyncio.create_task(self._generate(engine, answer)) for answer in self.answers]
        try:
            for number, answer in enumerate(self.answers, 1):
                await self._print(writer, number, answer)
        finally:
            await cancel_async_tasks(tasks)
        seconds = max(answer.ended_at for answer in self.answers) - began
        tokens = sum(len(answer.token_ids) for answer in self.answers)
        complain(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s")

    async def _generate(self, engine: AnyEngine, answer: Answer) -> None:
        try:
            async for output in engine.generate(answer.prompt_token_ids, self.params):
                answer.pieces.append(output.text)
                answer.token_ids += output.token_ids
                answer.finish_reason = output.finish_reason
                answer.ended_at = time.monotonic()
                answer.changed.set()
        except Exception as failure:  # raised where the answer is read
            answer.failure = failure
            answer.changed.set()

    async def _print(self, writer: StdoutWriter, number: int, answer: Answer) -> None:
        if self.as_json:
            await answer.whole_async()
            await writer.write_json_async(answer.as_json())
            return
        if not self.stream:
            await answer.whole_async()
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


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show that something is going on, to a person at a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
