"""The entry of a rank's process: build the worker, tell the driver, serve, leave."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from mpexec.config import WorkerSpec
from mpexec.messages import Failure, Ready
from mpexec.transport.channel import Receiver, Sender
from mpexec.transport.durations import Durations
from mpexec.transport.frame import dumps
from mpexec.transport.pool import PoolReader, PoolWriter
from mpexec.transport.ring import RingReader, RingWriter
from mpexec.transport.segment import Segment
from mpexec.worker.base_worker import BaseWorker
from mpexec.worker.build import Seat, build_worker
from mpexec.worker.control import ControlThread
from mpexec.worker.rendezvous import file_store, join_process_group, leave_process_group
from mpexec.worker.selector import RankLoop, RingSelector
from mpexec.worker.serving import RankServer

if TYPE_CHECKING:
    from mpexec.processes.boot import Boot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What a rank must know to read and write the rings; it travels ahead of the spec, which may fail to unpickle."""

    generation: int
    world_size: int
    shared_views: bool


STACK_SIGNAL = signal.SIGRTMAX - 1
_LEAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank that is ready to serve."""

    spec: WorkerSpec
    worker: BaseWorker
    server: RankServer
    control: ControlThread
    bell: int


def rank_main(boot: Boot) -> None:
    """Run one rank to its end. Called once, in the main thread of a fresh process."""
    try:
        rank = build_rank(boot)
    except Exception:
        # Other threads of a half-built model may hold the interpreter; the failure has been told, so leave at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _end_process(serve_rank(rank))


def build_rank(boot: Boot, *, attached: bool = False) -> Rank:
    """Connect with the driver, build the worker, and tell the driver how that went.

    Args:
        attached: The process is not ours to end: see `ControlThread`.

    Raises:
        BaseException: What went wrong; the driver has been told.
    """
    phase = ["connect"]
    control: ControlThread | None = None

    def report(text: str) -> None:
        phase[0] = text
        boot.lane.send(("phase", text))

    try:
        stack_signal = _register_stacks(boot.fds["stacks"])
        link, pickled = pickle.loads(boot.payload)
        server = _connect(boot, link)
        control = ControlThread(boot.lane, boot.driver_pidfd, server, attached=attached)
        control.start()
        report("unpickle spec")
        spec: WorkerSpec = pickle.loads(pickled)
        worker, facts = build_worker(
            spec,
            Seat(boot.rank, boot.rank, boot.rank, spec.world_size),
            join=lambda device: join_process_group(spec, boot.rank, device, file_store(boot.fds["store"], spec)),
            put_output=server.put_output,
            report=report,
        )
        server.serve(worker)
        boot.lane.send(("ready", Ready(boot.rank, os.getpid(), worker.method_names(), stack_signal, facts)))
    except BaseException as error:
        failure = Failure.of(error, call_id=0, rank=boot.rank, method=phase[0], dumps=dumps)
        if control is not None:
            control.left_cleanly()
        boot.lane.send(("failed", phase[0], failure))
        raise
    return Rank(spec, worker, server, control, boot.fds["call_bell"])


def _register_stacks(fd: int) -> int:
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)
    return int(STACK_SIGNAL)


def _connect(boot: Boot, link: LinkFacts) -> RankServer:
    fds, rank, generation = boot.fds, boot.rank, link.generation
    calls = Receiver(
        RingReader(Segment.attach(fds["calls"]), link.world_size, generation, rank),
        PoolReader(fds["call_pool"], link.world_size, rank, shared_views=link.shared_views),
    )
    replies = Sender(RingWriter(Segment.attach(fds["replies"]), 1, generation), PoolWriter(fds["reply_pool"], 1), [])
    durations = Durations(Segment.attach(fds["durations"]).words)
    return RankServer(rank, calls, replies, (fds["bell_0"], fds["bell_1"], fds["bell_2"]), durations)


def serve_rank(rank: Rank) -> int:
    """Serve until the driver has the rank exit, or it exits by itself; then clean up. Returns its exit code.

    A process that exits by itself, and one that is not attached, is ended within a bound from here on.
    """
    gc.freeze()  # what building left is permanent; collections need not look at it again
    control, server = rank.control, rank.server
    selector = RingSelector(rank.bell, server.has_news, server.serve_calls, server.park)
    server.spinner = selector.spinner
    loop = RankLoop(selector)
    asyncio.set_event_loop(loop)
    loop.add_reader(rank.bell, lambda: None)  # it only has to end the sleep
    code = 0
    try:
        control.use_loop(loop)
        if not control.exit_asked:
            loop.run_forever()
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        code = 1
        logger.exception("the rank's loop failed")
    control.left_cleanly()
    control.bound_exit(code, max(_LEAVE_S, rank.spec.stop_timeout / 4))
    _leave(loop, rank.worker, server, clean=control.exit_asked)
    asyncio.set_event_loop(None)
    return code


def _end_process(code: int) -> NoReturn:
    """Run the exit hooks and end. Taking the interpreter down with torch loaded takes longer than all the rest."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
    os._exit(code)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    logger.error("%s", leaving.code)  # as the interpreter does with a message
    return 1


def _leave(loop: asyncio.AbstractEventLoop, worker: BaseWorker, server: RankServer, *, clean: bool) -> None:
    """Stop tasks, release the agent, leave the process group; every step is tried whatever the one before did."""
    steps: list[Any] = [lambda: loop.run_until_complete(server.stop()), worker.release]
    if clean:
        steps.append(leave_process_group)
    for step in steps:
        try:
            step()
        except Exception:  # the agent's own clean-up must not keep the rest from running
            logger.exception("a step of leaving failed")
    loop.close()
