"""The benchmark's arithmetic, and that its command line carries a part through."""

import json
import subprocess
import sys
from importlib.util import find_spec
from multiprocessing import Pipe

import pytest
from click.testing import CliRunner

from tests.bench import engine, fresh, idle, pipes, ray_executor, rpc, startup, torchrun, zmq_engine
from tests.bench.__main__ import OPTIONAL, PARTS, chosen, main
from tests.bench.fresh import ROOT, BenchError
from tests.bench.settings import Settings
from tests.bench.stats import Row, quantile, table


def test_a_ratio_is_one_of_medians_and_must_not_exceed_its_bar():
    row = Row("call", [10.0, 30.0, 20.0], "us", [40.0, 50.0, 60.0], 0.4)
    assert (row.result, row.verdict, row.spread) == (0.4, "ok", (0.25, 0.6))
    row.bar = 0.39
    assert row.verdict == "MISS"


def test_a_speed_is_turned_round_and_must_reach_its_bar():
    assert Row("copy", [2.0], "ms", [1.0], 0.6, "speed").verdict == "MISS"
    assert Row("copy", [1.0], "ms", [1.0], 0.6, "speed").verdict == "ok"


def test_a_row_without_a_bar_gives_no_verdict():
    row = Row("call", [1.0], "us", [2.0])
    assert row.verdict == ""
    assert "0.50" in table([row])


def test_quantiles_are_samples():
    assert quantile(list(range(100)), 0.5) == 50
    assert quantile([3.0], 0.99) == 3.0


def test_a_quick_run_writes_its_figures_as_json(tmp_path):
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.bench", "imports", "--quick", "--repeats", "1", "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(target.read_text())
    assert figures["parts"]["imports"][0]["name"] == "import mpexec"
    assert not figures["failures"]


def test_a_ratio_of_speeds_must_reach_its_bar():
    row = Row("tokens", [450.0], "token/s", [500.0], 0.9, at_least=True)
    assert (row.result, row.verdict) == (0.9, "ok")
    row.measured = [440.0]
    assert row.verdict == "MISS"
    assert ">= 0.9" in table([row])


def test_an_optional_part_runs_only_when_it_is_named():
    assert set(PARTS) >= OPTIONAL
    assert set(chosen(())) == set(PARTS) - OPTIONAL
    assert chosen(("zmq", "imports", "zmq")) == ["zmq", "imports"]
    assert "all but these run: engine, ray, run, zmq" in CliRunner().invoke(main, ["--help"]).output


def test_a_peer_that_ends_before_or_after_it_is_ready_is_an_error_with_its_last_lines():
    broken = "sys.exit('first\\nno such model')"
    with pytest.raises(BenchError, match=r"(?s)bare ended with exit code 1; .*\nfirst\nno such model$"):
        with torchrun.started("bare", [sys.executable, "-c", f"import sys; {broken}"]):
            pass
    connected = "import sys; from multiprocessing.connection import Client; driver = Client(sys.argv[1]); driver.recv()"
    with torchrun.started("bare", [sys.executable, "-c", f"{connected}; {broken}"]) as peer:
        with pytest.raises(BenchError, match=r"(?s)bare has ended; .*\nno such model$"):
            peer.ask("a task")


def test_a_process_that_ends_before_it_is_ready_is_not_waited_for_behind_a_silent_one():
    (ours, silent), (other, ended) = Pipe(), Pipe()
    with ours, silent, other:
        ended.close()
        with pytest.raises(BenchError, match="ended before it was ready"):
            pipes.hear_each([ours, other])


@pytest.mark.slow
def test_the_engine_and_its_peers_under_torchrun_give_the_same_tokens():
    """The driver compares them itself."""
    figures = fresh.call(engine.drive, runs=1, new_tokens=4)
    assert figures.keys() == {"engine", "bare", "transformers"}
    assert all(speeds.keys() == {"1", "8"} for runs in figures.values() for speeds in runs)


def test_the_streams_and_round_trips_of_the_rpc_bring_what_they_should():
    """The drivers compare contents themselves, and fail where those differ."""
    assert fresh.call(zmq_engine.drive_stream, items=1000) > 0
    for drive in (zmq_engine.drive_mpexec, zmq_engine.drive_pyzmq):
        figures = fresh.call(drive, calls=50)
        assert 0 < figures["p50"] <= figures["p99"]


@pytest.mark.slow
def test_the_bare_processes_of_each_part_do_what_they_should():
    """The drivers compare contents themselves."""
    assert fresh.call(startup.drive_bare, world_size=2)["first"] > 0
    assert fresh.call(rpc.drive_pipes, world_size=2, calls=50, paced=0)["sync p50"] > 0
    assert fresh.call(idle.drive, case="bare gloo", start_at=0.0)[idle.IDLE] >= 0


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_the_round_trips_of_ray_bring_what_they_should():
    [by_peer] = fresh.call(ray_executor.drive_round_trips, world_sizes=[1], rounds=1, blocks=1)
    for [figures] in by_peer.values():
        assert 0 < figures["p50"] <= figures["p99"]


def test_the_part_of_ray_says_where_ray_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BenchError, match=r"pip install 'mpexec\[ray\]'"):
        ray_executor.run(Settings(quick=True))
