"""From prompts to outputs, for as long as the client is there to read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from mpexec.engine.engine import GenerationOutput, ModelPlan
from mpexec.errors import ConfigError, EngineStoppedError, MpexecError, QueueFullError
from mpexec.executor.threads import in_thread
from mpexec.http.openai import APIError, Prompt
from mpexec.tasks import cancel_async_tasks

T = TypeVar("T")
Indexed = tuple[int, GenerationOutput]

_LONG_TEXT = 32_768  # characters; encoding them takes some ten milliseconds, a thread a fraction of one


async def encode_async(
    plan: ModelPlan, prompts: Sequence[Prompt], *, param: str, special_tokens: bool = True
) -> list[tuple[int, ...]]:
    """The token ids of prompts; long texts are encoded in a thread, so that other requests go on.

    Args:
        plan: The model.
        prompts: Text or token ids.
        param: The request's parameter that they come from.
        special_tokens: See `Tokenizer.encode`.

    Raises:
        APIError: A prompt cannot run.
    """

    def encode() -> list[tuple[int, ...]]:
        return [_encode(plan, prompt, param, special_tokens) for prompt in prompts]

    long = sum(map(len, prompts)) > _LONG_TEXT
    return await in_thread(encode, name="mpexec-encode") if long else encode()


def _encode(plan: ModelPlan, prompt: Prompt, param: str, special_tokens: bool) -> tuple[int, ...]:
    try:
        if isinstance(prompt, str) and prompt and plan.tokenizer is not None:
            prompt = plan.tokenizer.encode(prompt, special_tokens=special_tokens)
        if not isinstance(prompt, str) and len(prompt) >= plan.max_length:
            raise APIError(
                400,
                f"the prompt has {len(prompt)} tokens; prompt and answer together may have {plan.max_length}",
                param=param,
                code="context_length_exceeded",
            )
        return plan.encode(prompt)
    except ConfigError as bad:
        raise APIError(400, f"{param}: {bad}", param=param) from bad


def as_api_error(error: MpexecError) -> APIError:
    """The answer that tells the client of an error of the engine."""
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), code="queue_full")
    if isinstance(error, EngineStoppedError):
        return APIError(503, str(error), code="engine_stopped")
    return APIError(400 if isinstance(error, ConfigError) else 500, str(error))


async def merge(streams: list[AsyncGenerator[GenerationOutput, None]]) -> AsyncGenerator[Indexed, None]:
    """The outputs of all streams as they come, each with its stream's index.

    A reader that is slower than the model gets longer outputs, not more of them. Closing it closes every stream.

    Raises:
        MpexecError: The first error of a stream; the others have been closed.
    """
    waiting = {asyncio.create_task(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                output, index = task.result(), waiting.pop(task)
                if output is not None:
                    waiting[asyncio.create_task(_next(streams[index]))] = index
                    yield index, output
    finally:
        await cancel_async_tasks(waiting)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[GenerationOutput, None]) -> GenerationOutput | None:
    return await anext(stream, None)


async def collect_async(outputs: AsyncGenerator[Indexed, None]) -> list[Indexed]:
    """All outputs, once there are no more."""
    async with aclosing(outputs):
        return [output async for output in outputs]


async def first_async(outputs: AsyncGenerator[Indexed, None]) -> Indexed:
    """The first output."""
    return await anext(outputs)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it as soon as the client has gone; it has ended when this returns or raises.

    Raises:
        ClientDisconnect: The client has gone.
        BaseException: What `work` raised.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await cancel_async_tasks([working, watching])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
