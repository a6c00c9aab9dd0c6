"""What an executor has counted: plain values, read without asking a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpexec.histogram import Histogram


@dataclass(frozen=True, slots=True)
class RankMeasures:
    """What one rank has counted since its start. None is what this kind of executor cannot know without asking.

    Attributes:
        methods: How long each method took inside the rank, by its name; "forward" is the agent's hook. A coroutine
            counts from its start to its end, whatever else the rank did meanwhile.
        reply_ring_fill: How full its reply ring is now, 0 to 1.
        spins: Waits for calls that ended while it was spinning.
        parks: Waits for which it went to sleep.
    """

    rank: int
    methods: Mapping[str, Histogram] | None = None
    reply_ring_fill: float | None = None
    spins: int | None = None
    parks: int | None = None


@dataclass(frozen=True, slots=True)
class Measures:
    """What driver and ranks have counted; None as in `RankMeasures`.

    Attributes:
        call_ring_fill: How full the call ring is now for the rank that is furthest behind, 0 to 1.
        spins: Waits of the driver, for replies and outputs, that ended while it was spinning.
        parks: Those for which a thread or loop of the driver went to sleep.
        ranks: Index = rank.
    """

    call_ring_fill: float | None = None
    spins: int | None = None
    parks: int | None = None
    ranks: tuple[RankMeasures, ...] = field(default=())
