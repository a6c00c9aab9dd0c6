"""Ranks that die, hang, or leave something behind: the test fails, and the next one runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(480)  # a machine that is busy starts ranks slowly

LOSSES = """
    import ctypes, os, threading, time
    import pytest
    import torch
    import torch.distributed as dist

    pytestmark = pytest.mark.ranks(2, timeout=100)
    forever = threading.Event()

    def total(value):
        tensor = torch.tensor([float(value)])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_1_good(rank):
        assert total(rank) == 1

    def test_2_one_raises_while_the_other_waits(rank):
        if rank == 1:
            raise ValueError("this is why")
        total(rank)

    def test_3_segfault(rank):
        if rank == 1:
            print("last words")
            ctypes.string_at(0)
        total(rank)

    def test_4_good(rank):
        assert total(rank) == 1

    def test_5_good(rank):
        assert total(rank) == 1

    @pytest.mark.ranks(2)
    def test_6_hangs(rank):
        if rank == 1:
            total(rank)
        forever.wait()

    def test_7_leaves_a_thread(rank):
        if rank == 0:
            threading.Thread(target=forever.wait, name="left behind", daemon=True).start()

    def test_8_good(rank):
        assert total(rank) == 1
        assert not any(thread.name == "left behind" for thread in threading.enumerate())
"""


def test_a_rank_that_dies_hangs_or_leaks_fails_its_test_and_the_next_one_runs(run: Callable[..., Any]) -> None:
    ran = run("--mpexec-timeout=3", "-p", "no:timeout", test_losses=LOSSES)
    assert {name for name, outcome in ran.outcomes.items() if outcome != "passed"} == {
        "test_2_one_raises_while_the_other_waits",
        "test_3_segfault",
        "test_6_hangs",
    }, ran.out
    assert len(ran.outcomes) == 8
    raised = ran.section("test_2_one_raises_while_the_other_waits")
    assert re.search(r"^rank 1 of 2", raised, re.M) and "ValueError: this is why" in raised
    died = ran.section("test_3_segfault")
    assert "rank 1" in died and "SIGSEGV" in died and "last words" in died and "Segmentation fault" in died
    hung = ran.section("test_6_hangs")
    assert re.search(r"^rank 0 of 2 \(pid \d+\):", hung, re.M) and re.search(r"^rank 1 of 2 \(pid \d+\):", hung, re.M)
    assert "in all_reduce" in hung and "in wait" in hung and "test_losses.py" in hung
    assert "--mpexec-timeout" in hung
    assert ran.seconds["test_6_hangs"] < 20
    assert re.search(r"test_7_leaves_a_thread left a running thread 'left behind' on rank 0", ran.out)


XDIST = """
    import os, signal
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("number", range(10))
    def test_many(rank, number):
        if (number, rank) in ((3, 0), (6, 1)):
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
"""


@pytest.mark.slow
def test_under_xdist_the_death_of_a_rank_is_a_failed_test_and_no_dead_worker(run: Callable[..., Any]) -> None:
    ran = run("-n", "2", test_xdist=XDIST)
    assert {name for name, outcome in ran.outcomes.items() if outcome != "passed"} == {"test_many[3]", "test_many[6]"}
    assert len(ran.outcomes) == 10
    assert "SIGKILL" in ran.section("test_many[3]") and "SIGKILL" in ran.section("test_many[6]")
    assert "crashed while running" not in ran.out


TIMEOUT = """
    import threading
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.timeout(200)
    @pytest.mark.ranks(2)
    def test_warm_up():
        pass

    @pytest.mark.timeout(2)
    @pytest.mark.ranks(2)
    def test_hangs(rank):
        if rank == 1:
            dist.all_reduce(torch.ones(1))
        threading.Event().wait()

    def test_next():
        pass
"""


@pytest.mark.slow
def test_pytest_timeout_ends_a_test_on_ranks_with_their_stacks(run: Callable[..., Any]) -> None:
    ran = run("-o", "timeout_method=signal", test_timeout=TIMEOUT)
    assert ran.outcomes == {"test_warm_up": "passed", "test_hangs": "failed", "test_next": "passed"}, ran.out
    hung = ran.section("test_hangs")
    assert "Timeout" in hung and "stack of rank 0" in hung and "stack of rank 1" in hung
    assert "in all_reduce" in hung
