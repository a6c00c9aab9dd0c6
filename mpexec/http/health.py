"""Whether requests make progress: the engine serves, where requests run, steps end, and who is asked, answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpexec.http.served import ServedEngine

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The health of one moment.

    Attributes:
        status: "ok", "draining" or "sleeping" (which are healthy), "stalled", or the engine's state.
        cause: Why it is not ok; None where it is, or where there is no more to say than the status.
    """

    ok: bool
    status: str
    cause: str | None = None

    def body(self) -> dict[str, str]:
        """As JSON tells it."""
        return {"status": self.status} | ({} if self.cause is None else {"cause": self.cause})


class HealthCheck:
    """Knows how long requests have been running without a step that ended, or waiting for an engine that is silent.

    A rank that was stopped, or that waits for ever inside a library, is alive for the kernel: that no step ends is
    the only sign. So is the engine's process: that it does not answer is the only sign. Idle is healthy for any length
    of time.

    Args:
        engine: Asked for its state and counts; its ranks are never asked, so a check cannot hang.
        stall_timeout: Seconds without a step while requests run, or without a word while something waits for the
            engine's answer, that count as a stall; 0 never does.
        clock: Monotonic seconds.
    """

    def __init__(self, engine: ServedEngine, stall_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._stall_timeout = stall_timeout or math.inf
        self._clock = clock
        self._steps = -1
        self._progress_at = clock()

    def look(self) -> float:
        """Take note of the present counts and return the seconds without progress."""
        metrics, health, now = self._engine.metrics(), self._engine.health(), self._clock()
        is_held = health.state == "draining" and health.step_age is None  # between two steps, on purpose
        if metrics.steps != self._steps or not metrics.running or is_held:
            self._steps, self._progress_at = metrics.steps, now
        return now - self._progress_at

    async def watch_async(self) -> None:
        """Look once a second until cancelled. A stall is the absence of events, so only a clock can see it."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_EVERY_S)

    def check(self) -> Verdict:
        """The verdict of this moment."""
        health = self._engine.health()
        if not health.ok and health.state != "stalled":  # the engine's limit for that is another one
            reason = health.reason
            return Verdict(False, health.state, None if reason is None else f"{type(reason).__name__}: {reason}")
        idle = self.look()
        silence = health.silence or 0.0
        if silence >= self._stall_timeout:
            return Verdict(False, "stalled", f"the engine's process has not answered for {silence:.0f} s")
        if idle >= self._stall_timeout:
            cause = f"requests run, but no step of the model has ended for {idle:.0f} s"
            return Verdict(False, "stalled", "; ".join([cause, *map(str, health.ranks)]))
        return Verdict(True, health.state if health.state in ("draining", "sleeping") else "ok")
