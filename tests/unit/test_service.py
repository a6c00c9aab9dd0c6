"""EngineService: what it tells clients."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from mpexec.engine.health import Health
from mpexec.engine.metrics import Metrics
from mpexec.mp_engine.service import EngineService


async def test_news_of_a_failed_engine_travel_whatever_the_root_cause_is() -> None:
    class Unpicklable(Exception):
        """Local, so no other process can have it."""

    async def wakeup() -> None:
        return

    published: list[Any] = []
    engine: Any = SimpleNamespace(
        metrics=Metrics,
        health=lambda: Health(False, "stopped", Unpicklable()),
        stall_timeout=None,
        wakeup_async=wakeup,
        start_profile_async=wakeup,
    )
    server: Any = SimpleNamespace(register=lambda *_: None, publish=published.append)
    await EngineService(engine, server).wakeup()
    (news,) = published
    assert pickle.loads(pickle.dumps(news)).health == Health(False, "stopped")
