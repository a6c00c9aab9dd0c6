"""RPC over one ROUTER and its DEALERs: calls, streams with credit, cancellation, and failures that reach everybody.

Whatever becomes ready in one turn of the loop travels in one frame. Every call of a client is a task that the server
holds until it has ended, and nothing is sent of it afterwards. A stream sends as many items as its client has given it
credit for, then waits: a slow reader holds its generator back, nothing is joined or dropped, no queue grows.

A client that dies is noticed when its connection closes: libzmq tells that a connection was lost, though not whose,
so the server then sends every client an empty frame, which for one that has gone is refused. What such a client had
still sent is not begun: a client is greeted with an empty frame before its first request is looked at.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from types import GenericAlias
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
from mpexec.mp_engine.frames import (
    CANCELLED,
    CLOSED,
    END,
    FAILED,
    ITEM,
    MAX_CREDIT,
    MAX_METHOD,
    NEWS,
    REPLY,
    WELCOME,
    Call,
    Cancel,
    Hello,
    Item,
    More,
    Request,
    box_error,
    decode_arguments,
    decode_items,
    decode_requests,
    dump_value,
    encode_arguments,
    encode_items,
    encode_requests,
    load_value,
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
from mpexec.tasks import TaskOwner, TaskSet, cancel_async_tasks

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
_FRAME_BYTES = 1 << 20  # of requests that travel together
_REQUEST_BYTES = 64  # at most, without texts
_MOST_ARGUMENTS = MAX_FRAME_BYTES - 2 * _FRAME_BYTES  # what travels with them has room
_HARD_LIMIT = 2 * MAX_FRAME_BYTES  # above it, libzmq itself drops the connection
_LAST_WORDS_MS = 500  # for what has been sent to reach the clients when the server closes
_PROBE_AGAIN_S = (0.05, 0.3, 2.0)  # after a lost connection: libzmq may tell of it before it refuses to send there
_MAX_CALLS = 10_000  # of one client at once
_DEFAULT_CREDIT = 64
_ROW_ITEMS = 64  # that a stream sends in a row before the loop's other callbacks get their turn


class _Method:
    """A registered function and the types of its parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_stream = inspect.isasyncgenfunction(function)
        self._signature = inspect.signature(function)
        self._types = get_type_hints(function)
        for name, parameter in self._signature.parameters.items():  # these are annotated with the type of one
            if name in self._types and parameter.kind is parameter.VAR_POSITIONAL:
                self._types[name] = GenericAlias(tuple, (self._types[name], ...))
            elif name in self._types and parameter.kind is parameter.VAR_KEYWORD:
                self._types[name] = GenericAlias(dict, (str, self._types[name]))

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call it with arguments turned into what its annotations say.

        Raises:
            ConfigError: They do not fit.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                if name in self._types:
                    bound.arguments[name] = msgspec.convert(value, self._types[name])
        except (TypeError, msgspec.ValidationError) as error:
            if isinstance(error.__cause__, MpexecError):  # a dataclass's own check, for example of a temperature
                raise error.__cause__ from error.__cause__.__cause__
            raise ConfigError(f"{self.function.__name__}: {error}") from error
        return self.function(*bound.args, **bound.kwargs)


class _MethodExitedError(MpexecError):
    """A method raised what is no `Exception`. Inside a task it cannot travel as itself: it would end the loop."""

    leaving: BaseException


@contextmanager
def _exits_as_themselves() -> Iterator[None]:
    try:
        yield
    except _MethodExitedError as exited:
        raise exited.leaving from exited.leaving.__cause__


class _ServerCall:
    """One call or stream that runs on the server."""

    __slots__ = ("cancelled", "credit", "id", "limit", "peer", "room", "task")

    def __init__(self, peer: _Peer, call_id: int, credit: int) -> None:
        self.peer = peer
        self.id = call_id
        self.credit = credit
        self.room = asyncio.Event()
        self.cancelled = False  # by its client, or because that has gone
        self.limit: asyncio.Timeout | None = None  # while its work runs
        self.task: asyncio.Task[Item] | None = None

    def cancel(self) -> None:
        """Ask its task to end; once, so that its clean-up is not cut short, neither by nor after its deadline."""
        if self.cancelled or self.task is None:
            return
        self.cancelled = True
        if self.limit is not None:
            if self.limit.expired():
                return
            self.limit.reschedule(None)
        self.task.cancel()


