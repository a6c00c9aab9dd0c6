"""RequestManager: every request is answered, by event, whatever becomes of the engine."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from typing import Any

import pytest

from mpexec.agent.steps import TokenLogprobs
from mpexec.engine.request import (
    Generation,
    Request,
    RequestManager,
    RequestType,
    Response,
    ResponseType,
)
from mpexec.engine.sampling_params import SamplingParams
from mpexec.errors import ConfigError, EngineStoppedError, WrongStateError
from mpexec.mp_engine.frames import decode_arguments, encode_arguments

GENERATION = Generation((1, 2), SamplingParams())


@pytest.fixture
async def manager() -> RequestManager:
    manager = RequestManager()
    manager.open()
    return manager


def tokens(*token_ids: int) -> Response:
    return Response(ResponseType.SUCCESS, token_ids)


def last(*token_ids: int) -> Response:
    return Response(ResponseType.FINISH, token_ids, "stop")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"max_new_tokens": 1 << 63},
        {"ignore_eos": 1},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 10**400},
        {"temperature": "hot"},
        {"seed": -1},
        {"seed": 1 << 63},
        {"seed": 0.5},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 2.0},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-310},
        {"temperature": 1e-308},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": "1"},
        {"logprobs": -1},
        {"logprobs": 21},
        {"logprobs": True},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": b"a"},
        {"stop": 5},
        {"stop": ["a"] * 17},
        {"stop": "a" * 257},
        {"stop": "\ud800"},
        {"stop": ["a", "b\udcff"]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": "12"},
        {"stop_token_ids": 7},
    ],
)
def test_sampling_params_refuse_what_cannot_work_and_name_it(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_sampling_params_keep_stops_as_tuples_and_one_string_is_one_stop() -> None:
    stops = ["a", "b"]
    params = SamplingParams(stop=stops, stop_token_ids=[1, 2])
    stops.append("")
    assert (params.stop, params.stop_strings, params.stop_token_ids) == (("a", "b"), ("a", "b"), (1, 2))
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=()).stop_strings == ()


class Text(str):
    pass


class Whole(int):
    pass


class Share(float):
    """As NumPy's numbers are floats."""


def test_sampling_params_that_are_accepted_can_go_to_an_engine_in_another_process() -> None:
    params = SamplingParams(
        max_new_tokens=(1 << 63) - 1,
        temperature=Share(0.5),
        top_p=1,
        repetition_penalty=10**300,
        logprobs=Whole(0),
        seed=Whole(7),
        stop=[Text("END"), "\U0001f54a"],
        stop_token_ids=[Whole(7)],
    )
    (decoded,), _ = decode_arguments(encode_arguments((params,), {}))
    assert SamplingParams(**decoded) == params
    assert {type(value) for value in decoded.values()} <= {int, float, bool, list}
    assert [type(one) for one in params.stop] == [str, str]


async def test_text_and_logprobs_that_nobody_has_read_are_joined_too(manager: RequestManager) -> None:
    request = manager.post_request(RequestType.GENERATE, GENERATION)
    likely = [TokenLogprobs(-float(n)) for n in range(3)]
    for n in range(2):
        response = Response(ResponseType.SUCCESS, (n,), text="ab"[n], logprobs=(likely[n],))
        manager.post_response(request, response)
    joined = await request.receive_async()
    assert (joined.token_ids, joined.text, joined.logprobs) == ((0, 1), "ab", tuple(likely[:2]))
    manager.post_response(request, Response(ResponseType.SUCCESS, (2,), text="c", logprobs=(likely[2],)))
    manager.post_cancel(request)
    joined = await request.receive_async()
    assert (joined.type, joined.token_ids, joined.logprobs) == (ResponseType.CANCEL, (2,), (likely[2],))


async def test_take_gives_cancels_first_and_each_type_in_order_of_arrival(manager: RequestManager) -> None:
    first = manager.post_request(RequestType.GENERATE, GENERATION)
    second = manager.post_request(RequestType.GENERATE, GENERATION)
    assert await manager.take_async() == [first, second]

    third = manager.post_request(RequestType.GENERATE, GENERATION)
    manager.post_cancel(first)
    taken = await manager.take_async()
    assert [request.type for request in taken] == [RequestType.CANCEL, RequestType.GENERATE]
    assert taken[0].data == first.request_id
    assert taken[1] is third


async def test_take_waits_without_turning_the_loop_until_a_request_arrives(manager: RequestManager) -> None:
    taker = asyncio.create_task(manager.take_async())
    await asyncio.sleep(0)
    assert not taker.done()
    request = manager.post_request(RequestType.GENERATE, GENERATION)
    assert await taker == [request]


async def test_a_slow_reader_gets_all_tokens_in_one_response_and_the_last_one_stays(manager: RequestManager) -> None:
    request = manager.post_request(RequestType.GENERATE, GENERATION)
    for token in range(5):
        manager.post_response(request, tokens(token))
    manager.post_response(request, last(5))
    manager.post_response(request, tokens(6))  # nothing follows the last one

    response = await request.receive_async()
    assert (response.type, response.token_ids, response.finish_reason) == (
        ResponseType.FINISH,
        (0, 1, 2, 3, 4, 5),
        "stop",
    )
    again = await request.receive_async()
    assert (again.type, again.token_ids) == (ResponseType.FINISH, ())
    assert manager.pending == 0


