"""The server of the RPC: one ROUTER, methods that run as tasks, and a failure that reaches every client.

What the server holds of the promises (the client's half is in `rpc_client`): every call is a task that it keeps until
it has ended, and nothing is sent of it afterwards. A stream sends as many items as its client has given it credit for,
then waits: a slow reader holds its generator back, nothing is joined or dropped, no queue grows. Whatever becomes
ready for a client in one turn of the loop travels in one frame, or in several where one would be large.

A client that dies is noticed when its connection closes: libzmq tells that a connection was lost, though not whose,
so the server then sends every client an empty frame, which for one that has gone is refused. What such a client had
still sent is not begun: a client is greeted with an empty frame before its first request is looked at.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec
import zmq

from mpexec.errors import ConfigError, MpexecError, TransportError, WrongStateError
from mpexec.mp_engine.frames import (
    CANCELLED,
    CLOSED,
    END,
    FAILED,
    ITEM,
    MAX_CREDIT,
    MAX_FRAME_BYTES,
    NEWS,
    REPLY,
    WELCOME,
    Call,
    Cancel,
    Item,
    More,
    Request,
    box_error,
    decode_arguments,
    decode_requests,
    dump_value,
    encode_items,
    timed_out,
)
from mpexec.mp_engine.sockets import ServerKeys, SocketSet, check_address, use_server_keys
from mpexec.tasks import TaskOwner, TaskSet, cancel_async_tasks

logger = logging.getLogger(__name__)

_HARD_LIMIT = 2 * MAX_FRAME_BYTES  # above it, libzmq itself drops the connection
_LAST_WORDS_MS = 500  # for what has been sent to reach the clients when the server closes
_PROBE_AGAIN_S = (0.05, 0.3, 2.0)  # after a lost connection: libzmq may tell of it before it refuses to send there
_MAX_CALLS = 10_000  # of one client at once
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
        self._sockets = SocketSet()
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
        with self._sockets.opening(zmq.ROUTER) as router:
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.SNDHWM, 0)  # credit bounds what a client can be owed
            router.setsockopt(zmq.MAXMSGSIZE, _HARD_LIMIT)
            if self._keys is not None:
                self._sockets.add(use_server_keys(router, self._keys))
            try:
                router.bind(self._wanted_address)
                self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
                if self.address.startswith("ipc://"):
                    os.chmod(self.address.removeprefix("ipc://"), 0o600)  # whatever the umask and the folder are
            except (zmq.ZMQError, OSError) as error:
                raise ConfigError(f"cannot listen at {self._wanted_address!r}: {error}") from error
        self._router = self._sockets.watch(router, self._on_message, self._on_lost_connection)
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks.start(self._until_fatal(), name="serve")

    def _forget_closed_loop(self) -> None:
        """Whatever a loop left behind that was closed before `stop`."""
        self._sockets.end()
        self._peers.clear()
        self._calls.clear()
        self._flush_planned, self._farewell = False, None

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
            self._peers.clear()
            await self._sockets.end_async(_LAST_WORDS_MS)

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
            return self._fail(call.id, timed_out(request.method, request.timeout) if late else error)

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


def _failed(call_id: int, error: BaseException) -> Item:
    return FAILED, call_id, dump_value(box_error(error))
