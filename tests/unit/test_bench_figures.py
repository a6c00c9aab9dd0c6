"""`mpexec bench`: percentiles, tables, the picture, and what is printed when a run ends early. No rank starts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mpexec.cli.figures import Level, Setting, in_milliseconds, percentile, print_json, print_table
from mpexec.cli.loading import Loading
from mpexec.cli.measure import Bench
from mpexec.config import EngineConfig
from mpexec.engine.engine import GenerationOutput

SETTING = Setting("kjv-small", 2, "mp", "bfloat16", "cpu", 8, 4)
KEYS = [
    "model", "tp", "executor", "dtype", "device", "prompt_tokens", "new_tokens", "concurrency", "requests", "complete",
    "seconds", "tokens", "tokens_per_second", "first_token_ms", "between_tokens_ms", "whole_request_ms",
]  # fmt: skip


def level(concurrency: int = 2, *, answered: int = 4) -> Level:
    """Four requests of four tokens in two seconds, of which some are answered."""
    made = Level(concurrency, requests=4, began=10.0, ended=12.0, tokens=16)
    made.first_token_s = [0.1, 0.2, 0.3, 0.4]
    made.inter_token_s = [0.01] * 12
    made.end_to_end_s = [1.0] * answered
    return made


def test_percentiles_lie_between_the_values_around_them() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)
    assert percentile([float(n) for n in range(101)], 99) == pytest.approx(99.0)
    assert in_milliseconds([0.3, 0.1]) == {50: pytest.approx(200), 90: pytest.approx(280), 99: pytest.approx(298)}
    assert in_milliseconds([]) == {50: None, 90: None, 99: None}


def test_json_has_one_object_for_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(SETTING, level())
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert list(figures) == KEYS
    assert figures["tokens_per_second"] == 8.0
    assert figures["first_token_ms"] == {"p50": 250.0, "p90": 370.0, "p99": 397.0}
    assert figures["complete"] is True


def test_a_piped_table_has_one_word_in_each_column_and_a_row_for_each_percentile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(SETTING, [level(1), level(2, answered=3)])
    header, *rows = capsys.readouterr().out.splitlines()
    assert max(map(len, [header, *rows])) < 100
    table = [dict(zip(header.split(), row.split(), strict=True)) for row in rows]
    assert [(row["streams"], row["percentile"]) for row in table] == [
        (streams, percentile) for streams in ("1", "2") for percentile in ("p50", "p90", "p99")
    ]
    assert (table[3]["requests"], table[3]["tokens/s"]) == ("3/4", "8.0")
    assert table[3]["first-token-ms"] == "250"
    assert table[5]["between-tokens-ms"] == "10.0"


def test_a_terminal_of_80_columns_gets_the_model_as_it_is_named_and_no_row_in_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it as being at a terminal
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    import click

    slow = level(1024)
    slow.tokens, slow.end_to_end_s = 1_000_000, [12345.6] * 4

    @click.command
    def shown() -> None:
        print_table(replace(SETTING, model="my[red]model"), [level(), slow])

    text = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(shown).output)
    title, _, _, *rows, footnote = text.splitlines()
    assert title.rstrip() == "my[red]model, TP 2, bfloat16 on cpu, 8 prompt tokens, 4 new tokens"
    assert [row.split() for row in rows] == [
        ["2", "4", "8.0", "p50", "250", "10.0", "1000"],
        ["p90", "370", "10.0", "1000"],
        ["p99", "397", "10.0", "1000"],
        ["1024", "4", "500000.0", "p50", "250", "10.0", "12345600"],
        ["p90", "370", "10.0", "12345600"],
        ["p99", "397", "10.0", "12345600"],
    ]
    assert footnote.rstrip() == "p99 of fewer than 100 requests is near the slowest of them"


def test_nothing_between_tokens_where_there_is_one_token(capsys: pytest.CaptureFixture[str]) -> None:
    alone = level()
    alone.inter_token_s = []
    print_table(SETTING, [alone])
    header, row, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert dict(zip(header, row, strict=True))["between-tokens-ms"] == "-"


DRAW = """
import dataclasses, sys, warnings
from pathlib import Path
from test_bench_figures import SETTING, level
from matplotlib.figure import Figure
from mpexec.cli import plot
from PIL import Image

