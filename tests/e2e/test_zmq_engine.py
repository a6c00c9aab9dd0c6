"""The engine in a process of its own: whoever dies, everybody hears why, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_agents import BrokenOnPurposeError, mp_engine, unbuildable_engine
from patience import alive, until, within

from mpexec import Engine, SamplingParams
from mpexec.errors import (
    ConfigError,
    ConnectionLostError,
    EngineStoppedError,
    StartupError,
    WorkerDiedError,
)
from mpexec.mp_engine.engine_client import EngineClient
from mpexec.mp_engine.sockets import make_keys
from mpexec.mp_engine.zmq_engine import ZMQEngine

Make = Callable[..., ZMQEngine]
STREAMS = 16


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes an engine over two counting ranks; released at the end, whatever the test does."""
    made: list[ZMQEngine] = []

    def make_one(*, drain_timeout: float = 30.0, stop_timeout: float = 5.0, **options: Any) -> ZMQEngine:
        factory = partial(mp_engine, **options)
        made.append(ZMQEngine(factory, start_timeout=60.0, drain_timeout=drain_timeout, stop_timeout=stop_timeout))
        return made[-1]

    yield make_one
    for engine in made:
        engine.release()


def many(new: int = 900) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


async def tokens(engine: Any, prompt: Any, params: SamplingParams) -> list[int]:
    return [token async for output in engine.generate(prompt, params) for token in output.token_ids]


