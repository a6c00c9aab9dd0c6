"""Engine: whole answers and how they end, over real executors and, where it matters, the real model."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

import psutil
import pytest
from engine_agents import BrokenOnPurposeError, as_if_likely, mp_engine, uni_engine
from patience import until, within

from mpexec import Engine, EngineConfig, SamplingParams, UniExecutor
from mpexec.engine.engine import GenerationOutput
from mpexec.engine.request import Generation, RequestType, ResponseType
from mpexec.engine.tokenizer import Tokenizer
from mpexec.errors import (
    ConfigError,
    EngineStoppedError,
    QueueFullError,
    RemoteTraceback,
    StartupError,
    WorkerDiedError,
    WrongStateError,
)
from mpexec.models import default_model_path
from mpexec.mp_engine.zmq_engine import ZMQEngine

MakeEngine = Callable[..., Engine]


@pytest.fixture
def made() -> Iterator[list[Engine]]:
    """Engines of a test; released at its end, whatever it does."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.release()


@pytest.fixture
def uni(made: list[Engine]) -> MakeEngine:
    """Makes an engine over one counting rank in this process."""

    def make(**options: Any) -> Engine:
        made.append(uni_engine(**options))
        return made[-1]

    return make


@pytest.fixture
def mp(made: list[Engine]) -> MakeEngine:
    """Makes an engine over two counting ranks, each a process."""

    def make(**options: Any) -> Engine:
        made.append(mp_engine(start_method="forkserver", **options))
        return made[-1]

    return make


@pytest.fixture
def zmq(made: list[Engine]) -> Any:
    """Makes an engine over two counting ranks in a process of its own."""

    def make(**options: Any) -> Any:
        engine: Any = ZMQEngine(partial(mp_engine, **options), start_timeout=60.0)
        made.append(engine)
        return engine

    return make


@pytest.fixture(params=["uni", "mp", "zmq"])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """Makes an engine of each kind: what is promised of one is promised of all."""
    made: MakeEngine = request.getfixturevalue(request.param)
    return made


@pytest.fixture(params=["mp", "zmq"])
def make_engine_with_ranks(request: pytest.FixtureRequest) -> MakeEngine:
    """Makes an engine of each kind whose ranks are processes."""
    made: MakeEngine = request.getfixturevalue(request.param)
    return made


def processes(engine: Any) -> list[int]:
    return [*engine.rank_pids, *([engine.pid] if isinstance(engine, ZMQEngine) else [])]


def many(new: int = 500, **fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, **{"ignore_eos": True, **fields})


async def collect(engine: Engine, prompt: Any, params: SamplingParams | None = None) -> list[GenerationOutput]:
    return [output async for output in engine.generate(prompt, params)]


