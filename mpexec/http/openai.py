"""The bodies of OpenAI's API: requests in, answers and errors out. No I/O and no engine.

A parameter that would change the answer and is not supported is refused by name. A client that asks for `n` answers or
for a `response_format` must not get an answer that silently lacks them.
"""

from __future__ import annotations

import json
import math
import reprlib
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mpexec.config import LEAST_SCALE, MAX_LOGPROBS, is_temperature
from mpexec.engine.request import MAX_PRIORITY
from mpexec.engine.sampling_params import (
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    SamplingParams,
    is_stop,
)
from mpexec.http.logprobs import ChatLogprobs, CompletionLogprobs, Logprobs, TextOf

Prompt = str | tuple[int, ...]
Message = dict[str, Any]

_DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API; a chat may fill the context
_MAX_PROMPTS = 1024  # in one request
_SEED_BITS = 63
_LARGEST = (1 << _SEED_BITS) - 1

# Parameters that are not supported, with the values that change nothing. Null counts as absent everywhere.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
# Parameters for the operator of a service, or for its speed: the answer is the same without them.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


class APIError(Exception):
    """An answer that is an error.

    Attributes:
        status: The HTTP status.
        param: The parameter that is to blame, or None.
        code: For programs, for example "model_not_found".
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The answer's body."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# -- requests ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the requests of both endpoints have in common.

    Attributes:
        model: The name asked for; None is whichever is served.
        max_tokens: None where the request names no limit.
        seed: None draws one for each answer.
        top_k, top_p, min_p, repetition_penalty, stop, stop_token_ids, logprobs: See `SamplingParams`.
        priority: See `Engine.generate`.
        include_usage: A stream ends with a chunk that has the counts.
    """

    model: str | None
    max_tokens: int | None
    temperature: float
    seed: int | None
    ignore_eos: bool
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    priority: int
    stream: bool
    include_usage: bool

    def sampling(self, default_max_tokens: int) -> SamplingParams:
        """The same for the engine, for one answer."""
        return SamplingParams(
            max_new_tokens=self.max_tokens or default_max_tokens,
            temperature=self.temperature,
            seed=secrets.randbits(_SEED_BITS) if self.seed is None else self.seed,
            ignore_eos=self.ignore_eos,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A body of `/v1/completions`.

    Attributes:
        prompts: One answer each, in this order.
        echo: Each answer begins with its prompt.
    """

    options: Options
    prompts: tuple[Prompt, ...]
    echo: bool

    @classmethod
    def parse(cls, body: Any) -> CompletionRequest:
        """Check a decoded body.

        Raises:
            APIError: Names the parameter and what it may be.
        """
        fields = _Fields(body)
        prompts = _prompts(fields.required("prompt"))
        echo = fields.flag("echo")
        options = _options(fields, fields.integer("max_tokens", least=1), _completion_logprobs(fields))
        if echo and options.logprobs is not None:
            raise APIError(400, "logprobs are of new tokens only: leave out echo, or logprobs", param="logprobs")
        fields.refuse_rest()
        return cls(options=options, prompts=prompts, echo=echo)

    def sampling(self) -> SamplingParams:
        """How to sample one answer."""
        return self.options.sampling(_DEFAULT_MAX_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A body of `/v1/chat/completions`.

    Attributes:
        messages: Each with a role, and with its content as one string.
        template_kwargs: Further variables for the chat template.
    """

    options: Options
    messages: tuple[Message, ...]
    template_kwargs: dict[str, Any]

    @classmethod
    def parse(cls, body: Any) -> ChatRequest:
        """Check a decoded body.

        Raises:
            APIError: Names the parameter and what it may be.
        """
        fields = _Fields(body)
        messages = _messages(fields.required("messages"))
        template_kwargs = fields.mapping("chat_template_kwargs")
        old_limit = fields.integer("max_tokens", least=1)
        limit = fields.integer("max_completion_tokens", least=1) or old_limit
        options = _options(fields, limit, _chat_logprobs(fields))
        fields.refuse_rest()
        return cls(options=options, messages=messages, template_kwargs=template_kwargs)


class _Fields:
    """The parameters of one body. Each is taken once; what is left at the end is nobody's."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise APIError(400, f"the body must be a JSON object, not {_show(body)}")
        self._left = {name: value for name, value in body.items() if value is not None}

    def required(self, name: str) -> Any:
        if name not in self._left:
            raise APIError(400, f"{name} is missing", param=name)
        return self._left.pop(name)

    def string(self, name: str) -> str | None:
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, value, "a string")
        return value

    def flag(self, name: str) -> bool:
        value = self._left.pop(name, False)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def is_false(self, name: str) -> bool:
        """Take it if it is false; true and 0 are not."""
        return self._left.get(name) is False and not self._left.pop(name)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._left.pop(name, {})
        if not isinstance(value, dict):
            raise _wrong(name, value, "an object")
        return value

    def integer(self, name: str, *, least: int, most: int | None = None) -> int | None:
        value = self._left.pop(name, None)
        if value is None:
            return None
        if not _is_integer(value) or not least <= value <= (_LARGEST if most is None else most):
            raise _wrong(name, value, f"an integer from {least} to {'2**63 - 1' if most is None else most}")
        assert isinstance(value, int)
        return value

    def within(self, name: str, default: float, is_good: Callable[[float], bool], expected: str) -> float:
        value = self._left.pop(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not is_good(value):
            raise _wrong(name, value, expected)
        return value

    def items(self, name: str, is_good: Callable[[Any], bool], most: int, expected: str) -> tuple[Any, ...]:
        value = self._left.pop(name, [])
        if not isinstance(value, list) or len(value) > most or not all(map(is_good, value)):
            raise _wrong(name, value, expected)
        return tuple(value)

    def stop(self) -> tuple[str, ...]:
        if isinstance(one := self._left.get("stop"), str):
            self._left["stop"] = [one]
        return self.items(
            "stop",
            is_stop,
            MAX_STOPS,
            f"a string of 1 to {MAX_STOP_LENGTH} characters of valid Unicode text, or up to {MAX_STOPS} of them",
        )

    def temperature(self, name: str, default: float) -> float:
        value = self._left.pop(name, default)
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, OverflowError):
            number = math.nan
        if not 0 <= number < math.inf or not is_temperature(number):
            raise _wrong(name, value, f"0, or a finite number of at least {LEAST_SCALE:g}")
        return number

    def refuse_rest(self) -> None:
        for name, value in self._left.items():
            if name in _WITHOUT_EFFECT:
                continue
            neutral = _NEUTRAL.get(name, ())
            if not any(_same(value, other) for other in neutral):
                remedy = f"leave it out, or use {json.dumps(neutral[0])}" if neutral else "leave it out"
                raise APIError(
                    400,
                    f"{name}={_show(value)} is not supported by this server: {remedy}",
                    param=name,
                    code="unsupported_parameter",
                )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _same(value: Any, other: Any) -> bool:
    """Equal, where true is not 1: `logprobs` 0 asks for something, false does not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _show(value: Any) -> str:
    """A value of the client's in an error, cut to a readable length."""
    return reprlib.repr(value)


def _wrong(name: str, value: Any, expected: str) -> APIError:
    return APIError(400, f"{name} must be {expected}, not {_show(value)}", param=name)


def _completion_logprobs(fields: _Fields) -> int | None:
    """A number of tokens; 0 asks for the chosen ones only."""
    if fields.is_false("logprobs"):
        return None
    return fields.integer("logprobs", least=0, most=MAX_LOGPROBS)


def _chat_logprobs(fields: _Fields) -> int | None:
    """A flag, and a number of tokens beside it."""
    if not fields.flag("logprobs"):
        return None
    return fields.integer("top_logprobs", least=0, most=MAX_LOGPROBS) or 0


def _options(fields: _Fields, max_tokens: int | None, logprobs: int | None) -> Options:
    stream = fields.flag("stream")
    return Options(
        model=fields.string("model"),
        max_tokens=max_tokens,
        temperature=fields.temperature("temperature", 1.0),
        seed=fields.integer("seed", least=0),
        ignore_eos=fields.flag("ignore_eos"),
        top_k=max(0, fields.integer("top_k", least=-1, most=(1 << 31) - 1) or 0),
        top_p=fields.within("top_p", 1.0, lambda value: 0 < value <= 1, "a number above 0, up to 1"),
        min_p=fields.within("min_p", 0.0, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
        repetition_penalty=fields.within(
            "repetition_penalty",
            1.0,
            lambda value: LEAST_SCALE <= value <= sys.float_info.max,
            f"a finite number of at least {LEAST_SCALE:g}",
        ),
        stop=fields.stop(),
        stop_token_ids=fields.items(
            "stop_token_ids",
            lambda item: _is_integer(item) and 0 <= item < 1 << 31,
            MAX_STOP_TOKENS,
            f"a list of up to {MAX_STOP_TOKENS} token ids",
        ),
        logprobs=logprobs,
        priority=fields.integer("priority", least=-MAX_PRIORITY, most=MAX_PRIORITY) or 0,
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


def _include_usage(fields: _Fields, stream: bool) -> bool:
    wanted = fields.mapping("stream_options")
    if wanted and not stream:
        raise APIError(400, "stream_options are for streams: set stream to true", param="stream_options")
    for name, value in wanted.items():
        # Obfuscation pads the chunks against eavesdroppers; the text is the same without.
        if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool):
            raise APIError(400, f"stream_options.{name}={_show(value)} is not supported", param="stream_options")
    return bool(wanted.get("include_usage", False))


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if (one := _prompt(value)) is not None:
        return (one,)
    several = "a string, a list of strings, a list of token ids, or a list of such lists"
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", value, several)
    if len(value) > _MAX_PROMPTS:
        raise APIError(400, f"one request may have {_MAX_PROMPTS} prompts, not {len(value)}", param="prompt")
    prompts = []
    for index, item in enumerate(value):
        if (prompt := _prompt(item)) is None:
            raise APIError(400, f"prompt must be {several}; prompt[{index}] is {_show(item)}", param="prompt")
        prompts.append(prompt)
    return tuple(prompts)


def _prompt(value: Any) -> Prompt | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_integer, value)):
        return tuple(value)
    return None


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", value, "a list of at least one message")
    return tuple(_message(f"messages[{index}]", item) for index, item in enumerate(value))


