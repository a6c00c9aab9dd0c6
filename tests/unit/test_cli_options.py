"""Every option of every command arrives where it is used, and bad ones are one line and exit code 2.

No rank starts: what a command would run is replaced, and it is looked at what it was given.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from mpexec.cli import app
from mpexec.cli.loading import Loading
from mpexec.config import EngineConfig
from mpexec.errors import ConfigError
from mpexec.models import BundledModel, default_model_path

Given = dict[str, Any]
Case = tuple[list[str], str, Any]  # options, the value's name, the value


class Taken(Exception):
    """The command has got as far as to what it would run."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.given = given


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Given]:
    """Runs a command up to what it would run, and gives what that was given."""

    def raise_taken(*args: Any, **given: Any) -> Any:
        given.update(given.pop("sampling", {}))
        raise Taken({**given, "args": args})

    from mpexec.cli.job import Job
    from mpexec.cli.measure import Bench

    monkeypatch.setattr(Job, "prepare", raise_taken)
    monkeypatch.setattr(Bench, "prepare", raise_taken)
    monkeypatch.setattr("mpexec.cli.bench.find_spec", lambda name: object())
    monkeypatch.setattr("mpexec.cli.run.launch_job", lambda job: raise_taken(**vars_of(job)))
    monkeypatch.setattr(
        "mpexec.http.server.bind", lambda host, port: contextlib.nullcontext({"host": host, "port": port})
    )
    monkeypatch.setattr(
        "mpexec.cli.serve._serve_async", lambda sock, model, **given: raise_taken(model, **sock, **given)
    )

    def take(*words: str) -> Given:
        with pytest.raises(Taken) as taken:
            app.group.main(list(words), prog_name="mpexec", standalone_mode=False)
        return taken.value.given

    return take


def vars_of(job: Any) -> Given:
    return {name: getattr(job, name) for name in job.__dataclass_fields__}


def of_model(*positional: int) -> list[Case]:
    """The options that all commands with a model have; the model itself is a positional argument of what they run."""
    return [
        (["--model", "/some/folder"], f"args {positional[0]}", "/some/folder"),
        (["--model", default_model_path().name], f"args {positional[0]}", str(default_model_path())),
        (["--tp", "4"], "tp", 4),
        (["--tensor-parallel-size", "4"], "tp", 4),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--device", "cpu"], "device", "cpu"),
        (["--start-method", "forkserver"], "start_method", "forkserver"),
        (["--verbose"], "verbose", True),
        (["-v"], "verbose", True),
    ]


