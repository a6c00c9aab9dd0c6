"""The client of the RPC: one DEALER, and calls that all end: with a value, an error, a deadline or the connection.

What the client holds of the promises (the server's half is in `rpc_server`): a call or stream that nobody waits for any
more is cancelled on the server, and counted until the server has acknowledged that. A stream gives credit as its items
are taken. A value that cannot be rebuilt here fails its own call. Once the server has failed, closed or died, every
call and stream ends, each with an error of its own, and nothing more is sent. What is asked in one turn of the loop
travels in one frame, or in several where one would be large.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import zmq

from mpexec.deadline import Deadline
from mpexec.errors import ConfigError, ConnectionLostError, SerializationError, WrongStateError
from mpexec.mp_engine.frames import (
    CANCELLED,
    CLOSED,
    FAILED,
    ITEM,
    MAX_CREDIT,
    MAX_FRAME_BYTES,
    MAX_METHOD,
    NEWS,
    REPLY,
    WELCOME,
    Call,
    Cancel,
    Hello,
    More,
    Request,
    box_error,
    decode_items,
    encode_arguments,
    encode_requests,
    load_value,
    timed_out,
    unbox_error,
)
from mpexec.mp_engine.sockets import ClientKeys, SocketSet, check_address, use_client_keys
from mpexec.tasks import TaskOwner, TaskSet

logger = logging.getLogger(__name__)

_FRAME_BYTES = 1 << 20  # of requests that travel together
_REQUEST_BYTES = 64  # at most, without texts
_MOST_ARGUMENTS = MAX_FRAME_BYTES - 2 * _FRAME_BYTES  # what travels with them has room
_DEFAULT_CREDIT = 64


class _ClientCall:
    """One call or stream that a client waits for."""

    __slots__ = ("_error", "_waker", "items", "method", "over")

    def __init__(self, method: str) -> None:
        self.method = method
        self.items: deque[Any] = deque()
        self.over = False
        self._error: BaseException | None = None
        self._waker: asyncio.Future[None] | None = None

    def add(self, value: Any) -> None:
        self.items.append(value)
        self._wake()

    def finish(self, error: BaseException | None) -> None:
        if not self.over:
            self.over, self._error = True, error
            self._wake()

    def raise_error(self) -> None:
        """Raise what it failed with, if it did; nothing keeps the error, whose traceback keeps all of its callers."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def change(self) -> None:
        """Wait for items, or the end."""
        self._waker = asyncio.get_running_loop().create_future()
        try:
            await self._waker
        finally:
            self._waker = None


