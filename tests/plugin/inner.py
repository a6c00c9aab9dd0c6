"""Runs of pytest inside a test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    """Run a module of tests in a process of its own, with this plugin and the one for coroutines."""
    pytester.makepyfile(test_inner=source)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    # By name, as it is not installed everywhere; twice it would be refused.
    pytester._monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester._monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "mpexec.pytest_plugin")
    return pytester.runpytest_subprocess(*plugins, *arguments, timeout=280)
