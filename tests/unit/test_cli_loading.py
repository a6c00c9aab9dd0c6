"""How a command ends an engine that it has loaded."""

from __future__ import annotations

import pytest

from mpexec.cli.loading import ending
from mpexec.cli.report import StalledError, ToldError


class Engine:
    """Writes down what happens to it, and what stderr held then; to stop it may fail."""

    def __init__(self, events: list[str], capsys: pytest.CaptureFixture[str], stop_fails: bool = False) -> None:
        self._events = events
        self._capsys = capsys
        self._stop_fails = stop_fails

    async def stop_async(self) -> None:
        self._events += [*self._capsys.readouterr().err.splitlines(), "stop"]
        if self._stop_fails:
            raise TimeoutError("a rank hangs")

    async def release_async(self) -> None:
        self._events.append("release")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    happened: list[str] = []
    monkeypatch.setattr(
        "mpexec.cli.loading.end_process_in", lambda seconds, code: happened.append(f"end with {code} in {seconds} s")
    )
    return happened


async def end(engine: Engine, failure: Exception | None) -> None:
    async with ending(engine, patience=1.5, untold=(OSError,)):
        if failure is not None:
            raise failure


async def test_a_failure_is_told_before_an_end_that_is_bounded(
    events: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ToldError):
        await end(Engine(events, capsys), RuntimeError("broken"))
    assert events == ["end with 1 in 1.5 s", "mpexec: RuntimeError: broken", "stop", "release"]


async def test_a_stall_is_told_as_it_is_and_its_end_may_take_a_moment_more(
    events: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ToldError):
        await end(Engine(events, capsys), StalledError("no step for 120 s"))
    assert events == ["end with 1 in 3.0 s", "mpexec: no step for 120 s", "stop", "release"]


async def test_an_end_without_failure_or_with_one_that_others_tell_is_silent(
    events: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    await end(Engine(events, capsys), None)
    with pytest.raises(BrokenPipeError):
        await end(Engine(events, capsys), BrokenPipeError())
    assert events == ["stop", "release"] * 2


async def test_an_engine_that_does_not_stop_is_released(events: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TimeoutError, match="a rank hangs"):
        await end(Engine(events, capsys, stop_fails=True), None)
    assert events == ["stop", "release"]
