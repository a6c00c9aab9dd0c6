"""How a program ends that has started no cluster itself, and what is left of the one that was started for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra: pip install 'mpexec[ray]'")

import leaks
from faults.drivers import Pipe
from faults.watching import LOAD

from on_ray.checking import Program

pytestmark = [pytest.mark.spawn, pytest.mark.slow, pytest.mark.timeout(120)]

GONE_S = 10.0  # Ray's own daemons included
RANKS_GONE_S = 3.0


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Starts programs, and ends those that still run after the test."""
    started: list[Program] = []

    def start(*arguments: str) -> Program:
        started.append(Program("drive_ending.py", *arguments))
        return started[-1]

    yield start
    for program in started:
        program.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path)
    yield pipe
    pipe.close()


def check_quiet(program: Program) -> None:
    """Nothing is left, and no word of it on stderr."""
    left = leaks.await_gone(program.family(), GONE_S * LOAD)
    assert not left, [leaks.describe_process(pid) for pid in left]
    assert not leaks.NOISE.search(program.stderr), program.stderr
    assert "mpexec" not in program.stderr.replace("/mpexec/", ""), program.stderr


def test_a_cluster_that_was_started_for_an_executor_goes_with_it_released_or_forgotten(start: Any) -> None:
    program = start("release")
    assert program.hear() == ["released"]
    (pids,) = program.hear()
    program.family()
    assert program.end() == 0, program.stderr
    assert not leaks.await_gone(pids, RANKS_GONE_S * LOAD)
    check_quiet(program)
    assert "Traceback" not in program.stderr, program.stderr


@pytest.mark.slow
def test_an_executor_under_which_ray_is_shut_down_says_so_and_can_be_released(start: Any) -> None:
    program = start("leave")
    (in_a_call,), (made,), (idle,) = program.hear(), program.hear(), program.hear()
    assert made == idle
    assert program.end() == 0, program.stderr
    assert not leaks.await_gone([*in_a_call, *idle], RANKS_GONE_S * LOAD)
    check_quiet(program)
    assert "Traceback" not in program.stderr, program.stderr


@pytest.mark.slow
def test_a_program_that_ends_by_an_error_shows_only_that(start: Any) -> None:
    program = start("error")
    (pids,) = program.hear()
    assert program.end() == 1
    assert not leaks.await_gone(pids, RANKS_GONE_S * LOAD)
    check_quiet(program)
    assert program.stderr.count("Traceback") == 1 and "KeyError: 'of the program'" in program.stderr


@pytest.mark.parametrize("manner", [pytest.param("hang_python", marks=pytest.mark.slow), "hang_c"])
def test_ranks_do_not_outlive_a_killed_program(start: Any, pipe: Pipe, manner: str) -> None:
    program = start(manner, pipe.path)
    (pids,) = program.hear()
    assert sorted(pipe.pids(2)) == sorted(pids)
    program.family()  # Ray's agents see to their own end, in their own time; they are ended with the test
    began = time.monotonic()
    program.process.kill()
    assert not leaks.await_gone(pids, RANKS_GONE_S * LOAD)
    print(f"ranks gone after {time.monotonic() - began:.2f} s")
