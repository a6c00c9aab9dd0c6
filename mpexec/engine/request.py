"""Requests on their way in and responses on their way out, between the callers and the loop of one engine.

The shape (requests by type, a response type per event, one error type for "the engine has stopped") follows lmdeploy's
request manager. What differs: a stop reaches every caller by event, with the root cause as an object.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import count
from typing import Any, Literal

from mpexec.agent.steps import TokenLogprobs
from mpexec.config import check_flags
from mpexec.engine.sampling_params import SamplingParams
from mpexec.engine.tokenizer import TextStream
from mpexec.errors import ConfigError, EngineStoppedError, WrongStateError

FinishReason = Literal["stop", "length", "cancel"]
MAX_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class Generation:
    """The data of a GENERATE request.

    Attributes:
        prompt_token_ids: Checked already.
        params: How to continue it.
        text: Makes the answer's text, which may end it; None for token ids only.
        priority: Lower ones start first; from -1000 to 1000.
        wait: Where the queue is full, wait all the same instead of being refused.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    text: TextStream | None = None
    priority: int = 0
    wait: bool = False

    def __post_init__(self) -> None:
        check_flags(wait=self.wait)
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise ConfigError(
                f"priority={self.priority!r}: use an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}; lower starts first"
            )


class RequestType(IntEnum):
    """What a caller wants. Of the requests that wait, lower values are taken first; within a type, the oldest."""

    CANCEL = 0
    GENERATE = 1


class ResponseType(Enum):
    """What has happened to a request. All but SUCCESS end it."""

    SUCCESS = "success"  # tokens; more will follow
    FINISH = "finish"  # the last tokens, with the reason
    CANCEL = "cancel"  # the caller gave up
    QUEUE_FULL = "queue_full"  # refused: too many requests wait
    INPUT_ERROR = "input_error"  # refused: this request can never run
    ENGINE_STOP_ERROR = "engine_stop_error"  # the engine failed or was stopped


@dataclass(frozen=True, slots=True)
class Response:
    """News of one request.

    Attributes:
        token_ids: New tokens since the response before.
        text: The text that has become certain since then; empty for a request without text.
        logprobs: One for each token, or None if they were not asked for.
        finish_reason: "stop" (a token that ends the text), "length" (a limit) or "cancel"; None while it goes on.
        error: Why it was refused; for ENGINE_STOP_ERROR the root cause, an `EngineStoppedError` after a plain stop.
    """

    type: ResponseType
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def is_last(self) -> bool:
        """True if no other response follows."""
        return self.type is not ResponseType.SUCCESS

    def after(self, earlier: Response | None) -> Response:
        """This response with the tokens of an earlier one, that nobody has read, in front."""
        if earlier is None:
            return self
        return Response(
            self.type,
            earlier.token_ids + self.token_ids,
            self.finish_reason,
            self.error,
            earlier.text + self.text,
            self.logprobs if earlier.logprobs is None else earlier.logprobs + (self.logprobs or ()),
        )

    def to_exception(self) -> BaseException | None:
        """A new exception for the caller; None for tokens.

        A stopped engine gives an `EngineStoppedError` of the caller's own, with `__cause__` the root cause, so that
        many callers can raise it without writing into each other's traceback.
        """
        if self.type is not ResponseType.ENGINE_STOP_ERROR:
            return self.error
        if self.error is None or isinstance(self.error, EngineStoppedError):
            return EngineStoppedError(str(self.error or "the engine was stopped"))
        stopped = EngineStoppedError(f"the engine has stopped after {type(self.error).__name__}: {self.error}")
        stopped.__cause__ = self.error
        return stopped


@dataclass(slots=True, eq=False)
class Request:
    """One request and the mailbox of its caller. Made by `RequestManager.post_request`."""

    request_id: int
    type: RequestType
    data: Any
    ended: bool = False
    _unread: Response | None = None
    _waker: asyncio.Future[None] | None = field(default=None, repr=False)

    def put(self, response: Response) -> None:
        """Hand over a response; nothing follows the last one.

        Tokens that the caller has not read yet are joined into one response, so a slow reader holds back nobody, and
        its mailbox holds at most one answer's tokens.
        """
        if self.ended:
            return
        self.ended = response.is_last
        self._unread = response.after(self._unread)
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def receive_async(self) -> Response:
        """Wait for the next response. For one reader at a time; the last response can be read again and again."""
        while self._unread is None:
            self._waker = asyncio.get_running_loop().create_future()
            try:
                await self._waker
            finally:
                self._waker = None
        response = self._unread
        self._unread = Response(response.type, (), response.finish_reason, response.error) if response.is_last else None
        return response