folder = Path(sys.argv[1])
for number, levels in enumerate([[level(1), level(4), level(64)], [level(3)]]):
    file = folder / f"{number}.png"
    plot.draw(SETTING, levels, file)
    with Image.open(file) as picture:
        print(picture.format, picture.size)

for name in ("w" * 250, "\u65e5\u672c" * 40, "a_$model$_^2"):
    plot.draw(dataclasses.replace(SETTING, model=name), [level()], file)
    figure = plot._figure(dataclasses.replace(SETTING, model=name), [level()])
    with warnings.catch_warnings(action="ignore"):
        title = figure._suptitle.get_window_extent(figure.canvas.get_renderer())
    print("inside" if 0 < title.x0 < title.x1 < figure.bbox.width else title, figure._suptitle.get_parse_math())

for streams in ([1, 4, 8], [2**n for n in range(11)], range(1, 17), [1000, 1024], [3]):
    figure = plot._figure(SETTING, [level(number) for number in streams])
    figure.canvas.draw()
    axes = figure.axes[0]
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    apart = all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:]))
    print(apart, *(label.get_text() for label in axes.get_xticklabels()))

def interrupted(figure, file, **options):
    file.write(b"half")
    raise KeyboardInterrupt

Figure.savefig, before = interrupted, file.read_bytes()
for drawn in (file, folder / "new.png"):
    try:
        plot.draw(SETTING, [level()], drawn)
    except KeyboardInterrupt:
        print(file.read_bytes() == before, sorted(file.name for file in folder.glob("*.*")))
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the script prints, in a process of its own: matplotlib keeps its fonts open."""
    folder = tmp_path_factory.mktemp("pictures")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    environment["MPLCONFIGDIR"] = str(tmp_path_factory.mktemp("matplotlib"))
    done = subprocess.run(
        [sys.executable, "-c", DRAW, str(folder)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "Glyph" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_picture_of_many_levels_or_one_is_large_enough_to_read(drawn: list[str]) -> None:
    assert drawn[:2] == ["PNG (1650, 750)"] * 2


@pytest.mark.slow
def test_a_name_of_any_length_and_script_is_inside_the_picture_and_no_formula(drawn: list[str]) -> None:
    assert drawn[2:5] == ["inside False"] * 3


@pytest.mark.slow
def test_levels_that_lie_close_have_no_numbers_over_each_other(drawn: list[str]) -> None:
    assert drawn[5:10] == [
        "True 1 4 8",
        "True 1 2 4 8 16 32 64 128 256 512 1024",
        "True 1 2 3 5 7 9 12 16",
        "True 1000 1024",
        "True 3",
    ]


@pytest.mark.slow
def test_drawing_that_is_interrupted_leaves_the_picture_of_before_or_none(drawn: list[str]) -> None:
    assert drawn[10:] == ["True ['0.png', '1.png']"] * 2


# -- a whole run, with an engine that answers at once ------------------------------------------------------------------


class Counting:
    """An engine that counts what runs together; `hang_at` requests have begun, it answers nobody any more."""

    def __init__(self, hang_at: int | None = None) -> None:
        self.begun = self.running = self.most = 0
        self.hang_at = hang_at
        self.hung = asyncio.Event()
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, prompt: tuple[int, ...], params: Any) -> AsyncIterator[GenerationOutput]:
        self.begun += 1
        self.prompts.append(prompt)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for token in range(params.max_new_tokens):
                await asyncio.sleep(0)
                if self.hang_at is not None and self.begun > self.hang_at:
                    self.hung.set()
                    await asyncio.Event().wait()
                last = token + 1 == params.max_new_tokens
                yield GenerationOutput("x", (token,), "length" if last else None, prompt)
        finally:
            self.running -= 1


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts an engine in place of a loaded one, and gives the limits that it would have been loaded with."""
    configs: list[EngineConfig] = []

    def engine_of(engine: Counting) -> list[EngineConfig]:
        @asynccontextmanager
        async def engine_async(self: Loading, config: EngineConfig) -> AsyncIterator[Counting]:
            configs.append(config)
            yield engine

        monkeypatch.setattr(Loading, "engine_async", engine_async)
        return configs

    return engine_of