def ids(outputs: list[GenerationOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def count_of(values: AsyncIterator[Any]) -> int:
    return sum([1 async for _ in values])


# -- answers -------------------------------------------------------------------------------------------------------


async def test_a_start_right_behind_a_requested_stop_serves(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        engine.stop()
        await engine.start_async()
        assert ids(await collect(engine, [7], many(3))) == [8, 9, 10]


@pytest.mark.parametrize("prompt", [b"abc", {1: 2}, {3, 4}, 5, None, [True], [1, False], [1.0]])
async def test_what_is_no_prompt_is_refused_and_harms_nobody(uni: MakeEngine, prompt: Any) -> None:
    async with uni() as engine:
        with pytest.raises(ConfigError, match=r"is no prompt|token id"):
            await collect(engine, prompt)
        assert ids(await collect(engine, [7], many(2))) == [8, 9]


async def test_many_prompts_share_the_slots_and_each_gets_its_own_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=3)
    async with engine:
        answers = await asyncio.gather(*(collect(engine, [100 * n], many(10 + n)) for n in range(1, 9)))
        for n, outputs in enumerate(answers, 1):
            assert ids(outputs) == list(range(100 * n + 1, 100 * n + 11 + n))
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            assert outputs[-1].finish_reason == "length"
            assert {output.prompt_token_ids for output in outputs} == {(100 * n,)}
        metrics = engine.metrics()
        assert (metrics.requests, metrics.finished, metrics.running, metrics.waiting) == (8, 8, 0, 0)
        assert metrics.generated_tokens == sum(10 + n for n in range(1, 9))
        assert metrics.tokens_per_second > 0


async def test_the_pieces_together_are_the_decoded_answer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.plan.tokenizer is not None
    async with engine:
        outputs = await collect(engine, [1], many(900))
    text = "".join(output.text for output in outputs)
    assert text == engine.plan.tokenizer.decode(ids(outputs))
    assert len(ids(outputs)) == 900


async def test_a_token_that_ends_the_text_stops_it_unless_it_is_ignored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    eos = engine.plan.facts.eos_token_ids[0]
    start = (eos - 3) % 2048
    async with engine:
        outputs = await collect(engine, [start], SamplingParams(max_new_tokens=10))
        assert (ids(outputs)[-1], len(ids(outputs)), outputs[-1].finish_reason) == (eos, 3, "stop")
        outputs = await collect(engine, [start], SamplingParams(max_new_tokens=10, ignore_eos=True))
        assert (len(ids(outputs)), outputs[-1].finish_reason) == (10, "length")


async def test_the_context_limit_ends_an_answer_with_reason_length(make_engine: MakeEngine) -> None:
    engine = make_engine(max_length=20)
    async with engine:
        outputs = await collect(engine, list(range(5)), many())
        assert (len(ids(outputs)), outputs[-1].finish_reason) == (15, "length")
        with pytest.raises(ConfigError, match="20 tokens"):
            engine.generate(list(range(20)))


async def test_a_stop_string_ends_an_answer_before_it_and_its_slot_serves_the_next(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=1)
    tokenizer = Tokenizer.load(default_model_path())
    whole = tokenizer.decode(range(301, 500))
    stop = whole[40:46]
    async with engine:
        outputs = await collect(engine, [300], many(stop=[stop, "\0never"]))
        text = "".join(output.text for output in outputs)
        assert (text, outputs[-1].finish_reason) == (whole[: whole.index(stop)], "stop")
        assert ids(outputs) == list(range(301, 301 + len(ids(outputs))))  # up to the token that completes it
        assert stop in tokenizer.decode(ids(outputs))
        assert stop not in tokenizer.decode(ids(outputs)[:-1])
        assert ids(await collect(engine, [5], many(2))) == [6, 7]
        outputs = await collect(engine, [300], many(stop_token_ids=[305]))
        assert (ids(outputs)[-1], outputs[-1].finish_reason) == (305, "stop")
        await until(lambda: (engine.metrics().finished, engine.metrics().cancelled) == (3, 0))


async def test_logprobs_stand_beside_their_tokens_and_only_where_they_were_asked_for(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with engine:
        with_them, without = await asyncio.gather(
            collect(engine, [100], many(20, logprobs=1)), collect(engine, [200], many(20))
        )
        known = [one for output in with_them for one in output.logprobs or ()]
        assert known == [as_if_likely(token) for token in ids(with_them)]
        assert all(len(output.logprobs or ()) == len(output.token_ids) for output in with_them)
        assert all(output.logprobs is None for output in without)


async def test_a_long_prompt_is_taken_in_pieces_and_the_answer_is_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_chunk=64)
    async with engine:
        running = engine.generate([1], many(900))
        await anext(running)
        before = engine.metrics().steps
        assert ids(await collect(engine, list(range(600)), many(3))) == [600, 601, 602]
        await until(lambda: engine.metrics().steps - before >= 12)
        await running.aclose()


async def test_those_that_want_to_wait_are_not_refused_and_low_priorities_start_first(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=1, max_queue=1)
    async with engine:
        ended: list[int] = []

        async def answer(first: int, priority: int) -> None:
            outputs = engine.generate([first], many(10), priority=priority, wait=True)
            assert ids([output async for output in outputs]) == list(range(first + 1, first + 11))
            ended.append(first)

        running = engine.generate([1], many(1000))  # long enough for all others to arrive
        await anext(running)
        await asyncio.gather(count_of(running), *(answer(10 * n, -n) for n in range(1, 6)))
        assert ended == [50, 40, 30, 20, 10]
        with pytest.raises(ConfigError, match="priority"):
            engine.generate([1], priority=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["", [], [2048], [-1], ["a"], [True, 1.0], "a" * 20_000, "\udcff"])
async def test_a_prompt_that_cannot_run_is_refused_at_the_call_and_others_go_on(
    make_engine: MakeEngine, prompt: Any
) -> None:
    engine = make_engine()
    async with engine:
        with pytest.raises(ConfigError):
            engine.generate(prompt)
        assert ids(await collect(engine, [5], many(2))) == [6, 7]


async def test_one_request_too_many_is_refused_and_the_others_go_on(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=1, max_queue=1)
    async with engine:
        outcomes = await asyncio.gather(*(collect(engine, [n], many(300)) for n in range(4)), return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFullError)]
        answered = [outcome for outcome in outcomes if isinstance(outcome, list)]
        assert (len(refused), len(answered)) == (2, 2)
        await until(lambda: engine.metrics().refused == 2)


async def test_leaving_closing_and_cancelling_free_the_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(max_slots=1)
    async with engine:
        async for _ in engine.generate([1], many()):
            break
        async with aclosing(engine.generate([1], many())) as outputs:
            await anext(outputs)
        task = asyncio.create_task(collect(engine, [1], many(1000)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        assert ids(await collect(engine, [5], many(3))) == [6, 7, 8]
        await until(lambda: (engine.metrics().running, engine.metrics().waiting) == (0, 0))


async def test_a_slow_reader_holds_back_nobody_and_gets_everything(make_engine: MakeEngine) -> None:  # F133
    engine = make_engine(max_slots=4)
    async with engine:
        slow = engine.generate([0], many(800))
        first = await anext(slow)
        await asyncio.gather(*(collect(engine, [n], many(800)) for n in range(3)))
        rest = [output async for output in slow]
        assert ids([first, *rest]) == [n % 2048 for n in range(1, 801)]
        assert len(rest) < 100


# -- lifecycle -----------------------------------------------------------------------------------------------------


async def test_health_follows_the_lifecycle(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert (engine.health().ok, engine.health().state) == (False, "new")
    with pytest.raises(WrongStateError):
        await collect(engine, [1])
    async with engine:
        assert engine.health().ok
    assert (engine.health().ok, engine.health().state, engine.health().reason) == (False, "stopped", None)


async def test_requests_after_a_plain_stop_get_an_error_without_cause(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.start_async()
    waiter = asyncio.create_task(engine.wait_tasks())
    outputs = engine.generate([1], many(1000))
    await anext(outputs)
    await engine.stop_async()
    await waiter
    with pytest.raises(EngineStoppedError) as caught:
        await count_of(outputs)
    assert caught.value.__cause__ is None
    with pytest.raises(EngineStoppedError) as caught:
        await collect(engine, [1])
    assert caught.value.__cause__ is None
    await engine.release_async()


def test_a_stopped_engine_starts_again_on_another_loop(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def serve(first: int) -> list[int]:
        await engine.start_async()
        unfinished = engine.generate([first], many(1000))
        await anext(unfinished)
        answer = ids(await collect(engine, [first], many(3)))
        await engine.stop_async()
        await unfinished.aclose()
        return answer

    for first in (10, 20, 30):
        assert asyncio.run(serve(first)) == [first + 1, first + 2, first + 3]
    engine.release()


def test_stop_from_another_thread_blocks_until_it_is_done(make_engine: MakeEngine) -> None:
    engine = make_engine()
    serving = threading.Event()

    async def serve() -> None:
        await engine.start_async()
        serving.set()
        with pytest.raises(EngineStoppedError):
            while True:
                await collect(engine, [1], many(100))
        await engine.wait_tasks()
        await engine.release_async()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    serving.wait(30)
    engine.stop()
    assert not engine.running
    thread.join(10)
    assert not thread.is_alive()


async def test_release_in_the_middle_of_a_request_ends_it_with_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.start_async()
    outputs = engine.generate([1], many(1000))
    await anext(outputs)
    engine.release()
    with pytest.raises(EngineStoppedError) as caught:
        await count_of(outputs)
    assert caught.value.__cause__ is None
    engine.release()
    await engine.stop_async()
    await engine.release_async()


async def test_stop_on_the_engines_own_thread_is_a_request_that_wait_tasks_sees(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with engine:
        waiter = asyncio.create_task(engine.wait_tasks())
        await asyncio.sleep(0)
        engine.stop()
        await waiter
        with pytest.raises(EngineStoppedError):
            await collect(engine, [1])


def test_leaving_the_loop_without_stop_ends_the_engine_and_says_so(make_engine_with_ranks: MakeEngine) -> None:  # F128
    engine = make_engine_with_ranks()

    async def first() -> None:
        await engine.start_async()
        await collect(engine, [1], many(2))

    async def second() -> None:
        with pytest.raises(EngineStoppedError):
            await collect(engine, [1])

    asyncio.run(first())
    asyncio.run(second())
    engine.release()


async def test_a_request_on_another_loop_is_refused(make_engine: MakeEngine) -> None:  # F116
    engine = make_engine()
    async with engine:

        def elsewhere() -> None:
            with pytest.raises(WrongStateError, match="loop"):
                asyncio.run(collect(engine, [1], many(2)))

        await asyncio.to_thread(elsewhere)


async def test_run_serves_until_stop(make_engine: MakeEngine) -> None:
    engine = make_engine()
    runner = asyncio.create_task(engine.run())
    while not engine.health().ok:
        await asyncio.sleep(0.005)
    assert ids(await collect(engine, [5], many(2))) == [6, 7]
    engine.stop()
    await runner
    assert not engine.running


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manner", ["raise", "raise while the peer waits"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_an_error_on_a_rank_reaches_wait_tasks_and_every_request_as_itself(
    make_engine_with_ranks: MakeEngine, rank: int, manner: str
) -> None:
    engine = make_engine_with_ranks(max_slots=2, break_at=(150, rank, manner))
    pids = processes(engine)
    await engine.start_async()
    waiter = asyncio.create_task(engine.wait_tasks())
    running = [asyncio.create_task(collect(engine, [first], many())) for first in (100, 1000, 2000)]
    since = time.monotonic()
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert time.monotonic() - since < within(2.0)

    with pytest.raises(BrokenOnPurposeError) as caught:
        await waiter
    root = caught.value
    assert isinstance(root.__cause__, RemoteTraceback)
    assert "in forward" in str(root.__cause__)
    assert any(f"rank {rank} " in note for note in root.__notes__)
    for outcome in outcomes:
        assert isinstance(outcome, EngineStoppedError)
        assert outcome.__cause__ is root
    with pytest.raises(EngineStoppedError) as later:
        await collect(engine, [1])
    assert later.value.__cause__ is root
    assert engine.health().reason is root
    assert not any(psutil.pid_exists(pid) for pid in pids)
    await engine.stop_async()
    await engine.release_async()


async def test_a_request_of_another_type_hears_of_a_failure_too(mp: MakeEngine) -> None:
    engine = mp(max_slots=1, break_at=(150, 0, "raise"))
    await engine.start_async()
    running = asyncio.create_task(collect(engine, [100], many()))
    await asyncio.sleep(0)
    waiting = engine.requests.post_request(RequestType.GENERATE, Generation((1,), many()))
    response = await waiting.receive_async()
    with pytest.raises(BrokenOnPurposeError) as caught:
        await engine.wait_tasks()
    assert (response.type, response.error) == (ResponseType.ENGINE_STOP_ERROR, caught.value)
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], EngineStoppedError)
    await engine.stop_async()
    await engine.release_async()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", ["idle", "decode", "inside a step"])
async def test_a_killed_rank_is_named_to_every_request_and_to_wait_tasks(
    make_engine_with_ranks: MakeEngine, rank: int, moment: str
) -> None:
    engine = make_engine_with_ranks(break_at=(150, rank, "kill") if moment == "inside a step" else None)
    await engine.start_async()
    pids, everything = engine.rank_pids, processes(engine)
    outputs = engine.generate([100], many(1000))
    if moment != "idle":
        await anext(outputs)
    since = time.monotonic()
    if moment != "inside a step":
        os.kill(pids[rank], signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        await engine.wait_tasks()
    with pytest.raises(EngineStoppedError) as stopped:
        await count_of(outputs)
    assert stopped.value.__cause__ is caught.value
    assert (caught.value.rank, caught.value.pid, caught.value.signal_name) == (rank, pids[rank], "SIGKILL")
    assert time.monotonic() - since < within(2.0)
    assert not any(psutil.pid_exists(pid) for pid in everything)
    await engine.stop_async()
    await engine.release_async()


async def test_the_block_raises_the_root_cause_at_its_end_if_it_did_not_raise_itself(make_engine: MakeEngine) -> None:
    engine = make_engine(break_at=(3, 0, "raise"))
    with pytest.raises(BrokenOnPurposeError):
        async with engine:
            with pytest.raises(EngineStoppedError):
                await collect(engine, [1], many())
            with pytest.raises(BrokenOnPurposeError):
                await engine.wait_tasks()


async def test_cancelling_generate_at_any_moment_frees_everything(make_engine_with_ranks: MakeEngine) -> None:  # F130
    engine = make_engine_with_ranks(max_slots=2)
    async with engine:
        for turns in range(50):
            task = asyncio.create_task(collect(engine, [1], many(20)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        assert ids(await collect(engine, [5], many(1))) == [6]
        await until(lambda: (engine.metrics().running, engine.metrics().waiting) == (0, 0))


# -- the real model --------------------------------------------------------------------------------------------------


PROMPTS = ["In the beginning", "And it came to pass", "The LORD", "Blessed are they that"]


async def test_the_bundled_model_gives_the_same_tokens_on_one_rank_and_on_two_alone_and_in_a_batch(
    one_thread: None,
) -> None:
    params = many(12)
    one = await Engine.from_pretrained_async()
    async with one:
        assert isinstance(one.executor, UniExecutor)
        batched = await asyncio.gather(*(collect(one, prompt, params) for prompt in PROMPTS))
        alone = await collect(one, PROMPTS[0], params)
    two = await Engine.from_pretrained_async(tp=2, start_method="forkserver")
    async with two:
        split = await asyncio.gather(*(collect(two, prompt, params) for prompt in PROMPTS))
    assert [ids(outputs) for outputs in batched] == [ids(outputs) for outputs in split]
    assert ids(batched[0]) == ids(alone)
    assert all(len(ids(outputs)) == 12 for outputs in batched)


def test_what_cannot_work_is_refused_before_any_rank_starts(tmp_path: Any) -> None:
    for arguments, words in (
        ({"path": tmp_path / "missing"}, "missing"),
        ({"tp": 3}, "3 ranks"),
        ({"tp": 0}, "0"),
        ({"config": EngineConfig(max_length=5000)}, "5000"),
        ({"backend": "uni", "tp": 2}, "2"),
        ({"backend": "teleport"}, "teleport"),
        ({"start_method": "teleport"}, "teleport"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine.from_pretrained(**arguments)


def test_a_rank_that_cannot_build_the_model_is_a_start_up_error_with_its_cause(tmp_path: Any) -> None:
    from mpexec.models import default_model_path

    for file in default_model_path().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "nosuch"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(StartupError) as caught:
        Engine.from_pretrained(tmp_path, 2, start_method="forkserver")
    assert caught.value.__cause__ is not None
    assert "nosuch" in str(caught.value.__cause__)
