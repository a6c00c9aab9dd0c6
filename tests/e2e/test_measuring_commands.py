"""`mpexec bench` and `mpexec doctor` with real ranks: what they print, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import left_of, within
from test_cli import end_of, ranks_of, run, running

pytestmark = [pytest.mark.spawn, pytest.mark.timeout(240)]

SMALL = ["bench", "--prompt-tokens", "8", "--max-new-tokens", "4", "--requests", "4"]
PNG = b"\x89PNG\r\n\x1a\n"


def test_bench_measures_each_concurrency_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "speed.png"
    plot = ["--plot", str(picture)] if find_spec("matplotlib") else []
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path)}
    done = run(*SMALL, "--concurrency", "1,3", "--json", *plot, env=environment)
    assert done.returncode == 0, done.stderr
    one, three = (json.loads(line) for line in done.stdout.splitlines())
    assert [(level["concurrency"], level["requests"], level["tokens"]) for level in (one, three)] == [
        (1, 4, 16),
        (3, 4, 16),
    ]
    for level in (one, three):
        assert level["complete"]
        assert level["tokens_per_second"] > 0
        assert 0 < level["first_token_ms"]["p50"] <= level["whole_request_ms"]["p50"]
        assert 0 < level["between_tokens_ms"]["p50"] <= level["between_tokens_ms"]["p99"]
    told = (
        "mpexec: loading kjv-small on 2 ranks\n"
        "mpexec: streams: 1 (1 of 2): 4 requests\nmpexec: streams: 3 (2 of 2): 4 requests\n"
    )
    if plot:
        assert done.stderr == f"{told}mpexec: drawn: {picture}\n"
        assert picture.read_bytes().startswith(PNG)
    else:
        assert done.stderr == told


@pytest.mark.slow
def test_ctrl_c_ends_bench_after_what_was_measured_has_been_printed() -> None:
    args = ["bench", "--json", "--max-new-tokens", "200", "--concurrency", "1,64", "--requests", "1"]
    with running(*args) as process:
        ranks = ranks_of(process)
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())  # the second concurrency takes many times as long
        since = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().decode().splitlines()
        process.stdout = None
        returncode, stderr, took = end_of(process, since)
        assert (returncode, stderr) == (130, "")
        assert took < within(1.0)
        assert (first["concurrency"], first["complete"], first["tokens"]) == (1, True, 200)
        assert [json.loads(line)["complete"] for line in rest] in ([], [False])  # [] if no token had come
        assert not left_of(ranks, within(1.0))


@pytest.mark.slow
def test_a_killed_rank_ends_bench_in_one_message() -> None:
    with running(*SMALL, "--requests", "100000", "--concurrency", "2", "--verbose") as process:
        ranks = ranks_of(process)
        assert process.stderr is not None
        while b"rank 1 is process" not in (line := process.stderr.readline()):
            assert line
        since = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        returncode, stderr, took = end_of(process, since)
        assert returncode == 1
        (line,) = stderr.splitlines()
        assert f"rank 1 (pid {ranks[1]})" in line
        assert took < within(2.0)
        assert not left_of(ranks, within(1.0))


@pytest.mark.slow
def test_doctor_finds_two_ranks_that_call_each_other() -> None:
    done = run("doctor", "--json")
    findings = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    assert "gloo all-reduce right" in findings["two ranks"]["text"]
    assert findings["torch"]["status"] == findings["kernel"]["status"] == "ok"
    assert all(row["remedy"] for row in findings.values() if row["status"] != "ok")


def test_the_driver_of_bench_and_the_doctor_itself_do_without_torch_and_matplotlib() -> None:
    code = (
        "import sys, mpexec.cli.bench, mpexec.cli.doctor, mpexec.cli.measure, mpexec.cli.ps, mpexec.cli.stack\n"
        "print(sorted({'torch', 'matplotlib', 'transformers', 'zmq', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