def bench(**changes: Any) -> Bench:
    options: dict[str, Any] = {
        "tp": 2, "prompt_tokens": 8, "max_new_tokens": 4, "concurrency": (1, 3), "requests": 5, "seed": 1,
        "as_json": True, "picture": None, "executor": "mp", "ray_address": None, "start_method": "spawn",
        "verbose": False,
    }  # fmt: skip
    return Bench.prepare(None, **{**options, **changes})


async def test_each_level_runs_so_many_requests_at_a_time(engine_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Counting()
    engine_of(engine)
    await bench().run_async()
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["concurrency"], first["requests"], first["tokens"]) == (1, 5, 20)
    assert (second["concurrency"], second["requests"], second["tokens"]) == (3, 5, 20)
    assert engine.most == 3
    assert engine.begun == 3 + 5 + 5  # the first three warm up
    assert {len(prompt) for prompt in engine.prompts} == {8}


async def test_a_pipe_is_told_of_each_level_as_it_begins(engine_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine_of(Counting())
    await bench(concurrency=(1, 8)).run_async()
    assert capsys.readouterr().err.splitlines() == [
        "mpexec: streams: 1 (1 of 2): 5 requests",
        "mpexec: streams: 8 (2 of 2): 8 requests",
    ]


async def test_the_same_seed_sends_the_same_prompts(engine_of: Any) -> None:
    sent = []
    for seed in (1, 1, 2):
        engine = Counting()
        engine_of(engine)
        await bench(seed=seed).run_async()
        sent.append(engine.prompts)
    assert sent[0] == sent[1] != sent[2]


async def test_a_prompt_is_drawn_when_its_request_is_sent(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, drawn, ahead = Bench._prompt, [0], []

    def counted(self: Bench, random: Any) -> tuple[int, ...]:
        drawn[0] += 1
        ahead.append(drawn[0] - engine.begun)
        return draw(self, random)

    monkeypatch.setattr(Bench, "_prompt", counted)
    engine = Counting()
    engine_of(engine)
    await bench(requests=50).run_async()
    assert engine.begun == drawn[0] == 3 + 50 + 50
    assert set(ahead) == {1}


async def test_the_engine_has_room_for_the_largest_level_and_no_more(engine_of: Any) -> None:
    configs = engine_of(Counting())
    await bench(concurrency=(2, 6)).run_async()
    (config,) = configs
    assert (config.max_slots, config.max_length) == (6, 12)


async def test_the_engine_has_the_slots_and_the_room_that_were_asked_for(engine_of: Any) -> None:
    configs = engine_of(Counting())
    await bench(concurrency=(2, 6), max_slots=4, max_length=32).run_async()
    (config,) = configs
    assert (config.max_slots, config.max_queue, config.max_length) == (4, 6, 32)


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "table"])
async def test_a_run_that_is_cancelled_prints_what_was_measured_until_then(
    as_json: bool, engine_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Counting(hang_at=3 + 5 + 3)  # in the second level, with three requests answered or under way
    engine_of(engine)
    run = asyncio.create_task(bench(as_json=as_json).run_async())
    await engine.hung.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    lines = capsys.readouterr().out.splitlines()
    if as_json:
        first, second = (json.loads(line) for line in lines)
        assert (first["complete"], second["complete"]) == (True, False)
        assert 0 < second["requests"] < 5
        assert 4 * second["requests"] <= second["tokens"] < 20
    else:
        rows = [line.split() for line in lines[1:]]
        assert [row[1] == "5" for row in rows] == [True] * 3 + [False] * 3
        assert all(row[1].endswith("/5") for row in rows[3:])
    assert engine.running == 0
