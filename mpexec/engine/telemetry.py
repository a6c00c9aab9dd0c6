"""What the loop of one engine observes: when requests start, get tokens and end, and how long steps take.

A few dictionary look-ups for each step and token; nothing here waits or fails.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mpexec.histogram import Histogram

_RATE_WINDOW_NS = 10_000_000_000
_RATE_LEAST_NS = 1_000_000_000


@dataclass(slots=True)
class _Times:
    """Moments of one request (monotonic ns); None for what has not happened."""

    accepted: int
    started: int | None = None
    last_token: int | None = None


class Rate:
    """How many come a second, since the first in the last ten seconds, and over a second at least.

    One step alone would be no measure. Costs the same however many steps the ten seconds had.

    Args:
        clock: Monotonic nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._recent: deque[tuple[int, int]] = deque()  # moment and count
        self._sum = 0

    def add(self, count: int) -> None:
        """So many have come now."""
        now = self._clock()
        self._recent.append((now, count))
        self._sum += count
        self._forget(now)

    def per_second(self) -> float:
        """The rate as of now."""
        now = self._clock()
        self._forget(now)
        return self._sum * 1e9 / max(now - self._recent[0][0], _RATE_LEAST_NS) if self._recent else 0.0

    def _forget(self, now: int) -> None:
        while self._recent and now - self._recent[0][0] > _RATE_WINDOW_NS:
            self._sum -= self._recent.popleft()[1]


class Telemetry:
    """Times of requests and steps. Called by the loop, in the order of events.

    Args:
        clock: Monotonic nanoseconds.

    Attributes:
        queue_wait: From the acceptance of a request to the step that takes in its prompt.
        time_to_first_token: From its acceptance to its first token.
        inter_token: Between two tokens of a request.
        end_to_end: From its acceptance to its last token; of requests that ended by "stop" or "length".
        tokens: New tokens of all requests.
        step: Steps of the model as the driver sees them: from the sending, or from the output of the step before if
            that was later, to the output.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self.queue_wait = Histogram()
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.end_to_end = Histogram()
        self.step = Histogram()
        self.tokens = Rate(clock)
        self._requests: dict[int, _Times] = {}
        self._sent: dict[int, int] = {}  # by step, in the order of sending
        self._last_output = 0

    def as_dict(self) -> dict[str, Histogram]:
        """Copies of the histograms, by name."""
        names = ("queue_wait", "time_to_first_token", "inter_token", "end_to_end", "step")
        return {name: getattr(self, name).copy() for name in names}

    def reset(self) -> None:
        """Forget what is under way: it will not come back. What has been observed stays."""
        self._requests.clear()
        self._sent.clear()

    def accepted(self, request_id: int) -> None:
        """A request waits for a slot."""
        self._requests[request_id] = _Times(self._clock())

    def gone(self, request_id: int) -> None:
        """A request ends without further tokens."""
        self._requests.pop(request_id, None)

    def sent(self, step_id: int, started: Iterable[int]) -> None:
        """A step is on its way to the ranks, and with it the beginning of these requests' prompts."""
        self._sent[step_id] = now = self._clock()
        for request_id in started:
            times = self._requests.get(request_id)
            if times is not None and times.started is None:
                times.started = now
                self.queue_wait.observe_ns(now - times.accepted)

    def received(self, step_id: int) -> None:
        """The output of a step is here."""
        now = self._clock()
        sent = self._sent.pop(step_id, now)
        self.step.observe_ns(now - max(sent, self._last_output))
        self._last_output = now

    def token(self, request_id: int, is_last: bool) -> None:
        """A token of a request is handed out."""
        times = self._requests.get(request_id)
        if times is None:
            return
        now = self._clock()
        if times.last_token is None:
            self.time_to_first_token.observe_ns(now - times.accepted)
        else:
            self.inter_token.observe_ns(now - times.last_token)
        times.last_token = now
        if is_last:
            del self._requests[request_id]
            self.end_to_end.observe_ns(now - times.accepted)

    def step_age(self) -> float | None:
        """Seconds since a step ended, or since the oldest one in flight was sent if that was later; None while idle."""
        sent = list(self._sent.values())  # in one step: other threads may ask
        return (self._clock() - max(self._last_output, sent[0])) / 1e9 if sent else None
