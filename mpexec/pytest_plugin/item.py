"""A test that runs on ranks, as the driver's pytest sees it: its three phases are calls to the ranks."""

from __future__ import annotations

import glob
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import pytest
from _pytest._code.code import ExceptionInfo, TerminalRepr

from mpexec.deadline import Deadline
from mpexec.errors import MpexecError, RPCTimeoutError, WorkerDiedError
from mpexec.pytest_plugin.marker import PARAMETER, RanksMark
from mpexec.pytest_plugin.phases import Notes, Phase, PhaseFailed, When
from mpexec.pytest_plugin.rendering import render_failed, render_lost
from mpexec.pytest_plugin.stacks import trimmed
from mpexec.pytest_plugin.verdict import RanksFailed, judge, notes_of
from mpexec.pytest_plugin.warned import forward_warnings

if TYPE_CHECKING:
    from mpexec.pytest_plugin.groups import RankGroups, WarmGroup

_LAST_LINES = 40
_TEARDOWN_S = 20.0  # at least, however much of the test's time is used up


class RanksFunction(pytest.Function):
    """Takes the place of the `pytest.Function` of a marked test.

    Attributes:
        mark: The marker's arguments.
        size: The number of ranks of this very test.
        groups: Where its ranks come from; set when it is about to run.
        next_on_ranks: The test that these ranks run next, as far as is known.
    """

    mark: RanksMark
    size: int
    rank_nodeid: str
    groups: RankGroups | None = None
    next_on_ranks: RanksFunction | None = None
    _group: WarmGroup | None = None
    _was_set_up = False
    _was_skipped = False
    _deadline: Deadline
    _lost_pids: tuple[int, ...] = ()

    @classmethod
    def of(cls, item: pytest.Function, mark: RanksMark) -> Self:
        """The twin of a collected test."""
        twin = cls.from_parent(
            item.parent,
            name=item.name,
            callspec=getattr(item, "callspec", None),
            callobj=item.obj,
            fixtureinfo=item._fixtureinfo,
            keywords=item.keywords,
            originalname=item.originalname,
        )
        twin.own_markers = item.own_markers
        twin.mark = mark
        twin.size = mark.sizes[0]
        if len(mark.sizes) > 1:
            params: dict[str, Any] = dict(twin.callspec.params) if hasattr(twin, "callspec") else {}
            if PARAMETER not in params:
                raise pytest.Collector.CollectError(
                    f"{item.name}: ranks{mark.sizes} stands where it cannot give several tests; mark the function, "
                    "its class or its module with it, or give one number"
                )
            twin.size = int(params[PARAMETER])
        twin.rank_nodeid = item.nodeid  # pytest-xdist changes it
        return twin

    @property
    def key(self) -> tuple[int, str]:
        """What its ranks must be."""
        return self.size, self.mark.device

    # -- the phases ------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Take ranks, and run this phase on them."""
        self._was_set_up = True
        assert self.groups is not None, "the test loop of another plug-in runs tests past pytest_runtest_protocol"
        if self.mark.device == "cuda" and has_no_gpu():
            pytest.skip(f"ranks: device='cuda' needs {self.size} CUDA devices, and this machine has none")
        self._take(self.groups)
        self._run("setup")

    def _take(self, groups: RankGroups) -> None:
        self._group = groups.take(self.key)
        timeout = groups.timeout if self.mark.timeout is None else self.mark.timeout
        self._deadline = Deadline.after(timeout or None)
        self._began = time.monotonic()

    def runtest(self) -> None:
        """Run the test on the ranks."""
        self._run("call")

    def teardown(self) -> None:
        """Tear down on the ranks, unless they are lost."""
        group, groups = self._group, self.groups
        if group is None or groups is None:
            return
        try:
            if group.usable:
                self._run("teardown")
        finally:
            self._group = None
            groups.done(group)

    def let_go(self) -> None:
        """After its teardown: if it was skipped before its setup, what its ranks have kept for it ends here all the
        same, as in one process, and may fail.
        """
        was_set_up, self._was_set_up = self._was_set_up, False
        if was_set_up or self.groups is None or not self.groups.has(self.key):
            return
        following = self.next_on_ranks
        if following is None or following.parent is not self.parent or self._is_last():  # else that one needs all of it
            self._take(self.groups)
            self._was_skipped = True
            try:
                self.teardown()
            finally:
                self._was_skipped = False

    def _run(self, when: When) -> None:
        group = self._group
        assert group is not None
        seconds = self._deadline.remaining()
        if seconds is not None and when == "teardown":
            seconds = max(seconds, _TEARDOWN_S)
        try:
            notes = group.run(self._phase(when, group.tests, seconds), seconds)
        except PhaseFailed as first:
            self._keep(when, [*notes_of(first), *group.take_notes()])
            judge(first, self.size)
        except Exception:  # a rank is lost, or what it runs is in disorder
            self._give_up()
            raise
        except BaseException:  # Ctrl-C, or a time-out of another plug-in
            self._show_stacks(when)
            self._give_up()
            raise
        else:
            self._keep(when, notes)

    def _phase(self, when: When, number: int, seconds: float | None) -> Phase:
        following = self.next_on_ranks
        phase = Phase(when, number, self.rank_nodeid, str(self.path), seconds=seconds, skipped=self._was_skipped)
        if when != "teardown" or following is None or self._is_last():
            return phase
        return replace(phase, next_nodeid=following.rank_nodeid, next_path=str(following.path))

    def _is_last(self) -> bool:
        """No other test comes on these ranks, whatever had been planned."""
        fresh = self.groups is not None and self.groups.fresh
        return bool(fresh or self.session.shouldfail or self.session.shouldstop)

    def _give_up(self) -> None:
        group, self._group = self._group, None
        if group is not None and self.groups is not None:
            self._lost_pids = group.pids
            self.groups.give_up(group)

    def _show_stacks(self, when: When) -> None:
        assert self._group is not None
        for rank, text in self._group.stacks().items():
            self.add_report_section(when, f"stack of rank {rank}", trimmed(text))

    def _keep(self, when: When, notes: list[Notes]) -> None:
        """Take over what the ranks have noted."""
        for note in notes:
            for title, text in note.sections:
                self.add_report_section(when, f"{_kind(title, when)} rank {note.rank}", text)
            for name, value in note.properties:
                named = (name, value) if note.rank == 0 else (f"rank{note.rank}.{name}", value)
                self.user_properties.append(named)
            if note.damage and self._group is not None:
                self._group.damage = note.damage
                self.warn(
                    pytest.PytestWarning(
                        f"{self.nodeid} left {note.damage} on rank {note.rank}: the next test gets new ranks"
                    )
                )
        forward_warnings(self.config, [warning for note in notes for warning in note.warnings])

    # -- what people read --------------------------------------------------------------------------------------------

    def _repr_failure_py(self, excinfo: ExceptionInfo[BaseException], style: Any = None) -> TerminalRepr:
        error = excinfo.value
        if isinstance(error, RanksFailed):
            return render_failed(self.config, error)
        if isinstance(error, RPCTimeoutError) and self._lost_pids:
            return render_lost(self, self._time_out_text(error), error)
        if isinstance(error, WorkerDiedError):
            return render_lost(self, _death_text(error), error)
        if isinstance(error, MpexecError):
            return render_lost(self, str(error), error)
        return super()._repr_failure_py(excinfo, style)

    def _time_out_text(self, error: RPCTimeoutError) -> str:
        seconds = time.monotonic() - self._began
        lines = [
            f"no end after {seconds:.1f} s on ranks {list(error.missing_ranks)}; all ranks were stopped "
            "(the limit is set by ranks(timeout=...), --mpexec-timeout or mpexec_timeout)"
        ]
        for rank in range(self.size):
            pid = self._lost_pids[rank]
            stack = error.stacks.get(rank)
            text = "  had finished, and was waiting for the others" if stack is None else trimmed(stack)
            lines.append(f"\nrank {rank} of {self.size} (pid {pid}):\n{text}")
        return "\n".join(lines)


def _death_text(error: WorkerDiedError) -> str:
    """The error with more of the last lines than it shows itself: a crash writes a long stack."""
    head, found, _ = str(error).partition("\nIts last lines:")
    if not found:
        return head
    lines = trimmed("\n".join(error.last_lines)).split("\n")
    return "\n  ".join([f"{head}\nIts last lines:", *lines[-_LAST_LINES:]])


def _kind(title: str, when: str) -> str:
    """ "log" of "Captured log call": it is put together again with the rank in it."""
    return title.removeprefix("Captured ").removesuffix(f" {when}")


def has_no_gpu() -> bool:
    """True where no driver of a GPU is loaded, so that torch need not be asked."""
    return not (glob.glob("/dev/nvidia*") or glob.glob("/dev/kfd") or glob.glob("/dev/dxg"))
