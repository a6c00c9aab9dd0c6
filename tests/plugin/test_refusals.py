"""What cannot work is refused while tests are collected, naming the value and the remedy; no rank is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(480)  # a machine that is busy starts ranks slowly

WRONG = {
    "ranks(0)": "0 is not a number of ranks of at least 1",
    'ranks("2")': "'2' is not a number of ranks",
    "ranks(True)": "True is not a number of ranks",
    "ranks()": "the number of ranks is missing; use @pytest.mark.ranks(2)",
    "ranks(2, 2)": "has a number twice",
    "ranks(2, gpus=1)": "unknown argument ['gpus']; there are device= and timeout=",
    'ranks(2, device="tpu")': "device='tpu'; use one of 'auto', 'cpu', 'cuda'",
    "ranks(2, timeout=-1)": "timeout=-1; use seconds of at least 0",
}


def test_bad_markers_are_errors_of_collection(run: Callable[..., Any]) -> None:
    files = {
        f"test_{number}": f"import pytest\n@pytest.mark.{marker}\ndef test_it(rank): pass\n"
        for number, marker in enumerate(WRONG)
    }
    ran = run(**files)
    assert ran.code == pytest.ExitCode.INTERRUPTED
    for number, message in enumerate(WRONG.values()):
        assert f"ERROR collecting test_{number}.py" in ran.out
        assert "test_it: ranks: " in ran.out and message in ran.out, ran.out


PLAIN = """
    import unittest
    import pytest

    @pytest.mark.ranks(2)
    def test_on_ranks(rank):
        pass

    def test_plain():
        pass

    def test_lost(rank):
        pass
"""
UNIT = """
    import unittest
    import pytest

    class TestOld(unittest.TestCase):
        @pytest.mark.ranks(2)
        def test_old(self):
            pass
"""


def test_pdb_a_testcase_and_a_rank_without_ranks_are_refused_with_a_hint(run: Callable[..., Any]) -> None:
    ran = run("--pdb", test_plain=PLAIN)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "test_on_ranks: --pdb cannot be used with tests on ranks" in ran.out and "-m 'not ranks'" in ran.out
    ran = run("-m", "not ranks")
    assert ran.outcomes == {"test_plain": "passed", "test_lost": "error"}
    assert "the fixture 'rank' is for tests on ranks: mark the test with @pytest.mark.ranks(2)" in ran.out
    ran = run("test_unit.py", test_unit=UNIT)
    assert ran.code == pytest.ExitCode.USAGE_ERROR and "a unittest.TestCase cannot run on ranks" in ran.out
    ran = run("--mpexec-timeout=-1")
    assert ran.code == pytest.ExitCode.USAGE_ERROR and "-1.0: use seconds of at least 0" in ran.out


def test_the_plugin_can_be_left_out_and_brings_nothing_heavy(run: Callable[..., Any]) -> None:
    ran = run(
        test_light="""
            import sys

            def test_light():
                assert not {"torch", "mpexec.executor", "mpexec.transport"} & set(sys.modules)
                assert "mpexec.pytest_plugin" in sys.modules
        """
    )
    assert ran.outcomes == {"test_light": "passed"}, ran.out
    ran = run(
        "-p",
        "no:mpexec",
        test_light="""
            import sys

            def test_light():
                assert "mpexec.pytest_plugin" not in sys.modules

            def test_rank(rank):
                pass
        """,
    )
    assert ran.outcomes == {"test_light": "passed", "test_rank": "error"}, ran.out
    assert "fixture 'rank' not found" in ran.out