OF_EXECUTOR: list[Case] = [
    (["--executor", "ray"], "executor", "ray"),
    (["--executor", "ray", "--ray-address", "10.0.0.1:6379"], "ray_address", "10.0.0.1:6379"),
]
ARGUMENTS = {"generate": ["In the beginning"], "bench": [], "serve": [], "run": [__file__]}
CASES: dict[str, list[Case]] = {
    "generate": [
        *of_model(1),
        *OF_EXECUTOR,
        (["--max-new-tokens", "3"], "max_new_tokens", 3),
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--seed", "7"], "seed", 7),
        (["--top-k", "40"], "top_k", 40),
        (["--top-p", "0.9"], "top_p", 0.9),
        (["--min-p", "0.05"], "min_p", 0.05),
        (["--repetition-penalty", "1.1"], "repetition_penalty", 1.1),
        (["--stop", ".", "--stop", "\\n"], "stop", (".", "\n")),
        (["--stop-token-id", "7", "--stop-token-id", "0"], "stop_token_ids", (7, 0)),
        (["--logprobs", "3", "--json"], "logprobs", 3),
        (["--ignore-eos"], "ignore_eos", True),
        (["--no-stream"], "stream", False),
        (["--stream"], "stream", True),
        (["--json"], "as_json", True),
        (["--engine-process"], "engine_process", True),
        (["--stall-timeout", "30"], "stall_timeout", 30.0),
        (["--max-length", "128"], "max_length", 128),
        (["--max-slots", "2"], "max_slots", 2),
    ],
    "bench": [
        *of_model(0),
        *OF_EXECUTOR,
        (["--prompt-tokens", "5"], "prompt_tokens", 5),
        (["--max-new-tokens", "6"], "max_new_tokens", 6),
        (["--concurrency", "8,1, 2,8"], "concurrency", (1, 2, 8)),
        (["--requests", "9"], "requests", 9),
        (["--stall-timeout", "0"], "stall_timeout", 0.0),
        (["--max-length", "128"], "max_length", 128),
        (["--max-slots", "2"], "max_slots", 2),
        (["--seed", "7"], "seed", 7),
        (["--json"], "as_json", True),
        (["--plot", "speed.png"], "picture", Path("speed.png")),
    ],
    "serve": [
        *of_model(0),
        (["--host", "0.0.0.0"], "host", "0.0.0.0"),
        (["--port", "0"], "port", 0),
        (["--served-model-name", "kjv"], "served_model_name", "kjv"),
        (["--max-slots", "3"], "max_slots", 3),
        (["--max-queue", "4"], "max_queue", 4),
        (["--max-length", "128"], "max_length", 128),
        (["--drain-timeout", "0.5"], "drain_timeout", 0.5),
        (["--stall-timeout", "0"], "stall_timeout", 0.0),
    ],
    "run": [
        (["--nproc-per-node", "3"], "nproc", 3),
        (["--nnodes", "2"], "nnodes", 2),
        (["--nnodes", "2", "--node-rank", "1"], "node_rank", 1),
        (["--master-addr", "10.0.0.1"], "master_addr", "10.0.0.1"),
        (["--master-port", "12345"], "master_port", 12345),
        (["--standalone"], "master_port", None),
        (["--rdzv-backend", "c10d"], "master_port", None),
        (["--rdzv-endpoint", "10.0.0.2:99"], "master_addr", "10.0.0.2"),
        (["--rdzv-id", "mine"], "run_id", "mine"),
        (["--role", "trainer"], "role", "trainer"),
        (["--max-restarts", "2"], "max_restarts", 2),
        (["--module"], "command", (sys.executable, "-u", "-m", __file__)),
        (["--no-python", "true"], "command", ("true", __file__)),
        (["--log-dir", "logs"], "log_dir", "logs"),
        (["--redirects", "3"], "redirects", {0: 3}),
        (["--tee", "1"], "tee", {0: 1}),
        (["--nproc-per-node", "3", "--local-ranks-filter", "0,2"], "shown", frozenset({0, 2})),
        (["--shutdown-timeout", "1.5"], "grace", 1.5),
        (["--signals-to-handle", "SIGTERM,SIGINT"], "signals", (signal.SIGTERM, signal.SIGINT)),
        (["--env", "A=1", "--env", "B=2"], "env", {"A": "1", "B": "2"}),
    ],
}
# Tests of options that are not given to anything, in the folder above.
ELSEWHERE = {
    "--version": "e2e/test_cli.py::test_version_and_help_and_their_examples",
    "generate --prompts": "e2e/test_cli.py::test_a_prompts_file_and_one_rank_give_the_same_answers",
    "models --json": "e2e/test_cli.py::test_models_lists_the_bundled_model_as_a_table_and_as_json",
    "doctor --json": "unit/test_doctor.py::test_json_is_one_object_a_line",
    "ps --json": "e2e/test_inspection_commands.py::test_a_broken_executor_is_still_listed_with_its_root_cause",
    "stack --json": "e2e/test_inspection_commands.py::"
    "test_ps_lists_a_driver_with_what_its_ranks_are_at_and_stack_shows_where",
}


@pytest.mark.parametrize(
    "command, words, name, value",
    [(command, *case) for command, cases in CASES.items() for case in cases],
    ids=[f"{command} {' '.join(case[0])}" for command, cases in CASES.items() for case in cases],
)
def test_an_option_arrives(take: Callable[..., Given], command: str, words: list[str], name: str, value: Any) -> None:
    given = take(command, *words, *ARGUMENTS[command])
    place = re.fullmatch(r"args (\d)", name)
    assert (given["args"][int(place[1])] if place else given[name]) == value


