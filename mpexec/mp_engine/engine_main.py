"""The engine's process: from the control lane to the exit code.

Exit codes: 0 after an orderly end (asked by the parent, or SIGTERM or SIGINT with everything drained), 1 after a
failure or where something had to be cut short, otherwise that of a `SystemExit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mpexec.engine.engine import Engine
from mpexec.errors import MpexecError
from mpexec.executor.base import State
from mpexec.mp_engine.frames import box_error
from mpexec.mp_engine.rpc_server import AsyncRPCServer
from mpexec.mp_engine.service import EngineService
from mpexec.mp_engine.sockets import ServerKeys
from mpexec.processes import Boot
from mpexec.tasks import cancel_async_tasks
from mpexec.transport.lane import ControlLane

logger = logging.getLogger(__name__)

FAILED = 1


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What the process needs to know.

    Attributes:
        factory: Pickled: makes the engine, without starting it.
        address: Where to listen.
        drain_timeout: Seconds that running requests get after SIGTERM or SIGINT.
        stop_timeout: Seconds for stopping and releasing the engine.
    """

    factory: bytes
    address: str
    keys: ServerKeys | None
    drain_timeout: float
    stop_timeout: float


def engine_main(boot: Boot) -> None:
    """Entry of the process: make the engine, serve it, end."""
    faulthandler.enable()
    plan: EnginePlan = pickle.loads(boot.payload)
    try:
        boot.lane.send(("phase", "load engine"))
        factory: Callable[[], Engine] = pickle.loads(plan.factory)
        engine = factory()
    except BaseException as error:
        boot.lane.send(("failed", box_error(error)))
        if not isinstance(error, Exception):
            raise
        _leave(FAILED)
    gc.freeze()
    code = FAILED
    try:
        code = asyncio.run(_EngineProcess(boot.lane, boot.driver_pidfd, plan, engine).run())
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else FAILED
    except BaseException:
        logger.exception("the engine process failed")
    _leave(code)


def _leave(code: int) -> None:
    """End now: taking the interpreter down may wait for threads that wait for ranks."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
    os._exit(code)


def _pids_here(engine: Engine) -> tuple[int, ...]:
    """Process ids of the ranks that are on this machine."""
    if not engine.rank_nodes:
        return engine.rank_pids
    import ray

    here = ray.util.get_node_ip_address()
    return tuple(pid for pid, node in zip(engine.rank_pids, engine.rank_nodes, strict=True) if node == here)


class _EngineProcess:
    """The life of the process on its event loop."""

    def __init__(self, lane: ControlLane, parent_pidfd: int, plan: EnginePlan, engine: Engine) -> None:
        self._lane = lane
        self._parent_pidfd = parent_pidfd
        self._plan = plan
        self._engine = engine
        self._ended = asyncio.Event()  # stop now
        self._drain = asyncio.Event()  # stop when the running requests have ended

    async def run(self) -> int:
        """Serve until told to end, or until the engine fails; everything is released when this returns.

        Returns:
            The exit code.
        """
        loop = asyncio.get_running_loop()
        server = AsyncRPCServer(self._plan.address, keys=self._plan.keys)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        code = FAILED
        try:
            await server.start_async()
            service = EngineService(self._engine, server)
            await service.start_async()
            loop.add_reader(self._lane.fileno(), self._read_lane)
            loop.add_reader(self._parent_pidfd, self._ended.set)
            self._say_ready(server)
            code = await self._serve(service, server)
        finally:
            self._bound_exit()
            loop.remove_reader(self._lane.fileno())
            loop.remove_reader(self._parent_pidfd)
            well = await self._clean_up(server)
        return code if well else FAILED

    def _say_ready(self, server: AsyncRPCServer) -> None:
        plan, engine = self._engine.plan, self._engine
        ranks = engine.rank_pids, engine.rank_nodes, _pids_here(engine)
        self._lane.send(("ready", server.address, plan.facts, plan.tp, plan.max_length, *ranks))

    async def _serve(self, service: EngineService, server: AsyncRPCServer) -> int:
        """Wait for the first reason to end, and for what runs if that reason leaves time for it."""
        failure = asyncio.create_task(service.wait_tasks(), name="engine.failure")
        end = asyncio.create_task(self._ended.wait(), name="engine.end")
        drain = asyncio.create_task(self._drain_when_told(service), name="engine.drain")
        try:
            await asyncio.wait({failure, end, drain}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                await failure
            well = end.done() or drain.result()
            return 0 if well and self._engine.health().reason is None else FAILED
        except SystemExit:
            raise
        except BaseException as error:
            logger.info("the engine failed: %s: %s", type(error).__name__, error)  # clients and parent are told
            server.say_closed(error)
            return FAILED
        finally:
            await cancel_async_tasks({failure, end, drain})
            with contextlib.suppress(Exception):  # told above, where it was the reason to end
                await service.stop_async()

    async def _drain_when_told(self, service: EngineService) -> bool:
        await self._drain.wait()
        return await service.drain(self._plan.drain_timeout)

    async def _clean_up(self, server: AsyncRPCServer) -> bool:
        """Stop and release everything; False if a rank or a step had to be given up."""
        well = True
        for step in (self._engine.stop_async, server.stop_async, self._engine.release_async):
            try:
                await step()
            except Exception:  # the next step must run
                logger.exception("the engine process did not end cleanly: %s", step.__qualname__)
                well = False
            well = well and self._engine.executor.state is not State.BROKEN
        return well

    def _on_signal(self) -> None:
        """The first one drains, the second stops at once."""
        if self._drain.is_set():
            self._ended.set()
        self._drain.set()

    def _read_lane(self) -> None:
        try:
            while (got := self._lane.try_recv()) is not None:
                message, fds = got
                for fd in fds:
                    os.close(fd)
                if message[0] == "exit":
                    self._ended.set()
                    self._drain.set()  # a SIGTERM that follows must not begin to drain
        except MpexecError as error:  # the parent has gone, or closed its end
            logger.debug("the control lane has ended: %s", error)
            asyncio.get_running_loop().remove_reader(self._lane.fileno())
            self._ended.set()

    def _bound_exit(self) -> None:
        """End the process, and with it its ranks, should the clean-up get stuck."""
        seconds = self._plan.stop_timeout + 1.0
        timer = threading.Timer(seconds, os._exit, args=(FAILED,))
        timer.daemon = True
        timer.start()
