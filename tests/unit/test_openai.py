"""OpenAI's bodies: what is understood, what is refused and how, and the chat template."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mpexec.agent.steps import TokenLogprobs
from mpexec.engine.engine import GenerationOutput, Health, Metrics
from mpexec.errors import ConfigError, QueueFullError
from mpexec.http.chat import ChatTemplate
from mpexec.http.generation import collect_async, merge, while_connected
from mpexec.http.health import HealthCheck
from mpexec.http.logprobs import ChatLogprobs, CompletionLogprobs
from mpexec.http.openai import APIError, ChatRequest, CompletionRequest, encode, event
from mpexec.http.server import _listen, bind, url_of

HELLO = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse({"prompt": "x", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse({"messages": HELLO, **fields})


def refused(parse: Any, **fields: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


# -- requests ------------------------------------------------------------------------------------------------------


def test_what_a_request_leaves_out_is_as_in_openais_api() -> None:
    params = completion().sampling()
    assert (params.max_new_tokens, params.temperature, params.ignore_eos) == (16, 1.0, False)
    options = completion().options
    assert (options.model, options.stream, options.include_usage, options.seed) == (None, False, False, None)
    assert chat().options.sampling(77).max_new_tokens == 77


def test_a_seed_that_is_left_out_is_drawn_for_each_answer_and_one_that_is_given_stays() -> None:
    assert len({completion().sampling().seed for _ in range(10)}) == 10
    assert completion(seed=5).sampling().seed == 5


def test_every_parameter_reaches_the_engine() -> None:
    request = completion(max_tokens=5, temperature=0, seed=9, ignore_eos=True, echo=True, stream=True, model="m")
    params = request.sampling()
    assert (params.max_new_tokens, params.temperature, params.seed, params.ignore_eos) == (5, 0.0, 9, True)
    params = completion(
        top_k=-1, top_p=0.5, min_p=0.25, repetition_penalty=2, stop="END", stop_token_ids=[7]
    ).sampling()
    assert (params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (0, 0.5, 0.25, 2)
    assert (params.stop, params.stop_token_ids) == (("END",), (7,))
    assert completion(top_k=3, stop=["a", "b"]).sampling().stop == ("a", "b")
    assert completion(stop=[], priority=-4).options.priority == -4
    assert (request.echo, request.options.stream, request.options.model) == (True, True, "m")
    assert completion(stream=True, stream_options={"include_usage": True}).options.include_usage


def test_logprobs_are_a_number_for_completions_and_a_flag_with_a_number_for_chats() -> None:
    wanted = [completion(logprobs=value).sampling().logprobs for value in (None, False, 0, 5)]
    assert wanted == [None, None, 0, 5]
    bodies: list[dict[str, Any]] = [{}, {"logprobs": False}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}]
    assert [chat(**body).options.logprobs for body in bodies] == [None, None, 0, 3]
    assert refused(chat, logprobs=3).param == "logprobs"
    assert refused(chat, top_logprobs=3).param == "top_logprobs"
    assert refused(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(completion, logprobs=1, echo=True).param == "logprobs"


def test_logprobs_are_shown_as_in_openais_api_and_only_once() -> None:
    known = [TokenLogprobs(-0.5, ((1, -0.25), (0, -0.5))), TokenLogprobs(-math.inf)]
    plain = CompletionLogprobs("ab\ufffd".__getitem__, offset=3)
    plain.add((0, 2), known)
    assert plain.take() == {
        "tokens": ["a", "\ufffd"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"b": -0.25, "a": -0.5}, {}],
        "text_offset": [3, 4],
    }
    assert plain.take()["tokens"] == []
    of_chat = ChatLogprobs("ab\ufffd".__getitem__)
    of_chat.add((0, 2), known)
    b, a = (
        {"token": letter, "logprob": value, "bytes": [ord(letter)]} for letter, value in (("b", -0.25), ("a", -0.5))
    )
    half = {"token": "\ufffd", "logprob": -9999.0, "bytes": None, "top_logprobs": []}
    assert of_chat.take() == {"content": [{**a, "top_logprobs": [b, a]}, half], "refusal": None}
    assert of_chat.take()["content"] == []


@pytest.mark.parametrize(
    "given_prompt, prompts",
    [
        ("a", ("a",)),
        (["a", ""], ("a", "")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_several_of_these(given_prompt: Any, prompts: Any) -> None:
    assert completion(prompt=given_prompt).prompts == prompts


@pytest.mark.parametrize("value", [[], 5, {}, [[]], ["a", None], [1, "a"], [1, True], [[1, 2.0]], ["a"] * 1025])
def test_anything_else_is_no_prompt(value: Any) -> None:
    assert refused(completion, prompt=value).param == "prompt"


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", 1 << 63),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", []),
        ("seed", -1),
        ("seed", 1.0),
        ("stream", 1),
        ("echo", "no"),
        ("model", 5),
        ("stream_options", []),
        ("ignore_eos", 0),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 0.5),
        ("min_p", -0.1),
        ("min_p", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-6),
        ("temperature", 1e-6),
        ("repetition_penalty", 10**400),
        ("stop", ""),
        ("stop", 5),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", "a" * 257),
        ("stop", ["a", "\ud800"]),
        ("max_tokens", 10**20),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("logprobs", 21),
        ("logprobs", True),
        ("priority", 1001),
        ("priority", "high"),
    ],
)
def test_a_wrong_type_is_refused_with_the_parameters_name(name: str, value: Any) -> None:
    error = refused(completion, **{name: value})
    assert error.param == name
    assert str(error).startswith(name)


@pytest.mark.parametrize(
    "name, neutral, other",
    [
        ("n", 1, 2),
        ("best_of", 1, 3),
        ("presence_penalty", 0, 0.5),
        ("frequency_penalty", 0.0, -1),
        ("logit_bias", {}, {"5": 1}),
        ("suffix", "", "end"),
        ("tools", [], [{"type": "function"}]),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("anything", None, 1),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name_and_what_would_not_is_fine(
    name: str, neutral: Any, other: Any
) -> None:
    for parse in (completion, chat):
        parse(**{name: neutral})
        error = refused(parse, **{name: other})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert name in str(error)


def test_what_is_for_the_operator_of_a_service_is_ignored() -> None:
    completion(user="me", metadata={"a": "b"})
    chat(store=True, service_tier="auto")


def test_stream_options_need_a_stream_and_are_known() -> None:
    assert refused(completion, stream_options={"include_usage": True}).param == "stream_options"
    assert refused(completion, stream=True, stream_options={"include_usage": 1}).param == "stream_options"
    assert refused(completion, stream=True, stream_options={"other": True}).param == "stream_options"


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=5),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = some.sampled_from(
    ["prompt", "messages", "model", "max_tokens", "temperature", "seed", "stream", "stream_options", "n", "stop", "x"]
)


@given(body=JSON | some.dictionaries(NAMES, JSON))
def test_any_json_is_understood_or_refused_with_an_error_that_is_json(body: Any) -> None:
    for parse in (CompletionRequest.parse, ChatRequest.parse):
        told: APIError | None = None
        try:
            parse(body)
        except APIError as error:
            told = error
        if told is not None:
            assert told.status == 400
            assert json.loads(encode(told.body()))["error"]["type"] == "invalid_request_error"


def test_an_error_says_whose_fault_it_is() -> None:
    kinds = {status: APIError(status, "x").body()["error"]["type"] for status in (400, 404, 429, 500, 503)}
    assert kinds == {
        400: "invalid_request_error",
        404: "invalid_request_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "server_error",
    }


def test_an_event_is_one_line_whatever_the_text_holds() -> None:
    line = event({"text": "a\nb\r\n\u2028\ud800"})
    assert line.startswith(b"data: ")
    assert line.endswith(b"\n\n")
    assert line.count(b"\n") == 2
    assert json.loads(line[6:]) == {"text": "a\nb\r\n\u2028\ud800"}


# -- conversations -------------------------------------------------------------------------------------------------


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == ({"role": "user", "content": "a\nb"},)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert refused(chat, messages=[*HELLO, image]).param == "messages[1].content"


@pytest.mark.parametrize(
    "messages", ["Hello", [], ["Hello"], [{"content": "x"}], [{"role": 5, "content": "x"}], [{"role": "user"}]]
)
def test_anything_else_is_no_conversation(messages: Any) -> None:
    assert str(refused(chat, messages=messages).param).startswith("messages")


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=5).options.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).options.max_tokens == 6


def settings(folder: Path, **values: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def test_a_folder_without_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(settings(tmp_path, bos_token="<s>")) is None


@pytest.mark.parametrize(
    "value", ["{{ bos_token }}{{ messages[0].content }}", [{"name": "default", "template": "{{ bos_token }}Hello"}]]
)
def test_the_template_of_the_tokenizers_settings_gets_special_tokens_and_messages(tmp_path: Path, value: Any) -> None:
    template = ChatTemplate.load(settings(tmp_path, chat_template=value, bos_token={"content": "<s>"}))
    assert template is not None
    assert template.render(chat()) == "<s>Hello"


def test_a_template_file_comes_first_and_gets_the_callers_variables(tmp_path: Path) -> None:
    settings(tmp_path, chat_template="no")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}\n{{ m.role }}{% if loop.first %}{% continue %}{% endif %}\n{% endfor %}"
        "{{ thinking }}{{ {'a': '<'} | tojson }}{{ tools is none }}{{ add_generation_prompt }}"
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    text = template.render(chat(chat_template_kwargs={"thinking": "no"}))
    assert text == 'userno{"a": "<"}TrueTrue'


def test_marks_for_training_change_nothing() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}"
    assert ChatTemplate(source, {}).render(chat()) == "Hello!"


@pytest.mark.parametrize(
    "source, words",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.nothing.at_all }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_what_a_template_refuses_is_the_requests_error(source: str, words: str) -> None:
    with pytest.raises(APIError, match=words) as caught:
        ChatTemplate(source, {}).render(chat())
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_damaged_settings_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        ChatTemplate.load(tmp_path)


# -- outputs of several prompts ------------------------------------------------------------------------------------


class Stream:
    """An engine's stream of so many outputs; an error may follow."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.closed = False
        self.given = 0
        self.outputs = self._outputs(count, error)

    async def _outputs(self, count: int, error: Exception | None) -> AsyncGenerator[GenerationOutput, None]:
        try:
            for self.given in range(1, count + 1):
                await asyncio.sleep(0)
                yield GenerationOutput(str(self.given), (self.given,), None, ())
            if error is not None:
                raise error
        finally:
            self.closed = True