async def test_every_pending_and_every_later_request_gets_the_root_cause_itself(manager: RequestManager) -> None:
    taken = manager.post_request(RequestType.GENERATE, GENERATION)
    await manager.take_async()
    queued = manager.post_request(RequestType.GENERATE, GENERATION)
    readers = [asyncio.create_task(request.receive_async()) for request in (taken, queued)]
    await asyncio.sleep(0)

    cause = ValueError("the root cause")
    manager.close(cause)
    manager.close(KeyError("a later consequence"))
    later = manager.post_request(RequestType.GENERATE, GENERATION)

    for response in [*await asyncio.gather(*readers), await later.receive_async()]:
        assert response.type is ResponseType.ENGINE_STOP_ERROR
        assert response.error is cause
        error = response.to_exception()
        assert isinstance(error, EngineStoppedError)
        assert error.__cause__ is cause
        assert "the root cause" in str(error)
    assert manager.pending == 0


async def test_tokens_not_read_before_the_failure_come_with_it(manager: RequestManager) -> None:
    request = manager.post_request(RequestType.GENERATE, GENERATION)
    manager.post_response(request, tokens(7))
    manager.close(ValueError("late"))
    response = await request.receive_async()
    assert (response.type, response.token_ids) == (ResponseType.ENGINE_STOP_ERROR, (7,))


async def test_after_a_plain_stop_the_error_has_no_cause(manager: RequestManager) -> None:
    request = manager.post_request(RequestType.GENERATE, GENERATION)
    manager.close(None)
    for response in (await request.receive_async(), await manager.post_request(RequestType.GENERATE).receive_async()):
        assert response.type is ResponseType.ENGINE_STOP_ERROR
        error = response.to_exception()
        assert isinstance(error, EngineStoppedError)
        assert error.__cause__ is None


async def test_two_callers_get_errors_of_their_own(manager: RequestManager) -> None:
    manager.close(ValueError("x"))
    errors = [(await manager.post_request(RequestType.GENERATE).receive_async()).to_exception() for _ in range(2)]
    assert errors[0] is not errors[1]


async def test_a_request_that_nobody_took_yet_is_cancelled_without_the_loop(manager: RequestManager) -> None:
    request = manager.post_request(RequestType.GENERATE, GENERATION)
    kept = manager.post_request(RequestType.GENERATE, GENERATION)
    manager.post_cancel(request)
    manager.post_cancel(request)
    assert (await request.receive_async()).type is ResponseType.CANCEL
    assert await manager.take_async() == [kept]


async def test_cancelling_what_has_ended_sends_nothing(manager: RequestManager) -> None:
    request = manager.post_request(RequestType.GENERATE, GENERATION)
    await manager.take_async()
    manager.post_response(request, last(1))
    manager.post_cancel(request)
    other = manager.post_request(RequestType.GENERATE, GENERATION)
    assert await manager.take_async() == [other]


async def test_a_reader_that_is_cancelled_leaves_the_request_readable(manager: RequestManager) -> None:
    request = manager.post_request(RequestType.GENERATE, GENERATION)
    reader = asyncio.create_task(request.receive_async())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    manager.post_response(request, tokens(3))
    assert (await request.receive_async()).token_ids == (3,)


async def test_a_manager_opens_again_after_close(manager: RequestManager) -> None:
    manager.close(None)
    manager.open()
    request = manager.post_request(RequestType.GENERATE, GENERATION)
    assert await manager.take_async() == [request]


def test_a_request_before_start_is_refused() -> None:
    with pytest.raises(WrongStateError, match="not been started"):
        RequestManager().post_request(RequestType.GENERATE, GENERATION)


async def test_a_request_from_another_loop_or_none_names_both_loops(manager: RequestManager) -> None:  # F116
    errors: list[BaseException] = []

    async def post() -> None:
        manager.post_request(RequestType.GENERATE, GENERATION)

    def elsewhere() -> None:
        for attempt in (lambda: asyncio.run(post()), lambda: manager.post_request(RequestType.GENERATE, GENERATION)):
            try:
                attempt()
            except WrongStateError as error:
                errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len(errors) == 2
    assert all(str(asyncio.get_running_loop()) in str(error) for error in errors)


def test_requests_on_a_loop_that_has_been_closed_are_answered_at_once_after_stop() -> None:  # F128
    manager = RequestManager()

    async def first() -> None:
        manager.open()
        manager.close(None)

    async def second() -> Response:
        return await manager.post_request(RequestType.GENERATE, GENERATION).receive_async()

    asyncio.run(first())
    assert asyncio.run(second()).type is ResponseType.ENGINE_STOP_ERROR


async def test_a_response_in_the_same_turn_as_the_readers_cancellation_is_not_lost(
    manager: RequestManager,
) -> None:  # F125
    for _ in range(500):
        request: Request = manager.post_request(RequestType.GENERATE, GENERATION)
        reader = asyncio.create_task(request.receive_async())
        await asyncio.sleep(0)
        manager.post_response(request, last(9))
        reader.cancel()
        try:
            response = await reader
        except asyncio.CancelledError:
            response = await request.receive_async()
        assert response.token_ids == (9,)
    gc.collect()
