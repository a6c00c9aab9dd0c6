"""What becomes of a test on ranks: every outcome, with fixtures, classes and parameters, and how failures read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(480)  # a machine that is busy starts ranks slowly

CONFTEST = """
    import os
    import pytest

    made = []

    def pytest_sessionfinish(session):
        if "RANK" in os.environ:
            raise RuntimeError("no end of the session")

    @pytest.fixture(scope="session")
    def model(rank, world_size):
        made.append("session")
        return {"rank": rank, "made": made}

    @pytest.fixture(scope="module", autouse=True)
    def setting():
        os.environ["SETTING"] = "module"
        yield
        del os.environ["SETTING"]

    @pytest.fixture
    def broken_before(rank):
        raise ValueError(f"no start on {rank}")

    @pytest.fixture
    def broken_after(rank):
        yield
        if rank == 1:
            raise ValueError("no end")
"""

GOOD = """
    import asyncio, logging, os, sys, warnings
    import pytest
    import torch
    import torch.distributed as dist

    pytestmark = pytest.mark.ranks(2)

    def total(value):
        tensor = torch.tensor([float(value)])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_collective(rank, world_size, device):
        assert device == torch.device("cpu")
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        assert total(rank + 1) == 3
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == "2" and os.environ["MASTER_ADDR"] == "127.0.0.1"

    @pytest.mark.parametrize("x, y", [(1, 2), pytest.param(3, 4, id="big")])
    def test_parameters(x, y, model):
        assert total(x) == 2 * x and y == x + 1
        assert model["made"] == ["session"]

    class TestClass:
        attribute = 7

        def setup_method(self):
            self.value = self.attribute

        def test_method(self, rank):
            assert self.value == 7 and total(1) == 2

    @pytest.mark.ranks(1, 2)
    def test_sizes(world_size, rank):
        assert total(1) == world_size

    def test_stores_listen_on_this_machine_only():
        # of all that listens: the address before the port, and 0A for listening
        rows = [line.split()[1:4:2] for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}")]
        port = f":{int(os.environ['MASTER_PORT']):04X}"
        assert [address for address, state in rows if state == "0A" and address.endswith(port)] == ["0100007F" + port]

    def test_own_group(rank, world_size):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        assert total(rank) == 1

    def test_own_group_again(rank):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        assert total(rank) == 1

    def test_capsys(capsys, rank):
        print("seen", rank)
        assert capsys.readouterr().out == f"seen {rank}\\n"

    def test_capfd(capfd, rank):
        os.write(1, b"raw")
        assert capfd.readouterr().out == "raw"

    def test_caplog(caplog, rank):
        logging.getLogger().warning("noted %d", rank)
        assert caplog.messages == [f"noted {rank}"]

    def test_tmp_path(tmp_path, rank):
        (tmp_path / "file").write_text(str(rank))
        assert f"rank{rank}" in str(tmp_path)

    def test_raises():
        with pytest.raises(ZeroDivisionError):
            1 / 0

    def test_loop_of_its_own():
        async def work():
            await asyncio.sleep(0)
            return 5
        assert asyncio.run(work()) == 5
        assert total(1) == 2

    @pytest.mark.asyncio
    async def test_async(rank):
        await asyncio.sleep(0)
        assert total(rank) == 1

    def test_warns(rank):
        warnings.warn("careful, you")

    def test_warns_by_a_module_that_only_ranks_may_load(rank):
        import only_ranks
        warnings.warn("rather slow", only_ranks.SlowWarning)

    def test_properties(record_property, rank):
        record_property("speed", rank + 5)

    def test_changes_state():
        os.environ["LEAK"] = "1"
        os.environ.pop("SETTING")
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)

    def test_finds_state():
        assert "LEAK" not in os.environ and os.environ["SETTING"] == "module"
        assert os.getcwd() != "/"
        assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()
        print("said by test_finds_state", os.getpid())

    def test_plain_beside():
        pass

    test_plain_beside = test_plain_beside
"""

BAD = """
    import logging, os, sys
    import pytest

    pytestmark = pytest.mark.ranks(2)

    def test_one_fails(rank):
        print("out of", rank)
        print("err of", rank, file=sys.stderr)
        logging.getLogger("here").warning("logged by %d", rank)
        values = [rank, 1]
        assert values == [0, 1]

    def test_both_fail(rank):
        assert {"rank": rank} == {}

    def test_exits(rank):
        sys.exit(3)

    def test_one_skips(rank):
        if rank == 0:
            pytest.skip("not here")

    def test_skips():
        pytest.skip("no reason at all")

    @pytest.mark.skipif(True, reason="marked")
    def test_skipif():
        raise AssertionError

    @pytest.mark.xfail(reason="known")
    def test_xfail(rank):
        assert rank == 0

    @pytest.mark.xfail(raises=ZeroDivisionError)
    def test_xfail_raises():
        1 / 0

    @pytest.mark.xfail(raises=ZeroDivisionError)
    def test_xfail_raises_other():
        raise ValueError("other")

    def test_xfail_inside(rank):
        pytest.xfail("gives up")

    @pytest.mark.xfail(strict=True)
    def test_xpass_strict():
        pass

    @pytest.mark.xfail
    def test_xpass():
        pass

    def test_setup_error(broken_before):
        pass

    def test_teardown_error(broken_after):
        pass

    def test_debugger(rank):
        breakpoint()

    class Unpicklable(Exception):
        def __init__(self, a, b):
            super().__init__(a)
            self.lock = __import__("threading").Lock()

    def test_odd_exception(rank):
        raise Unpicklable("odd", 1)

    def test_good_after_all(rank):
        pass
