"""EngineService: what it tells clients."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mpexec.engine.health import Health
from mpexec.engine.metrics import Metrics
from mpexec.engine.sampling_params import SamplingParams
from mpexec.errors import ConfigError
from mpexec.mp_engine.service import EngineService


async def nothing() -> None:
    return


def service(health: Health, **engine: Any) -> tuple[EngineService, list[Any]]:
    """One over an engine with these methods, and what it publishes."""
    published: list[Any] = []
    common = {"metrics": Metrics, "health": lambda: health, "stall_timeout": None}
    server: Any = SimpleNamespace(register=lambda *_: None, publish=published.append, open_calls=0)
    made: Any = SimpleNamespace(**common, **engine)
    return EngineService(made, server), published


async def test_news_of_a_failed_engine_travel_whatever_the_root_cause_is() -> None:
    class Unpicklable(Exception):
        """Local, so no other process can have it."""

    engine, published = service(Health(False, "stopped", Unpicklable()), wakeup_async=nothing)
    await engine.wakeup()
    (news,) = published
    assert pickle.loads(pickle.dumps(news)).health == Health(False, "stopped")


async def test_answers_that_end_together_are_told_once_before_their_last_pieces() -> None:
    step = asyncio.Event()

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        await step.wait()
        yield SimpleNamespace(text="", token_ids=(1,), finish_reason="stop", logprobs=None)

    engine, published = service(Health(True, "running"), generate=generate)

    async def read() -> int:
        (told,) = [len(published) async for _ in engine.generate([1], SamplingParams())]
        return told

    readers = [asyncio.create_task(read()) for _ in range(8)]
    await asyncio.sleep(0)
    step.set()
    assert await asyncio.gather(*readers) == [1] * 8
    step.clear()
    later = asyncio.create_task(read())
    await asyncio.sleep(0)
    step.set()
    assert await later == 2


async def test_whoever_waits_for_an_answer_hears_that_the_engine_is_there_though_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpexec.mp_engine.service._METRICS_EVERY_S", 0.001)
    given = asyncio.Event()

    async def take_long(*_: Any, **__: Any) -> None:
        await given.wait()

    engine, published = service(Health(True, "draining"), update_params_async=take_long)
    telling = asyncio.create_task(engine._publish_news())
    engine._server.open_calls = 1  # type: ignore[misc]
    change = asyncio.create_task(engine.update_params("new.safetensors", True, None))
    async with asyncio.timeout(10):
        while len(published) < 5:
            await asyncio.sleep(0)
    given.set()
    await change
    telling.cancel()


async def test_a_profile_goes_with_the_client_that_has_begun_it(monkeypatch: pytest.MonkeyPatch) -> None:
    goes: list[Callable[[], None]] = []
    asked: list[str] = []
    discarded = asyncio.Event()
    monkeypatch.setattr("mpexec.mp_engine.service.when_caller_goes", goes.append)

    async def begin(**_: bool) -> None:
        if asked:
            raise ConfigError("the ranks are being profiled already")
        asked.append("start")

    async def wait() -> None:
        await asyncio.Event().wait()

    async def discard() -> None:
        asked.append("discard")
        discarded.set()

    engine, _ = service(Health(True, "running"), start_profile_async=begin, discard_profile_async=discard)
    monkeypatch.setattr(engine, "_watch_server", wait)
    monkeypatch.setattr(engine, "_tell_failure", wait)
    async with engine:
        await engine.start_profile()
        with pytest.raises(ConfigError):
            await engine.start_profile()
        first, refused = goes
        refused()
        await asyncio.sleep(0)
        assert asked == ["start"]
        first()
        async with asyncio.timeout(10):
            await discarded.wait()
    assert asked == ["start", "discard"]
