"""One rank as a Ray actor. User code runs on a thread of its own, so that the actor always answers.

The actor's methods are coroutines on Ray's event loop. What the driver must hear unasked (progress of the start,
outputs, a long call, an exit) goes through `listen`: the driver has one such call pending all the time, which is
answered as soon as there is news. The end of the process ends it too, with Ray's own reason.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import pickle
import platform
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import ray

from mpexec.config import WorkerSpec
from mpexec.errors import MpexecError, SerializationError
from mpexec.messages import Call, Failure, Ready
from mpexec.transport import linux
from mpexec.transport.channel import DONE, FAILED, PLAIN_CALL, PLAIN_DONE
from mpexec.transport.frame import PLAIN, Frame, decode, dump_plain, dumps, encode, load_plain
from mpexec.worker.base_worker import BaseWorker
from mpexec.worker.build import Seat, build_worker
from mpexec.worker.interfaces import interface_of
from mpexec.worker.rendezvous import join_process_group, leave_process_group, tcp_store
from mpexec.worker.threaded import WorkerThread

logger = logging.getLogger(__name__)

EXITED = 100  # the kind of the answer to every call of a rank that ends by `SystemExit`; its value is the exit code
STACK_SIGNAL = int(signal.SIGRTMAX - 1)
INLINE = 65536  # bytes of a plain value; what is longer is pickled, and may leave the message
HEAD = struct.Struct("<QQB")
_LONG_S = 0.02  # a call that takes longer is told to the driver, for `describe`
_EXIT_S = 1.0

Record = tuple[int, bytes, list[pickle.PickleBuffer], list[bool]]
"""Kind, payload, the buffers that left the payload, and for each whether its reader needs a private copy."""
Body = bytes | tuple[bytes, list[pickle.PickleBuffer]]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank's process runs.

    Attributes:
        node_id: Ray's name of the node.
        address: The node's address in Ray.
        machine: Equal for two processes that see the same process ids.
        log: The file that its stderr goes to, "" if it is none.
        stacks: Descriptor of the memory file that its stacks are written to on `STACK_SIGNAL`.
        version: Of Python and of mpexec.
    """

    node_id: str
    address: str
    machine: str
    pid: int
    log: str
    stacks: int
    version: str