"""


ELSEWHERE = """
    import os
    import pytest

    if "RANK" in os.environ:
        raise ImportError("not on a rank")

    @pytest.mark.ranks(2)
    def test_elsewhere():
        pass
"""

SKIPPED = """
    import pytest
    import torch.distributed as dist

    pytestmark = pytest.mark.ranks(2)

    @pytest.fixture(scope="class")
    def asserts_at_its_end():
        yield
        dist.barrier()
        assert 1 == 2

    @pytest.fixture(scope="class")
    def fails_at_its_end():
        yield
        pytest.fail("a bad end")

    class TestAsserts:
        def test_uses_it(self, asserts_at_its_end):
            pass

        @pytest.mark.skip(reason="behind it")
        def test_first_behind_it(self):
            pass

        @pytest.mark.skip(reason="behind it")
        def test_last_behind_it(self):
            pass

    class TestFails:
        def test_uses_it_too(self, fails_at_its_end):
            pass

        @pytest.mark.skipif("True", reason="behind it")
        def test_behind_it_too(self):
            pass

    def test_behind_them(rank):
        dist.barrier()
"""

ONLY_RANKS = """
    import os

    if "RANK" not in os.environ:
        raise RuntimeError("no GPU in the driver")

    class SlowWarning(Warning):
        pass
"""


@pytest.fixture
def ran(run: Callable[..., Any]) -> Any:
    example = (ROOT / "examples" / "test_ranks.py").read_text()
    files = {"conftest": CONFTEST, "test_good": GOOD, "test_bad": BAD, "test_else": ELSEWHERE, "test_example": example}
    return run("-W", "default", **files, test_skipped=SKIPPED, only_ranks=ONLY_RANKS)


def test_every_outcome_is_that_of_the_ranks_and_failures_read_as_theirs(ran: Any) -> None:
    bad = {
        "test_one_fails": "failed",
        "test_both_fail": "failed",
        "test_exits": "failed",
        "test_one_skips": "failed",
        "test_skips": "skipped",
        "test_skipif": "skipped",
        "test_xfail": "skipped",
        "test_xfail_raises": "skipped",
        "test_xfail_raises_other": "failed",
        "test_xfail_inside": "skipped",
        "test_xpass_strict": "failed",
        "test_setup_error": "error",
        "test_teardown_error": "error",
        "test_debugger": "failed",
        "test_odd_exception": "failed",
        "test_elsewhere": "error",
        "test_first_behind_it": "skipped",
        "test_last_behind_it": "skipped",
        "test_behind_it_too": "skipped",
    }
    assert {name: outcome for name, outcome in ran.outcomes.items() if outcome != "passed"} == bad, ran.out
    assert "test_a_matrix_split_by_columns_gives_the_whole_product[4ranks-3]" in ran.outcomes, "the example"
    assert {"test_parameters[1-2]", "test_parameters[big]", "test_sizes[1rank]", "test_sizes[2ranks]"} <= set(
        ran.outcomes
    )
    check_failures(ran)
    check_summaries(ran)


def check_failures(ran: Any) -> None:
    one = ran.section("test_one_fails")
    assert re.search(r"^rank 1 of 2 \(pid \d+\), the only one to fail:", one, re.M), ran.out
    assert "assert [1, 1] == [0, 1]" in one and "At index 0 diff: 1 != 0" in one
    assert "[rank 0] out of 0" in one and "[rank 1] out of 1" in one and "[rank 1] err of 1" in one
    assert "Captured log rank 0 call" in one and "Captured log rank 1 call" in one and "logged by 1" in one
    both = ran.section("test_both_fail")
    assert "the first to fail:" in both and re.search(r"^-+ rank \d of 2 \(pid \d+\) -+$", both, re.M)
    assert "rank 0 was skipped (not here); rank 1 was not" in ran.section("test_one_skips")
    assert "ValueError: other" in ran.section("test_xfail_raises_other")
    assert "no start on" in ran.section("test_setup_error") and "no end" in ran.section("test_teardown_error")
    elsewhere = ran.section("test_elsewhere")
    assert "could not collect" in elsewhere and "ImportError: not on a rank" in elsewhere
    assert "assert 1 == 2" in ran.section("TestAsserts.test_last_behind_it")
    assert "a bad end" in ran.section("TestFails.test_behind_it_too")
    assert re.search(r"ERRORS at the end of the ranks =+\nRuntimeError: no end of the session", ran.out), ran.out
    assert "no debugger can be used on a rank" in ran.section("test_debugger")
    assert "Unpicklable: odd" in ran.section("test_odd_exception")
    assert "mpexec/pytest_plugin" not in ran.out, "our own frames are no news"


def check_summaries(ran: Any) -> None:
    assert re.search(r"^FAILED test_bad.py::test_one_fails - .*rank 1: assert \[1, 1\] == \[0, 1\]", ran.out, re.M), (
        ran.out
    )
    assert re.search(r"^SKIPPED \[1\] test_bad.py:\d+: no reason at all", ran.out, re.M)
    assert re.search(r"^XFAIL test_bad.py::test_xfail - known", ran.out, re.M)
    assert re.search(r"^XPASS test_bad.py::test_xpass\b", ran.out, re.M)
    assert "careful, you" in ran.out and "test_good.py::test_warns" in ran.out
    assert "UserWarning: SlowWarning: rather slow" in ran.out
    assert (
        "rank 1: assert [1, 1] == [0, 1]" in ran.messages["test_one_fails"].replace("\n", " ")
        or "rank 1: " in ran.messages["test_one_fails"]
    )
    assert '<property name="speed" value="5"' in ran.xml and '<property name="rank1.speed" value="6"' in ran.xml
    assert "said by test_finds_state" not in ran.out, "what a passing test prints is captured"
