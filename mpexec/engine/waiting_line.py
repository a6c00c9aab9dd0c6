"""WaitingLine: who starts next among those that wait for a slot."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

PASSES = 8


class WaitingLine(Generic[T]):
    """What waits, by priority, and within a priority first come, first served.

    Nobody waits for ever: after eight in a row that were not the one that has waited longest, that one is next. So
    whoever joins behind n others, of any priority, is taken after at most 9 * (n + 1) turns, whatever comes later.
    """

    def __init__(self) -> None:
        # By priority: key to arrival and item. A plain dict grows slower at its front the more have left there.
        self._classes: dict[int, OrderedDict[int, tuple[int, T]]] = {}
        self._priorities: dict[int, int] = {}  # by key
        self._arrivals = 0
        self._passed = 0  # how often the oldest has been passed over in a row

    def __len__(self) -> int:
        return len(self._priorities)

    def join(self, key: int, item: T, priority: int) -> None:
        """Wait behind all others of this priority; lower numbers are taken first. `key` is new."""
        self._arrivals += 1
        self._priorities[key] = priority
        self._classes.setdefault(priority, OrderedDict())[key] = (self._arrivals, item)

    def leave(self, key: int) -> bool:
        """Take out one that gives up; False if it does not wait."""
        priority = self._priorities.get(key)
        if priority is None:
            return False
        self._remove(priority, key)
        return True

    def _remove(self, priority: int, key: int) -> T:
        del self._priorities[key]
        _, item = self._classes[priority].pop(key)
        if not self._classes[priority]:
            del self._classes[priority]
        return item

    def next(self) -> T | None:
        """Whose turn it is; None if nobody waits. Asking changes nothing."""
        place = self._next_place()
        return None if place is None else self._classes[place[0]][place[1]][1]

    def take(self) -> T:
        """Take out the one whose turn it is; somebody waits."""
        place = self._next_place()
        assert place is not None
        self._passed = 0 if place == self._oldest() else self._passed + 1
        return self._remove(*place)

    def _next_place(self) -> tuple[int, int] | None:
        """Priority and key of the one whose turn it is."""
        if not self._classes:
            return None
        if self._passed >= PASSES:
            return self._oldest()
        first = min(self._classes)
        return first, next(iter(self._classes[first]))

    def _oldest(self) -> tuple[int, int]:
        heads = []
        for priority, waiting in self._classes.items():
            key, (arrival, _) = next(iter(waiting.items()))
            heads.append((arrival, priority, key))
        _, priority, key = min(heads)
        return priority, key
