"""Whether an engine serves requests, and what its ranks are at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class RankHealth:
    """What one rank is at, read without asking it.

    Attributes:
        state: Of its process: "running" (idle, too), "stopped", "uninterruptible", "zombie" or "gone".
        method: What it is in; "forward" is a step. None when it is in nothing, or this executor does not know.
        seconds: For how long it has been in that method.
    """

    rank: int
    pid: int
    state: str
    method: str | None = None
    seconds: float | None = None

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """From a row of `Executor.describe`."""
        return cls(row["rank"], row["pid"], row["state"], row.get("method"), row.get("seconds"))

    def __str__(self) -> str:
        how = [] if self.state == "running" else [self.state]
        if self.method is not None:
            how.append(f"in {self.method!r} for {self.seconds or 0.0:.1f} s")
        return f"rank {self.rank} (pid {self.pid}) {' '.join(how) or 'idle'}"


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine serves requests.

    Attributes:
        ok: Requests are served, or wait for a wake-up that somebody has to ask for.
        state: "new", "running", "draining" (an operation waits for what runs), "sleeping", "stalled" (requests run, and
            no step has ended for `EngineConfig.stall_timeout`; or the engine's process has been silent for as long) or
            "stopped".
        reason: The root cause when it stopped by a failure.
        ranks: Index = rank; empty before the start, and where it is not known.
        step_age: Seconds since a step ended, or since the oldest one under way was sent if that was later; None while
            no step is under way.
        silence: Of a client: seconds for which the engine's process has let something wait for an answer without a
            word; None while nothing waits, and for an engine in this process.
    """

    ok: bool
    state: str
    reason: BaseException | None = None
    ranks: tuple[RankHealth, ...] = ()
    step_age: float | None = None
    silence: float | None = None

    def judged(self, stall_timeout: float | None) -> Health:
        """The same, "stalled" if no step has ended, or no word has come, for that many seconds; None never is."""
        if self.ok and stall_timeout is not None and max(self.step_age or 0.0, self.silence or 0.0) >= stall_timeout:
            return replace(self, ok=False, state="stalled")
        return self
