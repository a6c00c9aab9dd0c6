"""How failures of ranks are shown: the root cause as the rank itself would show it, named by rank; then the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ExceptionRepr,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)

from mpexec.pytest_plugin.phases import PhaseFailed
from mpexec.pytest_plugin.verdict import RanksFailed


def render_failed(config: pytest.Config, error: RanksFailed) -> ExceptionRepr:
    """The first failure with its rank in the first line, further ones as sections."""
    if error.preface:
        shown: ExceptionRepr = as_repr(error.preface, _location(error.failures[0]))
    else:
        first = error.failures[0]
        shown = _own_repr(config, first)
        entries = _first_traceback(shown).reprentries
        entries[:] = [ReprEntryNative([f"{_who(first, error)}:\n"]), *entries]
        if shown.reprcrash is not None:
            shown.reprcrash.message = f"rank {first.rank}: {shown.reprcrash.message}"
        text = str(_own_repr(config, first))
        for failure in error.failures[1:]:
            own = str(_own_repr(config, failure))
            shown.addsection(_name(failure, error.size), "the same" if own == text else own)
    _add_others(shown, error.others)
    return shown


def render_lost(item: pytest.Item, text: str, error: BaseException) -> ExceptionRepr:
    """The end of ranks from outside: there is no traceback, only what the driver knows."""
    path, line, _ = item.reportinfo()
    shown = as_repr(text, ReprFileLocation(str(path), (line or 0) + 1, ""), name=type(error).__name__)
    others = getattr(getattr(error, "others", None), "exceptions", ())
    for other in others:
        if isinstance(other, PhaseFailed) and other.report is not None:
            shown.addsection(f"rank {other.rank} (pid {other.pid})", str(_own_repr(item.config, other)))
    _add_others(shown, [other for other in others if not isinstance(other, PhaseFailed)])
    if error.__cause__ is not None:
        shown.addsection("cause", f"{type(error.__cause__).__name__}: {error.__cause__}\n{_cause_text(error)}")
    return shown


def as_repr(text: str, location: ReprFileLocation, name: str = "") -> ReprExceptionInfo:
    """Text in the form of a failure, so that it survives pytest-xdist and shows in summaries and JUnit files."""
    whole = f"{name}: {text}" if name else text
    location.message = whole.partition("\n")[0]
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback([ReprEntryNative([f"{whole}\n"])], None, style="native"), reprcrash=location
    )


def _who(failure: PhaseFailed, error: RanksFailed) -> str:
    if error.size == 1:
        return _name(failure, 1)
    return f"{_name(failure, error.size)}, {'the first to fail' if len(error.failures) > 1 else 'the only one to fail'}"


def _name(failure: PhaseFailed, size: int) -> str:
    return f"rank {failure.rank} of {size} (pid {failure.pid})"


def _own_repr(config: pytest.Config, failure: PhaseFailed) -> ExceptionRepr:
    """The failure as its rank has shown it; a new object each time."""
    if failure.report is None:
        return as_repr(failure.reason, _location(failure))
    import copy

    report = config.hook.pytest_report_from_serializable(config=config, data=copy.deepcopy(failure.report))
    longrepr: Any = report.longrepr
    if isinstance(longrepr, ExceptionRepr):
        return longrepr
    return as_repr(longrepr[2] if isinstance(longrepr, tuple) else str(longrepr), _location(failure))


def _location(failure: PhaseFailed) -> ReprFileLocation:
    path, line, _ = (failure.report or {}).get("location", ("", 0, ""))
    return ReprFileLocation(str(path), (line or 0) + 1, failure.reason)


def _first_traceback(shown: ExceptionRepr) -> Any:
    """The one that is printed first: of a chain that is the cause of all."""
    return shown.chain[0][0] if isinstance(shown, ExceptionChainRepr) else shown.reprtraceback


def _add_others(shown: ExceptionRepr, others: Sequence[BaseException]) -> None:
    for other in others:
        shown.addsection("also", f"{type(other).__name__}: {other}")


def _cause_text(error: BaseException) -> str:
    deeper = error.__cause__.__cause__ if error.__cause__ is not None else None
    return "" if deeper is None else str(deeper)
