"""One deadline, made at the door and handed down, so that timeouts in a row never add up."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mpexec.errors import ConfigError

_NS = 1_000_000_000
_LONGEST_S = 366 * 24 * 3600  # what is longer is never: system calls refuse times that are too long
_LONGEST_POLL_MS = 1 << 30


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock, or never.

    Attributes:
        at_ns: `time.monotonic_ns()` at which it expires; None never expires.
    """

    at_ns: int | None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """The deadline `seconds` from now; None, and more than a year, never expires.

        Raises:
            ConfigError: `seconds` is negative or not a number.
        """
        if seconds is None:
            return NEVER
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
            raise ConfigError(f"a timeout must be None or at least 0 seconds, not {seconds!r}")
        if seconds > _LONGEST_S:
            return NEVER
        return cls(time.monotonic_ns() + int(seconds * _NS))

    @property
    def expired(self) -> bool:
        """True once the point has passed."""
        return self.at_ns is not None and time.monotonic_ns() >= self.at_ns

    def remaining(self) -> float | None:
        """Seconds left, at least 0.0; None when it never expires."""
        if self.at_ns is None:
            return None
        return max(0, self.at_ns - time.monotonic_ns()) / _NS

    def share(self, fraction: float) -> Deadline:
        """An earlier deadline that leaves `1 - fraction` of what is left to the steps that follow."""
        left = self.remaining()
        return self if left is None else Deadline.after(left * fraction)

    def sooner(self, other: Deadline) -> Deadline:
        """Whichever of the two expires first."""
        if self.at_ns is None or other.at_ns is None:
            return self if other.at_ns is None else other
        return self if self.at_ns <= other.at_ns else other

    def poll_ms(self) -> int | None:
        """Milliseconds left for `select.poll`, rounded up so that a wake-up never comes before the deadline.

        At most twelve days: a poll that ends earlier is a look at the clock and another poll.
        """
        if self.at_ns is None:
            return None
        return min(_LONGEST_POLL_MS, max(0, -((time.monotonic_ns() - self.at_ns) // 1_000_000)))


NEVER = Deadline(None)
