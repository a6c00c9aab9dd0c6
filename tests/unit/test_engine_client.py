"""EngineClient: what it says of an engine that says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from rpc_pairs import bounded, serving, until

from mpexec.config import EngineConfig
from mpexec.engine.engine import ModelPlan
from mpexec.engine.health import Health
from mpexec.engine.metrics import Metrics
from mpexec.models import default_model_path
from mpexec.mp_engine.engine_client import EngineClient
from mpexec.mp_engine.service import News
from mpexec.mp_engine.sockets import SocketFolder


async def test_an_engine_that_was_healthy_and_answers_nothing_is_stalled(folder: SocketFolder) -> None:  # F070
    plan = ModelPlan.read(default_model_path(), 1, EngineConfig())
    healthy = News(Metrics(), Health(True, "running"), stall_timeout=0.1)

    def about() -> Any:
        server.publish(healthy)
        return plan.facts, 1, 64

    async def generate(*_: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async with serving(folder, about, generate) as server, EngineClient(server.address) as client:
        assert client.health() == Health(True, "running")
        reading = asyncio.ensure_future(anext(client.generate([1])))
        await until(lambda: server.open_calls == 1)
        await until(lambda: not client.health().ok)
        health = client.health()
        assert (health.state, health.step_age) == ("stalled", None)
        assert health.silence is not None
        assert health.silence >= 0.1
        server.publish(healthy)
        await until(lambda: client.health().ok)
        reading.cancel()
        await bounded(asyncio.wait([reading]))
