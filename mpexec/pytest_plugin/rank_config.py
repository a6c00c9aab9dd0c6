"""The pytest configuration inside a rank: the driver's command line, without what makes sense in one process only."""

from __future__ import annotations

import os
import pdb
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import pytest
from _pytest.config import _prepareconfig

import mpexec
from mpexec.pytest_plugin.marker import RANK_PLUGIN
from mpexec.pytest_plugin.phases import RankSettings

# The driver has selected the tests, and writes the reports. Names of options of plug-ins that are not there do no harm.
_OFF: Mapping[str, Any] = {
    "cacheclear": False,
    "cacheshow": None,
    "collectonly": False,
    "dist": "no",
    "distload": False,
    "durations": None,
    "failedfirst": False,
    "htmlpath": None,
    "keyword": "",
    "lf": False,
    "log_file": os.devnull,
    "looponfail": False,
    "markexpr": "",
    "maxfail": 0,
    "maxprocesses": None,
    "newfirst": False,
    "numprocesses": None,
    "pastebin": None,
    "pyargs": False,
    "report_log": None,
    "stepwise": False,
    "trace": False,
    "tx": [],
    "usepdb": False,
    "xmlpath": None,
}
_NO_DEBUGGER = (
    "no debugger can be used on a rank, which has no terminal: print() appears as [rank N] with -s, and a test that "
    "hangs is shown with the stacks of all ranks when its timeout is over"
)


class RankPlugin:
    """Marks the configuration of a rank, and tells the fixtures who they are."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device


def make_config(settings: RankSettings, plugin: RankPlugin) -> pytest.Config:
    """Read command line, ini file and conftests as the driver did, and configure all plug-ins.

    Raises:
        pytest.UsageError: As in the driver.
    """
    os.chdir(settings.folder)
    # A plug-in's whole distribution is marked for the rewriting of assertions, and pytest warns of what was imported
    # before: of this package, in a rank. With warnings as errors that would be the end.
    mpexec.__doc__ = f"{mpexec.__doc__}\nPYTEST_DONT_REWRITE"
    with warnings.catch_warnings():
        warnings.showwarning = _show_nothing  # the driver's command line is the same, and has been warned of
        config = _prepareconfig(_arguments(settings), [_Marked(plugin)])
        _configure(config, settings, plugin.rank)
    _silence(config)
    return config


def _configure(config: pytest.Config, settings: RankSettings, rank: int) -> None:
    for name, value in _OFF.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    if settings.basetemp:
        config.option.basetemp = os.path.join(settings.basetemp, f"rank{rank}")
    config.option.color = "yes" if settings.color else "no"
    config.workerinput = dict(settings.workerinput)  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    config._do_configure()


class _Marked:
    """Puts the rank's plug-in under its name before anything else is loaded."""

    def __init__(self, plugin: RankPlugin) -> None:
        self._plugin = plugin

    def pytest_plugin_registered(self, plugin: object, manager: pytest.PytestPluginManager) -> None:
        if plugin is self:
            manager.register(self._plugin, RANK_PLUGIN)


def _arguments(settings: RankSettings) -> list[str]:
    own = ["--capture=no"]  # descriptors 1 and 2 are pipes to the driver, which captures
    if settings.no_cov:
        own.append("--no-cov")
    given = list(settings.args)
    end = given.index("--") if "--" in given else len(given)
    return given[:end] + own + given[end:]


def _silence(config: pytest.Config) -> None:
    """The driver shows how tests go, enforces their deadlines, and debugs."""
    manager = config.pluginmanager
    reporter = manager.get_plugin("terminalreporter")
    if reporter is not None:
        manager.unregister(reporter)
        manager.register(_QuietReporter(reporter), "terminalreporter")
    for name in ("timeout", "pytest_timeout"):
        if (enforcing := manager.get_plugin(name)) is not None:
            manager.unregister(enforcing)
    pdb.set_trace = _refuse_debugger


def _show_nothing(*args: object, **options: object) -> None:
    """Takes the place of `warnings.showwarning`, which no filter of an ini file does away with."""


class _QuietReporter:
    """The terminal reporter without its hooks. Plug-ins look for it, and comparisons of values are coloured by it."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115  # stays open as long as the process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)


def _refuse_debugger(*args: object, **options: object) -> NoReturn:
    __tracebackhide__ = True
    raise RuntimeError(_NO_DEBUGGER)
