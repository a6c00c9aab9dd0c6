"""The server around the application: from a bound socket to the exit, by a signal or by a failure of the engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from mpexec.errors import ConfigError, EngineStoppedError
from mpexec.http.app import create_app
from mpexec.http.health import HealthCheck
from mpexec.http.served import ServedEngine, ServedModel
from mpexec.tasks import cancel_async_tasks

_LAST_ANSWERS_S = 1.0  # after the engine has ended, for the open requests to be told
_KEEP_ALIVE_S = 15  # longer than the five seconds of most clients: the side that sends closes first
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Take an address. Nobody can connect before `listen`, so a model that is still loading looks like no server.

    Args:
        host: A name or an address.
        port: 0 takes any that is free.

    Raises:
        ConfigError: Taken, not ours, or not an address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the latter for what can be no name, such as "a..b"
        reason = error.strerror or error if isinstance(error, OSError) else "it is no host name"
        raise ConfigError(f"cannot serve on {host!r}: {reason}; choose another --host") from error
    try:
        # Connections of an earlier server that the kernel still remembers do not keep the next one from starting.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_serve(host, port, error) from error
    return sock


def _listen(sock: socket.socket) -> None:
    """Let clients connect. Of two servers that bound the same address while they loaded, the second fails here."""
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _cannot_serve(host, port, error) from error


def _cannot_serve(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot serve on {host}:{port}: {error.strerror}; choose another --host or --port (0 takes any free port)"
    )


def url_of(sock: socket.socket) -> str:
    """Where clients find a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs the process, and tells when it is ready."""

    def __init__(self, app: Starlette, on_ready: Callable[[], None], *, access_log: bool) -> None:
        settings = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=access_log,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        super().__init__(settings)
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets=sockets)
        self._on_ready()

    async def abort_async(self) -> None:
        """Close the connections that are still open, whatever is unsent or has not arrived, and end their requests."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if tasks := set(self.server_state.tasks):
            # Each hears that its client has gone, and ends as it always does then.
            await asyncio.wait(tasks, timeout=_LAST_ANSWERS_S)
            await cancel_async_tasks(tasks)


class HTTPServer:
    """Serves one engine until somebody asks it to stop, or the engine fails.

    Args:
        engine: Ready to start. Stopping and releasing it afterwards is its owner's.
        model: What the engine runs.
        stall_timeout: See `HealthCheck`.
        access_log: Log every request.
    """

    def __init__(
        self, engine: ServedEngine, model: ServedModel, *, stall_timeout: float, access_log: bool = False
    ) -> None:
        self._engine = engine
        self._health = HealthCheck(engine, stall_timeout)
        self._app = create_app(engine, model, self._health)
        self._access_log = access_log

    async def run_async(
        self, sock: socket.socket, stop: asyncio.Event, *, drain_timeout: float, on_ready: Callable[[], None]
    ) -> None:
        """Start the engine and serve; returns after a stop, with every request answered.

        Args:
            sock: From `bind`; closed when this returns or raises.
            stop: Set it to stop. No new connection is taken; requests that run end in their own time.
            drain_timeout: Seconds after the stop at which requests that still run end with an error.
            on_ready: Called when requests are taken.

        Raises:
            BaseException: The root cause of the engine's failure. Open requests have been answered with it.
            ConfigError: Another server has taken the address while the model was loading.
        """
        await self._engine.start_async()
        _listen(sock)
        server = _Uvicorn(self._app, on_ready, access_log=self._access_log)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="HTTPServer.serve")
        engine = asyncio.create_task(self._engine.wait_tasks(), name="HTTPServer.engine")
        stopping = asyncio.create_task(stop.wait(), name="HTTPServer.stop")
        watching = asyncio.create_task(self._health.watch_async(), name="HTTPServer.watch")
        try:
            await asyncio.wait({serving, engine, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            if stopping.done():
                await self._drain_async(serving, engine, drain_timeout)
            # The engine has ended, or nothing is left to do. Requests that are open hear of it by themselves.
            await asyncio.wait({serving}, timeout=_LAST_ANSWERS_S)
            for task in (engine, serving, watching):
                if task.done():
                    task.result()
            if not stopping.done():
                raise EngineStoppedError("the engine was stopped, though nobody had asked the server to stop")
        finally:
            await cancel_async_tasks([serving, engine, stopping, watching])
            await server.abort_async()

    async def _drain_async(self, serving: asyncio.Task[None], engine: asyncio.Task[None], timeout: float) -> None:
        """Wait for the open requests; when their time is over, stop the engine, which answers them."""
        await asyncio.wait({serving, engine}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done() and not engine.done():
            await self._engine.stop_async()
