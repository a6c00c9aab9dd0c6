"""Warm ranks: many small tests are fast, in step, and the session ends at once."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(480)  # a machine that is busy starts ranks slowly

MANY = """
    import os
    import time
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("number", range(100))
    def test_tiny(rank, number):
        with open(f"order-{rank}", "a") as file:
            print(number, os.getpid(), file=file)
        tensor = torch.tensor([float(number)])
        dist.all_reduce(tensor)
        assert tensor.item() == 2 * number
        with open("end", "w") as file:
            print(time.time(), file=file)
"""
FAST_S = 0.2
END_S = 3.0


def test_a_hundred_tiny_tests_share_their_ranks_in_step_and_end_at_once(
    run: Callable[..., Any], pytester: pytest.Pytester
) -> None:
    ran = run(test_tiny=MANY)
    ended = time.time()
    assert len(ran.outcomes) == 100 and set(ran.outcomes.values()) == {"passed"}, ran.out
    orders = [Path(pytester.path, f"order-{rank}").read_text().split() for rank in (0, 1)]
    assert orders[0][::2] == orders[1][::2] == [str(number) for number in range(100)]
    assert len({*orders[0][1::2], *orders[1][1::2]}) == 2, "two processes in all"
    after = sorted(list(ran.seconds.values())[1:])
    median = statistics.median(after)
    end = ended - float(Path(pytester.path, "end").read_text())
    print(f"a two-rank test takes {median * 1e3:.0f} ms (median of {len(after)}), at most {after[-1] * 1e3:.0f} ms;")
    print(f"the session ended {end:.2f} s after the last test")
    # Other programs may keep this machine busy: programs that want to run, per core.
    slowness = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert median <= FAST_S * slowness
    assert end <= 2 * END_S * slowness


SELECTED = """
    import pytest

    @pytest.mark.ranks(2)
    def test_a(rank):
        pass

    @pytest.mark.ranks(2)
    def test_b(rank):
        assert rank == 0

    @pytest.mark.ranks(2)
    def test_c(rank):
        pass
"""


@pytest.mark.slow
def test_selection_by_x_lf_and_k_works_as_ever(run: Callable[..., Any]) -> None:
    ran = run("-x", "-W", "error", "-pno:asyncio", test_selected=SELECTED)
    assert ran.outcomes == {"test_a": "passed", "test_b": "failed"}, ran.out
    ran = run("--lf", "-k", "not test_c")
    assert ran.outcomes == {"test_b": "failed"}, ran.out


FRESH = """
    import os
    import pytest

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("number", range(2))
    def test_fresh(rank, number):
        with open(f"pids-{rank}", "a") as file:
            print(os.getpid(), file=file)
"""


@pytest.mark.slow
def test_with_ranks_fresh_no_process_runs_a_second_test(run: Callable[..., Any], pytester: pytest.Pytester) -> None:
    ran = run("--ranks-fresh", test_fresh=FRESH)
    assert set(ran.outcomes.values()) == {"passed"}, ran.out
    for rank in (0, 1):
        pids = Path(pytester.path, f"pids-{rank}").read_text().split()
        assert len(set(pids)) == 2


COVERED = """
    def f(rank):
        if rank == 0:
            return "zero"
        return "other"
"""
COVERING = """
    import pytest
    import covered

    @pytest.mark.ranks(2)
    def test_it(rank):
        assert covered.f(rank)
"""


@pytest.mark.slow
def test_coverage_of_the_ranks_is_in_the_report(run: Callable[..., Any]) -> None:
    pytest.importorskip("pytest_cov")
    ran = run("--cov=covered", "--cov-report=term-missing", covered=COVERED, test_covering=COVERING)
    assert ran.outcomes == {"test_it": "passed"}, ran.out
    assert re.search(r"^covered.py +4 +0 +100%", ran.out, re.M), ran.out
