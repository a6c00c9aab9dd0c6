"""RPC over one ROUTER and its DEALERs: calls, streams with credit, cancellation, and failures that reach everybody.

Whatever becomes ready in one turn of the loop travels in one frame. Every call of a client is a task that the server
holds until it has ended, and nothing is sent of it afterwards. A stream sends as many items as its client has given it
credit for, then waits: a slow reader holds its generator back, nothing is joined or dropped, no queue grows.

A client that dies is noticed when its connection closes: libzmq tells that a connection was lost, though not whose,
so the server then sends every client an empty frame, which for one that has gone is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, get_type_hints

import msgspec
import zmq

from mpexec.deadline import Deadline
from mpexec.errors import (
    ConfigError,
    ConnectionLostError,
    MpexecError,
    RPCTimeoutError,
    SerializationError,
    TransportError,
    WrongStateError,
)
from mpexec.executor.threads import in_thread
from mpexec.messages import unpicklable
from mpexec.mp_engine.frames import (
    CANCELLED,
    CLOSED,
    END,
    FAILED,
    ITEM,
    NEWS,
    REPLY,
    WELCOME,
    BoxedError,
    Call,
    Cancel,
    Hello,
    Item,
    More,
    Request,
    box_error,
    decode_requests,
    encode_requests,
    unbox_error,
)
from mpexec.mp_engine.sockets import (
    ClientKeys,
    LoopSocket,
    ServerKeys,
    check_address,
    use_client_keys,
    use_server_keys,
    watch_disconnections,
)
from mpexec.tasks import TaskOwner, cancel_async_tasks
from mpexec.transport.frame import dumps

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
_HARD_LIMIT = 2 * MAX_FRAME_BYTES  # above it, libzmq itself drops the connection
_LAST_WORDS_MS = 500  # for what has been sent to reach the clients when the server closes
_PROBE_AGAIN_S = (0.05, 0.3)  # after a lost connection: libzmq may tell of it before it refuses to send there
_MAX_CALLS = 10_000  # of one client at once
_DEFAULT_CREDIT = 64


class _Method:
    """A registered function and the types of its parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_stream = inspect.isasyncgenfunction(function)
        self._signature = inspect.signature(function)
        self._hints = get_type_hints(function)

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call it with arguments turned into what its annotations say.

        Raises:
            ConfigError: They do not fit.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                if name in self._hints:
                    bound.arguments[name] = msgspec.convert(value, self._hints[name])
        except (TypeError, msgspec.ValidationError) as error:
            if isinstance(error.__cause__, MpexecError):  # a dataclass's own check, for example of a temperature
                raise error.__cause__ from None
            raise ConfigError(f"{self.function.__name__}: {error}") from error
        return self.function(*bound.args, **bound.kwargs)


class _ServerCall:
    """One call or stream that runs on the server."""

    __slots__ = ("cancelled", "credit", "id", "room", "task")

    def __init__(self, call_id: int, credit: int) -> None:
        self.id = call_id
        self.credit = credit
        self.room = asyncio.Event()
        self.cancelled = False
        self.task: asyncio.Task[None] | None = None


class _Peer:
    """A client as the server sees it."""

    __slots__ = ("calls", "identity", "outgoing")

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.calls: dict[int, _ServerCall] = {}
        self.outgoing: list[Item] = []