def shown_options() -> dict[str, click.Option]:
    """The options that `--help` shows, as words: the command, and the name to turn it on, or to turn it off."""
    context = click.Context(app.group)
    commands = {f"{name} ": app.group.get_command(context, name) for name in app.group.list_commands(context)}
    found = {}
    for start, command in {"": app.group, **commands}.items():
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                for names in filter(None, (option.opts, option.secondary_opts)):
                    found[start + next(name for name in names if name.startswith("--"))] = option
    return found


def is_tested_by(test: str, words: str) -> bool:
    """True where a test of some file has these words as strings, itself or in what it uses of its module."""
    file, _, name = test.partition("::")
    module = ast.parse((Path(__file__).parents[1] / file).read_text())
    defined: dict[str, ast.AST] = {}
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            defined[statement.name] = statement
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            defined[statement.targets[0].id] = statement
    used, strings = [name], set()
    for user in used:
        for part in ast.walk(defined[user]):
            if isinstance(part, ast.Constant):
                strings.add(part.value)
            elif isinstance(part, ast.Name) and part.id in defined and part.id not in used:
                used.append(part.id)
    return strings.issuperset(words.split())


def test_every_option_in_help_has_a_test() -> None:
    arriving = {f"{command} {word}" for command, cases in CASES.items() for words, _, _ in cases for word in words}
    assert shown_options().keys() - arriving == ELSEWHERE.keys()
    for words, test in ELSEWHERE.items():
        assert is_tested_by(test, words), f"{test} does without {words}"


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_every_command_has_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in app.group.list_commands(click.Context(app.group)):
        assert app.run([command, word]) == 0
        shown, told = capsys.readouterr()
        assert shown.startswith(f"Usage: mpexec {command} [OPTIONS]")
        assert told == ""


def test_sampling_options_that_are_not_given_are_left_to_the_engine(take: Callable[..., Given]) -> None:
    given = take("generate", "In the beginning")
    assert not {"top_k", "top_p", "min_p", "repetition_penalty", "stop", "stop_token_ids", "logprobs"} & set(given)


