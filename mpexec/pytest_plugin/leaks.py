"""Behind the fixture `no_leaks`: a test that leaves something behind fails, and hears what and how to mend it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import pytest

from mpexec.errors import ConfigError
from mpexec.pytest_plugin.snapshot import REMEDIES, Snapshot


class NoLeaks:
    """The watch over one test."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def allow(self, kind: str, matching: str = "*") -> None:
        """Overlook some leaks of this test. A process that is allowed is not killed either.

        Args:
            kind: "process", "zombie", "thread", "descriptor", "shared memory", "environment", "signal handler", "task"
                or "noise".
            matching: A pattern as in the shell for what the report says after the kind, such as "*sleep*".

        Raises:
            ConfigError: There is no such kind.
        """
        if kind not in REMEDIES:
            raise ConfigError(f"no_leaks.allow({kind!r}): use one of {', '.join(map(repr, REMEDIES))}")
        self._snapshot.allow(kind, matching)


@contextlib.contextmanager
def nothing_left(item: pytest.Item, snapshot: Snapshot) -> Iterator[None]:
    """Fail at the end of the block, which is to be that of the test, if something is left since the snapshot."""
    test = getattr(item, "obj", None)
    if inspect.iscoroutinefunction(test):
        item.obj = snapshot.watch_tasks(test)  # type: ignore[attr-defined]
    try:
        yield
        stderr = "".join(text for _, kind, text in item._report_sections if kind in ("stderr", "log"))
        left = snapshot.leaks(stderr)
    finally:
        snapshot.close()
        if inspect.iscoroutinefunction(test):
            item.obj = test  # type: ignore[attr-defined]
    if left:
        pytest.fail("the test left behind:\n" + "\n".join(f"  {leak}" for leak in left), pytrace=False)
