"""A pytest session inside a rank: collects a file when a test of it comes, and runs single phases of single tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _pytest.reports import CollectReport

from mpexec.errors import MpexecError
from mpexec.pytest_plugin.phases import Notes, Outcome, Phase, PhaseFailed, RankSettings
from mpexec.pytest_plugin.rank_config import RankPlugin, make_config
from mpexec.pytest_plugin.state import StateWatch

_Call = pytest.CallInfo[None]


class RankSession:
    """The tests of one rank.

    Args:
        settings: What the driver says of its own session.
        plugin: Who this rank is.
    """

    def __init__(self, settings: RankSettings, plugin: RankPlugin) -> None:
        self._rank = plugin.rank
        self._items: dict[str, pytest.Item] = {}
        self._collected: set[str] = set()
        self._errors: dict[str, str] = {}
        self._failures: list[str] = []
        self._notes = Notes(plugin.rank)
        self._done: tuple[_Call, pytest.TestReport] | None = None
        self._when = "setup"
        self._is_skipped = False
        self.watch = StateWatch()
        self.config = make_config(settings, plugin)
        self.config.pluginmanager.register(self, "mpexec-rank-session")
        self.session = pytest.Session.from_config(self.config)
        self.config.hook.pytest_sessionstart(session=self.session)

    def run(self, phase: Phase) -> None:
        """Run one phase of one test.

        Raises:
            PhaseFailed: It did not pass here.
        """
        item = self._find(phase.nodeid, phase.path)
        if item is None:
            if phase.when == "teardown":  # its setup has told of it
                return
            raise PhaseFailed.of(None, "failed", self._why_missing(phase), None, self.take_notes())
        next_item = self._find(phase.next_nodeid, phase.next_path)
        if not getattr(item, "_request", True):  # it runs a second time
            item._initrequest()  # type: ignore[attr-defined]
        self._when, self._is_skipped, self._done = phase.when, phase.skipped, None
        known = len(item._report_sections)
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
        finally:
            self._notes.sections += [
                (title, text) for when, title, text in item._report_sections[known:] if when == phase.when
            ]
            if phase.when == "teardown":
                item._request = False  # type: ignore[attr-defined]
                item.funcargs = None  # type: ignore[attr-defined]
        done, self._done = self._last_done(), None  # a failure's frames hold tensors: not longer than must be
        if done is None:
            raise MpexecError(f"a plug-in has taken the test over: {phase.nodeid}")
        call, report = done
        self._judge(item, call, report)

    # Asked for by a call, because a type checker believes that `_done` is still what `run` has set it to.
    def _last_done(self) -> tuple[_Call, pytest.TestReport] | None:
        return self._done

    def take_notes(self) -> Notes:
        """What has been noted since the last time."""
        notes, self._notes = self._notes, Notes(self._rank)
        return notes

    def note_damage(self, damage: str) -> None:
        """These ranks should not run another test."""
        self._notes.damage = damage

    def finish(self) -> None:
        """Tear down the fixtures that are left, and end the session.

        Raises:
            BaseException: What a fixture raised.
        """
        try:
            self.config.hook.pytest_sessionfinish(session=self.session, exitstatus=pytest.ExitCode.OK)
        finally:
            self.config._ensure_unconfigure()

    # -- finding -------------------------------------------------------------------------------------------------

    def _find(self, nodeid: str | None, path: str | None) -> pytest.Item | None:
        if nodeid is None or path is None:
            return None
        if nodeid not in self._items and path not in self._collected:
            self._collect(path)
        return self._items.get(nodeid)

    def _why_missing(self, phase: Phase) -> str:
        return self._errors.get(phase.path) or (
            f"rank {self._rank} has collected no test {phase.nodeid!r}. The names of tests must be the same in every "
            "process: parameters from a set, for example, have no order."
        )

    def _collect(self, path: str) -> None:
        self._collected.add(path)
        self._failures = []
        self.config.args = [path]
        self.session.shouldfail = self.session.shouldstop = False
        try:
            self.config.hook.pytest_collection(session=self.session)
        except (Exception, pytest.Session.Interrupted, pytest.Session.Failed) as error:  # hooks of users among others
            self._failures.append(f"{type(error).__name__}: {error}")
        if self._failures:
            self._errors[path] = f"rank {self._rank} could not collect {path}:\n" + "\n".join(self._failures)

    @pytest.hookimpl
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._items[item.nodeid] = item

    @pytest.hookimpl
    def pytest_collectreport(self, report: CollectReport) -> None:
        if report.failed or report.skipped:
            self._failures.append(report.longreprtext or str(report.longrepr))

    # -- running -------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """The driver may not have run the test that was said to come next: what was kept for that one ends here."""
        __tracebackhide__ = True
        try:
            self.session._setupstate.teardown_exact(item)
        except BaseException as error:
            error.add_note("raised by the teardown of what an earlier test has used, not by this one")
            raise

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """One phase only. All wrappers of the protocol are around it: for assertions, warnings, logging."""
        when: Any = self._when
        hook: Callable[..., None] = getattr(item.ihook, f"pytest_runtest_{when}")
        facts: dict[str, Any] = {"nextitem": nextitem} if when == "teardown" else {}

        def run() -> None:
            __tracebackhide__ = True
            if self._is_skipped:  # plug-ins do not expect a teardown without a setup
                self.session._setupstate.teardown_exact(nextitem)
            else:
                hook(item=item, **facts)

        call = pytest.CallInfo.from_call(run, when=when)
        self._done = call, item.ihook.pytest_runtest_makereport(item=item, call=call)
        return True

    def _judge(self, item: pytest.Item, call: _Call, report: pytest.TestReport) -> None:
        self._notes.properties += [
            (name, value if isinstance(value, str | int | float | None) else repr(value))
            for name, value in item.user_properties
        ]
        item.user_properties.clear()
        error = None if call.excinfo is None else call.excinfo.value
        if error is None and (report.passed or "[XPASS" in str(report.longrepr)):
            return  # what an unexpected pass means, the driver says
        outcome, reason = _outcome(error, report)
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        data["user_properties"] = []
        raise PhaseFailed.of(error, outcome, reason, data, self.take_notes())

    # -- what is noted ----------------------------------------------------------------------------------------------

    @pytest.hookimpl
    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if when != "runtest":  # the driver has collected the same files, and warned
            return
        category = warning_message.category
        self._notes.warnings.append(
            {
                "module": category.__module__,
                "name": category.__name__,
                "text": str(warning_message.message),
                "filename": warning_message.filename,
                "lineno": warning_message.lineno,
                "when": when,
                "nodeid": nodeid,
                "location": location,
            }
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        """What a fixture of a wider scope changes is not a leak of the test that happens to come first."""
        __tracebackhide__ = True
        if fixturedef.scope == "function":
            return (yield)
        with self.watch.widening(fixturedef):
            return (yield)

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        self.watch.narrowed(fixturedef)


def _outcome(error: BaseException | None, report: pytest.TestReport) -> tuple[Outcome, str]:
    if isinstance(error, pytest.exit.Exception):
        return "exit", error.msg
    if hasattr(report, "wasxfail"):
        return "xfailed", str(report.wasxfail).removeprefix("reason: ")
    if report.skipped:
        longrepr = report.longrepr
        reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
        return "skipped", reason.removeprefix("Skipped: ")
    return "failed", str(error)