async def test_merged_streams_keep_each_its_order() -> None:
    streams = [Stream(count) for count in (3, 0, 5)]
    merged = await collect_async(merge([stream.outputs for stream in streams]))
    assert [output.text for index, output in merged if index == 0] == ["1", "2", "3"]
    assert [output.text for index, output in merged if index == 2] == ["1", "2", "3", "4", "5"]
    assert all(stream.closed for stream in streams if stream.given)


async def test_a_reader_that_waits_leaves_the_outputs_in_the_streams() -> None:
    stream = Stream(100)
    merged = merge([stream.outputs])
    await anext(merged)
    for _ in range(20):
        await asyncio.sleep(0)
    assert stream.given == 2
    await merged.aclose()
    assert stream.closed


async def test_the_error_of_one_stream_ends_all() -> None:
    streams = [Stream(1000), Stream(3, QueueFullError("full")), Stream(1000)]
    with pytest.raises(QueueFullError):
        await collect_async(merge([stream.outputs for stream in streams]))
    assert all(stream.closed for stream in streams)


async def test_work_ends_when_the_client_goes_and_the_watch_ends_with_the_work() -> None:
    from starlette.requests import ClientDisconnect

    gone, stream = asyncio.Event(), Stream(10**9)

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def quick() -> int:
        return 5

    assert await while_connected(receive, quick()) == 5
    asyncio.get_running_loop().call_later(0.01, gone.set)
    with pytest.raises(ClientDisconnect):
        await while_connected(receive, collect_async(merge([stream.outputs])))
    assert stream.closed


