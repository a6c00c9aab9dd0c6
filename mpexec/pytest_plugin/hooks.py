"""The pytest plug-in: `@pytest.mark.ranks(2)` runs a test on two spawned ranks with a process group ready.

The driver's own test protocol runs as ever; the three phases of such a test are calls to its ranks (`item`), which are
an `MPExecutor` that is kept for the next test (`groups`). Each rank holds a pytest session of its own (`rank_session`).
Loading the plug-in loads nothing else of mpexec: that waits for the first test that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

from mpexec.pytest_plugin.marker import PARAMETER, RANK_PLUGIN, MarkerError, RanksMark, is_seconds, size_id

if TYPE_CHECKING:
    from mpexec.pytest_plugin.groups import RankGroups
    from mpexec.pytest_plugin.schedule import Schedule

_SCHEDULE: pytest.StashKey[Schedule] = pytest.StashKey()
_GROUPS: pytest.StashKey[RankGroups] = pytest.StashKey()
_DEFAULT_TIMEOUT_S = 300.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mpexec", "tests on several ranks (@pytest.mark.ranks)")
    group.addoption(
        "--mpexec-timeout",
        metavar="SECONDS",
        type=float,
        default=None,
        help="seconds for one test on ranks; its ranks are stopped then, and their stacks shown. 0 is no limit. "
        f"The default is that of the ini file (mpexec_timeout), else {_DEFAULT_TIMEOUT_S:g}.",
    )
    group.addoption(
        "--ranks-fresh",
        action="store_true",
        default=False,
        help="start new ranks for every test, instead of reusing those of an earlier one",
    )
    parser.addini("mpexec_timeout", "seconds for one test on ranks; 0 is no limit", default=str(_DEFAULT_TIMEOUT_S))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, device='auto', timeout=None): run the test on that many spawned ranks with a process group "
        "ready, once for each size; the fixtures rank, world_size and device tell it where it is.",
    )
    _default_timeout(config)


def _default_timeout(config: pytest.Config) -> float:
    given: Any = config.getoption("mpexec_timeout")
    if given is None:
        try:
            given = float(config.getini("mpexec_timeout"))
        except ValueError:
            given = config.getini("mpexec_timeout")
    if not is_seconds(given):
        raise pytest.UsageError(f"mpexec timeout {given!r}: use seconds of at least 0, where 0 is no limit")
    return float(given)


def _on_a_rank(config: pytest.Config) -> bool:
    return config.pluginmanager.has_plugin(RANK_PLUGIN)


# -- collecting --------------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    sizes = _parse(marker, metafunc.definition).sizes
    if len(sizes) > 1:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, sizes, indirect=True, ids=list(map(size_id, sizes)))


def _parse(marker: pytest.Mark, node: pytest.Function) -> RanksMark:
    try:
        return RanksMark.parse(marker)
    except MarkerError as error:
        raise pytest.Collector.CollectError(f"{node.name}: {error}") from None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class) -> Generator[None, Any, Any]:
    made = yield
    if _on_a_rank(collector.config):
        return made
    if isinstance(made, list):
        return [_on_ranks(item) for item in made]
    return _on_ranks(made)


def _on_ranks(item: Any) -> Any:
    """The item itself, or its twin that runs on ranks where it is marked so."""
    if not isinstance(item, pytest.Function) or (marker := item.get_closest_marker("ranks")) is None:
        return item
    from mpexec.pytest_plugin.item import RanksFunction

    return item if isinstance(item, RanksFunction) else RanksFunction.of(item, _parse(marker, item))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _on_a_rank(config):
        return
    for index, item in enumerate(items):
        marker = item.get_closest_marker("ranks")
        if marker is None:
            continue
        _refuse_unfit(item, config)
        try:
            items[index] = _on_ranks(item)  # marked by a hook, after it was made
        except pytest.Collector.CollectError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from None


def _refuse_unfit(item: pytest.Item, config: pytest.Config) -> None:
    from _pytest.unittest import TestCaseFunction

    if isinstance(item, TestCaseFunction) or not isinstance(item, pytest.Function):
        raise pytest.UsageError(
            f"{item.nodeid}: ranks is for functions and methods of plain classes; a unittest.TestCase cannot run on "
            "ranks. Take TestCase out of the bases, and assert instead of self.assert..."
        )
    for option, name in (("usepdb", "--pdb"), ("trace", "--trace")):
        if config.getoption(option, False):
            raise pytest.UsageError(
                f"{item.nodeid}: {name} cannot be used with tests on ranks, which have no terminal. Deselect them "
                "(for example -m 'not ranks'), or leave it out: -s shows what ranks print while they run, -l the "
                "local variables of a failure, and --mpexec-timeout=10 the stacks of all ranks of a test that hangs."
            )


# -- running -----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, trylast=True)  # the innermost: pytest-cov combines its data in a wrapper around this one
def pytest_runtestloop(session: pytest.Session) -> Generator[None, Any, Any]:
    config = session.config
    if _on_a_rank(config) or not any(item.get_closest_marker("ranks") for item in session.items):
        return (yield)
    from mpexec.pytest_plugin.groups import RankGroups
    from mpexec.pytest_plugin.schedule import Schedule

    groups = RankGroups(config, _default_timeout(config))
    config.stash[_GROUPS] = groups
    config.stash[_SCHEDULE] = Schedule(groups, session.items, in_full=not hasattr(config, "workerinput"))
    try:
        return (yield)
    finally:
        groups.close()
        _tell(session, groups.failures)


def _tell(session: pytest.Session, failures: list[str]) -> None:
    """Fixtures and hooks of ranks have failed when no test was there any more that could fail by it."""
    session.testsfailed += len(failures)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if failures and reporter is not None:
        reporter.ensure_newline()
        reporter.write_sep("=", "ERRORS at the end of the ranks", red=True)
        reporter.write_line("\n".join(failures))


def pytest_unconfigure(config: pytest.Config) -> None:
    groups = config.stash.get(_GROUPS, None)
    if groups is not None:
        groups.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    let_go: Callable[[], None] | None = getattr(item, "let_go", None)  # of RanksFunction
    if let_go is not None:
        let_go()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    schedule = item.config.stash.get(_SCHEDULE, None)
    if schedule is not None:
        schedule.begin(item, nextitem)
    return (yield)
