"""The engine without an event loop of one's own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from engine_agents import mp_engine, uni_engine

from mpexec import SamplingParams
from mpexec.engine.blocking import BlockingEngine
from mpexec.errors import ConfigError, EngineStoppedError, WorkerDiedError
from mpexec.mp_engine.zmq_engine import ZMQEngine

MAKERS: dict[str, Callable[..., Any]] = {
    "uni": uni_engine,
    "mp": partial(mp_engine, start_method="forkserver"),
    "zmq": lambda **options: ZMQEngine(partial(mp_engine, **options), start_timeout=60.0),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    maker: Callable[..., Any] = MAKERS[request.param]
    return maker


def many(new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


def tokens(engine: BlockingEngine, first: int, new: int) -> list[int]:
    return [token for output in engine.generate([first], many(new)) for token in output.token_ids]


def test_threads_read_their_answers_side_by_side(make: Callable[..., Any]) -> None:
    with BlockingEngine(make(max_slots=4)) as engine:
        assert engine.health().ok
        got: dict[int, list[int]] = {}
        threads = [
            threading.Thread(target=lambda n=number: got.update({n: tokens(engine, n, 50)})) for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert got == {number: list(range(number + 1, number + 51)) for number in range(4)}
        with pytest.raises(ConfigError):
            engine.generate([])
    assert not engine.health().ok


def test_leaving_an_answer_early_frees_its_slot(make: Callable[..., Any]) -> None:
    with BlockingEngine(make(max_slots=1)) as engine:
        for _ in range(3):
            for _output in engine.generate([1], many(900)):
                break
        assert tokens(engine, 5, 3) == [6, 7, 8]


def test_a_failure_reaches_readers_and_waiters(make: Callable[..., Any]) -> None:
    if make is uni_engine:
        pytest.skip("there is no process to kill")
    engine = BlockingEngine(make())
    try:
        outputs = engine.generate([1], many(900))
        next(outputs)
        victim = engine._engine.rank_pids[1]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerDiedError) as caught:
            engine.wait_tasks()
        assert caught.value.pid == victim
        with pytest.raises(EngineStoppedError):
            list(outputs)
    finally:
        engine.close()
    engine.close()


def test_a_closed_engine_refuses_requests(make: Callable[..., Any]) -> None:
    engine = BlockingEngine(make())
    waiter = threading.Thread(target=engine.wait_tasks)
    waiter.start()
    engine.close()
    waiter.join(10)
    assert not waiter.is_alive()
    with pytest.raises(EngineStoppedError):
        tokens(engine, 1, 1)