class RequestManager:
    """The requests of one engine that have not been answered to the end.

    It belongs to the event loop on which `open` was called. A manager that is not open answers every request at once.
    """

    def __init__(self) -> None:
        self._ids = count(1)
        self._waiting: dict[RequestType, deque[Request]] = {kind: deque() for kind in sorted(RequestType)}
        self._pending: dict[int, Request] = {}
        self._arrived = asyncio.Event()
        self._turned = asyncio.Event()  # of the state that `accepting` tells
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Response | None = None

    @property
    def accepting(self) -> bool:
        """True between `open` and `close`."""
        return self._loop is not None and self._end is None

    @property
    def stop_response(self) -> Response | None:
        """What every request is answered with since `close`; None while open, or when it never was."""
        return self._end

    @property
    def pending(self) -> int:
        """Number of requests whose last response has not been sent."""
        return len(self._pending)

    def open(self) -> None:
        """Accept requests on the running loop; also after a `close`."""
        self._loop = asyncio.get_running_loop()
        self._end = None
        self._arrived = asyncio.Event()
        self._turn()

    def _turn(self) -> None:
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    async def opened_async(self) -> None:
        """Wait until requests are accepted."""
        while not self.accepting:
            await self._turned.wait()

    async def closed_async(self) -> Response:
        """Wait for the next `close`, at once after one; gives what every request is answered with since."""
        while self._end is None:
            await self._turned.wait()
        return self._end

    def close(self, cause: BaseException | None) -> None:
        """Answer every pending and every later request with ENGINE_STOP_ERROR. The first call decides the cause.

        Args:
            cause: The root cause, or None for a plain stop.
        """
        if not self.accepting:
            return
        error = cause or EngineStoppedError("the engine was stopped")
        self._end = Response(ResponseType.ENGINE_STOP_ERROR, error=error)
        self._turn()
        for queue in self._waiting.values():
            queue.clear()
        for request in list(self._pending.values()):
            self.post_response(request, self._end)

    def post_request(self, kind: RequestType, data: Any = None) -> Request:
        """Queue a request and return it at once; `receive_async` of the request waits for the responses.

        Raises:
            WrongStateError: The engine was never started, or runs on another event loop.
        """
        request = Request(next(self._ids), kind, data)
        if self._end is not None:
            request.put(self._end)
            return request
        self._check_loop()
        self._pending[request.request_id] = request
        self._queue(request)
        return request

    def _queue(self, request: Request) -> None:
        self._waiting[request.type].append(request)
        self._arrived.set()

    def post_cancel(self, request: Request) -> None:
        """Tell the loop that nobody waits for this request any more; without effect once it has ended."""
        if request.ended or not self.accepting:
            return
        self.post_response(request, Response(ResponseType.CANCEL, finish_reason="cancel"))
        waiting = self._waiting[request.type]
        if request in waiting:
            waiting.remove(request)
        else:
            self._queue(Request(next(self._ids), RequestType.CANCEL, request.request_id))

    def post_response(self, request: Request, response: Response) -> None:
        """Hand a response to the caller of `request`."""
        request.put(response)
        if request.ended:
            self._pending.pop(request.request_id, None)

    def find(self, request_id: int) -> Request | None:
        """The pending request with this id."""
        return self._pending.get(request_id)

    async def take_async(self) -> list[Request]:
        """Wait until requests have arrived; take all of them, by type, then by age."""
        await self._arrived.wait()
        self._arrived.clear()
        return list(self._drain())

    def _drain(self) -> Iterable[Request]:
        for queue in self._waiting.values():
            while queue:
                yield queue.popleft()

    def _check_loop(self) -> None:
        if self._loop is None:
            raise WrongStateError("the engine has not been started: use `async with engine`", state="new")
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self._loop:
            raise WrongStateError(
                f"the engine runs on {self._loop!r}, this request comes from {running!r}: send requests on the "
                "engine's loop, or stop the engine and start it on this one",
                state="running",
            )
