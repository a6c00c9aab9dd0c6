"""The line that shows progress: only to a person, and never in the way of an answer."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from mpexec.agent.steps import TokenLogprobs
from mpexec.cli.job import Answer, Job
from mpexec.cli.loading import loading_progress
from mpexec.cli.progress import progress
from mpexec.engine.engine import GenerationOutput
from mpexec.models import default_model_path

PROMPTS = ["In the beginning", "And", "Behold"]


class Screen(io.StringIO):
    """What a terminal has been sent."""

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


@pytest.fixture
def at_screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Screen]:
    """Makes stderr a terminal. Called within the test: pytest replaces stderr between set-up and test."""

    def at_screen() -> Screen:
        shown = Screen()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", shown)
        return shown

    return at_screen


class Written:
    """Stands for stdout, which is the same terminal or something else."""

    def __init__(self, screen: Screen | None) -> None:
        self.is_terminal = screen is not None
        self.is_inside_line = False
        self.text = ""
        self._screen = screen

    async def write_async(self, text: str) -> None:
        self.text += text
        if self._screen is not None:
            self._screen.write(text)

    async def write_json_async(self, line: str) -> None:
        await self.write_async(line + "\n")


class Answering:
    """An engine that gives four tokens."""

    async def generate(self, prompt: tuple[int, ...], params: Any) -> AsyncIterator[GenerationOutput]:
        for token in range(4):
            yield GenerationOutput("word ", (token,), "length" if token == 3 else None, prompt)


def job(**changes: Any) -> Job:
    options: dict[str, Any] = {
        "tp": 2, "sampling": {"max_new_tokens": 4}, "stream": True, "as_json": False, "executor": "mp",
        "ray_address": None, "start_method": "spawn", "verbose": False,
    }  # fmt: skip
    prompts = changes.pop("prompts", PROMPTS)
    return Job.prepare(prompts, None, **{**options, **changes})


def test_a_line_is_shown_at_a_terminal_and_is_gone_afterwards(at_screen: Callable[[], Screen]) -> None:
    screen = at_screen()
    with progress("loading [a] model") as line:
        assert line.is_shown
        line.update("3/8 prompts")
    assert "loading [a] model" in screen.text
    assert "3/8 prompts" in screen.text
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")  # the cursor is back


def test_loading_shows_what_ranks_report_and_leaves_the_logger_as_it_was(at_screen: Callable[[], Screen]) -> None:
    screen = at_screen()
    logger = logging.getLogger("mpexec.executor.starting")
    before = (logger.level, list(logger.handlers))
    with loading_progress("kjv-small", 2):
        logger.info("rank %d: %s", 1, "loading file 3 of 8")
    assert "loading kjv-small on 2 ranks, rank 1: loading file 3 of 8" in screen.text
    assert (logger.level, list(logger.handlers)) == before


def test_nothing_is_shown_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("loading") as line, line.hidden():
        line.update("more")
        assert not line.is_shown
    assert capsys.readouterr().err == ""


def test_one_line_tells_a_pipe_what_is_loaded_where_somebody_waits_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_progress("kjv-small", 1, is_told=True):
        assert capsys.readouterr().err == "mpexec: loading kjv-small on 1 rank\n"
    with loading_progress("kjv-small", 2):
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "prompts, told",
    [
        (["And"], "cut at the context limit of 8 tokens"),
        (PROMPTS, "3 of 3 answers cut at the context limit of 8 tokens"),
    ],
)
async def test_answers_that_the_context_has_cut_are_told(
    prompts: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for most, lines in ((5, 2), (4, 1)):
        made = job(prompts=prompts, sampling={"max_new_tokens": most}, max_length=8)
        await made._serve(Answering(), Written(None))  # type: ignore[arg-type]
        complaints = capsys.readouterr().err.splitlines()
        assert len(complaints) == lines
        assert (f"mpexec: {told}" in complaints) == (lines == 2)


async def test_json_has_the_log_probabilities_where_there_are_some() -> None:
    likely = TokenLogprobs(-0.5, ((7, -0.5), (9, -math.inf)))
    answer = Answer("And", (1,), token_ids=[7], logprobs=[likely])
    shown = json.loads(answer.as_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert shown["logprobs"] == [
        {"chosen": -0.5, "top": [{"token_id": 7, "logprob": -0.5}, {"token_id": 9, "logprob": -9999.0}]}
    ]
    assert "logprobs" not in json.loads(Answer("And", (1,)).as_json())


async def test_a_batch_into_a_file_counts_prompts_and_tokens_on_the_terminal(at_screen: Callable[[], Screen]) -> None:
    screen = at_screen()
    written = Written(None)
    await job()._serve(Answering(), written)  # type: ignore[arg-type]
    assert "0/3 prompts, 0 tokens" in screen.text
    assert "3/3 prompts, 12 tokens" in screen.text
    assert "mpexec: 12 tokens in" in screen.text
    assert written.text.count("word word word word") == 3


async def test_whole_answers_to_the_same_terminal_hide_the_line_while_they_are_written(
    at_screen: Callable[[], Screen],
) -> None:
    screen = at_screen()
    await job(as_json=True)._serve(Answering(), Written(screen))  # type: ignore[arg-type]
    answers = [line for line in screen.text.splitlines() if '"prompt"' in line]
    assert len(answers) == 3
    assert all(re.search(r'(^|\r| )\{"prompt": ', line) for line in answers)
    assert "prompts, " in screen.text


async def test_text_that_streams_to_the_terminal_is_progress_enough(at_screen: Callable[[], Screen]) -> None:
    screen = at_screen()
    await job()._serve(Answering(), Written(screen))  # type: ignore[arg-type]
    assert "prompts, " not in screen.text
    assert "word word word word" in screen.text


def long_model(folder: Path) -> Path:
    """The bundled model with a longer context, without what a rank would need of it."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(default_model_path() / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return folder


def test_an_engine_has_room_for_the_longest_prompt_and_its_answer_and_no_more(tmp_path: Path) -> None:
    folder = str(long_model(tmp_path))
    options: dict[str, Any] = {
        "tp": 2, "stream": True, "as_json": False, "executor": "mp", "ray_address": None, "start_method": "spawn",
        "verbose": False,
    }  # fmt: skip

    def limits(**changes: Any) -> tuple[int, int | None]:
        made = Job.prepare(["And", "And " * 5000], folder, **{**options, "sampling": {"max_new_tokens": 4}, **changes})
        config = made.engine_config()
        return config.max_slots, config.max_length

    tokens = len(job().loading.plan.tokenizer.encode("And " * 5000))  # type: ignore[union-attr]
    assert 4096 < tokens < 8000
    assert limits() == (2, tokens + 4)
    assert limits(sampling={"max_new_tokens": 9000}) == (2, 8192)
    assert limits(max_slots=1, max_length=8000) == (1, 8000)


async def test_sampling_params_are_made_of_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, Any]] = []

    def params(**fields: Any) -> Any:
        taken.append(fields)
        raise ValueError("enough")

    monkeypatch.setattr("mpexec.cli.job.SamplingParams", params)
    with pytest.raises(ValueError, match="enough"):
        job(sampling={"top_k": 5, "stop": (".",)})
    assert taken == [{"top_k": 5, "stop": (".",)}]
