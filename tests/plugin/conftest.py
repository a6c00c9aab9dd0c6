"""Runs a suite of tests with the plug-in in a pytest of its own, and reads what came of each test."""

from __future__ import annotations

import importlib.metadata
import os
import re
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_INSTALLED = any(
    entry.value == "mpexec.pytest_plugin" for entry in importlib.metadata.entry_points(group="pytest11", name="mpexec")
)
PLUGIN = () if _INSTALLED else ("-p", "mpexec.pytest_plugin")
_BOUND_S = 240.0
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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(*args: str, **files: str) -> Ran:
        for name, text in files.items():
            pytester.path.joinpath(f"{name}.py").write_text(textwrap.dedent(text))
        done = pytester.runpytest_subprocess(*PLUGIN, *_QUICK, *args, timeout=_BOUND_S)
        ran = Ran(int(done.ret), done.stdout.str() + "\n" + done.stderr.str())
        _read(ran, pytester.path / "junit.xml")
        return ran

    return run


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