@pytest.mark.parametrize(
    "words, told",
    [
        ("--top-p 0.9", "mpexec: --top-p has no effect without --temperature above 0\n"),
        ("--seed 0", "mpexec: --seed has no effect without --temperature above 0\n"),
        (
            "--seed 7 --top-k 5 --min-p 0",
            "mpexec: --top-k, --min-p, --seed have no effect without --temperature above 0\n",
        ),
        ("--seed 7 --top-k 5 --top-p 1 --min-p 0 --temperature 0.5", ""),
        ("--repetition-penalty 1.1 --stop x", ""),
    ],
)
def test_options_of_drawing_without_a_temperature_are_said_to_have_no_effect(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpexec.cli.generate.run_interruptibly", lambda work: work.close())
    assert app.run(["generate", *words.split(), "In the beginning"]) == 0
    assert capsys.readouterr().err == told


# -- bad input ---------------------------------------------------------------------------------------------------------

LONG = "a" * 300
DIGITS = "9" * 5000  # more than Python makes a number of
BAD = [
    ("generate --tp 0 x", "'--tensor-parallel-size': 0"),
    ("generate --tp -2 x", "'--tensor-parallel-size': -2"),
    ("generate --start-method teleport x", "'teleport'"),
    ("generate --dtype float64 x", "'float64' is not one of 'float32', 'bfloat16', 'float16'"),
    ("generate --device tpu x", "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
    ("bench --dtype half", "'half'"),
    ("bench --device cuda:0", "'cuda:0'"),
    ("generate --max-new-tokens 0 x", "'--max-new-tokens': 0"),
    ("generate --max-new-tokens -5 x", "'--max-new-tokens': -5"),
    ("generate --temperature -1 x", "'--temperature': '-1'"),
    ("generate --temperature nan x", "'nan'"),
    ("generate --temperature inf x", "'inf'"),
    ("generate --seed -1 x", "'--seed': -1"),
    ("generate --top-k -1 x", "'--top-k': -1"),
    ("generate --top-k many x", "'many'"),
    ("generate --max-length 1 x", "'--max-length': 1"),
    ("generate --max-length 4 In the beginning God created", "may have 4"),
    ("generate --max-length 2048 x", "kjv-small allows 2 to 1024 tokens"),
    ("generate --max-slots 0 x", "'--max-slots': 0"),
    ("generate --stop-token-id . x", "'.'"),
    ("generate --logprobs 21 --json x", "'--logprobs': 21"),
    ("generate --logprobs 3 x", "--logprobs 3 needs --json"),
    ("generate --model kjv x", "no model folder at kjv; bundled: kjv-small (`mpexec models`)"),
    ("serve --model kjv", "bundled: kjv-small"),
    ("generate --stall-timeout -1 x", "'--stall-timeout': '-1'"),
    ("generate --top-p 0 x", "'--top-p': '0'"),
    ("generate --top-p 1.5 x", "at most 1"),
    ("generate --min-p -0.1 x", "'--min-p': '-0.1'"),
    ("generate --min-p nan x", "'nan'"),
    ("generate --repetition-penalty 0 x", "at least 1e-05"),
    ("generate --temperature 1e-6 x", "1e-05"),
    ("generate --stop= x", "'' is empty"),
    ("generate --executor slurm x", "'slurm'"),
    ("generate --ray-address auto x", "needs --executor ray"),
    ("bench --concurrency 0", "'0' is no list"),
    ("bench --concurrency 1,,2", "for example 1,4,16"),
    ("bench --concurrency 1,-2", "'1,-2'"),
    ("bench --concurrency 4096", "1024"),
    ("bench --requests 0", "'--requests': 0"),
    ("bench --prompt-tokens 0", "'--prompt-tokens': 0"),
    ("bench --max-new-tokens none", "'none'"),
    ("bench --prompt-tokens 1000 --max-new-tokens 1000", "1024 tokens that kjv-small allows"),
    ("bench --seed 1.5", "'1.5'"),
    ("bench --max-length 100", "more than the 100 tokens of --max-length"),
    ("bench --max-slots none", "'none'"),
    ("bench --stall-timeout never", "'never'"),
    ("bench --executor ray --start-method fork", "--start-method fork is for --executor mp"),
    ("bench --executor ray --ray-address head", "'head' is not HOST:PORT"),
    ("bench --tp 3", "3 ranks"),
    ("bench --model /no/such/folder", "/no/such/folder"),
    ("bench --plot speed.pdf", "ends in .png"),
    ("bench --plot /no/such/folder/speed.png", "cannot be written"),
    (f"bench --plot {LONG}.png", "cannot be written"),
    ("bench --plot /proc/speed.png", "cannot be written"),
    (f"bench --model {LONG}", "File name too long"),
    (f"generate --model {LONG} x", "File name too long"),
    ("bench an-argument", "an-argument"),
    ("doctor --fix", "--fix"),
    ("doctor now", "now"),
    ("ps 12", "12"),
    ("stack", "PID"),
    ("stack 0", "'0' is no process id"),
    ("stack init", "'init' is no process id"),
    (f"stack {DIGITS}", "is no process id"),
    (f"bench --concurrency {DIGITS}", "is no list of numbers"),
    (f"generate --executor ray --ray-address host:{DIGITS} x", "is not HOST:PORT"),
    (f"run --no-python --nproc-per-node {DIGITS} true", "--nproc-per-node is a number from 1 to"),
    (f"run --no-python --nnodes {DIGITS} true", "--nnodes is a number"),
    (f"run --no-python --rdzv-endpoint host:{DIGITS} true", "--rdzv-endpoint is HOST:PORT"),
    (f"run --no-python --tee {DIGITS}:1 true", "--tee is 0, 1, 2 or 3"),
    (f"run --no-python --local-ranks-filter {DIGITS} true", "--local-ranks-filter is RANK"),
    ("stack 1", "MPEXEC_INSPECT=1"),
    ("completion", "bash|zsh|fish"),
    ("completion tcsh", "'tcsh'"),
    ("serve --tp two", "'two'"),
    ("serve --start-method exec", "'exec'"),
    ("serve --dtype int8", "'int8'"),
    ("serve --device gpu", "'gpu'"),
    ("serve --port 65536", "'--port': 65536"),
    ("serve --max-slots 0", "'--max-slots': 0"),
    ("serve --max-queue 0", "'--max-queue': 0"),
    ("serve --max-length 1", "'--max-length': 1"),
    ("serve --drain-timeout -1", "'-1'"),
    ("serve --stall-timeout inf", "'inf'"),
    ("run --node-rank first x", "'first'"),
    ("run --master-port 65536 x", "65536 is not in the range"),
    ("run --max-restarts -1 x", "'--max-restarts'"),
    ("run --shutdown-timeout nan x", "'nan'"),
    ("no-such-command", "no-such-command"),
]


BAD_ELSEWHERE = {
    "generate --prompts": "e2e/test_cli.py::test_bad_input_is_one_line_and_exit_code_2_before_any_rank_starts",
    "serve --host": "e2e/test_serve.py::test_bad_input_is_one_line_and_exit_code_2",
    **dict.fromkeys(
        [
            *("run --rdzv-backend", "run --log-dir", "run --redirects", "run --signals-to-handle", "run --env"),
        ],
        "e2e/test_run.py::test_bad_input_is_one_line_and_exit_code_2",
    ),
}
ANY_VALUE_WILL_DO = {"serve --served-model-name", "run --master-addr", "run --rdzv-id", "run --role"}


@pytest.mark.parametrize(
    "words, told", BAD, ids=[words.replace(LONG, "a...").replace(DIGITS, "9...") for words, _ in BAD]
)
def test_bad_input_is_one_line_and_exit_code_2_before_any_rank_starts(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def never(self: Loading, config: EngineConfig) -> Any:
        raise AssertionError("ranks would start")

    monkeypatch.setattr(Loading, "engine_async", never)
    monkeypatch.setattr("mpexec.cli.bench.find_spec", lambda name: object())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert app.run(words.split()) == 2
    shown, complaint = capsys.readouterr()
    assert shown == ""
    (line,) = complaint.splitlines()
    assert line.startswith("mpexec: ")
    assert told in line


def test_the_signals_that_are_handled_are_named_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["run", "--help"]) == 0
    assert "Default: SIGTERM, SIGINT, SIGHUP, SIGQUIT." in " ".join(capsys.readouterr().out.split())


def test_every_option_with_a_value_has_a_bad_one_in_a_table() -> None:
    tried = {f"{words.split()[0]} {word.partition('=')[0]}" for words, _ in BAD for word in words.split()}
    with_value = {words for words, option in shown_options().items() if not option.is_flag}
    assert with_value - tried == BAD_ELSEWHERE.keys() | ANY_VALUE_WILL_DO
    for words, test in BAD_ELSEWHERE.items():
        assert is_tested_by(test, words), f"{test} does without {words}"


def test_a_plot_without_matplotlib_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpexec.cli.bench import check_picture

    monkeypatch.setattr("mpexec.cli.bench.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'mpexec\[plot\]'"):
        check_picture("speed.png")


# -- output ----------------------------------------------------------------------------------------------------------


def test_characters_that_stdout_lacks_are_question_marks_and_json_has_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = BundledModel("kjv", Path("/模/[bold]x"), "…", 1, 1)
    monkeypatch.setattr("mpexec.cli.models.bundled_models", lambda: (model,))
    assert b"\xe2" not in written_to_latin_1(monkeypatch, "run", "--help")
    assert b"/?/[bold]x" in written_to_latin_1(monkeypatch, "models")
    assert json.loads(written_to_latin_1(monkeypatch, "models", "--json"))["path"] == str(model.path)


def written_to_latin_1(monkeypatch: pytest.MonkeyPatch, *words: str) -> bytes:
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
        assert app.run(list(words)) == 0
        sys.stdout.flush()
        return written.getvalue()


# -- completion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed, offered",
    [
        ("mpexec gen", ["generate"]),
        ("mpexec s", ["serve", "stack"]),
        ("mpexec generate --to", ["--top-k", "--top-p"]),
        ("mpexec bench --executor r", ["ray"]),
        ("mpexec completion f", ["fish"]),
    ],
)
def test_a_shell_is_offered_commands_options_and_values(
    typed: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_MPEXEC_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert app.run(None) == 0
    assert [line.removeprefix("plain,") for line in capsys.readouterr().out.splitlines()] == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_this_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_MPEXEC_COMPLETE={shell}_complete" in script
    assert "mpexec" in script
