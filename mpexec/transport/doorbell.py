"""Wake-ups that cannot be lost, and the adaptive spin before a reader parks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

YIELDS = 60  # about 48 us of own CPU; a budget in yields lets the other ranks run where cores are few
WALL_NS = 300_000
CONTENDED_NS = 1_000_000  # one yield that took this long: the cores are busy, and spinning hurts the spinner
_CONTENDED_PAUSE = 256  # waits without a spin after that
_LONGEST_PAUSE = 64


class Spinner:
    """Looks for news for a short while before its owner parks, and learns whether that pays.

    A cross-core wake-up costs about 25 us each way, a look about 1 us. A spin that found nothing doubles the number of
    waits that are not spun for (at most 64); one that found something resets it; a wake-up that came soon after parking
    resets it too, or a rank that once fell out of step would never come back.

    Attributes:
        hits: Waits that ended while it was spinning.
        parks: Waits for which its owner went to sleep; counted by the owner.
    """

    __slots__ = ("_pause", "_skip", "_yields", "hits", "parks")

    def __init__(self, yields: int = YIELDS) -> None:
        self._yields = yields
        self._pause = 0
        self._skip = 0
        self.hits = 0
        self.parks = 0

    def wants_to_spin(self) -> bool:
        """True if this wait should begin with a spin; counts waits down while it pauses."""
        if self._skip > 0:
            self._skip -= 1
            return False
        return True

    def spin(self, found: Callable[[], bool]) -> bool:
        """Yield the core and ask `found` until it is true or the budget is used up; false at once while it pauses."""
        if self._skip > 0:
            self._skip -= 1
            return False
        last = time.monotonic_ns()
        end = last + WALL_NS
        for _ in range(self._yields):
            os.sched_yield()
            now = time.monotonic_ns()
            if now - last > CONTENDED_NS:
                self.contended()
                return found()
            if found():
                self._pause = 0
                self.hits += 1
                return True
            if now > end:
                break
            last = now
        self.missed()
        return False

    def contended(self) -> None:
        """One yield took longer than `CONTENDED_NS`: whatever it found, the cores are busy; block from now on."""
        self._skip = _CONTENDED_PAUSE

    def hit(self) -> None:
        """A spin has found something: go on spinning."""
        self._pause = 0
        self.hits += 1

    def missed(self) -> None:
        """A spin found nothing: spin less often."""
        self._pause = min(_LONGEST_PAUSE, max(1, self._pause * 2))
        self._skip = self._pause

    def woke_after(self, parked_ns: int) -> None:
        """A parked wait ended after `parked_ns`; if a spin would have seen it, spin again from now on."""
        if parked_ns < WALL_NS and self._skip < _CONTENDED_PAUSE // 2:
            self._skip = self._pause = 0
