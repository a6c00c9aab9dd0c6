"""The `mpexec` command as people use it: in a terminal, in a pipe, interrupted, and with bad input."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from patience import left_of, within

import mpexec
from mpexec.engine.tokenizer import Tokenizer
from mpexec.models import default_model_path

COMMAND = [sys.executable, "-m", "mpexec"]
PROMPT = "In the beginning"
ENDLESS = ["generate", PROMPT, "--ignore-eos", "--max-new-tokens", "1000", "--verbose"]
JSON_KEYS = ["prompt", "text", "token_ids", "prompt_token_ids", "finish_reason"]

pytestmark = [pytest.mark.spawn, pytest.mark.timeout(180)]


def run(*args: str, stdin: str | bytes | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; stdin is empty unless given."""
    data = stdin.encode() if isinstance(stdin, str) else stdin or b""
    done = subprocess.run([*COMMAND, *args], input=data, capture_output=True, timeout=120, check=False, **options)  # type: ignore[call-overload]
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def answers(stdout: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in stdout.splitlines()]


@contextlib.contextmanager
def running(*args: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
    """The command while it runs; whatever a test does, it is gone afterwards."""
    process = subprocess.Popen([*COMMAND, *args], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(process: subprocess.Popen[bytes], count: int = 2) -> list[int]:
    """Wait until the ranks' processes exist; their ids, by rank."""
    driver = psutil.Process(process.pid)
    while len(children := driver.children()) < count:
        assert process.poll() is None
        time.sleep(0.005)
    return sorted(child.pid for child in children)


def end_of(process: subprocess.Popen[bytes], since: float) -> tuple[int, str, float]:
    """Wait for the end: exit code, stderr without what is said anyway or with --verbose, seconds since a moment."""
    _, stderr = process.communicate(timeout=60)
    took = time.monotonic() - since
    usual = re.compile(r"mpexec\.\S+: |mpexec: (rank \d is |loading \S+ on \d ranks|streams: )")
    lines = [line for line in stderr.decode().splitlines() if not usual.match(line)]
    return process.returncode, "\n".join(lines), took


# -- what it prints ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_answers() -> list[dict[str, object]]:
    """Four prompts of different length in one run of the command, which says nothing about deprecations."""
    environment = {**os.environ, "PYTHONWARNINGS": "always"}
    done = run("generate", "--json", "--max-new-tokens", "24", "--ignore-eos", *FOUR, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(TOLD, done.stderr)
    return answers(done.stdout)


TOLD = r"mpexec: loading kjv-small on 2 ranks\nmpexec: 96 tokens in \d+\.\d\d s: \d+\.\d tokens/s\n"
FOUR = [PROMPT, "And", "The LORD is my shepherd; I shall not want", "Behold, ünïcödé 🙂"]


def test_json_is_one_object_a_line_in_the_order_of_the_prompts(four_answers: list[dict[str, object]]) -> None:
    tokenizer = Tokenizer.load(default_model_path())
    assert [answer["prompt"] for answer in four_answers] == FOUR
    for answer in four_answers:
        assert list(answer) == JSON_KEYS
        assert answer["finish_reason"] == "length"
        token_ids, prompt_ids = answer["token_ids"], answer["prompt_token_ids"]
        assert isinstance(token_ids, list)
        assert len(token_ids) == 24
        assert answer["text"] == tokenizer.decode(token_ids)
        assert prompt_ids == list(tokenizer.encode(str(answer["prompt"])))


@pytest.mark.slow
def test_a_prompts_file_and_one_rank_give_the_same_answers(
    four_answers: list[dict[str, object]], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\r\n".join(FOUR).encode() + b"\r\n\n")
    options = ["generate", "--json", "--max-new-tokens", "24", "--ignore-eos"]
    done = run(*options, "--prompts", str(file), "--tp", "1")
    assert answers(done.stdout) == four_answers, done.stderr


@pytest.mark.slow
def test_prompts_from_stdin_are_printed_in_order_under_a_header_each(four_answers: list[dict[str, object]]) -> None:
    done = run("generate", "--max-new-tokens", "24", "--ignore-eos", "--no-stream", stdin="\n".join(FOUR))
    assert done.returncode == 0, done.stderr
    expected = [f"[{n}/4] {answer['prompt']}\n{answer['text']}\n" for n, answer in enumerate(four_answers, 1)]
    assert done.stdout == "\n".join(expected)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_and_another_one_does_not_on_a_model_given_by_name() -> None:
    options = ["generate", "--json", "--temperature", "1.5", "--max-new-tokens", "24", "--tp", "1"]
    by_name = ["--model", default_model_path().name]
    one, again = answers(run(*options, *by_name, "--seed", "7", PROMPT, PROMPT).stdout)
    (other,) = answers(run(*options, "--seed", "8", PROMPT).stdout)
    assert one == again
    assert one["token_ids"] != other["token_ids"]


def test_text_is_streamed_into_a_pipe_while_it_is_generated() -> None:
    with running(*ENDLESS) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 4096)
        assert first
        assert process.poll() is None
        text = first
        while len(text) < 200:
            text += (piece := os.read(process.stdout.fileno(), 4096))
            assert piece
        assert process.poll() is None


def test_models_lists_the_bundled_model_as_a_table_and_as_json() -> None:
    (model,) = answers(run("models", "--json").stdout)
    assert model["path"] == str(default_model_path())
    assert Path(str(model["path"]), "config.json").is_file()
    table = run("models").stdout
    assert str(model["name"]) in table
    assert str(model["path"]) in table


def test_version_and_help_and_their_examples() -> None:
    assert run("--version").stdout == f"mpexec {mpexec.__version__}\n"
    for arguments in (["--help"], ["-h"], ["generate", "--help"], ["models", "--help"]):
        done = run(*arguments)
        assert done.returncode == 0
        assert "Usage: mpexec" in done.stdout
    assert "Examples:\n" in run("generate", "--help").stdout


def test_help_does_without_torch_transformers_tokenizers_and_asyncio() -> None:
    code = (
        "import sys; from mpexec.cli import main; code = main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'asyncio', 'numpy', 'rich.console'}\n"
        "print(sorted(heavy & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


@pytest.mark.slow
def test_generating_leaves_torch_and_transformers_out_of_the_driver() -> None:
    code = (
        "import sys; from mpexec.cli import main\n"
        "if __name__ == '__main__':\n"
        "    code = main(['generate', 'In', '--max-new-tokens', '2'])\n"
        "    print(sorted({'torch', 'transformers', 'zmq', 'ray'} & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


# -- bad input -----------------------------------------------------------------------------------------------------

BAD_INPUT = [  # values that their option refuses by itself are in unit/test_cli_options.py
    (["--model", "/no/such/folder", PROMPT], "/no/such/folder"),
    (["--model", "/", PROMPT], "config.json"),
    (["--tp", "3", PROMPT], "3 ranks"),
    (["--tp", "two", PROMPT], "'two'"),
    (["--no-such-option", PROMPT], "--no-such-option"),
    ([""], "empty"),
    ([PROMPT, "   "], "prompt 2 of 2"),
    ([], "stdin"),
    (["--prompts", "/no/such/file"], "/no/such/file"),
    (["--prompts", "/"], "prompts file /"),
    (["--prompts", "/dev/null"], "/dev/null"),
    (["--prompts", "-"], "stdin"),
    (["--prompts", "x", PROMPT], "not both"),
    (["a " * 2000], "1024"),
]


@pytest.mark.parametrize("args, words", BAD_INPUT, ids=[" ".join(args)[:40] or "nothing" for args, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_exit_code_2_before_any_rank_starts(args: list[str], words: str) -> None:
    done = run("generate", *args, "--verbose")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("mpexec: ")
    assert words in line


@pytest.mark.parametrize(
    "content, words",
    [(b"one\n\nthree\n", "line 2"), (b"one\n\xff\xfe\n", "line 2"), (b"\n", "no prompt")],
    ids=["empty line", "not text", "only a line end"],
)
def test_a_bad_prompts_file_is_one_line_that_names_the_line(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    for done in (run("generate", "--prompts", str(file)), run("generate", stdin=content)):
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert words in done.stderr


def test_a_damaged_model_folder_is_refused_by_name(tmp_path: Path) -> None:
    def complain(break_it: Callable[[Path], object], name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for file in default_model_path().iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        break_it(folder)
        done = run("generate", "--model", str(folder), PROMPT)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        return line

    assert "weights" in complain(lambda folder: (folder / "model.safetensors").unlink(), "a")
    assert "tokenizer.json" in complain(lambda folder: (folder / "tokenizer.json").unlink(), "b")
    assert "tokenizer.json" in complain(lambda folder: (folder / "tokenizer.json").write_text("{}"), "c")
    assert "config.json" in complain(lambda folder: (folder / "config.json").write_text("{"), "d")


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ImportError('not here')")
    done = run("generate", PROMPT, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr == "mpexec: the command line needs click and rich: pip install 'mpexec[cli]'\n"


# -- how it ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment, number",
    [
        ("load", signal.SIGINT),
        pytest.param("load", signal.SIGTERM, marks=pytest.mark.slow),
        ("import torch", signal.SIGINT),
        pytest.param("start", signal.SIGINT, marks=pytest.mark.slow),
        ("decode", signal.SIGTERM),
    ],
)
def test_a_signal_ends_it_within_a_second_silently_with_nothing_left(moment: str, number: int) -> None:
    with running(*ENDLESS) as process:
        ranks = ranks_of(process)
        assert process.stdout is not None
        assert process.stderr is not None
        if moment == "decode":
            assert process.stdout.read(1)
        elif moment != "load":
            awaited = b"rank 1 is process" if moment == "start" else b"import torch"
            while awaited not in (line := process.stderr.readline()):
                assert line
        since = time.monotonic()
        process.send_signal(number)
        returncode, stderr, took = end_of(process, since)
        assert (returncode, stderr) == (128 + number, "")
        assert took < within(1.0)
        assert not left_of(ranks, within(1.0))


@pytest.mark.slow
def test_ctrl_c_ends_it_although_nobody_reads_its_full_stdout_pipe() -> None:
    readable, writable = os.pipe()
    fcntl.fcntl(writable, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writable, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writable, b"." * 64)
    os.set_blocking(writable, True)
    try:
        with running(*ENDLESS, stdout=writable) as process:
            ranks = ranks_of(process)
            assert process.stderr is not None
            while b"rank 1 is process" not in process.stderr.readline():
                pass
            driver = psutil.Process(process.pid)
            while not any(thread_waits_for_pipe(driver.pid, thread.id) for thread in driver.threads()):
                time.sleep(0.01)
            since = time.monotonic()
            process.send_signal(signal.SIGINT)
            returncode, stderr, took = end_of(process, since)
            assert (returncode, stderr) == (130, "")
            assert took < within(1.0)
            assert not left_of(ranks, within(1.0))
    finally:
        os.close(readable)
        os.close(writable)


def thread_waits_for_pipe(pid: int, thread: int) -> bool:
    """True while a thread is in write(2) on stdout."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/task/{thread}/syscall").read_text().startswith("1 0x1 ")
    return False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_in_one_message_within_two_seconds(rank: int) -> None:
    with running(*ENDLESS) as process:
        ranks = ranks_of(process)
        assert process.stdout is not None
        assert process.stdout.read(1)
        since = time.monotonic()
        os.kill(ranks[rank], signal.SIGKILL)
        returncode, stderr, took = end_of(process, since)
        assert returncode == 1
        (line,) = stderr.splitlines()
        assert line.startswith(f"mpexec: WorkerDiedError: rank {rank} (pid {ranks[rank]}) ")
        assert "SIGKILL" in line
        assert took < within(2.0)
        assert not left_of(ranks, within(1.0))


def test_an_engine_in_a_process_of_its_own_gives_the_same_answers(four_answers: list[dict[str, object]]) -> None:
    done = run("generate", "--engine-process", "--json", "--max-new-tokens", "24", "--ignore-eos", *FOUR)
    assert done.returncode == 0, done.stderr
    assert answers(done.stdout) == four_answers
    assert re.fullmatch(TOLD, done.stderr)


@pytest.mark.parametrize("victim", ["engine", "rank"])
def test_a_kill_behind_an_engine_process_is_named_in_one_message_within_two_seconds(victim: str) -> None:
    with running(*ENDLESS, "--engine-process") as process:
        (engine,) = ranks_of(process, 1)
        assert process.stdout is not None
        assert process.stdout.read(1)
        everybody = [engine, *(child.pid for child in psutil.Process(engine).children())]
        assert len(everybody) == 3
        pid = engine if victim == "engine" else everybody[1]
        since = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        returncode, stderr, took = end_of(process, since)
        assert returncode == 1
        (line,) = stderr.splitlines()
        assert line.startswith("mpexec: WorkerDiedError: ")
        assert f"(pid {pid}) killed by SIGKILL" in line
        assert took < within(2.0)
        assert not left_of(everybody, within(1.0))


@pytest.mark.slow
def test_ctrl_c_ends_an_engine_process_too() -> None:
    with running(*ENDLESS, "--engine-process") as process:
        (engine,) = ranks_of(process, 1)
        assert process.stdout is not None
        assert process.stdout.read(1)
        everybody = [engine, *(child.pid for child in psutil.Process(engine).children())]
        since = time.monotonic()
        process.send_signal(signal.SIGINT)
        returncode, stderr, took = end_of(process, since)
        assert (returncode, stderr) == (130, "")
        assert took < within(1.0)
        assert not left_of(everybody, within(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("where", [["generate", PROMPT], ["generate", PROMPT, "--engine-process"], ["bench"]])
def test_a_rank_that_stands_still_ends_it_after_the_stall_timeout_with_its_name(where: list[str]) -> None:
    long = ["--max-new-tokens", "900", "--verbose", "--stall-timeout", "2"]
    with running(*where, *long, *(["--ignore-eos"] if "generate" in where else [])) as process:
        parent = ranks_of(process, 1)[0] if "--engine-process" in where else process.pid
        assert process.stderr is not None
        while b"rank 1 is process" not in (line := process.stderr.readline()):
            assert line
        ranks = sorted(child.pid for child in psutil.Process(parent).children())
        if "generate" in where:
            assert process.stdout is not None
            assert process.stdout.read(1)
        since = time.monotonic()
        os.kill(ranks[1], signal.SIGSTOP)
        returncode, stderr, took = end_of(process, since)
        assert returncode == 1
        (line,) = (line for line in stderr.splitlines() if "no step" in line)
        assert re.match(rf"mpexec: no step for \d+ s: rank 1 \(pid {ranks[1]}\) stopped", line)
        assert 2.0 <= took < within(6.0)
        assert not left_of(ranks, within(1.0))


@pytest.mark.slow
def test_an_engine_process_that_stands_still_ends_it_too() -> None:
    with running(*ENDLESS, "--engine-process", "--stall-timeout", "2") as process:
        (engine,) = ranks_of(process, 1)
        assert process.stdout is not None
        assert process.stdout.read(1)
        everybody = [engine, *(child.pid for child in psutil.Process(engine).children())]
        since = time.monotonic()
        os.kill(engine, signal.SIGSTOP)
        returncode, stderr, took = end_of(process, since)
        assert returncode == 1
        assert re.search(r"^mpexec: no word from the engine's process for \d+ s$", stderr, re.MULTILINE)
        assert 2.0 <= took < within(6.0)
        assert not left_of(everybody, within(1.0))


@pytest.mark.slow
def test_a_rank_that_stands_still_is_told_after_some_seconds_and_again_at_ctrl_c() -> None:
    with running(*ENDLESS) as process:
        ranks = ranks_of(process)
        assert process.stdout is not None
        assert process.stdout.read(1)
        os.kill(ranks[1], signal.SIGSTOP)
        assert process.stderr is not None
        while b"mpexec: no step for" not in (line := process.stderr.readline()):
            assert line
        since = time.monotonic()
        process.send_signal(signal.SIGINT)
        returncode, stderr, took = end_of(process, since)
        assert (returncode, stderr.count("no step for")) == (130, 1)
        assert took < within(1.0)
        assert not left_of(ranks, within(1.0))


def test_a_rank_killed_while_loading_is_named_and_ends_it() -> None:
    with running(*ENDLESS) as process:
        ranks = ranks_of(process)
        since = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        returncode, stderr, took = end_of(process, since)
        assert returncode == 1
        assert "rank 1" in stderr
        assert "SIGKILL" in stderr
        assert "Traceback" not in stderr
        assert took < within(2.0)
        assert not left_of(ranks, within(1.0))


def test_an_error_in_the_models_forward_shows_type_text_and_remote_traceback(tmp_path: Path) -> None:
    (tmp_path / "breaker.py").write_text(BREAKER)
    environment = {**os.environ, "PYTHONPATH": str(Path(mpexec.__file__).parents[1])}
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(tmp_path / "breaker.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert time.monotonic() - since < within(60.0)
    assert done.returncode == 1
    message = done.stderr.partition("mpexec: loading kjv-small on 2 ranks\n")[2]
    assert message.startswith("mpexec: ArithmeticError: broken on purpose\n")
    assert "raised on rank 1 (pid " in message
    assert "in forward" in message
    assert message.count("Traceback (most recent call last)") == 1


BREAKER = '''
"""The command, with an agent that raises on rank 1 in its third step while rank 0 is in an all-reduce."""
import sys
import mpexec.engine.engine as engine
from mpexec.cli import main

def breaking_agent(*args, **kwargs):
    from mpexec.agent.causal_lm import CausalLMAgent

    class BreakingAgent(CausalLMAgent):
        def forward(self, inputs):
            if inputs.step_id == 3 and self.rank == 1:
                raise ArithmeticError("broken on purpose")
            return super().forward(inputs)

    return BreakingAgent(*args, **kwargs)

if __name__ == "__main__":
    engine.causal_lm_agent = breaking_agent
    sys.exit(main(["generate", "In the beginning", "--ignore-eos"]))
'''


def test_a_closed_reader_ends_it_quietly() -> None:
    with running(*ENDLESS) as process:
        ranks = ranks_of(process)
        assert process.stdout is not None
        assert process.stdout.read(1)
        since = time.monotonic()
        process.stdout.close()
        process.stdout = None
        returncode, stderr, took = end_of(process, since)
        assert (returncode, stderr) == (141, "")
        assert took < within(2.0)
        assert not left_of(ranks, within(1.0))


@pytest.mark.parametrize("args", [["--help"], ["models"], ["models", "--json"]])
def test_a_reader_that_never_reads_ends_it_quietly(args: list[str]) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    done = subprocess.run([*COMMAND, *args], stdout=writable, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writable)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_is_one_message() -> None:
    with open("/dev/full", "wb") as full, running("generate", PROMPT, stdout=full.fileno()) as process:
        returncode, stderr, _ = end_of(process, time.monotonic())
        assert returncode == 1
        (line,) = stderr.splitlines()
        assert "No space left" in line


# -- in a terminal ---------------------------------------------------------------------------------------------------


class Terminal:
    """The command in the foreground of a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x18\x00\x50\x00\x00\x00\x00\x00")
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - there is one thread here
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(slave)
        self.screen = b""

    def read_until(self, pattern: bytes) -> None:
        while not re.search(pattern, self.screen):
            assert self._read(60.0), f"ended without {pattern!r}: {self.screen!r}"

    def read_to_end(self) -> int:
        while self._read(60.0):
            pass
        return self.process.wait(60)

    def _read(self, timeout: float) -> bool:
        assert select.select([self._master], [], [], timeout)[0], f"silent: {self.screen!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # EIO: nobody has the other end open
            return False
        self.screen += data
        return bool(data)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*args: str) -> Terminal:
        made.append(Terminal(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_terminal_shows_progress_then_prompt_and_text_then_the_rate(terminal: Callable[..., Terminal]) -> None:
    shell = terminal("generate", PROMPT, "--max-new-tokens", "8", "--ignore-eos")
    shell.read_until(rb"loading \S+ on 2 ranks")
    assert shell.read_to_end() == 0
    shown = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shell.screen)
    assert PROMPT.encode() in shown
    assert re.search(rb"8 tokens in [0-9.]+ s: [0-9.]+ tokens/s", shown)
    assert shell.screen.rindex(b"\x1b[?25h") > shell.screen.rindex(b"\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize("moment", [rb"loading", rb"beginning(\x1b\[0m)?[^\x1b]+"], ids=["loading", "decode"])
def test_ctrl_c_in_a_terminal_ends_it_without_a_traceback(terminal: Callable[..., Terminal], moment: bytes) -> None:
    shell = terminal(*ENDLESS)
    shell.read_until(moment)
    since = time.monotonic()
    shell.press(b"\x03")
    assert shell.read_to_end() == 130
    assert time.monotonic() - since < within(1.0)
    assert b"Traceback" not in shell.screen
    assert b"Error" not in shell.screen


def test_without_a_prompt_at_a_terminal_it_says_how_to_give_one(terminal: Callable[..., Terminal]) -> None:
    shell = terminal("generate")
    assert shell.read_to_end() == 2
    assert b"no prompt" in shell.screen