class AsyncRPCServer(TaskOwner):
    """Serves registered functions on the event loop on which it is started.

    `wait_tasks` raises what a method raised that is no `Exception`: `SystemExit` is passed on, not swallowed.

    Args:
        address: "ipc:///path" in a folder of the user's own, or "tcp://host:port" with keys.
        keys: For TCP.

    Attributes:
        refused: Frames that were malformed, oversized or foreign; counted, answered where possible, dropped.
    """

    def __init__(self, address: str, *, keys: ServerKeys | None = None) -> None:
        super().__init__()
        check_address(address, keys)
        self._wanted_address = address
        self._keys = keys
        self._methods: dict[str, _Method] = {}
        self._peers: dict[bytes, _Peer] = {}
        self._sockets: list[LoopSocket] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._flush_planned = False
        self.address = ""
        self.refused = 0

    def register(self, name: str, function: Callable[..., Any]) -> None:
        """Let clients call `function`: a plain function, a coroutine function or an async generator function.

        Arguments arrive as what its annotations say, dataclasses too; what does not fit is a `ConfigError` for the
        caller. Values and errors are pickled.
        """
        self._methods[name] = _Method(function)

    @property
    def open_calls(self) -> int:
        """Calls and streams that run now, of all clients."""
        return sum(len(peer.calls) for peer in self._peers.values())

    # -- life ------------------------------------------------------------------------------------------------------

    def _open(self, tasks: Any) -> None:
        self._context = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.SNDHWM, 0)  # credit bounds what a client can be owed
            router.setsockopt(zmq.MAXMSGSIZE, _HARD_LIMIT)
            if self._keys is not None:
                self._sockets.append(use_server_keys(self._context, router, self._keys))
            try:
                router.bind(self._wanted_address)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot listen at {self._wanted_address!r}: {error}") from error
            self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            router.close(0)
            self._close_sockets()
            self._context.term()
            raise
        self._router = LoopSocket(router, self._on_message)
        self._sockets += [watch_disconnections(router, self._on_lost_connection), self._router]
        tasks.start(self._until_fatal(), name="serve")

    async def _until_fatal(self) -> None:
        await self._fatal

    async def _close(self) -> None:
        await self._end_calls()
        self.say_closed(None)
        self._close_sockets()
        context, self._context = self._context, None
        if context is not None:  # waits for the last words, as long as the router lingers
            await in_thread(context.term, name="mpexec-rpc-close")

    async def _end_calls(self) -> None:
        tasks = [call.task for peer in self._peers.values() for call in peer.calls.values() if call.task is not None]
        await cancel_async_tasks(tasks)

    def say_closed(self, error: BaseException | None) -> None:
        """Tell every client that nothing more will come; the first call counts for them."""
        box = None if error is None else box_error(error)
        for peer in list(self._peers.values()):
            self._put(peer, (CLOSED, 0, box))
        self._flush()

    def publish(self, news: Any) -> None:
        """Send something that nobody has asked for to every client."""
        for peer in list(self._peers.values()):
            self._put(peer, (NEWS, 0, news))

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(_LAST_WORDS_MS)
        self._sockets.clear()
        self._peers.clear()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _on_message(self, parts: list[bytes]) -> None:
        identity = parts[0]
        try:
            if len(parts) != 2:
                raise TransportError(f"a message of {len(parts)} parts; there must be an identity and a frame")
            if len(parts[1]) > MAX_FRAME_BYTES:
                raise TransportError(f"a frame of {len(parts[1])} bytes; at most {MAX_FRAME_BYTES} are taken")
            requests = decode_requests(parts[1])
        except (MpexecError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._refuse(identity, error)
            return
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._peers[identity] = _Peer(identity)
        for request in requests:
            self._take(peer, request)

    def _refuse(self, identity: bytes, error: Exception) -> None:
        self.refused += 1
        logger.warning("a frame was refused: %s", error)
        refusal = TransportError(f"the frame was refused: {error}")
        self._flush_peer(self._peers.get(identity) or _Peer(identity), [(FAILED, 0, box_error(refusal))])

    def _take(self, peer: _Peer, request: Request) -> None:
        if isinstance(request, Call):
            self._start_call(peer, request)
        elif isinstance(request, More):
            call = peer.calls.get(request.id)
            if call is not None:
                call.credit += request.count
                call.room.set()
        elif isinstance(request, Cancel):
            call = peer.calls.get(request.id)
            if call is None or call.task is None:
                self._put(peer, (CANCELLED, request.id, None))  # it had ended by itself
            else:
                call.cancelled = True
                call.task.cancel()
        else:
            self._put(peer, (WELCOME, 0, None))

    def _start_call(self, peer: _Peer, request: Call) -> None:
        try:
            method = self._methods.get(request.method)
            if method is None:
                raise AttributeError(f"the server has no method {request.method!r}")
            if request.id in peer.calls:
                raise TransportError(f"call {request.id} runs already")
            if len(peer.calls) >= _MAX_CALLS:
                raise WrongStateError(f"a client may have {_MAX_CALLS} calls in flight", state="full")
            if method.is_stream != (request.credit is not None):
                raise TypeError(f"{request.method!r} is {'a stream' if method.is_stream else 'no stream'}")
            work = method.bind(request.args, request.kwargs)
        except Exception as error:  # of the arguments, or of a plain function: it belongs to this call
            self._put(peer, (FAILED, request.id, box_error(error)))
            return
        if not (method.is_stream or inspect.isawaitable(work)):
            self._put(peer, (REPLY, request.id, work))
            return
        call = _ServerCall(request.id, request.credit or 0)
        peer.calls[request.id] = call
        body = self._run_stream(peer, call, work) if method.is_stream else self._run_call(call, work)
        call.task = asyncio.get_running_loop().create_task(
            self._bounded(peer, call, body, request), name=f"rpc {request.method} {request.id}"
        )

    async def _bounded(self, peer: _Peer, call: _ServerCall, body: Awaitable[Item], request: Call) -> None:
        """Run a call to its end, whatever that is; the client hears of it once, as the last thing of this call."""
        last: Item = (CANCELLED, call.id, None)
        try:
            async with asyncio.timeout(request.timeout) as limit:
                last = await body
        except asyncio.CancelledError:
            if not call.cancelled:  # by the method itself, or because the server stops
                last = (FAILED, call.id, box_error(asyncio.CancelledError(f"{request.method!r} was cancelled")))
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            told = _timed_out(request.method, request.timeout) if late else error
            last = (FAILED, call.id, box_error(told))
            if not isinstance(error, Exception) and not self._fatal.done():
                self._fatal.set_exception(error)
        finally:
            del peer.calls[call.id]
            self._put(peer, last)

    async def _run_call(self, call: _ServerCall, work: Awaitable[Any]) -> Item:
        return REPLY, call.id, await work

    async def _run_stream(self, peer: _Peer, call: _ServerCall, work: AsyncGenerator[Any, None]) -> Item:
        async with aclosing(work):
            async for item in work:
                self._put(peer, (ITEM, call.id, item))
                call.credit -= 1
                while call.credit <= 0:
                    call.room.clear()
                    await call.room.wait()
        return END, call.id, None

    # -- sending -----------------------------------------------------------------------------------------------------

    def _put(self, peer: _Peer, item: Item) -> None:
        peer.outgoing.append(item)
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        for peer in list(self._peers.values()):
            if peer.outgoing:
                items, peer.outgoing = peer.outgoing, []
                self._flush_peer(peer, items)

    def _flush_peer(self, peer: _Peer, items: list[Item]) -> None:
        try:
            payload = dumps(items)
        except Exception:  # one of them cannot be pickled: it fails its own call, the others travel
            payload = dumps([self._picklable(peer, item) for item in items])
        self._send(peer, payload)

    def _picklable(self, peer: _Peer, item: Item) -> Item:
        """The item, or the failure of its call where it cannot be pickled."""
        try:
            dumps(item)
        except Exception as error:
            call = peer.calls.get(item[1])
            if call is not None and call.task is not None:
                call.cancelled = True
                call.task.cancel()
            return FAILED, item[1], box_error(unpicklable(item[2], error, "a value for a client of the engine process"))
        return item

    def _send(self, peer: _Peer, payload: bytes) -> None:
        try:
            self._router.send([peer.identity, payload])
        except zmq.ZMQError as error:
            logger.debug("a client has gone: %s", error)
            self._drop(peer)

    def _on_lost_connection(self) -> None:
        loop = asyncio.get_running_loop()
        self._probe()
        for seconds in _PROBE_AGAIN_S:
            loop.call_later(seconds, self._probe)

    def _probe(self) -> None:
        """Find out which clients have gone: sending there is refused."""
        if self._context is not None:
            for peer in list(self._peers.values()):
                self._send(peer, b"")

    def _drop(self, peer: _Peer) -> None:
        """A client has gone: nobody waits for its calls any more."""
        self._peers.pop(peer.identity, None)
        peer.outgoing.clear()
        for call in list(peer.calls.values()):
            call.cancelled = True
            if call.task is not None:
                call.task.cancel()


class _ClientCall:
    """One call or stream that a client waits for."""

    __slots__ = ("error", "items", "over", "waker")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.over = False
        self.error: BaseException | None = None
        self.waker: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waker is not None and not self.waker.done():
            self.waker.set_result(None)

    def finish(self, error: BaseException | None) -> None:
        if not self.over:
            self.over, self.error = True, error
            self.wake()

    async def change(self) -> None:
        """Wait for items, or the end."""
        self.waker = asyncio.get_running_loop().create_future()
        try:
            await self.waker
        finally:
            self.waker = None


class AsyncRPCClient(TaskOwner):
    """Calls a server's methods from the event loop on which it is started.

    `wait_tasks` raises when the server has failed or is gone, and returns after `stop`.

    Args:
        address: The server's.
        keys: For TCP.
        connect_timeout: Seconds for the server to answer the first frame.

    Attributes:
        on_news: Called with whatever the server publishes.
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
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._ended: BaseException | None = None
        self.on_news: Callable[[Any], None] | None = None
        self.late = 0

    @property
    def unacknowledged(self) -> int:
        """Cancellations that the server has not acknowledged yet."""
        return len(self._cancelling)

    # -- life ------------------------------------------------------------------------------------------------------

    def _open(self, tasks: Any) -> None:
        self._context = zmq.Context()
        dealer = self._context.socket(zmq.DEALER)
        self._ended = None
        self._welcome = asyncio.Event()
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            dealer.setsockopt(zmq.SNDHWM, 0)
            dealer.setsockopt(zmq.RCVHWM, 0)  # credit bounds it
            if self._keys is not None:
                use_client_keys(dealer, self._keys)
            dealer.connect(self.address)
        except BaseException:
            dealer.close(0)
            self._context.term()
            raise
        self._monitor = watch_disconnections(dealer, self._on_disconnected)
        self._dealer = LoopSocket(dealer, self._on_message)
        tasks.start(self._until_ended(), name="receive")
        self._send(Hello())

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
        self._flush()
        self._monitor.close()
        self._dealer.close(_LAST_WORDS_MS if self._cancelling else 0)
        context, self._context = self._context, None
        if context is not None:
            await in_thread(context.term, name="mpexec-rpc-close")

    def release(self) -> None:
        """Close at once what a loop that has ended has left open. Works in any state, twice."""
        context, self._context = self._context, None
        if context is not None:
            self._monitor.close()
            self._dealer.close()
            context.term()

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
        if not self._news.done():
            self._news.set_exception(error)
            self._news.exception()  # whoever waits gets it; whoever does not need not hear of it again

    def _on_disconnected(self) -> None:
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
            Exception: What the method raised, as itself.
        """
        deadline = Deadline.after(timeout)
        call_id, call = self._open_call(method, args, kwargs, timeout, None)
        try:
            async with asyncio.timeout(deadline.remaining()):
                while not call.over:
                    await call.change()
        except TimeoutError:
            raise _timed_out(method, timeout) from None
        finally:
            self._leave(call_id, call)
        if call.error is not None:
            raise call.error
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
        """
        deadline = Deadline.after(timeout)
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
                    raise _timed_out(method, timeout) from None
        finally:
            self._leave(call_id, call)
        if call.error is not None:
            raise call.error

    def _open_call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None, credit: int | None
    ) -> tuple[int, _ClientCall]:
        if not self.running or self._context is None:
            raise WrongStateError("the client has not been started: use `async with client`", state="new")
        if self._ended is not None:
            raise unbox_error(box_error(self._ended))
        self._last_id += 1
        request = Call(self._last_id, method, list(args), kwargs, timeout, credit)
        size = len(encode_requests([request]))
        if size > MAX_FRAME_BYTES:
            raise SerializationError(f"the arguments of {method!r} have {size} bytes; at most {MAX_FRAME_BYTES} can go")
        call = self._calls[self._last_id] = _ClientCall()
        self._send(request)
        return self._last_id, call

    def _leave(self, call_id: int, call: _ClientCall) -> None:
        """Nobody waits for this call any more; one that still runs is cancelled on the server."""
        if self._calls.pop(call_id, None) is not None and not call.over:
            self._cancelling.add(call_id)
            self._send(Cancel(call_id))

    def _send(self, request: Request) -> None:
        """Send with whatever else is sent in this turn of the loop."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(request)

    def _flush(self) -> None:
        requests, self._outgoing = self._outgoing, []
        if self._context is None or not requests:
            return
        self._dealer.send([encode_requests(requests)])

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _on_message(self, parts: list[bytes]) -> None:
        if not parts[-1]:  # the server wanted to know whether we are there
            return
        for kind, call_id, value in pickle.loads(parts[-1]):
            self._take(kind, call_id, value)

    def _take(self, kind: int, call_id: int, value: Any) -> None:
        call = self._calls.get(call_id)
        if kind == WELCOME:
            self._welcome.set()
        elif kind == NEWS:
            if self.on_news is not None:
                self.on_news(value)
        elif kind == CLOSED:
            self._end(_farewell(value))
        elif call is None:
            self._late(kind, call_id, value)
        elif kind == ITEM:
            call.items.append(value)
            call.wake()
        else:
            if kind == REPLY:
                call.items.append(value)
            del self._calls[call_id]
            call.finish(unbox_error(value) if kind == FAILED else None)

    def _late(self, kind: int, call_id: int, value: Any) -> None:
        if kind == FAILED and not call_id:
            assert isinstance(value, BoxedError)
            logger.error("the server refused a frame of ours: %s", value.text)
            return
        if kind != ITEM and call_id in self._cancelling:
            self._cancelling.discard(call_id)
        else:
            self.late += 1


def _farewell(box: BoxedError | None) -> ConnectionLostError:
    """What a server's last words mean for its clients: the cause is that of its end, none after an orderly one."""
    if box is None:
        return ConnectionLostError("the server has closed")
    error = ConnectionLostError(f"the server has closed after {box.type_name}: {box.text}")
    error.__cause__ = unbox_error(box)
    return error


def _timed_out(method: str, timeout: float | None) -> RPCTimeoutError:
    return RPCTimeoutError(f"{method!r} was not done within {timeout} s", method=method)