class AsyncRPCClient(TaskOwner):
    """Calls a server's methods from the event loop on which it is started.

    `wait_tasks` raises when the server has failed or is gone, and returns after `stop`.

    Args:
        address: The server's.
        keys: For TCP.
        connect_timeout: Seconds for the server to answer the first frame.

    Attributes:
        on_news: Called with whatever the server publishes; what it raises is logged.
        late: Answers to calls that nobody waited for any more.
        unacknowledged: Cancellations that the server has not acknowledged yet.
    """

    def __init__(self, address: str, *, keys: ClientKeys | None = None, connect_timeout: float = 5.0) -> None:
        super().__init__()
        check_address(address, keys)
        self.address = address
        self._keys = keys
        self._connect_timeout = connect_timeout
        self._calls: dict[int, _ClientCall] = {}
        self._cancelling: set[int] = set()
        self._last_id = 0
        self._outgoing: list[Request] = []
        self._outgoing_bytes = 0
        self._sockets = SocketSet()
        self._ended: BaseException | None = None
        self.on_news: Callable[[Any], None] | None = None
        self.late = 0
        self._waits_since: float | None = None  # monotonic seconds

    @property
    def silence(self) -> float | None:
        """Seconds for which the server has let something wait for an answer, and has said nothing at all.

        None while nothing waits. May be read from any thread.
        """
        since = self._waits_since
        return None if since is None else time.monotonic() - since

    @property
    def unacknowledged(self) -> int:
        """Cancellations that the server has not acknowledged yet."""
        return len(self._cancelling)

    # -- life ------------------------------------------------------------------------------------------------------

    def _open(self, tasks: TaskSet) -> None:
        self._forget_closed_loop()
        with self._sockets.opening(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.SNDHWM, 0)
            dealer.setsockopt(zmq.RCVHWM, 0)  # credit bounds it
            if self._keys is not None:
                use_client_keys(dealer, self._keys)
            try:
                dealer.connect(self.address)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot connect to {self.address!r}: {error}") from error
        self._dealer = self._sockets.watch(dealer, self._on_message, self._on_disconnected)
        self._welcome = asyncio.Event()
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks.start(self._until_ended(), name="receive")
        self._send(Hello())

    def release(self) -> None:
        """Close at once what a loop has left behind that ended before `stop`. Works in any state, twice."""
        if self._loop is not None and not self._loop.is_closed():
            self._end(WrongStateError("the client was released", state="released"))
        self._forget_closed_loop()

    def _forget_closed_loop(self) -> None:
        """Whatever a loop left behind that was closed before `stop`."""
        self._close_sockets()
        self._calls.clear()
        self._ended = None
        self._sockets.end()

    def _close_sockets(self) -> None:
        """Close without last words: the server learns from the closed connection that nobody waits any more."""
        self._sockets.close()
        self._outgoing, self._outgoing_bytes = [], 0
        self._cancelling.clear()
        self._waits_since = None

    async def start_async(self) -> None:
        """Connect.

        Raises:
            ConnectionLostError: Nobody answers at the address, or it does not accept our keys.
        """
        self.start()
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self._welcome.wait()
        except TimeoutError:
            await self.stop_async()
            raise ConnectionLostError(
                f"no engine answers at {self.address!r} within {self._connect_timeout:g} s"
            ) from None
        except BaseException:
            await self.stop_async()
            raise
        if self._ended is not None:
            await self.stop_async()
            raise self._ended

    async def _until_ended(self) -> None:
        await self._news

    async def _close(self) -> None:
        self._end(WrongStateError("the client was stopped", state="stopped"))
        await self._sockets.end_async()

    def _end(self, error: BaseException) -> None:
        """Every call ends with an error like this one: callers must not write into each other's traceback."""
        if self._ended is not None:
            return
        self._ended = error
        self._welcome.set()
        box = box_error(error)
        for call in self._calls.values():
            call.finish(unbox_error(box))
        self._calls.clear()
        self._close_sockets()  # nothing is to reach a server that comes after this one
        if not self._news.done():
            self._news.set_exception(error)
            self._news.exception()  # whoever waits gets it; whoever does not need not hear of it again

    def _on_disconnected(self) -> None:
        while self._dealer.read():  # its last words may say why
            pass
        self._end(ConnectionLostError(f"the connection to the engine at {self.address!r} was lost"))

    # -- calls -------------------------------------------------------------------------------------------------------

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a function or coroutine of the server and wait for its value.

        Cancelling the await cancels the server's task.

        Args:
            method: Its registered name.
            args: Plain data, or dataclasses of it.
            timeout: Seconds, on both sides.
            kwargs: As `args`.

        Raises:
            RPCTimeoutError: The deadline passed.
            ConnectionLostError: The server is gone.
            SerializationError: An argument is not plain data; or the value cannot be pickled there, or rebuilt here.
            Exception: What the method raised, as itself.
        """
        deadline = Deadline.after(timeout)
        call_id, call = self._open_call(method, args, kwargs, timeout, None)
        try:
            async with asyncio.timeout(deadline.remaining()):
                while not call.over:
                    await call.change()
        except TimeoutError:
            raise timed_out(method, timeout) from None
        finally:
            self._leave(call_id, call)
        call.raise_error()
        return call.items[0]

    async def stream(
        self, method: str, *args: Any, credit: int = _DEFAULT_CREDIT, timeout: float | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Call an async generator of the server and pass its items on, each once and in order.

        The call begins at the first iteration. Closing the generator, or leaving it to the collector, ends the
        server's.

        Args:
            method: Its registered name.
            args: As for `call`.
            credit: Items that may be under way before this side has taken them.
            timeout: Seconds for the whole stream.
            kwargs: As `args`.

        Raises:
            RPCTimeoutError: The deadline passed.
            ConnectionLostError: The server is gone.
            SerializationError: An item cannot be pickled there, or rebuilt here.
            Exception: What the generator raised, as itself.
        """
        deadline = Deadline.after(timeout)
        if not isinstance(credit, int) or not 1 <= credit <= MAX_CREDIT:
            raise ConfigError(f"credit={credit!r}: use an integer from 1 to {MAX_CREDIT}")
        call_id, call = self._open_call(method, args, kwargs, timeout, credit)
        items, taken, batch = call.items, 0, max(1, credit // 2)
        try:
            while True:
                while items:
                    taken += 1
                    if taken >= batch and not call.over:
                        self._send(More(call_id, taken))
                        taken = 0
                    yield items.popleft()
                if call.over:
                    break
                try:
                    async with asyncio.timeout(deadline.remaining()):
                        await call.change()
                except TimeoutError:
                    raise timed_out(method, timeout) from None
        finally:
            self._leave(call_id, call)
        call.raise_error()

    def _open_call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None, credit: int | None
    ) -> tuple[int, _ClientCall]:
        if not self.running or self._sockets.ended:
            raise WrongStateError("the client has not been started: use `async with client`", state="new")
        if asyncio.get_running_loop() is not self._loop:
            raise WrongStateError(f"the client was started on {self._loop!r}: call from there", state="running")
        if self._ended is not None:
            raise unbox_error(box_error(self._ended))
        if len(method) > MAX_METHOD or not method.isprintable():  # it could not be sent
            raise AttributeError(f"the server has no method {method!r}")
        arguments = encode_arguments(args, kwargs)
        if len(arguments) > _MOST_ARGUMENTS:
            raise SerializationError(
                f"the arguments of {method!r} have {len(arguments)} bytes; at most {_MOST_ARGUMENTS} can go"
            )
        call_id = self._last_id = self._last_id + 1
        call = self._calls[call_id] = _ClientCall(method)
        size = len(arguments) + 4 * len(method) + _REQUEST_BYTES
        endless = Deadline.after(timeout).at_ns is None
        self._send(Call(call_id, method, arguments, None if endless else timeout, credit), size)
        return call_id, call

    def _leave(self, call_id: int, call: _ClientCall) -> None:
        """Nobody waits for this call any more; one that still runs is cancelled on the server."""
        if self._calls.pop(call_id, None) is not None and not call.over:
            self._cancel(call_id)

    def _cancel(self, call_id: int) -> None:
        self._cancelling.add(call_id)
        self._send(Cancel(call_id))

    def _send(self, request: Request, size: int = _REQUEST_BYTES) -> None:
        """Send with whatever else is sent in this turn of the loop."""
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        if self._outgoing_bytes + size > _FRAME_BYTES:
            self._flush()
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(request)
        self._outgoing_bytes += size

    def _flush(self) -> None:
        requests, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
        if requests:
            self._dealer.send([encode_requests(requests)])

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _on_message(self, parts: list[bytes]) -> None:
        if parts[-1]:  # else the server wanted to know whether we are there
            for kind, call_id, payload in decode_items(parts[-1]):
                self._take(kind, call_id, payload)
        # A call that was given up waits, too: callers that are less patient than the judge must not hide the silence.
        self._waits_since = time.monotonic() if self._calls or self._cancelling else None

    def _take(self, kind: int, call_id: int, payload: bytes) -> None:
        if kind == WELCOME:
            self._welcome.set()
        elif kind == NEWS:
            self._hear(payload)
        elif kind == CLOSED:
            self._end(_farewell(payload))
        elif kind == FAILED and not call_id:  # whatever else was in that frame will never be answered
            refusal = ConnectionLostError("the server refused a frame")
            refusal.__cause__ = unbox_error(load_value(payload))
            self._end(refusal)
        elif kind == CANCELLED:
            self._cancelling.discard(call_id)
        elif call_id not in self._calls:
            self.late += 1
        elif kind == ITEM:
            self._take_value(call_id, payload, last=False)
        elif kind == REPLY:
            self._take_value(call_id, payload, last=True)
        else:
            self._calls.pop(call_id).finish(unbox_error(load_value(payload)) if kind == FAILED else None)

    def _take_value(self, call_id: int, payload: bytes, *, last: bool) -> None:
        """Hand a value to its call; one that cannot be rebuilt here fails this call, and ends it on the server."""
        call = self._calls[call_id]
        error: SerializationError | None = None
        try:
            call.add(load_value(payload))
        except Exception as failed:  # its class may be missing here, or raise anything
            error = SerializationError(f"a value of {call.method!r} cannot be rebuilt here: {failed!r}")
            error.__cause__ = failed
            if not last:
                self._cancel(call_id)
        if last or error is not None:
            del self._calls[call_id]
            call.finish(error)

    def _hear(self, payload: bytes) -> None:
        if self.on_news is not None:
            try:
                self.on_news(load_value(payload))
            except Exception:  # what comes after it in this frame is for others
                logger.exception("news of the server could not be told")


def _farewell(payload: bytes) -> ConnectionLostError:
    """What a server's last words mean for its clients: the cause is that of its end, none after an orderly one."""
    if not payload:
        return ConnectionLostError("the server has closed")
    box = load_value(payload)
    error = ConnectionLostError(f"the server has closed after {box.type_name}: {box.text}")
    error.__cause__ = unbox_error(box)
    return error
