"""ZMQEngine: the engine's face, while the engine runs in a process of its own.

A web server's event loop and the engine's loop then never wait for each other. The process, its ranks and its socket
belong to whoever made them: they end with `release`, with a failure, and with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

from mpexec.config import EngineConfig
from mpexec.deadline import Deadline
from mpexec.engine.engine import Backend, Engine, ModelPlan
from mpexec.errors import ConnectionLostError, RPCTimeoutError
from mpexec.executor.starting import StartAbort
from mpexec.executor.threads import in_thread
from mpexec.mp_engine.engine_client import EngineClient, stopped_error
from mpexec.mp_engine.engine_main import EnginePlan
from mpexec.mp_engine.engine_process import EngineProcess, died_error
from mpexec.mp_engine.rpc_client import AsyncRPCClient
from mpexec.mp_engine.sockets import ClientKeys, ServerKeys, SocketFolder
from mpexec.transport.frame import dumps

logger = logging.getLogger(__name__)

_DEATH_S = 1.0  # from a lost connection to the news of why


class ZMQEngine(EngineClient):
    """An engine in a process of its own, with the face of `Engine`.

    `start` starts the engine and `stop` stops it; the process stays until `release`. `wait_tasks` raises the root cause
    when a rank, the engine or its process fails, and the process has ended by then; streams raise `EngineStoppedError`
    with that cause. A failed engine can be released, but not started again; after a plain `stop` it can, on any loop.

    Args:
        factory: Makes the engine, unstarted, in the new process; picklable, or by value with cloudpickle.
        start_timeout: Seconds until the engine must be ready.
        stop_timeout: Seconds for `stop` and for `release`, each.
        drain_timeout: Seconds that running requests get when the process is sent SIGTERM or SIGINT.
        address: "tcp://host:port" for other machines, with keys; None is a unix socket in a folder of this user's own.
        keys: For TCP, see `make_keys`: the server's, and those with which this process connects.

    Raises:
        StartupError: The process, or a rank of its engine, did not become ready; nothing is left behind.
        ConfigError: What the factory raised.
    """

    def __init__(
        self,
        factory: Callable[[], Engine],
        *,
        start_timeout: float = 600.0,
        stop_timeout: float = 5.0,
        drain_timeout: float = 30.0,
        address: str | None = None,
        keys: tuple[ServerKeys, ClientKeys] | None = None,
        _abort: StartAbort | None = None,
    ) -> None:
        self._stop_timeout = stop_timeout
        server_keys, client_keys = keys or (None, None)
        folder = SocketFolder() if address is None else None
        try:
            where = folder.address if folder is not None else str(address)
            plan = EnginePlan(dumps(factory), where, server_keys, drain_timeout, stop_timeout)
            self._process = EngineProcess(plan, folder, start_timeout, _abort)
        except BaseException:
            if folder is not None:
                folder.remove()
            raise
        super().__init__(self._process.address, keys=client_keys)
        self._plan = self._process.plan
        self._dead = asyncio.Event()
        # An engine that nobody refers to is released, as one that lives to the end of the interpreter is.
        self._finalizer = weakref.finalize(self, _end_process, self._process, min(stop_timeout, 2.0))

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | None = None,
        tp: int = 1,
        *,
        backend: Backend = "auto",
        config: EngineConfig | None = None,
        dtype: str = "float32",
        start_timeout: float = 600.0,
        drain_timeout: float = 30.0,
        _abort: StartAbort | None = None,
        **fields: Any,
    ) -> Self:
        """Load a model in a new process; blocks until every rank is ready. Arguments as for `Engine.from_pretrained`.

        Raises:
            ConfigError: Found before any process starts, or by the engine.
            StartupError: The process or a rank did not become ready; nothing is left behind.
        """
        config = config or EngineConfig()
        ModelPlan.read(path, tp, config)  # a wrong value is told at once, not after a start
        factory = partial(Engine.from_pretrained, path, tp, backend=backend, config=config, dtype=dtype, **fields)
        return cls(
            factory,
            start_timeout=start_timeout,
            stop_timeout=config.stop_timeout,
            drain_timeout=drain_timeout,
            _abort=_abort,
        )

    @classmethod
    async def from_pretrained_async(cls, *args: Any, **options: Any) -> Self:
        """As `from_pretrained`, without blocking the loop. Cancelling it ends what was started."""
        return await cls._made_async(partial(cls.from_pretrained, *args, **options))

    @classmethod
    async def create_async(cls, factory: Callable[[], Engine], **options: Any) -> Self:
        """Construct without blocking the loop. Cancelling it ends what was started."""
        return await cls._made_async(partial(cls, factory, **options))

    @classmethod
    async def _made_async(cls, make: Callable[..., Self]) -> Self:
        abort = StartAbort()
        return await in_thread(
            lambda: make(_abort=abort),
            name="mpexec-create",
            abandoned=lambda made: made.release(),
            cancel=abort.ask,
        )

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids of the engine's ranks, index = rank. With Ray each is that of its own node."""
        return tuple(self._process.rank_pids)

    @property
    def rank_nodes(self) -> tuple[str, ...]:
        """Addresses of the nodes that Ray has put the ranks on, index = rank; empty with any other executor."""
        return tuple(self._process.rank_nodes)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    async def start_async(self) -> None:
        """Connect to the process and start the engine; requests are served when this returns.

        Raises:
            EngineStoppedError: It has failed, or was released.
        """
        if not self.running:
            loop = asyncio.get_running_loop()
            self._dead = asyncio.Event()
            self._process.on_death(partial(_call_soon, loop, self._dead.set))
        try:
            await super().start_async()
        except ConnectionLostError as lost:
            root = self._learn(await self._why_lost(lost))
            raise stopped_error(root) from root

    async def _greet(self, client: AsyncRPCClient) -> None:
        await client.call("start", timeout=self._stop_timeout)

    async def _part(self, client: AsyncRPCClient) -> None:
        try:
            await client.call("stop", timeout=self._stop_timeout)
        except (ConnectionLostError, RPCTimeoutError) as gone:  # `release` ends what does not answer
            logger.info("the engine could not be asked to stop: %s", gone)

    async def _why_lost(self, lost: ConnectionLostError) -> BaseException:
        """The end of the process says more than that of its connection, and comes a moment later."""
        if lost.__cause__ is not None:
            return lost.__cause__
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEATH_S):
                await self._dead.wait()
        return lost if self._process.death is None else died_error(self._process.death)

    async def _after_failure(self) -> None:
        await in_thread(self._end, name="mpexec-end-engine")

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        _end_process(self._process, self._stop_timeout)
        self._finalizer.detach()

    def stop(self) -> None:
        """Stop the engine; every open request hears of it.

        On the thread of the loop on which it was started this is a request, and `wait_tasks` ends when it is done; from
        any other thread it blocks until then, bounded by the stop timeout.
        """
        self._stop_within(self._stop_timeout + 1.0)

    def release(self) -> None:
        """End the process and its ranks; blocks up to the stop timeout. Works in any state, twice, after a failure."""
        super().release()
        self._process.on_death(None)
        self._end()

    async def release_async(self) -> None:
        """As `release`, without blocking the loop."""
        try:
            await self.stop_async()
        finally:
            self._released = True
            self._process.on_death(None)
            await in_thread(self._end, name="mpexec-release")


def _end_process(process: EngineProcess, seconds: float) -> None:
    process.end(Deadline.after(seconds))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed; its waiters are gone with it
        loop.call_soon_threadsafe(callback)
