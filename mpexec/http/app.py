"""The routes: OpenAI's endpoints, health and metrics, as a Starlette application on top of an engine."""

from __future__ import annotations

import asyncio
import json
import reprlib
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mpexec.engine.engine import GenerationOutput
from mpexec.engine.sampling_params import SamplingParams
from mpexec.errors import MpexecError
from mpexec.http.generation import (
    Indexed,
    as_api_error,
    collect_async,
    encode_async,
    first_async,
    merge,
    while_connected,
)
from mpexec.http.health import HealthCheck
from mpexec.http.logprobs import Logprobs
from mpexec.http.metrics import CONTENT_TYPE, EngineMetrics
from mpexec.http.openai import (
    DONE,
    Answer,
    APIError,
    ChatAnswer,
    ChatRequest,
    CompletionRequest,
    Options,
    Prompt,
    Usage,
    encode,
    event,
    model_card,
)
from mpexec.http.served import ServedEngine, ServedModel

MAX_BODY_BYTES = 4 << 20
_LAST_READ_BYTES = 64 << 20  # of a body that is too large: who closes on a client that still sends, resets the answer
_CLIENT_GONE = 499  # as web servers log it; nobody reads it


def create_app(engine: ServedEngine, model: ServedModel, health: HealthCheck) -> Starlette:
    """Make the application.

    Args:
        engine: Started by the time of the first request.
        model: What the engine runs.
        health: Of the same engine.
    """
    endpoints = _Endpoints(engine, model, health)
    return Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.model),
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.metrics),
        ],
        exception_handlers={
            APIError: _answer_api_error,
            MpexecError: _answer_engine_error,
            HTTPException: _answer_http_error,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_bug,
        },
    )


