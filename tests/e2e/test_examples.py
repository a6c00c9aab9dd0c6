"""Every program in `examples` runs, says what it should, and leaves stderr empty."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OUTPUT = {
    "own_agent.py": """\
        entries on each rank: [8, 8]
        output: [3.0, 11.0, 19.0, 27.0]
        output: [6.0, 22.0, 38.0, 54.0]
        output: [9.0, 33.0, 57.0, 81.0]
        a call failed: rank 1 has only 8 entries
        the next call: [8, 8]
        a background task failed: 2 numbers for a matrix of 4 columns
        """,
    "scatter.py": """\
        totals: [44999850000, 134999850000, 224999850000]
        of ranks 0 and 2: [44999850000, 224999850000]
        all run it, rank 1 replies: 134999850000
        numbers of rank 0: 0 to 299999, read-only: True
        numbers of rank 1: 300000 to 599999, read-only: True
        numbers of rank 2: 600000 to 899999, read-only: True
        begins: [0, 300000, 600000]
        as in the whole array: [True, True, True]
        by futures: [[44999850000], [134999850000], [224999850000]]
        ten times as much: [449998500000, 1349998500000, 2249998500000]
        """,
}


def run(name: str, *arguments: str) -> list[str]:
    """The lines of a program that ends well; a warning of any kind would be on its stderr."""
    command = [sys.executable, "-W", "always", str(EXAMPLES / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    return ended.stdout.splitlines()


@pytest.mark.parametrize("name", OUTPUT)
def test_an_example_prints_what_it_should(name: str) -> None:
    assert run(name) == [line.strip() for line in OUTPUT[name].strip().splitlines()]


@pytest.mark.timeout(240)  # two programs
def test_the_training_loop_learns_and_another_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    folder = str(tmp_path / "made" / "by the program")
    first, second = run("training_loop.py", folder), run("training_loop.py", folder)
    assert second.pop(0) == "goes on after step 40"
    assert first.pop() == second.pop() == "the ranks have the same parameters: True"
    found = [re.fullmatch(r"step +(\d+)  loss (\d\.\d{4})", line) for line in first + second]
    steps = [int(match[1]) for match in found if match]
    losses = [float(match[2]) for match in found if match]
    assert steps == [10, 20, 30, 40, 50, 60, 70, 80]
    assert losses[0] > 1.5 * losses[3]
    assert max(losses[4:]) < losses[3], "the second run began anew"
    assert [path.name for path in Path(folder).iterdir()] == ["checkpoint.pt"]


def test_the_list_of_examples_names_every_one_with_the_command_that_runs_it() -> None:
    rows = dict(
        re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|.*\| `(.+)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    )
    assert sorted(rows) == sorted(program.name for program in EXAMPLES.glob("*.py"))
    for name, command in rows.items():
        # One with options is what the program itself says.
        assert command == f"python examples/{name}" or command in (EXAMPLES / name).read_text(), command
