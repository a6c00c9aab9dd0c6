"""What a command says, and does, when the steps of the model do not end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from mpexec.cli import stall
from mpexec.cli.report import StalledError, describe_failure
from mpexec.cli.stall import describe_stall, watching
from mpexec.engine.health import Health, RankHealth

STOPPED = (RankHealth(0, 11, "running", "forward", 30.0), RankHealth(1, 12, "stopped", "forward", 30.0))
NO_STEP = "no step for 30 s: rank 1 (pid 12) stopped in 'forward' for 30.0 s"


class Ageing:
    """An engine whose last step is so many seconds ago, each time it is asked; the last value stays."""

    def __init__(self, ages: Iterable[float | None]) -> None:
        self._ages = list(ages)
        self.asked_for_all = asyncio.Event()

    def health(self) -> Health:
        if len(self._ages) == 1:
            self.asked_for_all.set()
        age = self._ages.pop(0) if len(self._ages) > 1 else self._ages[0]
        return Health(True, "running", ranks=STOPPED, step_age=age)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_LOOK_EVERY_S", 0.0)


async def test_each_stall_is_told_once() -> None:
    told: list[str] = []
    engine = Ageing([0.1, 9.0, 10.0, 11.0, None, 30.0, 31.0, None])
    async with watching(engine, 0.0, told.append):
        await engine.asked_for_all.wait()
    assert [line.partition(":")[0] for line in told] == ["no step for 10 s", "no step for 30 s"]


async def test_past_the_limit_the_block_is_cancelled_and_the_error_says_where_the_ranks_are() -> None:
    told: list[str] = []
    with pytest.raises(StalledError) as stalled:
        async with watching(Ageing([0.1, 30.0]), 20.0, told.append):
            await asyncio.Event().wait()
    assert describe_failure(stalled.value) == NO_STEP
    assert told == []
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_who_interrupts_a_stall_is_told_of_it_again() -> None:
    told: list[str] = []
    engine = Ageing([30.0])

    async def work() -> None:
        async with watching(engine, 0.0, told.append):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await engine.asked_for_all.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == [NO_STEP, NO_STEP]


async def test_a_block_without_stall_ends_as_it_likes_in_silence() -> None:
    told: list[str] = []
    for failure in (TimeoutError("of its own"), asyncio.CancelledError()):
        with pytest.raises(type(failure)) as ended:
            async with watching(Ageing([0.1]), 20.0, told.append):
                raise failure
        assert ended.value is failure
    assert told == []


def test_all_ranks_are_named_where_none_is_known_to_stand_still() -> None:
    ranks = (RankHealth(0, 11, "running", "forward", 12.0), RankHealth(1, 12, "running"))
    health = Health(True, "running", ranks=ranks, step_age=12.0)
    assert describe_stall(health) == "no step for 12 s: rank 0 (pid 11) in 'forward' for 12.0 s; rank 1 (pid 12) idle"
    assert describe_stall(Health(True, "running", step_age=12.0)) == "no step for 12 s"


def test_an_engine_in_a_process_of_its_own_that_says_nothing_is_named_and_not_its_ranks() -> None:
    silent = Health(True, "running", ranks=STOPPED, step_age=30.2, silence=30.0)
    assert describe_stall(silent) == "no word from the engine's process for 30 s"
    assert describe_stall(replace(silent, step_age=None)) == "no word from the engine's process for 30 s"
    assert describe_stall(replace(silent, step_age=30.0, silence=0.2)) == NO_STEP
