"""`mpexec serve` as its clients see it, through the openai package, and as the supervisor sees it that started it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai.types import Completion
from patience import left_of, within
from prometheus_client.parser import text_string_to_metric_families

from mpexec.engine.tokenizer import Tokenizer
from mpexec.models import default_model_path

COMMAND = [sys.executable, "-m", "mpexec", "serve"]
COUNTING = [sys.executable, str(Path(__file__).with_name("serve_counting.py"))]
MODEL = "kjv-small"
PROMPT = "In the beginning"
FOUR = [PROMPT, "And it came to pass", "The LORD", "Blessed are they that"]
LONG = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}

pytestmark = [pytest.mark.spawn, pytest.mark.timeout(180)]


def wait_until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    """Ask the server again and again: HTTP has no event for what happens inside it."""
    give_up = time.monotonic() + within(seconds)
    while not what():
        assert time.monotonic() < give_up
        time.sleep(0.02)


class Served:
    """A server in a process of its own."""

    def __init__(self, *args: str, command: list[str] = COMMAND) -> None:
        self.process = subprocess.Popen(
            [*command, "--port", "0", *args], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def wait_ready(self) -> Served:
        """Wait for the line that says where."""
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        match = re.fullmatch(r"serving (\S+) on (http://127\.0\.0\.1:(\d+))\n", line)
        if match is None:
            self.process.kill()
            pytest.fail(line + self.process.stderr.read())
        self.url, self.port = match[2], int(match[3])
        return self

    def ranks(self, count: int = 2) -> list[int]:
        """The processes of the ranks, by rank."""
        found: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if child.name().startswith("mpexec-rank"):
                found[child.name()] = child.pid
        assert len(found) == count
        return [found[name] for name in sorted(found)]

    def end(self, since: float = 0.0) -> tuple[int, str, float]:
        """Wait for the end: exit code, what was left on stderr, seconds since a moment."""
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr, time.monotonic() - since

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and decoded body; what is no bytes is sent as JSON."""
        status, text = self.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())
        return status, json.loads(text)

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def metric(self, name: str) -> float:
        """The value of one metric without labels."""
        _, text = self.get("/metrics")
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return next(sample.value for sample in samples if sample.name == name)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **{"max_retries": 0, "timeout": 60, **options})

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """The bundled model on two ranks, for the tests that leave it healthy."""
    served = Served("--start-method", "forkserver", "--max-queue", "64", "--max-slots", "8")
    try:
        yield served.wait_ready()
        served.process.send_signal(signal.SIGTERM)
        assert served.end()[:2] == (0, "")
    finally:
        served.process.kill()
        served.process.communicate()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


@pytest.fixture
def start() -> Iterator[Callable[..., Served]]:
    """Starts servers, which are gone after the test whatever it does."""
    made: list[Served] = []

    def make(*args: str, command: list[str] = COUNTING) -> Served:
        made.append(Served(*args, command=command))
        return made[-1]

    yield make
    for served in made:
        served.process.kill()
        served.process.communicate()


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Completion:
    return client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 12, **options})


# -- answers -------------------------------------------------------------------------------------------------------