def this_machine() -> str:
    """A name for the space of process ids that this process lives in."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def this_version() -> str:
    """What driver and ranks must have in common: they exchange code objects, marshalled values and our messages."""
    return f"Python {platform.python_version().rpartition('.')[0]} and mpexec {import_module('mpexec').__version__}"


class RankActor:
    """Serves one rank. Made by the driver as an actor with room for any number of calls at once."""

    _rank = -1  # Ray asks for the name also when the constructor has failed

    def __init__(self, rank: int, environment: Mapping[str, str | None], path: list[str], local_size: int) -> None:
        """Take on the rank's environment, before anything imports torch.

        Args:
            rank: This rank.
            environment: Changes to the variables.
            path: The driver's `sys.path`.
            local_size: How many ranks this node has: they share its cores.
        """
        # Ray sets it to the CPUs that it reserves, which says how it counts and not how many there are.
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // local_size))
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        known = set(sys.path)
        sys.path.extend(folder for folder in path if folder not in known and os.path.isdir(folder))
        self._rank = rank
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = WorkerThread(
            f"mpexec-rank{rank}", self._report, dropped=self._answer_nothing, on_exit=self._on_exit
        )
        self._news: list[tuple[Any, ...]] = []
        self._news_came = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Record]] = {}
        self._early: dict[int, tuple[int, int, Body]] = {}  # by the id of the call that comes before
        self._last = 0
        self._exit_code = 0
        self._facts: dict[str, Any] = {}
        self._run = 0  # counts the stops; an output of an earlier run is known by its number
        self._told: int | None = None
        self._looks = False
        self._socket: socket.socket | None = None
        self._stacks = linux.OwnedFd(linux.memfd_create("mpexec-stacks", 0))
        faulthandler.register(STACK_SIGNAL, file=self._stacks.fd, all_threads=True, chain=False)

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # Ray puts it in front of every line that the rank prints

    # -- start -----------------------------------------------------------------------------------------------------

    async def where(self) -> RankPlace:
        """Where this rank runs."""
        self._loop = asyncio.get_running_loop()
        return self._place()

    def _place(self) -> RankPlace:
        context = ray.get_runtime_context()
        log = os.readlink("/proc/self/fd/2")
        return RankPlace(
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            machine=this_machine(),
            pid=os.getpid(),
            log=log if os.path.isfile(log) else "",
            stacks=self._stacks.fd,
            version=this_version(),
        )

    async def bind(self, host: str) -> int:
        """Bind the socket of the rendezvous on this address of the node, and give its port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen(1024)
        return int(self._socket.getsockname()[1])

    async def build(self, pickled: Body, local_rank: int, store: tuple[str, int] | None, local: bool) -> None:
        """Begin to build the worker; what becomes of it is news.

        Args:
            pickled: The spec.
            local_rank: This rank among those of its node.
            store: Host and port of the rendezvous.
            local: All ranks are on this node.
        """
        phase = ["unpickle spec"]

        def report(text: str) -> None:
            phase[0] = text
            self._tell("phase", text)

        def make() -> BaseWorker:
            report(phase[0])
            spec: WorkerSpec = _decode(pickled)
            worker, self._facts = build_worker(
                spec,
                Seat(self._rank, local_rank, _device_index(), 1),
                join=lambda device: self._join(spec, device, store, local),
                put_output=self.put_output,
                report=report,
            )
            return worker

        def done(error: BaseException | None) -> None:
            if error is None:
                assert self._thread.worker is not None
                names = self._thread.worker.method_names()
                self._tell("ready", Ready(self._rank, os.getpid(), names, STACK_SIGNAL, self._facts))
            else:
                failure = Failure.of(error, call_id=0, rank=self._rank, method=phase[0], dumps=dumps)
                self._tell("failed", phase[0], failure)

        self._thread.build(make, done)

    def _join(self, spec: WorkerSpec, device: str, store: tuple[str, int] | None, local: bool) -> None:
        assert store is not None
        listening = None if self._socket is None else self._socket.detach()
        self._socket = None
        found = None if local else (lambda: interface_of(ray.util.get_node_ip_address()))
        join_process_group(spec, self._rank, device, tcp_store(store, spec, listening), interface=found)

    # -- news ------------------------------------------------------------------------------------------------------

    async def listen(self) -> list[tuple[Any, ...]]:
        """Wait until there is news, and give all of it, oldest first."""
        while not self._news:
            self._news_came.clear()
            await self._news_came.wait()
        news, self._news = self._news, []
        return news

    def _tell(self, *news: Any) -> None:
        """Add news, from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._add, news)

    def _add(self, news: tuple[Any, ...]) -> None:
        self._news.append(news)
        self._news_came.set()

    def put_output(self, value: Any) -> None:
        """Push one output to the driver; an output that cannot be pickled is sent as that failure."""
        try:
            record = _record(DONE, encode(value, "an output"))
        except Exception as error:  # whatever it is, the driver hears of it
            record = self._failed(0, "forward", error)
        self._tell("output", self._run, record)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def call(self, head: bytes, stored: Body | None = None) -> Record | bytes | None:
        """Run a call when all before it have been begun, and answer.

        One `bytes` each way is what Ray carries fastest, so that is what small calls and answers are.

        Args:
            head: `HEAD`: the id of the call that comes before it on this rank (0 for the first), its own id, the kind
                of its payload; then the payload, where it is small.
            stored: Payload and buffers, where they are large.

        Returns:
            The answer, without buffers the kind as one byte and the payload; None to a call that was sent twice, which
            is run once.
        """
        after, call_id, kind = HEAD.unpack_from(head)
        if call_id <= self._last or after in self._early:
            return None
        assert self._loop is not None
        answer = self._answers[call_id] = self._loop.create_future()
        self._early[after] = (call_id, kind, head[HEAD.size :] if stored is None else stored)
        while self._last in self._early:
            begun = self._early.pop(self._last)
            self._last = begun[0]
            self._post(*begun)
        self._look_later()
        try:
            record: Record = await answer
        finally:
            self._answers.pop(call_id, None)
        return record if record[2] else bytes((record[0],)) + record[1]

    def _post(self, call_id: int, kind: int, body: Body) -> None:
        try:
            self._thread.post(call_id, lambda: self._open(call_id, kind, body))
        except RuntimeError:  # the rank's thread has ended by a `SystemExit`
            self._settle(call_id, _plain(EXITED, self._exit_code))

    def _open(self, call_id: int, kind: int, body: Body) -> Call | None:
        if kind == PLAIN_CALL and isinstance(body, bytes):
            return Call(call_id, *load_plain(body))
        try:
            return Call(call_id, *_decode(body))
        except Exception as error:  # unpickling runs user code, and a class may be missing here
            self._answer(call_id, self._failed(call_id, "unpickling the arguments", error))
            return None

    def _report(self, call: Call, value: Any, error: BaseException | None) -> None:
        self._answer(call.call_id, self._outcome(call, value, error))

    def _outcome(self, call: Call, value: Any, error: BaseException | None) -> Record:
        if error is not None:
            return self._failed(call.call_id, call.name, error)
        if call.reply_ranks is not None and self._rank not in call.reply_ranks:
            value = None
        if type(value) in PLAIN and (payload := dump_plain(value, INLINE)) is not None:
            return PLAIN_DONE, payload, [], []
        try:
            return _record(DONE, encode(value, f"the value that rank {self._rank} returned from {call.name!r}"))
        except Exception as failed:  # whatever it is, the call is answered
            return self._failed(call.call_id, call.name, failed)

    def _failed(self, call_id: int, method: str, error: BaseException) -> Record:
        if isinstance(error, SerializationError) and error.rank is None:
            error.rank = self._rank
        failure = Failure.of(error, call_id=call_id, rank=self._rank, method=method, dumps=dumps)
        return _record(FAILED, encode(failure, "a failure"))

    def _answer_nothing(self, call_id: int) -> None:
        self._answer(call_id, _plain(PLAIN_DONE, None))

    def _answer(self, call_id: int, record: Record) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._settle, call_id, record)

    def _settle(self, call_id: int, record: Record) -> None:
        answer = self._answers.get(call_id)
        if answer is not None and not answer.done():
            answer.set_result(record)
        if self._told == call_id:
            self._told = None
            self._add(("idle", call_id))
        if len(self._answers) > (call_id in self._answers):
            self._look_later()

    async def cancel(self, call_id: int) -> None:
        """Cancel the coroutine of an abandoned call; a sync method runs to its end."""
        self._thread.cancel(call_id)
        self._answer_nothing(call_id)

    # -- what the rank is at ---------------------------------------------------------------------------------------

    def _look_later(self) -> None:
        if not self._looks and self._told is None:
            assert self._loop is not None
            self._looks = True
            self._loop.call_later(_LONG_S, self._look)

    def _look(self) -> None:
        """Tell the driver of the call that keeps the rank busy; one that is short is not worth a message."""
        self._looks = False
        current = self._thread.current
        if current is None:
            return
        call, since = current
        seconds = (time.monotonic_ns() - since) / 1e9
        if seconds >= _LONG_S * 0.9:
            self._told = call.call_id
            self._add(("busy", call.call_id, seconds))
        else:
            self._look_later()

    async def ping(self) -> None:
        """Answer."""

    async def stacks(self) -> str:
        """The Python stacks of all threads."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    async def stop(self, last_id: int) -> tuple[int, str | None]:
        """Stop the background tasks and the coroutines, and drop the calls up to `last_id`.

        Returns:
            The number of the run that comes next, and the error of the agent's own clean-up as text.
        """
        self._thread.drop_until = max(self._thread.drop_until, last_id)
        error: str | None = None
        try:
            await asyncio.wrap_future(self._thread.stop())
        except Exception as failed:  # the driver logs it and goes on
            error = f"{type(failed).__name__}: {failed}"
        self._run += 1
        self._news = [news for news in self._news if news[0] != "output"]
        for call_id in [known for known in self._answers if known <= last_id]:
            self._settle(call_id, _plain(PLAIN_DONE, None))
        return self._run, error

    async def leave(self) -> None:
        """Stop and release the worker, and leave the process group; nothing is answered any more but this."""
        leaving = self._thread.leave()
        if leaving is not None:
            await asyncio.wrap_future(leaving)
        try:
            await asyncio.get_running_loop().run_in_executor(None, leave_process_group)
        except (RuntimeError, MpexecError) as error:
            logger.warning("the process group could not be left: %s", error)

    def _on_exit(self, leaving: BaseException, is_clean: bool) -> None:
        """The rank's thread ends by `SystemExit`, and the process is to end with it, after the clean-up.

        Then the driver hears of it, and ends the actor. Should the clean-up get stuck, or there be no driver, the
        process ends by itself.
        """
        code = exit_code(leaving)
        if is_clean:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._say_exited, code)
            return
        logger.error("rank %d ends: %r", self._rank, leaving)
        worker = self._thread.worker
        timer = threading.Timer(max(_EXIT_S, worker.spec.stop_timeout / 4 if worker else 0.0), os._exit, (code,))
        timer.daemon = True
        timer.start()

    def _say_exited(self, code: int) -> None:
        self._exit_code = code
        self._add(("exit", code))
        for call_id in list(self._answers):
            self._settle(call_id, _plain(EXITED, code))


def exit_code(leaving: BaseException) -> int:
    """The exit code that a `SystemExit` or `KeyboardInterrupt` stands for."""
    if not isinstance(leaving, SystemExit):
        return 130
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    return 1


def _device_index() -> int:
    """Ray shows an actor only the devices that are its own, unless the node is told not to."""
    own = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    sees_all = os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "0") not in ("", "0")
    return int(own[0]) if own and sees_all else 0


def _decode(body: Body) -> Any:
    payload, buffers = (body, ()) if isinstance(body, bytes) else body
    return decode(payload, [memoryview(buffer) for buffer in buffers])


def _record(kind: int, frame: Frame) -> Record:
    return kind, frame.payload, [pickle.PickleBuffer(buffer) for buffer in frame.buffers], list(frame.private)


def _plain(kind: int, value: Any) -> Record:
    payload = dump_plain(value, INLINE)
    assert payload is not None
    return kind, payload, [], []