class _Peer:
    """A client as the server sees it."""

    __slots__ = ("calls", "identity", "outgoing", "when_gone")

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.calls: dict[int, _ServerCall] = {}
        self.outgoing: list[Item] = []
        self.when_gone: list[Callable[[], None]] = []


_caller: ContextVar[_Peer] = ContextVar("caller")


def when_caller_goes(then: Callable[[], None]) -> None:
    """Within a method that a client has called: have `then` called should that client go."""
    _caller.get().when_gone.append(then)


class AsyncRPCServer(TaskOwner):
    """Serves registered functions on the event loop on which it is started.

    `wait_tasks` raises what a method raised that is no `Exception`: `SystemExit` is passed on, not swallowed.

    Args:
        address: "ipc:///path" in a folder of the user's own, or "tcp://host:port" with keys.
        keys: For TCP.

    Attributes:
        address: Where it listens, with the port that was found where none was given.
        refused: Frames and arguments that were malformed, oversized or foreign; counted, answered where possible,
            dropped.
    """

    def __init__(self, address: str, *, keys: ServerKeys | None = None) -> None:
        super().__init__()
        check_address(address, keys)
        self._wanted_address = address
        self._keys = keys
        self._methods: dict[str, _Method] = {}
        self._peers: dict[bytes, _Peer] = {}
        self._calls: set[_ServerCall] = set()  # also those of clients that have gone, until they have ended
        self._sockets: list[LoopSocket] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._flush_planned = False
        self._farewell: Item | None = None
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
        return len(self._calls)

    # -- life ------------------------------------------------------------------------------------------------------

    def _open(self, tasks: TaskSet) -> None:
        self._forget_closed_loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        try:
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.SNDHWM, 0)  # credit bounds what a client can be owed
            router.setsockopt(zmq.MAXMSGSIZE, _HARD_LIMIT)
            if self._keys is not None:
                self._sockets.append(use_server_keys(context, router, self._keys))
            try:
                router.bind(self._wanted_address)
                self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
                if self.address.startswith("ipc://"):
                    os.chmod(self.address.removeprefix("ipc://"), 0o600)  # whatever the umask and the folder are
            except (zmq.ZMQError, OSError) as error:
                raise ConfigError(f"cannot listen at {self._wanted_address!r}: {error}") from error
        except BaseException:
            router.close(0)
            self._close_sockets()
            context.term()
            raise
        self._context = context
        self._router = LoopSocket(router, self._on_message)
        self._sockets += [watch_disconnections(router, self._on_lost_connection), self._router]
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks.start(self._until_fatal(), name="serve")

    def _forget_closed_loop(self) -> None:
        """Whatever a loop left behind that was closed before `stop`."""
        self._close_sockets(linger_ms=0)
        self._calls.clear()
        self._flush_planned, self._farewell = False, None
        if self._context is not None:
            self._context.term()

    async def _until_fatal(self) -> None:
        await self._fatal

    async def wait_tasks(self) -> None:
        """Wait until the server fails, and raise its error; return only after `stop`.

        Raises:
            BaseException: What a method raised that is no `Exception`.
        """
        with _exits_as_themselves():
            await super().wait_tasks()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with _exits_as_themselves():
            await super().__aexit__(kind, error, trace)

    async def _close(self) -> None:
        self.say_closed(None)
        try:
            await cancel_async_tasks([call.task for call in self._calls if call.task is not None])
        finally:
            self._close_sockets()
            context, self._context = self._context, None
            if context is not None:  # waits for the last words, as long as the router lingers
                await in_thread(context.term, name="mpexec-rpc-close")

    def say_closed(self, error: BaseException | None) -> None:
        """Tell every client, also one that comes later, that nothing more will come; the first call counts."""
        if self._farewell is None:
            self._farewell = (CLOSED, 0, b"" if error is None else dump_value(box_error(error)))
            for peer in self._peers.values():
                self._put(peer, self._farewell)
            self._flush()

    def publish(self, news: Any) -> None:
        """Send something that nobody has asked for to every client.

        Raises:
            SerializationError: It cannot be pickled.
        """
        item = NEWS, 0, dump_value(news)
        for peer in self._peers.values():
            self._put(peer, item)

    def _close_sockets(self, linger_ms: int = _LAST_WORDS_MS) -> None:
        for socket in self._sockets:
            socket.close(linger_ms)
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
        except Exception as error:  # whatever the decoder makes of a stranger's bytes
            self._refuse(identity, error)
            return
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._peers[identity] = _Peer(identity)
            self._send(peer, b"")  # drops it if it has gone since: nobody would ever tell again
        if identity in self._peers:
            for request in requests:
                self._take(peer, request)

    def _refuse(self, identity: bytes, error: Exception) -> None:
        self.refused += 1
        logger.warning("a frame was refused: %s", error)
        peer = self._peers.get(identity) or _Peer(identity)
        for frame in encode_items([_failed(0, TransportError(f"the frame was refused: {error}"))]):
            self._send(peer, frame)

    def _take(self, peer: _Peer, request: Request) -> None:
        if isinstance(request, More):
            call = peer.calls.get(request.id)
            if call is not None:
                call.credit = min(call.credit + request.count, MAX_CREDIT)
                call.room.set()
        elif isinstance(request, Cancel):
            call = peer.calls.get(request.id)
            if call is not None:
                call.cancel()
            else:
                self._put(peer, (CANCELLED, request.id, b""))  # it had ended by itself
        elif self._farewell is not None:
            self._put(peer, self._farewell)
        elif isinstance(request, Call):
            self._start_call(peer, request)
        else:
            self._put(peer, (WELCOME, 0, b""))

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
            work = method.bind(*self._arguments(request))
            if not (method.is_stream or inspect.isawaitable(work)):
                self._put(peer, (REPLY, request.id, dump_value(work)))
                return
        except BaseException as error:  # of the arguments, or of a plain function: it belongs to this call
            self._put(peer, self._fail(request.id, error))
            return
        call = _ServerCall(peer, request.id, request.credit or 0)
        peer.calls[request.id] = call
        self._calls.add(call)
        call.task = asyncio.get_running_loop().create_task(
            self._run(call, work, request), name=f"rpc {request.method} {request.id}"
        )
        call.task.add_done_callback(lambda task: self._on_done(call, work, task))

    def _arguments(self, request: Call) -> tuple[list[Any], dict[str, Any]]:
        try:
            return decode_arguments(request.arguments)
        except Exception as error:  # whatever the decoder makes of a stranger's bytes
            self.refused += 1
            raise TransportError(f"the arguments of {request.method!r} were refused: {error}") from error

    async def _run(self, call: _ServerCall, work: Any, request: Call) -> Item:
        """Run a call to its end, whatever that is.

        Returns:
            The last that its client hears of it.
        """
        _caller.set(call.peer)  # the context is this task's own
        try:
            async with asyncio.timeout(request.timeout) as limit:
                call.limit = limit
                try:
                    if request.credit is None:
                        return REPLY, call.id, dump_value(await work)
                    await self._pump(call, work)
                    return END, call.id, b""
                finally:
                    call.limit = None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            return self._fail(call.id, _timed_out(request.method, request.timeout) if late else error)

    async def _pump(self, call: _ServerCall, work: AsyncGenerator[Any, None]) -> None:
        row = 0
        async with aclosing(work):
            async for item in work:
                self._put(call.peer, (ITEM, call.id, dump_value(item)))
                call.credit -= 1
                row += 1
                while call.credit <= 0:
                    row = 0
                    call.room.clear()
                    await call.room.wait()
                if row >= _ROW_ITEMS:
                    row = 0
                    await asyncio.sleep(0)

    def _on_done(self, call: _ServerCall, work: Any, task: asyncio.Task[Item]) -> None:
        self._calls.discard(call)
        call.peer.calls.pop(call.id, None)
        if inspect.iscoroutine(work):
            work.close()  # where it was cancelled before its first step
        if call.cancelled:  # the answer to a `Cancel`, whatever came of it
            self._put(call.peer, (CANCELLED, call.id, b""))
        elif task.cancelled():  # by the method itself, or because the server stops
            name = task.get_name()
            self._put(call.peer, _failed(call.id, asyncio.CancelledError(f"{name} was cancelled on the server")))
        else:
            self._put(call.peer, task.result())

    def _fail(self, call_id: int, error: BaseException) -> Item:
        """What the client of a failed call hears; an exit is told to the owner of the server, too."""
        exits = not isinstance(error, Exception | asyncio.CancelledError)
        if exits and not self._fatal.done():
            self._fatal.set_exception(_MethodExitedError(f"a method raised {error!r}", leaving=error))
            self._fatal.exception()  # whoever waits gets it; while the server stops nobody does
        return _failed(call_id, error)

    # -- sending -----------------------------------------------------------------------------------------------------

    def _put(self, peer: _Peer, item: Item) -> None:
        """Send with whatever else becomes ready in this turn of the loop."""
        peer.outgoing.append(item)
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        for peer in list(self._peers.values()):
            if peer.outgoing:
                items, peer.outgoing = peer.outgoing, []
                for frame in encode_items(items):
                    self._send(peer, frame)

    def _send(self, peer: _Peer, frame: bytes) -> None:
        try:
            self._router.send([peer.identity, frame])
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
        for peer in list(self._peers.values()):
            self._send(peer, b"")

    def _drop(self, peer: _Peer) -> None:
        """A client has gone: nobody waits for its calls any more."""
        self._peers.pop(peer.identity, None)
        peer.outgoing.clear()
        for call in list(peer.calls.values()):
            call.cancel()
        for then in peer.when_gone:
            then()


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
        self._sockets: list[LoopSocket] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._ended: BaseException | None = None
        self.on_news: Callable[[Any], None] | None = None
        self.late = 0

    @property
    def unacknowledged(self) -> int:
        """Cancellations that the server has not acknowledged yet."""
        return len(self._cancelling)

    # -- life ------------------------------------------------------------------------------------------------------

    def _open(self, tasks: TaskSet) -> None:
        self._forget_closed_loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.SNDHWM, 0)
            dealer.setsockopt(zmq.RCVHWM, 0)  # credit bounds it
            if self._keys is not None:
                use_client_keys(dealer, self._keys)
            try:
                dealer.connect(self.address)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot connect to {self.address!r}: {error}") from error
        except BaseException:
            dealer.close(0)
            context.term()
            raise
        self._context = context
        self._dealer = LoopSocket(dealer, self._on_message)
        self._sockets += [watch_disconnections(dealer, self._on_disconnected), self._dealer]
        self._welcome = asyncio.Event()
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks.start(self._until_ended(), name="receive")
        self._send(Hello())

    def release(self) -> None:
        """Close at once what a loop has left behind that ended before `stop`. Works in any state, twice."""
        if self._loop is not None and not self._loop.is_closed():
            self._end(WrongStateError("the client was released", state="released"))
        self._forget_closed_loop()
        self._context = None

    def _forget_closed_loop(self) -> None:
        """Whatever a loop left behind that was closed before `stop`."""
        self._close_sockets()
        self._calls.clear()
        self._ended = None
        if self._context is not None:
            self._context.term()

    def _close_sockets(self) -> None:
        """Close without last words: the server learns from the closed connection that nobody waits any more."""
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        self._outgoing, self._outgoing_bytes = [], 0
        self._cancelling.clear()

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
        context, self._context = self._context, None
        if context is not None:
            await in_thread(context.term, name="mpexec-rpc-close")

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
            raise _timed_out(method, timeout) from None
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
                    raise _timed_out(method, timeout) from None
        finally:
            self._leave(call_id, call)
        call.raise_error()

    def _open_call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None, credit: int | None
    ) -> tuple[int, _ClientCall]:
        if not self.running or self._context is None:
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
        if not parts[-1]:  # the server wanted to know whether we are there
            return
        for kind, call_id, payload in decode_items(parts[-1]):
            self._take(kind, call_id, payload)

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


def _failed(call_id: int, error: BaseException) -> Item:
    return FAILED, call_id, dump_value(box_error(error))


def _farewell(payload: bytes) -> ConnectionLostError:
    """What a server's last words mean for its clients: the cause is that of its end, none after an orderly one."""
    if not payload:
        return ConnectionLostError("the server has closed")
    box = load_value(payload)
    error = ConnectionLostError(f"the server has closed after {box.type_name}: {box.text}")
    error.__cause__ = unbox_error(box)
    return error


def _timed_out(method: str, timeout: float | None) -> RPCTimeoutError:
    return RPCTimeoutError(f"{method!r} was not done within {timeout} s", method=method)
