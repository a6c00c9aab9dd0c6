"""`mpexec generate --executor ray`, and an engine on Ray: the same answers, bad input, and a rank that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest
from patience import left_of, within

from mpexec import ConfigError, Engine
from mpexec.cli.app import run as run_in_process

PROMPTS = ["In the beginning", "The LORD is my shepherd; I shall not want"]
COMMAND = [sys.executable, "-m", "mpexec", "generate"]
ON_RAY = ["--executor", "ray"]
ENDLESS = [*ON_RAY, PROMPTS[0], "--ignore-eos", "--max-new-tokens", "1000", "--verbose"]
RANK = re.compile(r"mpexec: rank (\d) is process (\d+) on node (\S+)\n")

# Looked for and not imported: Ray changes the environment of the process that imports it.
HAS_RAY = find_spec("ray") is not None

pytestmark = [
    pytest.mark.spawn,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not HAS_RAY, reason="needs the extra: pip install 'mpexec[ray]'"),
]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """For a command that finds no cluster of others, and leaves Ray's logs in a folder that goes after the test."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        yield {**kept, "RAY_TMPDIR": folder}


def generate(environment: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*COMMAND, *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
    )


@contextlib.contextmanager
def generating(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[tuple[int, str]], set[int]]]:
    """The command while it generates, pid and node of each rank, and all processes that it has started."""
    process = subprocess.Popen(
        [*COMMAND, *ENDLESS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    started: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        ranks: list[tuple[int, str]] = []
        while len(ranks) < 2:
            line = process.stderr.readline()
            assert line, "the command has ended"
            if told := RANK.match(line):
                assert int(told[1]) == len(ranks)
                ranks.append((int(told[2]), told[3]))
        assert process.stdout.read(1)
        started = psutil.Process(process.pid).children(recursive=True)
        yield process, ranks, {child.pid for child in started}
    finally:
        process.kill()
        process.communicate()
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end: exit code, and what the command itself says; --verbose adds more."""
    _, stderr = process.communicate(timeout=60)
    return process.returncode, "\n".join(line for line in stderr.splitlines() if line.startswith("mpexec: "))


# -- what it prints ----------------------------------------------------------------------------------------------------


def test_the_answers_are_those_of_mp_and_nothing_of_rays_is_printed(environment: dict[str, str]) -> None:
    options = ["--json", "--max-new-tokens", "12", "--ignore-eos", *PROMPTS]
    on_ray = generate({**environment, "PYTHONWARNINGS": "always::DeprecationWarning:mpexec"}, *options, *ON_RAY)
    assert on_ray.returncode == 0, on_ray.stderr
    loading, speed = on_ray.stderr.splitlines()
    assert loading == "mpexec: loading kjv-small on 2 ranks"
    assert re.fullmatch(r"mpexec: 24 tokens in \d+\.\d\d s: \d+\.\d tokens/s", speed)
    assert on_ray.stdout == generate(environment, *options).stdout
    assert [json.loads(line)["prompt"] for line in on_ray.stdout.splitlines()] == PROMPTS


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_uses_ray_too(environment: dict[str, str]) -> None:
    options = ["--json", "--max-new-tokens", "12", "--ignore-eos", *PROMPTS]
    on_ray = generate(environment, *options, "--engine-process", "--verbose", "--executor", "auto")
    assert "on node" not in on_ray.stderr  # no cluster is named: "auto" is mp
    environment["RAY_ADDRESS"] = "local"
    on_ray = generate(environment, *options, "--engine-process", "--verbose", "--executor", "auto")
    assert on_ray.returncode == 0, on_ray.stderr
    assert len(RANK.findall(on_ray.stderr)) == 2
    assert on_ray.stdout == generate(environment, *options).stdout


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD_INPUT = [
    (["--executor", "teleport"], "'teleport'"),
    (["--ray-address", "auto"], "--ray-address auto needs --executor ray, but it is 'mp'"),
    (["--ray-address", "10.0.0.1:6379", "--executor", "auto"], "10.0.0.1:6379 needs --executor ray, but it is 'auto'"),
    ([*ON_RAY, "--ray-address", "10.0.0.1"], "'10.0.0.1' is not HOST:PORT"),
    ([*ON_RAY, "--ray-address", "head:65536"], "'head:65536' is not HOST:PORT"),
    ([*ON_RAY, "--ray-address", "head:port"], "'head:port' is not HOST:PORT"),
    ([*ON_RAY, "--ray-address", ""], "'' is not HOST:PORT"),
    ([*ON_RAY, "--ray-address", "ray://head:10001"], "'ray://head:10001' is of Ray Client"),
    ([*ON_RAY, "--start-method", "spawn"], "--start-method spawn is for --executor mp"),
    ([*ON_RAY, "--tp", "3"], "3 ranks"),
]


@pytest.mark.parametrize("args, words", BAD_INPUT, ids=[" ".join(args)[:60] for args, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_in_process(["generate", PROMPTS[0], *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("mpexec: ")
    assert words in line


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"], ids=["asked for", "by RAY_ADDRESS"])
def test_a_missing_ray_is_named_with_the_command_that_installs_it(
    address: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert run_in_process(["generate", PROMPTS[0], "--executor", "ray" if address is None else "auto"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'mpexec[ray]'" in line
    assert address is None or address in line


def test_an_engine_refuses_options_of_ray_for_another_executor_and_bad_ones() -> None:
    with pytest.raises(ConfigError, match="'cpus_per_rank'"):
        Engine.from_pretrained(tp=2, backend="mp", cpus_per_rank=2)
    with pytest.raises(ConfigError, match="placement_strategy='HEAP'"):
        Engine.from_pretrained(tp=2, backend="ray", placement_strategy="HEAP")


def test_an_address_where_nothing_answers_is_named_and_ends_it(environment: dict[str, str]) -> None:
    done = generate(environment, PROMPTS[0], *ON_RAY, "--ray-address", "127.0.0.1:9")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no Ray cluster at '127.0.0.1:9'" in done.stderr
    assert "Traceback" not in done.stderr


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_node_and_rays_reason_and_the_cluster_goes_too(
    environment: dict[str, str],
) -> None:
    """F136: the first error is the one that is told, although all actors are gone when they are released."""
    with generating(environment) as (process, ranks, everybody):
        pid, node = ranks[1]
        since = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        returncode, stderr = end_of(process)
        assert time.monotonic() - since < within(3.0)
        assert returncode == 1
        (line,) = stderr.splitlines()
        assert line.startswith(f"mpexec: WorkerDiedError: rank 1 (pid {pid}) on node {node} ended: ")
        assert "worker process has died" in line
        assert len(everybody) > 2
        assert not left_of(everybody | {pid for pid, _ in ranks}, within(5.0))


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_and_the_cluster(environment: dict[str, str]) -> None:
    with generating(environment) as (process, ranks, everybody):
        since = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert end_of(process) == (130, "")
        assert time.monotonic() - since < within(1.0)
        assert not left_of(everybody | {pid for pid, _ in ranks}, within(5.0))


@pytest.mark.slow
def test_the_ranks_end_with_a_command_that_is_killed(environment: dict[str, str]) -> None:
    """Agents of Ray's own notice a minute later, when they no longer reach their head."""
    with generating(environment) as (process, ranks, _):
        process.kill()
        assert end_of(process) == (-signal.SIGKILL, "")
        assert not left_of({pid for pid, _ in ranks}, within(5.0))
