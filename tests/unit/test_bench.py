"""The benchmark's arithmetic, and that its command line carries a part through."""

import json
import subprocess
import sys

from tests.bench.fresh import ROOT
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
