"""What comes next: a test's ranks keep the fixtures that the next test on the same ranks uses too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from mpexec.pytest_plugin.item import RanksFunction

if TYPE_CHECKING:
    from mpexec.pytest_plugin.groups import RankGroups


class Schedule:
    """The order of the tests of one session.

    Args:
        groups: Where the ranks come from.
        items: The tests in their order.
        in_full: This process runs all of them. A worker of pytest-xdist runs some, and learns which as it goes.
    """

    def __init__(self, groups: RankGroups, items: Sequence[pytest.Item], *, in_full: bool) -> None:
        self._groups = groups
        self._next = _successors(items) if in_full else {}

    def begin(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        """A test is about to run, and `next_item` after it."""
        if isinstance(item, RanksFunction):
            item.groups = self._groups
            item.next_on_ranks = None
            if isinstance(next_item, RanksFunction) and next_item.key == item.key:
                item.next_on_ranks = next_item
            elif next_item is not None:
                item.next_on_ranks = self._next.get(item)


def _successors(items: Sequence[pytest.Item]) -> dict[pytest.Item, RanksFunction]:
    """For each test on ranks the next one on the same ranks."""
    successors: dict[pytest.Item, RanksFunction] = {}
    latest: dict[tuple[int, str], RanksFunction] = {}
    for item in reversed(items):
        if isinstance(item, RanksFunction):
            if item.key in latest:
                successors[item] = latest[item.key]
            latest[item.key] = item
    return successors
