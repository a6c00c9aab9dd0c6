"""What the documentation names exists: tests behind promises, files, threads, extras, benchmarks."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mpexec.cli.checks import EXTRAS
from mpexec.engine.health import Health
from mpexec.engine.metrics import Metrics
from mpexec.http.health import HealthCheck
from mpexec.http.metrics import EngineMetrics
from tests.bench.__main__ import PARTS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "guarantees.md").read_text()
PICTURE = (ROOT / "docs" / "how_it_works.md").read_text()
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
NOT_YET = {"5"}
FOR_DEVELOPERS = {"test", "dev"}


def named_tests() -> list[tuple[str, str]]:
    """File and function of every test that is named; "::name" is in the file named before it on its line."""
    found = []
    for line in TEXT.splitlines():
        file = ""
        for path, name in re.findall(r"`((?:tests/[\w/]+\.py)?)::(\w+)`", line):
            file = path or file
            found.append((file, name))
    return found


def test_every_test_that_is_named_exists() -> None:
    missing = [
        (file, name)
        for file, name in named_tests()
        if not file or not re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert not missing


def test_everything_else_that_is_named_exists() -> None:
    for path in re.findall(r"`((?:tests|tools|docs|mpexec)/[\w/.]+)", TEXT):
        assert (ROOT / path).exists(), path


def test_every_numbered_promise_is_shown_by_a_test() -> None:
    promises, shown = TEXT.split("| | shown by |\n")
    numbers = re.findall(r"^(?:\| |\*\*)(\d+)(?: \||\.)", promises, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", shown, re.MULTILINE))
    assert sorted(rows, key=int) == [number for number in numbers if number not in NOT_YET]
    assert all("::test_" in tests for tests in rows.values())


def test_the_metrics_that_are_served_are_the_ones_that_are_named() -> None:
    engine: Any = SimpleNamespace(metrics=Metrics, health=lambda: Health(True, "running"))
    text = EngineMetrics(engine, HealthCheck(engine, 0), "kjv-small").text().decode()
    assert set(re.findall(r"`(mpexec_\w+)`", OPERATIONS)) == set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))


def test_the_files_and_threads_of_the_picture_exist() -> None:
    sources = {path: path.read_text() for path in (ROOT / "mpexec").rglob("*.py")}
    for name in re.findall(r"[\w/]+\.py\b", PICTURE):
        assert any(str(path).endswith(f"/{name}") for path in sources), name
    for thread in re.findall(r"\bmpexec-[a-z]+(?:-[a-z]+)?", PICTURE):
        assert any(f'"{thread}' in text for text in sources.values()), thread


def extras() -> dict[str, set[str]]:
    """The extras of setup.cfg, each with all the packages that it brings."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = {name: text.split() for name, text in config["options.extras_require"].items()}

    def packages(name: str) -> set[str]:
        found: set[str] = set()
        for one in named[name]:
            inner = re.fullmatch(r"mpexec\[(.+)\]", one)
            found |= set().union(*map(packages, inner[1].split(","))) if inner else {re.split(r"[<>=]", one)[0]}
        return found

    return {name: packages(name) for name in named if name not in FOR_DEVELOPERS}


def test_the_extra_all_is_all_the_others() -> None:
    every = extras()
    assert every.pop("all") == set().union(*every.values())


def test_the_readme_lists_the_extras_and_what_they_bring() -> None:
    every = extras()
    rows = dict(
        re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", README.split("## Installing")[1].split("\n## ")[0], re.MULTILINE)
    )
    assert set(rows) == set(every)
    for name in set(rows) - {"all"}:
        said = re.findall(r"[\w-]+", rows[name].replace("those of `zmq`", "pyzmq msgspec"))
        assert set(said) == every[name]


def test_doctor_looks_for_every_extra() -> None:
    every = extras()
    assert set(EXTRAS) == set(every) - {"all"}
    assert all(set(names) <= every[name] for name, names in EXTRAS.items())


def test_every_benchmark_that_is_named_exists() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for part in re.findall(r"`tools/bench (\w+)", page.read_text()):
            assert part in PARTS, f"{page}: {part}"