def test_a_completion_has_text_a_reason_and_counts(client: openai.OpenAI) -> None:
    answer = complete(client, PROMPT)
    (choice,) = answer.choices
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert abs(answer.created - time.time()) < 60
    assert choice.finish_reason == "length"
    assert choice.text.strip()
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_the_pieces_of_a_stream_are_the_whole_answer_and_usage_comes_last_if_asked_for(client: openai.OpenAI) -> None:
    whole = complete(client, PROMPT)
    chunks = list(complete(client, PROMPT, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert len(pieces) > 3
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {last.id}
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in complete(client, PROMPT, stream=True))


def test_several_prompts_as_text_or_as_token_ids_are_answered_in_order(client: openai.OpenAI) -> None:
    tokenizer = Tokenizer.load(default_model_path())
    token_ids = [list(tokenizer.encode(prompt)) for prompt in FOUR]
    alone = [complete(client, ids).choices[0].text for ids in token_ids]
    for prompts in (FOUR, token_ids):
        answer = complete(client, prompts)
        assert [choice.text for choice in answer.choices] == alone
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(map(len, token_ids)), 48)
    texts = ["", "", "", ""]
    for chunk in complete(client, FOUR, stream=True, echo=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [prompt + text for prompt, text in zip(FOUR, alone, strict=True)]


def test_a_seed_decides_a_sampled_text_and_without_one_texts_differ(client: openai.OpenAI) -> None:
    def texts(**options: Any) -> list[str]:
        answer = complete(client, [PROMPT, PROMPT], max_tokens=24, temperature=1.5, **options)
        return [choice.text for choice in answer.choices]

    assert len({*texts(seed=7), *texts(seed=7)}) == 1
    assert len({*texts(), *texts(), *texts(seed=8)}) == 5


def test_a_stop_string_ends_the_text_before_it_streamed_or_not(client: openai.OpenAI) -> None:
    whole = complete(client, PROMPT).choices[0].text
    stop = whole[9:13]
    cut = complete(client, PROMPT, stop=[stop, "never said"])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    chunks = list(complete(client, PROMPT, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_ignore_eos_writes_on_where_the_text_would_have_ended(client: openai.OpenAI) -> None:
    ended = complete(client, PROMPT, max_tokens=40)
    assert ended.choices[0].finish_reason == "stop"
    written_on = complete(client, PROMPT, max_tokens=40, extra_body={"ignore_eos": True})
    assert written_on.choices[0].finish_reason == "length"
    assert written_on.usage is not None
    assert written_on.usage.completion_tokens == 40


def test_a_model_without_chat_template_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
    assert caught.value.code == "no_chat_template"


def test_a_conversation_runs_through_the_models_template_streamed_or_not(
    start: Callable[..., Served], tmp_path: Path
) -> None:
    shutil.copytree(default_model_path(), tmp_path / "chatty")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    (tmp_path / "chatty" / "chat_template.jinja").write_text(template)
    served = start("--model", str(tmp_path / "chatty")).wait_ready()
    with served.client() as client:
        say: dict[str, Any] = {"model": "chatty", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}
        whole = client.chat.completions.create(**say)
        assert whole.id.startswith("chatcmpl-")
        assert whole.choices[0].message.role == "assistant"
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        as_text = client.completions.create(model="chatty", prompt="user: Hello\nassistant:", max_tokens=9)
        assert as_text.choices[0].text == whole.choices[0].message.content
        assert as_text.usage == whole.usage
        chunks = list(client.chat.completions.create(**say, stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == as_text.choices[0].text
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage == whole.usage
        likely = client.chat.completions.create(**say, logprobs=True, top_logprobs=1).choices[0].logprobs
        assert likely is not None
        assert likely.content is not None
        assert len(likely.content) == 9
        assert all(one.logprob == one.top_logprobs[0].logprob < 0 for one in likely.content)
        plain = client.completions.create(model="chatty", prompt=[100], max_tokens=9, logprobs=0).choices[0].logprobs
        assert plain is not None
        assert plain.token_logprobs == [-token / 1024 for token in range(101, 110)]
        chunks = list(client.completions.create(model="chatty", prompt=[100], max_tokens=9, logprobs=0, stream=True))
        parts = [part for chunk in chunks if (part := chunk.choices[0].logprobs)]
        assert [value for part in parts for value in part.token_logprobs or []] == plain.token_logprobs
        assert [offset for part in parts for offset in part.text_offset or []] == plain.text_offset


# -- many clients, and clients that leave --------------------------------------------------------------------------


async def test_64_concurrent_requests_get_each_its_own_answer(server: Served) -> None:
    async with server.async_client() as client:

        async def ask(number: int) -> str:
            prompt = FOUR[number % 4]
            answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
            return answer.choices[0].text

        alone = [await ask(number) for number in range(4)]
        assert len(set(alone)) == 4
        assert await asyncio.gather(*map(ask, range(64))) == alone * 16


def test_a_client_that_leaves_in_mid_stream_frees_its_slot(server: Served, client: openai.OpenAI) -> None:
    cancelled = server.metric("mpexec_requests_cancelled_total")
    stream = complete(client, PROMPT, stream=True, **LONG)
    for _ in range(3):
        next(stream)
    wait_until(lambda: server.metric("mpexec_requests_running") == 1, 1.0)
    stream.close()
    wait_until(lambda: server.metric("mpexec_requests_running") == 0, 1.0)
    wait_until(lambda: server.metric("mpexec_requests_cancelled_total") == cancelled + 1, 1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_frees_its_slots(server: Served, stream: bool) -> None:
    cancelled = server.metric("mpexec_requests_cancelled_total")
    with server.client() as busy, server.client(timeout=0.3) as hasty:
        with complete(busy, [PROMPT] * 8, stream=True, **LONG) as running:
            next(running)
            with pytest.raises(openai.APITimeoutError):
                complete(hasty, FOUR * 4, stream=stream, **LONG)
            wait_until(lambda: server.metric("mpexec_requests_waiting") == 0, 1.0)
    wait_until(lambda: server.metric("mpexec_requests_running") == 0, 1.0)
    wait_until(lambda: server.metric("mpexec_requests_cancelled_total") == cancelled + 24, 1.0)


def test_more_requests_than_the_queue_holds_are_refused_and_leave_nothing_behind(
    server: Served, client: openai.OpenAI
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="max_queue") as caught:
            list(complete(client, [PROMPT] * 80, stream=stream, **LONG))
        assert caught.value.code == "queue_full"
        wait_until(lambda: server.metric("mpexec_requests_running") == 0, 1.0)
        wait_until(lambda: server.metric("mpexec_requests_waiting") == 0, 1.0)
    assert complete(client, PROMPT).choices[0].text


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_wrong_model_name_is_not_found(client: openai.OpenAI) -> None:
    for ask in (
        lambda: client.completions.create(model="gpt-5", prompt=PROMPT),
        lambda: client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "Hello"}]),
        lambda: client.models.retrieve("gpt-5"),
    ):
        with pytest.raises(openai.NotFoundError, match="gpt-5") as caught:
            ask()
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("prompt", ["word " * 2000, "word " * 20_000, [5] * 1024], ids=["text", "long text", "tokens"])
def test_a_prompt_that_is_too_long_is_refused_with_the_limit(client: openai.OpenAI, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="1024") as caught:
        complete(client, prompt)
    assert caught.value.code == "context_length_exceeded"


BAD_BODIES: list[tuple[Any, int, str | None]] = [
    (b"", 400, None),
    (b"{", 400, None),
    (b"\xff\xfe", 400, None),
    (b'{"prompt": NaN}', 400, None),
    (b"[" * 100_000, 400, None),
    ([], 400, None),
    ({}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": [PROMPT, []]}, 400, "prompt"),
    ({"prompt": [2048]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": "\ud800"}, 400, "prompt"),
    ({"model": 5}, 400, "model"),
    ({"model": "\ud800"}, 404, "model"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": 10**400}, 400, "temperature"),
    ({"seed": -1}, 400, "seed"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"n": 2}, 400, "n"),
    ({"stop": ["\n", ""]}, 400, "stop"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"presence_penalty": 0.1}, 400, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"surprise": 1}, 400, "surprise"),
    (b" " * (5 << 20), 413, None),
]


@pytest.mark.parametrize("body, status, param", BAD_BODIES, ids=[repr(body)[:30] for body, *_ in BAD_BODIES])
def test_a_bad_request_is_answered_with_an_error_that_names_the_parameter(
    server: Served, body: Any, status: int, param: str | None
) -> None:
    if isinstance(body, dict) and body and "prompt" not in body:
        body = {"prompt": PROMPT, **body}
    answered, told = server.post("/v1/completions", body)
    error = told["error"]
    assert (answered, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error["message"]
    assert param is None or param in error["message"]
    assert server.get("/health") == (200, '{"status":"ok"}')


def test_values_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    neutral: dict[str, Any] = {"n": 1, "best_of": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
    answer = complete(client, PROMPT, **neutral, stop=None, logprobs=None, user="me", logit_bias={}, suffix="")
    assert answer.choices == complete(client, PROMPT).choices


def test_an_unknown_path_and_a_wrong_method_are_errors_in_the_same_shape(server: Served) -> None:
    assert server.get("/v1/nothing")[0] == 404
    status, text = server.get("/v1/completions")
    assert status == 405
    assert "GET /v1/completions" in json.loads(text)["error"]["message"]


# -- models, health, metrics ---------------------------------------------------------------------------------------


def test_models_lists_the_one_that_is_served(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "mpexec")
    assert client.models.retrieve(MODEL) == model


def test_metrics_count_what_was_asked_and_written(server: Served, client: openai.OpenAI) -> None:
    names = ["requests", "requests_finished", "generated_tokens", "prompt_tokens"]

    def counts() -> list[float]:
        return [server.metric(f"mpexec_{name}_total") for name in names]

    before = counts()
    complete(client, [[1, 2, 3], [4]])
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 2, 24, 4]
    assert server.metric("mpexec_healthy") == 1
    assert server.metric("mpexec_request_seconds_count") == counts()[1]


def test_health_is_503_while_no_step_ends_and_200_when_steps_go_on(start: Callable[..., Served]) -> None:  # F070
    served = start("--stall-timeout", "0.5").wait_ready()
    rank = served.ranks()[0]  # the one whose tokens are handed out; ranks that count need not wait for each other
    with served.client() as client:
        stream = client.completions.create(model=MODEL, prompt=[1], stream=True, **LONG)
        next(stream)
        assert served.get("/health")[0] == 200
        os.kill(rank, signal.SIGSTOP)
        wait_until(lambda: served.get("/health")[0] == 503)
        verdict = json.loads(served.get("/health")[1])
        assert verdict["status"] == "stalled"
        assert f"(pid {rank}) stopped" in verdict["cause"]
        assert served.metric("mpexec_healthy") == 0
        os.kill(rank, signal.SIGCONT)
        wait_until(lambda: served.get("/health")[0] == 200)
        next(stream)
        stream.close()


@pytest.mark.slow
def test_health_is_503_while_the_engine_does_not_answer_and_200_when_it_does(start: Callable[..., Served]) -> None:
    served = start("--stall-timeout", "1", "--tp", "1", command=COMMAND).wait_ready()  # F070
    children = psutil.Process(served.process.pid).children(recursive=True)
    (engine,) = [child for child in children if child.name() == "mpexec-engine"]
    engine.suspend()
    for _ in range(20):  # clients that are less patient than the check
        with pytest.raises(openai.APITimeoutError), served.client(timeout=0.2) as client:
            client.completions.create(model=MODEL, prompt=[1], max_tokens=2)
    status, body = served.get("/health")
    assert (status, json.loads(body)["status"]) == (503, "stalled")
    assert "the engine's process has not answered" in body
    assert served.metric("mpexec_healthy") == 0
    engine.resume()
    wait_until(lambda: served.get("/health")[0] == 200)
    with served.client() as client:
        assert client.completions.create(model=MODEL, prompt=[1], max_tokens=2).usage.completion_tokens == 2
    served.process.send_signal(signal.SIGTERM)
    assert served.end()[:2] == (0, "")


# -- failures ------------------------------------------------------------------------------------------------------


async def test_a_rank_killed_under_load_is_told_to_every_open_request_and_ends_the_process_with_1(
    start: Callable[..., Served],
) -> None:
    served = start("--start-method", "forkserver", "--max-slots", "4", command=COMMAND)
    await asyncio.to_thread(served.wait_ready)
    ranks = served.ranks()
    writing = [asyncio.Event() for _ in range(4)]
    async with served.async_client() as client:

        async def stream(began: asyncio.Event) -> str:
            text = ""
            chunks = await client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **LONG)
            async for chunk in chunks:
                text += chunk.choices[0].text
                began.set()
            return text

        streams = [asyncio.create_task(stream(began)) for began in writing]
        await asyncio.gather(*(began.wait() for began in writing))
        whole = [
            asyncio.create_task(client.completions.create(model=MODEL, prompt=prompt, **LONG)) for prompt in FOUR * 4
        ]
        await asyncio.to_thread(wait_until, lambda: served.metric("mpexec_requests_waiting") == 16)
        since = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        errors = await asyncio.gather(*streams, *whole, return_exceptions=True)
        returncode, stderr, took = await asyncio.to_thread(served.end, since)
    assert took < within(3.0)
    assert returncode == 1
    for error in errors:
        assert isinstance(error, openai.APIError), error
        assert f"rank 1 (pid {ranks[1]}) killed by SIGKILL" in error.message
        assert error.code == "engine_stopped"
    for error in errors[4:]:
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503
    (line,) = stderr.splitlines()
    assert line.startswith(f"mpexec: WorkerDiedError: rank 1 (pid {ranks[1]}) killed by SIGKILL")
    assert not left_of(ranks, within(2.0))


@pytest.mark.parametrize("moment", ["idle", "while the other rank is stopped"])
def test_a_killed_rank_ends_an_idle_server_with_1_also_when_another_rank_does_not_answer(
    start: Callable[..., Served], moment: str
) -> None:
    served = start().wait_ready()
    ranks = served.ranks()
    if moment != "idle":
        os.kill(ranks[1], signal.SIGSTOP)
    since = time.monotonic()
    os.kill(ranks[0], signal.SIGKILL)
    returncode, stderr, took = served.end(since)
    assert took < within(3.0)
    assert returncode == 1
    assert stderr.startswith(f"mpexec: WorkerDiedError: rank 0 (pid {ranks[0]}) killed by SIGKILL")
    assert not left_of(ranks, within(2.0))


def test_clients_that_never_end_their_request_or_never_read_the_answer_do_not_delay_the_exit(
    start: Callable[..., Served],
) -> None:
    served = start().wait_ready()
    body = json.dumps({"prompt": [1], "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.ExitStack() as open_clients:
        for sent in (b"", b"POST /v1", head + body[:5], head + body):
            client = open_clients.enter_context(socket.create_connection(("127.0.0.1", served.port), 10))
            client.sendall(sent)
        wait_until(lambda: served.metric("mpexec_requests_running") == 1)
        since = time.monotonic()
        os.kill(served.ranks()[0], signal.SIGKILL)
        returncode, stderr, took = served.end(since)
    assert took < within(3.0)
    assert returncode == 1
    assert len(stderr.splitlines()) == 1


# -- how it is started and stopped ---------------------------------------------------------------------------------


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(start: Callable[..., Served]) -> None:
    served = start().wait_ready()
    with served.client() as client:
        stream = client.completions.create(model=MODEL, prompt=[1], stream=True, max_tokens=100)
        text = next(stream).choices[0].text
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not can_connect(served.port))
        chunks = list(stream)
        text += "".join(chunk.choices[0].text for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length"
    assert text == Tokenizer.load(default_model_path()).decode(list(range(2, 102)))
    assert served.end()[:2] == (0, "")


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 10).close()
    except ConnectionRefusedError:
        return False
    return True


def test_requests_that_outlast_the_drain_timeout_end_with_an_error(start: Callable[..., Served]) -> None:
    served = start("--drain-timeout", "0.2").wait_ready()
    with served.client() as client:
        stream = client.completions.create(model=MODEL, prompt=[1], stream=True, **LONG)
        next(stream)
        since = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="stopped") as caught:
            list(stream)
        assert caught.value.code == "engine_stopped"
    returncode, stderr, took = served.end(since)
    assert (returncode, stderr) == (0, "")
    assert took < within(3.0)


def test_a_rank_that_dies_while_requests_end_after_sigterm_is_still_a_failure(start: Callable[..., Served]) -> None:
    served = start().wait_ready()
    rank = served.ranks()[0]
    with served.client() as client:
        stream = client.completions.create(model=MODEL, prompt=[1], stream=True, **LONG)
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not can_connect(served.port))
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
    returncode, stderr, _ = served.end()
    assert returncode == 1
    assert stderr.startswith(f"mpexec: WorkerDiedError: rank 0 (pid {rank})")


def test_a_second_signal_ends_it_at_once(start: Callable[..., Served]) -> None:
    served = start().wait_ready()
    ranks = served.ranks()
    with served.client() as client:
        stream = client.completions.create(model=MODEL, prompt=[1], stream=True, **LONG)
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not can_connect(served.port))
        since = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        returncode, stderr, took = served.end(since)
        assert (returncode, stderr) == (143, "")
        assert took < within(1.0)
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    assert not left_of(ranks, within(2.0))


def test_a_signal_while_the_model_loads_ends_it_within_a_second(start: Callable[..., Served]) -> None:
    served = start(command=COMMAND)
    driver = psutil.Process(served.process.pid)
    wait_until(lambda: len(driver.children(recursive=True)) >= 2)
    ranks = [child.pid for child in driver.children(recursive=True)]
    since = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    returncode, stderr, took = served.end(since)
    assert (returncode, stderr) == (143, "")
    assert took < within(1.0)
    assert not left_of(ranks, within(2.0))


def test_a_port_that_is_taken_is_one_line_before_anything_is_loaded(
    server: Served, start: Callable[..., Served]
) -> None:
    second = subprocess.run(
        [*COMMAND, "--port", str(server.port)], capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 2
    (line,) = second.stderr.splitlines()
    assert line.startswith(f"mpexec: cannot serve on 127.0.0.1:{server.port}: Address already in use")
    assert "--port" in line


def test_a_server_can_follow_another_on_its_port_at_once(start: Callable[..., Served]) -> None:
    first = start().wait_ready()
    assert first.get("/health")[0] == 200
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 0
    second = start("--port", str(first.port)).wait_ready()
    assert second.port == first.port


@pytest.mark.parametrize(
    "args, words",
    [
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--tp", "3"], "3 ranks"),
        (["--host", "256.1.1.1"], "256.1.1.1"),
        (["--max-length", "5000"], "5000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(start: Callable[..., Served], args: list[str], words: str) -> None:
    returncode, stderr, _ = start(*args, command=COMMAND).end()
    assert returncode == 2
    (line,) = stderr.splitlines()
    assert line.startswith("mpexec: ")
    assert words in line


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        COMMAND, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("pip install 'mpexec[serve]'")


def test_the_program_in_the_documentation_runs(server: Served, tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    script = tmp_path / "program.py"
    script.write_text(program.replace("http://127.0.0.1:8000", server.url))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 20


def test_help_lists_the_routes_and_does_without_a_web_server() -> None:
    code = (
        "import sys; from mpexec.cli import main; main(['--help']); main(['serve', '--help'])\n"
        "heavy = {'starlette', 'uvicorn', 'prometheus_client', 'jinja2', 'torch', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "/v1/completions" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