def engine_children() -> list[int]:
    """Engine processes of this one; others, such as the fork server of another test, do not count."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "mpexec-engine":
                found.append(child.pid)
    return found


async def open_streams(engine: ZMQEngine, count: int = STREAMS) -> tuple[list[asyncio.Task[list[int]]], asyncio.Event]:
    """Streams that have begun, and the event that all of them have."""
    begun, left = asyncio.Event(), count

    async def read(first: int) -> list[int]:
        nonlocal left
        got: list[int] = []
        async for output in engine.generate([first], many()):
            if not got:
                left -= 1
                if not left:
                    begun.set()
            got += output.token_ids
        return got

    tasks = [asyncio.create_task(read(number)) for number in range(count)]
    async with asyncio.timeout(within(20.0)):
        await begun.wait()
    return tasks, begun


# -- failures ------------------------------------------------------------------------------------------------------


# F004
@pytest.mark.parametrize("victim", ["engine", "rank 0", "rank 1"])
async def test_a_kill_reaches_sixteen_streams_and_wait_tasks_with_the_true_cause(make: Make, victim: str) -> None:
    engine = make(max_slots=STREAMS)
    await engine.start_async()
    folder = Path(engine.address.removeprefix("ipc://")).parent
    everybody = (engine.pid, *engine.rank_pids)
    waiter = asyncio.create_task(engine.wait_tasks())
    tasks, _ = await open_streams(engine)
    pid = engine.pid if victim == "engine" else engine.rank_pids[int(victim[-1])]
    since = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    told = time.monotonic() - since
    with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
        await waiter
    assert told < within(1.0)
    assert time.monotonic() - since < within(1.0)
    assert (caught.value.pid, caught.value.signal_name) == (pid, "SIGKILL")
    for outcome in outcomes:
        assert isinstance(outcome, EngineStoppedError)
        assert outcome.__cause__ is caught.value
    assert not alive(*everybody)
    assert not folder.exists()
    assert engine._process.death is not None
    assert engine._process.death.exit_code == (None if victim == "engine" else 1)
    await engine.release_async()


@pytest.mark.parametrize("manner", ["raise", "raise while the peer waits"])
async def test_an_exception_in_a_forward_reaches_sixteen_streams_and_wait_tasks_as_itself(
    make: Make, manner: str
) -> None:
    engine = make(max_slots=STREAMS, break_at=(600, 1, manner))
    await engine.start_async()
    everybody = (engine.pid, *engine.rank_pids)
    tasks, _ = await open_streams(engine)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    with pytest.raises(BrokenOnPurposeError) as caught:
        await engine.wait_tasks()
    assert time.monotonic() - caught.value.args[1] < within(1.0)
    assert "in forward" in str(caught.value.__cause__)
    assert [(type(o), o.__cause__) for o in outcomes] == [(EngineStoppedError, caught.value)] * STREAMS  # type: ignore[union-attr]
    assert engine._process.death is not None
    assert engine._process.death.exit_code == 1
    assert not alive(*everybody)
    await engine.release_async()


@pytest.mark.parametrize("factory, expected", [("config", ConfigError), ("exit", StartupError), ("rank", StartupError)])
def test_an_engine_that_cannot_be_made_is_the_same_error_as_in_process(factory: str, expected: type) -> None:
    before = set(Path("/tmp").glob("mpexec-engine-*"))
    with pytest.raises(expected) as caught:
        ZMQEngine(partial(unbuildable_engine, factory), start_timeout=60.0)
    assert {"config": "no such model", "exit": "exited with code 7", "rank": "cannot build"}[factory] in str(
        caught.value
    ) + str(caught.value.__cause__)
    assert set(Path("/tmp").glob("mpexec-engine-*")) == before


def test_a_start_that_takes_too_long_is_an_error_and_leaves_nothing() -> None:
    since = time.monotonic()
    with pytest.raises(StartupError, match="start_timeout"):
        ZMQEngine(partial(unbuildable_engine, "hang"), start_timeout=1.0, stop_timeout=1.0)
    assert time.monotonic() - since < within(6.0)


async def test_a_cancelled_start_ends_what_was_started() -> None:
    task = asyncio.create_task(ZMQEngine.create_async(partial(unbuildable_engine, "hang"), stop_timeout=1.0))
    await until(engine_children, 20.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not engine_children())


# -- several clients -----------------------------------------------------------------------------------------------


async def test_two_clients_share_one_engine_and_leave_it_as_it_is(make: Make) -> None:
    engine = make(max_slots=4)
    async with engine, EngineClient(engine.address) as first, EngineClient(engine.address) as second:
        assert first.plan.facts == engine.plan.facts
        answers = await asyncio.gather(*(tokens(client, [100], many(50)) for client in (engine, first, second)))
        assert answers == [list(range(101, 151))] * 3
        await second.stop_async()
        assert await tokens(first, [5], many(2)) == [6, 7]
        assert await tokens(engine, [5], many(2)) == [6, 7]
        with pytest.raises(EngineStoppedError):
            await tokens(second, [5], many(2))


# F037
async def test_a_failure_on_a_rank_reaches_three_clients_with_type_and_text(make: Make) -> None:
    engine = make(max_slots=3, break_at=(600, 1, "raise"))
    await engine.start_async()
    clients = [engine, EngineClient(engine.address), EngineClient(engine.address)]
    for client in clients[1:]:
        await client.start_async()
    outcomes = await asyncio.gather(
        *(tokens(client, [first], many()) for first, client in enumerate(clients)), return_exceptions=True
    )
    for outcome in outcomes:
        assert isinstance(outcome, EngineStoppedError)
        assert isinstance(outcome.__cause__, BrokenOnPurposeError)
        assert "(600, 1, 'raise')" in str(outcome.__cause__)
        assert "in forward" in str(outcome.__cause__.__cause__)
    for client in clients:
        with pytest.raises(BrokenOnPurposeError):
            await client.wait_tasks()
        assert isinstance(client.health().reason, BrokenOnPurposeError)
        await client.release_async()


CLIENT = """
import asyncio, sys
from mpexec import SamplingParams
from mpexec.mp_engine.engine_client import EngineClient

async def read(client, first):
    async for output in client.generate([first], SamplingParams(max_new_tokens=1000, ignore_eos=True)):
        if first == 0:
            print("token", flush=True)

async def main():
    async with EngineClient(sys.argv[1]) as client:
        await asyncio.gather(*(read(client, first) for first in range(16)))