def _message(name: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object with role and content")
    if not isinstance(value.get("role"), str):
        raise _wrong(f"{name}.role", value.get("role"), "a string")
    return {**value, "content": _content(f"{name}.content", value.get("content"))}


def _content(name: str, value: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(name, value, "a string or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong(name, part, 'made of parts like {"type": "text", "text": "..."}')
    return "\n".join(part["text"] for part in value)


# -- answers -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    """The tokens of one request."""

    prompt_tokens: int
    completion_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """As in an answer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Answer:
    """The bodies that answer one request of `/v1/completions`.

    Args:
        model: The name under which the model is served.
        created: Seconds since the epoch.
    """

    prefix: ClassVar[str] = "cmpl-"
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def __init__(self, model: str, created: int) -> None:
        self._facts = {"id": self.prefix + secrets.token_hex(16), "created": created, "model": model}

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """The one body of an answer that is not streamed."""
        return {**self._facts, "object": self.kind, "choices": choices, "usage": usage.as_dict()}

    def chunk(self, *choices: dict[str, Any], usage: Usage | None = None) -> dict[str, Any]:
        """One body of a stream; the last one has usage and no choice."""
        counts = {} if usage is None else {"usage": usage.as_dict()}
        return {**self._facts, "object": self.chunk_kind, "choices": list(choices), **counts}

    def logprobs(self, text_of: TextOf, offset: int) -> Logprobs:
        """What collects the log probabilities of one choice, whose text has `offset` characters before it."""
        return CompletionLogprobs(text_of, offset)

    def choice(self, index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        """One prompt's answer."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def opening(self, index: int, head: str) -> list[dict[str, Any]]:
        """What a stream says of a choice before its first output; `head` is the text that comes before all others."""
        return [self.piece(index, head, None)] if head else []

    def piece(self, index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        """A part of one prompt's answer."""
        return self.choice(index, text, finish_reason, logprobs)


class ChatAnswer(Answer):
    """The bodies that answer one request of `/v1/chat/completions`."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def logprobs(self, text_of: TextOf, offset: int) -> Logprobs:
        """What collects the log probabilities of one choice."""
        return ChatLogprobs(text_of)

    def choice(self, index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        """The assistant's message."""
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def opening(self, index: int, head: str) -> list[dict[str, Any]]:
        """The role, which is told once."""
        return [{**self.piece(index, "", None), "delta": {"role": "assistant", "content": head}}]

    def piece(self, index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        """A part of the assistant's message."""
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


DONE = b"data: [DONE]\n\n"


def encode(body: Any) -> bytes:
    """JSON in ASCII: text of the client's that is no valid Unicode must not break the answer that quotes it."""
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def model_card(name: str, created: int, max_length: int) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    return {"id": name, "object": "model", "created": created, "owned_by": "mpexec", "max_model_len": max_length}
