"""Runs a suite of tests in a pytest of its own that has the plug-in, and reads what came of each test."""

from __future__ import annotations

import os
import re
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BOUND_S = 400.0
# Without plug-ins that have nothing to do here and take seconds; --junitxml is read.
_QUICK = ("-pno:randomly", "-pno:hypothesispytest", "-pno:anyio", "-ra", "--junitxml=junit.xml", "--color=no")


@dataclass
class Ran:
    """What came of one run of pytest.

    Attributes:
        outcomes: "passed", "failed", "error" or "skipped" for each test, by its name; an expected failure is skipped.
        seconds: What each test took, as the JUnit file has it, in the order in which they ran.
        xml: The text of the JUnit file.
    """

    code: int
    out: str
    xml: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def section(self, test: str) -> str:
        """What is shown of a failed test."""
        title = rf"^_+ (?:ERROR at \w+ of )?{re.escape(test)} _+$"
        found = re.search(rf"{title}(.*?)(?=^(?:___|===).* .*(?:___|===)$)", self.out, re.M | re.S)
        return found.group(1) if found else ""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Writes files and runs pytest on them; `run("-x", test_it="...")` writes `test_it.py`."""
    paths = [_installed(pytester.mkdir("installed")), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths).rstrip(os.pathsep))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(*args: str, **files: str) -> Ran:
        for name, text in files.items():
            pytester.path.joinpath(f"{name}.py").write_text(textwrap.dedent(text))
        done = pytester.runpytest_subprocess(*_QUICK, *args, timeout=_BOUND_S)
        ran = Ran(int(done.ret), done.stdout.str() + "\n" + done.stderr.str())
        _read(ran, pytester.path / "junit.xml")
        return ran

    return run


def _installed(folder: Path) -> str:
    """What pip leaves of a distribution with the plug-in: pytest finds it, and rewrites the asserts of its files."""
    facts = folder / "mpexec-0.dist-info"
    facts.mkdir()
    facts.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: mpexec\nVersion: 0\n")
    facts.joinpath("entry_points.txt").write_text("[pytest11]\nmpexec = mpexec.pytest_plugin\n")
    facts.joinpath("RECORD").write_text("mpexec/__init__.py,,\nmpexec/pytest_plugin/__init__.py,,\n")
    return str(folder)


def _read(ran: Ran, path: Path) -> None:
    if not path.exists():
        return
    ran.xml = path.read_text()
    path.unlink()
    for case in ET.fromstring(ran.xml).iter("testcase"):
        name = case.get("name", "")
        ends = [child for child in case if child.tag in ("failure", "error", "skipped")]
        kind = ends[0].tag if ends else "passed"
        ran.outcomes[name] = "failed" if kind == "failure" else kind
        ran.seconds[name] = float(case.get("time", "0"))
        ran.messages[name] = " ".join(child.get("message", "") for child in ends)