# -- health and the socket -----------------------------------------------------------------------------------------


def test_only_running_requests_without_steps_are_a_stall() -> None:
    now = [0.0]
    counts = SimpleNamespace(steps=0, running=0)
    health = SimpleNamespace(ok=True, state="running", reason=None, ranks=(), step_age=None, silence=None)
    engine: Any = SimpleNamespace(health=lambda: health, metrics=lambda: counts)
    check = HealthCheck(engine, 10.0, clock=lambda: now[0])
    for second, steps, running, ok in (
        (100, 0, 0, True),  # idle for long
        (101, 0, 1, True),  # a request begins
        (110, 0, 1, False),
        (111, 1, 1, True),  # a step ends after all
        (120, 1, 1, True),
        (121, 1, 1, False),
        (122, 1, 0, True),  # the request was given up
    ):
        now[0], counts.steps, counts.running = second, steps, running
        assert check.check().ok == ok, second
    counts.running, health.state = 1, "draining"
    now[0] = 222
    assert check.check().status == "draining"  # requests run and no step does: weights are being changed
    now[0], health.step_age = 232, 10.0
    assert not check.check().ok


def test_an_engine_that_leaves_requests_without_a_word_is_stalled_whatever_it_told_before() -> None:  # F070
    health = Health(True, "running", silence=9.9)
    engine: Any = SimpleNamespace(health=lambda: health, metrics=Metrics)
    check = HealthCheck(engine, 10.0)
    assert check.check().body() == {"status": "ok"}
    for state in ("running", "draining", "sleeping", "stalled"):
        health = Health(state != "stalled", state, silence=15.0)
        assert check.check().body() == {"status": "stalled", "cause": "the engine's process has not answered for 15 s"}
    assert HealthCheck(engine, 0).check().ok


def test_a_stopped_engine_is_unhealthy_with_its_cause() -> None:
    engine: Any = SimpleNamespace(
        health=lambda: SimpleNamespace(ok=False, state="stopped", reason=ValueError("rank 1")),
        metrics=lambda: SimpleNamespace(steps=0, running=0),
    )
    verdict = HealthCheck(engine, 0).check()
    assert verdict.body() == {"status": "stopped", "cause": "ValueError: rank 1"}


def test_of_two_servers_that_load_for_the_same_port_the_second_is_told() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            _listen(first)
            with pytest.raises(ConfigError, match=str(port)):
                _listen(second)
        with pytest.raises(ConfigError, match="in use"):
            bind("127.0.0.1", port)
        assert url_of(first) == f"http://127.0.0.1:{port}"


def test_an_address_that_is_none_is_refused() -> None:
    for host in ("256.1.1.1", "no such host", "192.0.2.1", "a..b", "ü" * 70):
        with pytest.raises(ConfigError, match=host):
            bind(host, 0)