class _Endpoints:
    """What the routes lead to."""

    def __init__(self, engine: ServedEngine, model: ServedModel, health: HealthCheck) -> None:
        self._engine = engine
        self._health = health
        self._name = model.name
        self._template = model.template
        self._created = int(time.time())
        self._metrics = EngineMetrics(engine, health, model.name)

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        wanted = CompletionRequest.parse(await _read_json_async(request))
        self._check_model(wanted.options.model)
        prompts = await encode_async(self._engine.plan, wanted.prompts, param="prompt")
        work = [(prompt, wanted.sampling()) for prompt in prompts]
        heads = [self._text_of(prompt) if wanted.echo else "" for prompt in wanted.prompts]
        answer = Answer(self._name, int(time.time()))
        return await self._answer(request, wanted.options, answer, work, heads)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        wanted = ChatRequest.parse(await _read_json_async(request))
        self._check_model(wanted.options.model)
        if self._template is None:
            raise APIError(
                400, f"the model {self._name!r} has no chat template: use /v1/completions", code="no_chat_template"
            )
        plan = self._engine.plan
        # The template has written the special tokens already.
        text = self._template.render(wanted)
        (prompt,) = await encode_async(plan, [text], param="messages", special_tokens=False)
        work = [(prompt, wanted.options.sampling(plan.max_length - len(prompt)))]
        return await self._answer(request, wanted.options, ChatAnswer(self._name, int(time.time())), work, [""])

    async def models(self, _: Request) -> Response:
        """The one model."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        self._check_model(request.path_params["name"])
        return _json(self._card())

    async def health(self, _: Request) -> Response:
        """200 while requests make progress, else 503 and why."""
        verdict = self._health.check()
        return _json(verdict.body(), 200 if verdict.ok else 503)

    async def metrics(self, _: Request) -> Response:
        """For Prometheus."""
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    def _card(self) -> dict[str, Any]:
        return model_card(self._name, self._created, self._engine.plan.max_length)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._name):
            raise APIError(
                404,
                f"there is no model {reprlib.repr(name)} here: this server has {self._name!r}",
                param="model",
                code="model_not_found",
            )

    def _text_of(self, prompt: Prompt) -> str:
        tokenizer = self._engine.plan.tokenizer
        if isinstance(prompt, str) or tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return tokenizer.decode(prompt)

    def _token_text(self, token_id: int) -> str:
        tokenizer = self._engine.plan.tokenizer
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)

    async def _answer(
        self,
        request: Request,
        options: Options,
        answer: Answer,
        work: list[tuple[tuple[int, ...], SamplingParams]],
        heads: list[str],
    ) -> Response:
        outputs = merge([self._engine.generate(prompt, params, priority=options.priority) for prompt, params in work])
        logprobs = [answer.logprobs(self._token_text, len(head)) for head in heads]
        reply = _Reply(answer, Usage(sum(len(prompt) for prompt, _ in work)), heads, logprobs)
        if not options.stream:
            return _json(reply.whole(await while_connected(request.receive, collect_async(outputs))))
        # The first output is awaited before the status line is sent: a request that is refused has its own status.
        first = await while_connected(request.receive, first_async(outputs))
        return EventStream(reply.events(first, outputs, options.include_usage))


@dataclass(slots=True)
class _Reply:
    """The outputs of one request on their way into bodies.

    Attributes:
        heads: One for each prompt: the text that its answer begins with.
        logprobs: One for each prompt; stay empty where nobody has asked for them.
    """

    answer: Answer
    usage: Usage
    heads: list[str]
    logprobs: list[Logprobs]

    def whole(self, outputs: list[Indexed]) -> dict[str, Any]:
        """The one body of an answer that is not streamed."""
        texts = [[head] for head in self.heads]
        reasons: list[str | None] = [None] * len(texts)
        has_logprobs = False
        for index, output in outputs:
            has_logprobs = self._count(index, output)
            texts[index].append(output.text)
            reasons[index] = output.finish_reason
        choices = []
        for index, text in enumerate(texts):
            logprobs = self.logprobs[index].take() if has_logprobs else None
            choices.append(self.answer.choice(index, "".join(text), reasons[index], logprobs))
        return self.answer.whole(choices, self.usage)

    def _count(self, index: int, output: GenerationOutput) -> bool:
        """Note the tokens of an output; true if it has log probabilities."""
        self.usage.completion_tokens += len(output.token_ids)
        if output.logprobs is not None:
            self.logprobs[index].add(output.token_ids, output.logprobs)
        return output.logprobs is not None

    async def events(
        self, first: Indexed, rest: AsyncGenerator[Indexed, None], include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream. One that fails ends with an error, and without the mark of a complete one."""
        async with aclosing(rest):
            for index, head in enumerate(self.heads):
                for choice in self.answer.opening(index, head):
                    yield event(self.answer.chunk(choice))
            try:
                yield self._event(*first)
                async for output in rest:
                    yield self._event(*output)
            except MpexecError as error:
                yield event(as_api_error(error).body())
                return
            if include_usage:
                yield event(self.answer.chunk(usage=self.usage))
            yield DONE

    def _event(self, index: int, output: GenerationOutput) -> bytes:
        """One output as an event. One without text has it too: it shows the client that there is progress."""
        logprobs = self.logprobs[index].take() if self._count(index, output) else None
        return event(self.answer.chunk(self.answer.piece(index, output.text, output.finish_reason, logprobs)))


class EventStream(Response):
    """Server-sent events, for as long as the client listens. The generator is closed whatever ends them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        # Proxies that collect answers before they pass them on would undo the streaming.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them all."""
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_async(send))
            except ClientDisconnect:
                return  # nobody is left to tell

    async def _send_async(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            # Where many events are ready, the news that the client has gone must get its turn between them.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read_json_async(request: Request) -> Any:
    """The decoded body.

    Raises:
        APIError: It is too large, or not JSON.
    """
    body = bytearray()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY_BYTES:
            body += part
        elif size > _LAST_READ_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise APIError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="body_too_large")
    try:
        return json.loads(bytes(body), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {error}", code="invalid_json") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, media_type="application/json")


# -- errors --------------------------------------------------------------------------------------------------------


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return _json(error.body(), error.status)


async def _answer_engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MpexecError)
    return await _answer_api_error(request, as_api_error(error))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = APIError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return _json(told.body(), error.status_code, error.headers)


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _answer_bug(_: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer, so that the log shows where it comes from."""
    return _json(APIError(500, f"{type(error).__name__}: {error}").body(), 500)