asyncio.run(main())
"""


async def test_a_killed_client_frees_its_slots_within_a_second_for_the_next_one(make: Make) -> None:
    engine = make(max_slots=STREAMS, step_seconds=0.005)
    async with engine:
        command = [sys.executable, "-c", CLIENT, engine.address]
        client = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert await asyncio.wait_for(client.stdout.readline(), within(20.0)) == b"token\n"
        await until(lambda: engine.metrics().running == STREAMS)
        client.kill()
        since = time.monotonic()
        await client.wait()
        await until(lambda: engine.metrics().running == 0, 2.0)
        assert time.monotonic() - since < within(1.0) + 0.2  # the counts come ten times a second
        assert await tokens(engine, [5], many(3)) == [6, 7, 8]


async def test_a_thousand_abandoned_streams_leave_no_slot_no_task_and_no_memory(make: Make) -> None:
    engine = make(max_slots=8, max_queue=64)

    async def abandon(first: int) -> None:
        async for _ in engine.generate([first], many()):
            break  # the generator is left to the collector

    async with engine:
        process = psutil.Process(engine.pid)
        for number in range(1000):
            await abandon(number % 2000)
            if number == 200:
                gc.collect()
                before = process.memory_info().rss, len(asyncio.all_tasks())
        gc.collect()
        await until(lambda: (engine.metrics().running, engine.metrics().waiting) == (0, 0))
        assert engine._client is not None
        await until(lambda: engine._client is not None and engine._client.unacknowledged == 0)
        assert len(asyncio.all_tasks()) <= before[1] + 2
        assert process.memory_info().rss < before[0] + 8e6
        assert await tokens(engine, [5], many(3)) == [6, 7, 8]


async def test_a_client_of_an_engine_that_ends_hears_of_it(make: Make) -> None:
    engine = make()
    await engine.start_async()
    async with EngineClient(engine.address) as client:
        waiter = asyncio.create_task(client.wait_tasks())
        outputs = client.generate([1], many())
        await anext(outputs)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(ConnectionLostError):
            await waiter
        with pytest.raises(EngineStoppedError):
            async for _ in outputs:
                pass
        assert not client.health().ok
        await engine.release_async()
        client._tasks = None  # the failure has been seen: the block is not to raise it again


async def test_over_tcp_only_those_with_the_keys_are_served() -> None:
    server_keys, client_keys = make_keys()
    strangers = make_keys()[1]
    engine = await ZMQEngine.create_async(
        mp_engine, address="tcp://127.0.0.1:0", keys=(server_keys, client_keys), start_timeout=60.0
    )
    async with engine:
        assert await tokens(engine, [5], many(3)) == [6, 7, 8]
        thief = type(client_keys)(strangers.public, strangers.secret, client_keys.server)
        with pytest.raises(ConnectionLostError):
            await EngineClient(engine.address, keys=thief).start_async()
    with pytest.raises(ConfigError, match="keys"):
        EngineClient("tcp://127.0.0.1:1")


# -- signals -------------------------------------------------------------------------------------------------------


async def test_sigterm_lets_running_requests_finish_refuses_new_ones_and_exits_with_zero(make: Make) -> None:
    engine = make(max_slots=16, step_seconds=0.002)
    await engine.start_async()
    tasks, _ = await open_streams(engine, 8)
    os.kill(engine.pid, signal.SIGTERM)
    refused = None
    while refused is None and not all(task.done() for task in tasks):
        try:
            await tokens(engine, [1], many(1))
        except EngineStoppedError as error:
            refused = error
    assert refused is not None
    assert "no new requests" in str(refused)
    assert [len(got) for got in await asyncio.gather(*tasks)] == [900] * 8
    with pytest.raises(WorkerDiedError, match="exited with code 0"):
        await engine.wait_tasks()
    await engine.release_async()


async def test_a_second_signal_stops_at_once(make: Make) -> None:
    engine = make(max_slots=8, step_seconds=0.002)
    await engine.start_async()
    tasks, _ = await open_streams(engine, 8)
    since = time.monotonic()
    for _ in range(2):
        os.kill(engine.pid, signal.SIGINT)
        await asyncio.sleep(0.05)  # two signals of one kind that nobody has seen yet are one
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, EngineStoppedError) for outcome in outcomes)
    with pytest.raises(WorkerDiedError):
        await engine.wait_tasks()
    assert time.monotonic() - since < within(2.0)
    await engine.release_async()


async def test_sigterm_with_a_hung_rank_is_bounded_and_exits_with_one(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = make(break_at=(150, 0, "hang"), drain_timeout=0.5, stop_timeout=2.0)
    await engine.start_async()
    stuck = asyncio.create_task(tokens(engine, [100], many()))
    await until(lambda: engine.metrics().generated_tokens >= 49)
    since = time.monotonic()
    os.kill(engine.pid, signal.SIGTERM)
    with pytest.raises(WorkerDiedError, match="exited with code 1"):
        await engine.wait_tasks()
    assert time.monotonic() - since < within(0.5 + 2.0 + 1.5)
    assert isinstance((await asyncio.gather(stuck, return_exceptions=True))[0], EngineStoppedError)
    assert "[engine] ranks [0] do not stop" in capfd.readouterr().err
    assert not alive(engine.pid, *engine.rank_pids)
    await engine.release_async()


DRIVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from engine_agents import mp_engine
from mpexec.mp_engine.zmq_engine import ZMQEngine

if __name__ == "__main__":
    engine = ZMQEngine(mp_engine)
    print(engine.pid, *engine.rank_pids, engine.address, flush=True)
    sys.stdin.read()
"""


async def test_the_end_of_the_parent_ends_the_engine_and_its_ranks_and_the_next_one_sweeps_its_folder(
    make: Make, tmp_path: Path
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(Path(__file__).parent), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    line = await asyncio.wait_for(driver.stdout.readline(), within(30.0))
    *pids, address = line.decode().split()
    driver.kill()
    await driver.wait()
    await until(lambda: not alive(*map(int, pids)), 2.0)
    folder = Path(address.removeprefix("ipc://")).parent
    assert folder.exists()
    make()
    assert not folder.exists()


FORGETFUL = """
import gc, sys
sys.path.insert(0, sys.argv[1])
from engine_agents import mp_engine
from mpexec.mp_engine.zmq_engine import ZMQEngine

if __name__ == "__main__":
    first = ZMQEngine(mp_engine)
    print(first.pid, *first.rank_pids, first.address, flush=True)
    del first
    gc.collect()
    second = ZMQEngine(mp_engine)
    print(second.pid, *second.rank_pids, second.address, flush=True)
"""


def test_an_engine_that_is_forgotten_or_there_at_the_end_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    command = [sys.executable, str(script), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for line in done.stdout.splitlines():
        *pids, address = line.split()
        assert not alive(*map(int, pids))
        assert not Path(address.removeprefix("ipc://")).parent.exists()


# F106
@pytest.mark.parametrize("folder", ["long", "missing", "read-only"])
async def test_it_works_wherever_the_temporary_folder_is(
    make: Make, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ("x" * 150 if folder == "long" else "tmp")
    if folder != "missing":
        path.mkdir(mode=0o500 if folder == "read-only" else 0o700)
    monkeypatch.setenv("TMPDIR", str(path))
    async with make() as engine:
        assert await tokens(engine, [5], many(3)) == [6, 7, 8]


# -- where it is used ------------------------------------------------------------------------------------------------


def test_it_works_on_uvloop(make: Make) -> None:
    uvloop = pytest.importorskip("uvloop")
    engine = make()

    async def serve() -> list[int]:
        async with engine:
            return await tokens(engine, [5], many(200))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(serve()) == list(range(6, 206))


def test_it_works_in_a_thread_that_is_not_the_main_one(make: Make) -> None:
    got: list[list[int]] = []

    async def serve() -> None:
        async with make() as engine:
            got.append(await tokens(engine, [5], many(3)))

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    thread.join(within(30.0))
    assert got == [[6, 7, 8]]


async def test_the_bundled_model_gives_the_same_tokens_for_thirty_two_streams(one_thread: None) -> None:
    prompts = [f"{'And it came to pass ' * (number % 5)}In the days of {number}" for number in range(32)]

    async def answers(engine: Any) -> AsyncIterator[list[int]]:
        for got in await asyncio.gather(*(tokens(engine, p, many(5 + n)) for n, p in enumerate(prompts))):
            yield got

    async with await Engine.from_pretrained_async() as engine:
        here = [got async for got in answers(engine)]
    async with await ZMQEngine.from_pretrained_async() as engine:
        there = [got async for got in answers(engine)]
    assert here == there
    assert [len(got) for got in here] == [5 + number for number in range(32)]
