"""The actors of one RayExecutor, from their making to the last one gone."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mpexec.config import RayOptions, WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import StartupError
from mpexec.executor.ray_cluster import check_session, is_session, within
from mpexec.executor.ray_placement import Placement
from mpexec.executor.starting import StartAbort, StartWatch
from mpexec.messages import Ready
from mpexec.processes import Death, rank_environment
from mpexec.processes.process import process_state
from mpexec.transport import linux
from mpexec.transport.frame import encode
from mpexec.worker.ray_rank import STACK_SIGNAL, RankActor, RankPlace, this_machine, this_version

logger = logging.getLogger(__name__)

_ROOM = 1 << 20  # calls in flight on one actor; there is no limit of ours
_LAST_LINES = 200
_LAST_BYTES = 65536
_FORWARDED = ("MPEXEC_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_")
_KILL_S = 0.25  # for an actor to end by itself when Ray kills it; Ray would give it five seconds
_GO_S = 1.5  # for one that has left: taking an interpreter with torch down takes its time
_KILL_FLOOR_S = 2.0

_TOLD_BETTER = re.compile(
    r"(class_name|actor_id|pid|namespace|ip|name|job_id): |The actor died unexpectedly before finishing this task"
)

_RemoteRank = ray.remote(RankActor)


class RayRank:
    """One actor as its driver sees it.

    Attributes:
        actor: The handle.
        place: Where it runs, once it has said so.
        ready: What it reported when it was ready.
        death: How it ended.
        exit_code: What it said before it ended by itself.
        busy: The call that keeps it busy, and since when (monotonic ns of this process), or None.
        gone: Set once Ray has told its end.
        left: Set once it has left in good order.
    """

    def __init__(self, rank: int, actor: Any) -> None:
        self.rank = rank
        self.actor = actor
        self.place: RankPlace | None = None
        self.ready: Ready | None = None
        self.death: Death | None = None
        self.exit_code: int | None = None
        self.busy: tuple[int, int] | None = None
        self.gone = threading.Event()
        self.left = threading.Event()
        self.pidfd: linux.OwnedFd | None = None
        self._stacks: linux.OwnedFd | None = None

    def come_near(self, place: RankPlace) -> None:
        """Note where it runs. What runs on this machine can be looked at without its help."""
        self.place = place
        if place.machine != this_machine():
            return
        with contextlib.suppress(OSError):  # it has ended since, or is another user's
            self.pidfd = linux.OwnedFd(linux.pidfd_open(place.pid))
            self._stacks = linux.OwnedFd(os.open(f"/proc/{place.pid}/fd/{place.stacks}", os.O_RDONLY))

    @property
    def pid(self) -> int:
        """Its process id, 0 before it is known."""
        return 0 if self.place is None else self.place.pid

    @property
    def is_near(self) -> bool:
        """True if its process is one of this machine's."""
        return self._stacks is not None

    # What `collect_stacks` asks of a rank.

    @property
    def stack_signal(self) -> int:
        """The signal on which it writes its stacks."""
        return STACK_SIGNAL

    def state(self) -> str:
        """What the kernel says of it; of a rank on another machine only whether it is known to be gone."""
        if self.place is None or self.pidfd is None or self.pidfd.closed:
            return "gone" if self.gone.is_set() or self.place is None else "running"
        return process_state(self.place.pid, self.pidfd.fd)

    def surely_lives(self) -> bool:
        """True if it can be seen from here that its process goes on."""
        return self.pidfd is not None and self.state() not in ("gone", "zombie")

    def signal_stacks(self) -> None:
        """Have it write its stacks."""
        if self.pidfd is not None and not self.pidfd.closed:
            linux.pidfd_send_signal(self.pidfd.fd, STACK_SIGNAL)

    def await_end(self, deadline: Deadline) -> bool:
        """Wait until its process has ended, where it is here; else until Ray says so. False if it has not."""
        if self.pidfd is None or self.pidfd.closed:
            return self.gone.wait(deadline.remaining())
        poll = select.poll()
        poll.register(self.pidfd.fd, select.POLLIN)
        return bool(poll.poll(deadline.poll_ms()))

    def kill(self) -> None:
        """End a process of this machine that Ray has been asked to end."""
        if self.pidfd is not None and not self.pidfd.closed:
            linux.pidfd_send_signal(self.pidfd.fd, signal.SIGKILL)

    def stack_bytes(self) -> int:
        """Length of its stack file by now."""
        return 0 if self._stacks is None or self._stacks.closed else os.fstat(self._stacks.fd).st_size

    def read_stacks(self, start: int) -> str:
        """The stack file's text from byte `start` on."""
        return "" if self._stacks is None else os.pread(self._stacks.fd, 1 << 20, start).decode(errors="replace")

    def last_lines(self) -> tuple[str, ...]:
        """What it wrote last, if its files are here: stdout, then stderr."""
        if not self.is_near or self.place is None or not self.place.log:
            return ()
        lines: list[str] = []
        for path in (self.place.log.removesuffix(".err") + ".out", self.place.log):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
                tail = file.read().decode(errors="replace").splitlines()
                lines += [line for line in tail if line and not line.startswith((":actor_name:", ":job_id:", ":task_"))]
        return tuple(lines[-_LAST_LINES:])

    def close(self) -> None:
        """Close the descriptors; again changes nothing."""
        for fd in (self.pidfd, self._stacks):
            if fd is not None:
                fd.close()


class RayGroup:
    """All actors of one executor.

    Ray answers on threads of its own, so that nothing here polls: each rank has a call of `listen` pending, which ends
    with news or with the rank.

    Attributes:
        ranks: Index = rank; empty before `launch`.
        rungs: What it took to end each rank: "exited", "asked" or "KILL".
    """

    def __init__(self, spec: WorkerSpec, options: RayOptions, session: str, abort: StartAbort | None) -> None:
        self.spec = spec
        self.options = options
        self.session = session
        self.ranks: list[RayRank] = []
        self.rungs: dict[int, str] = {}
        self.owner_pid = os.getpid()
        self._start = StartWatch(spec, abort)
        self._death_lock = threading.Lock()
        self._end_lock = threading.Lock()
        self._is_ending = False
        self._gave_up = False

    # -- start -----------------------------------------------------------------------------------------------------

    def launch(self, placement: Placement) -> None:
        """Make all actors and have them build their workers; `await_ready` comes next.

        Raises:
            SerializationError: The spec cannot be pickled.
            StartupError: A rank did not come up, or is of another version.
        """
        # One answer for all ranks to "which device": they are to use one backend.
        spec = self.spec.with_changes(device="cuda" if "GPU" in placement.need else "cpu")
        frame = encode(spec, "the agent's class or arguments", main_by_value=True)
        pickled = ray.put((frame.payload, [pickle.PickleBuffer(buffer) for buffer in frame.buffers]))
        self.ranks = [RayRank(rank, self._make_actor(rank, placement)) for rank in self.spec.topology.ranks]
        deadline = Deadline.after(self.spec.init_timeout)
        places = self._ask_all(lambda rank: rank.actor.where.remote(), "spawn", deadline)
        for rank, place in zip(self.ranks, places, strict=True):
            rank.come_near(place)
            if place.version != this_version():
                raise StartupError(
                    f"rank {rank.rank} on node {place.address} runs {place.version}, the driver {this_version()}: "
                    "they must be the same",
                    rank=rank.rank,
                    phase="spawn",
                )
        store = self._open_store(placement, deadline)
        for rank in self.ranks:
            self._listen(rank)
        local = len(placement.nodes) == 1
        for rank, bundle in zip(self.ranks, placement.bundles, strict=True):
            _then(rank.actor.build.remote(pickled, bundle.local_rank, store, local), partial(self._begun, rank))

    def _begun(self, rank: RayRank, future: Any) -> None:
        """A rank builds, of which there will be news; unless what it was to build could not be brought there."""
        error = future.exception()
        if error is not None:
            self.lose(rank.rank, error)

    def _make_actor(self, rank: int, placement: Placement) -> Any:
        bundle, need = placement.bundles[rank], dict(placement.need)
        env = {**self.spec.env, **(self.spec.env_per_rank[rank] if self.spec.env_per_rank else {})}
        environment = {
            **forwarded(dict(os.environ)),
            **rank_environment(rank, self.spec.world_size, {}, threads=self.spec.threads),
            "LOCAL_RANK": str(bundle.local_rank),
            "LOCAL_WORLD_SIZE": str(bundle.local_size),
            **env,
        }
        return _RemoteRank.options(
            num_cpus=need.pop("CPU", 0),
            num_gpus=need.pop("GPU", 0),
            resources=need,
            runtime_env=dict(self.options.runtime_env) or None,
            max_concurrency=_ROOM,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement.group, bundle.index, placement_group_capture_child_tasks=False
            ),
        ).remote(rank, environment, list(sys.path), bundle.local_size)

    def _ask_all(self, ask: Callable[[RayRank], Any], phase: str, deadline: Deadline) -> list[Any]:
        """What every rank answers to one question.

        Raises:
            StartupError: One cannot answer, or does not in time.
        """
        for rank in self.ranks:
            _then(ask(rank), partial(self._start.put, "answer", rank.rank))
        found: dict[int, Any] = {}
        while len(found) < len(self.ranks):
            number, future = self._next_answer(deadline, found, phase)
            error = future.exception()
            if error is not None:
                text = f"rank {number} did not come up: {_reason(error)}"
                raise StartupError(text, rank=number, phase=phase) from error
            found[number] = future.result()
        return [found[number] for number in sorted(found)]

    def _next_answer(self, deadline: Deadline, found: Mapping[int, Any], phase: str) -> tuple[int, Any]:
        while True:
            try:
                kind, rank, news = self._start.next(deadline)
            except queue.Empty:
                missing = [rank.rank for rank in self.ranks if rank.rank not in found]
                text = f"ranks {missing} did not come up within {self.spec.init_timeout:g} s (init_timeout)"
                raise StartupError(text, rank=missing[0], phase=phase) from None
            if kind == "answer":
                return rank, news

    def _open_store(self, placement: Placement, deadline: Deadline) -> tuple[str, int] | None:
        if not (self.spec.init_process_group and self.spec.world_size > 1):
            return None
        host = "127.0.0.1" if len(placement.nodes) == 1 else placement.bundles[0].address
        _then(self.ranks[0].actor.bind.remote(host), partial(self._start.put, "answer", 0))
        _, future = self._next_answer(deadline, {rank.rank: None for rank in self.ranks[1:]}, "bind")
        error = future.exception()
        if error is not None:
            text = f"rank 0 could not bind a socket on {host} for the rendezvous: {_reason(error)}"
            raise StartupError(text, rank=0, phase="bind") from error
        return host, future.result()

    def await_ready(self) -> None:
        """Wait until every rank is ready. On a failure the caller ends the actors.

        Raises:
            StartupError: With the first failing rank's error as cause; `init_timeout` counts from the last progress.
        """
        for rank, ready in zip(self.ranks, self._start.await_ready(), strict=True):
            rank.ready = ready

    def attach(self, on_news: Callable[[int, tuple[Any, ...]], None], on_death: Callable[[Death], None]) -> None:
        """From now on, news goes to the executor; what has come meanwhile goes there first."""
        self._start.attach(on_news, on_death)

    # -- news ------------------------------------------------------------------------------------------------------

    def _listen(self, rank: RayRank) -> None:
        try:
            check_session(self.session)
            _then(rank.actor.listen.remote(), lambda future: self._heard(rank, future))
        except Exception as error:  # Ray has been shut down meanwhile
            self.lose(rank.rank, error)

    def _heard(self, rank: RayRank, future: Any) -> None:
        error = future.exception()
        if error is not None:
            self.lose(rank.rank, error)
            return
        try:
            for news in future.result():
                self._take(rank, news)
        finally:
            self._listen(rank)

    def _take(self, rank: RayRank, news: tuple[Any, ...]) -> None:
        if news[0] == "exit":
            self.exited(rank.rank, news[1])
        elif news[0] == "busy":
            rank.busy = news[1], time.monotonic_ns() - int(news[2] * 1e9)
        elif news[0] == "idle":
            rank.busy = None
        else:
            self._start.pass_on("message", rank.rank, news)

    def exited(self, rank: int, code: int) -> None:
        """A rank has said that it ends by itself; its process is about to."""
        leaving = self.ranks[rank]
        leaving.exit_code = code
        leaving.left.set()
        self._die(leaving, "")

    def lose(self, rank: int, error: BaseException) -> None:
        """Ray says that a rank is gone."""
        lost = self.ranks[rank]
        self._die(lost, _reason(error))
        lost.gone.set()
        lost.left.set()

    def _die(self, rank: RayRank, reason: str) -> None:
        lines = rank.last_lines() if rank.death is None else ()
        with self._death_lock:
            if rank.death is not None:
                return
            rank.death = Death(
                rank=rank.rank,
                pid=rank.pid,
                exit_code=rank.exit_code,
                signal_name=None,
                sent_by_us=self._is_ending,
                at_ns=time.monotonic_ns(),
                last_lines=lines,
                out_of_memory=False,
                node=rank.place.address if rank.place is not None else "",
                reason=reason,
            )
        self._start.pass_on("death", rank.rank, rank.death)

    # -- end -------------------------------------------------------------------------------------------------------

    def end(self, deadline: Deadline, *, ask: bool = True) -> None:
        """End every rank, asked first, and wait until Ray says that it is gone; again changes nothing.

        Args:
            deadline: For asking and killing together; two seconds more where Ray takes long to confirm.
            ask: False kills at once: for ranks that are not ready.
        """
        with self._end_lock:
            if self._gave_up or len(self.rungs) == len(self.ranks) or os.getpid() != self.owner_pid:
                return
            self._is_ending = True
            seconds = (deadline.remaining() or 0.0) + 2 * _KILL_FLOOR_S
            self._gave_up = not within(seconds, lambda: self._end_all(deadline, ask), "end the actors")

    def _end_all(self, deadline: Deadline, ask: bool) -> None:
        connected = is_session(self.session)
        before = {rank.rank for rank in self.ranks if rank.gone.is_set() or rank.exit_code is not None}
        if ask and connected:
            asking = deadline.share(0.4)
            for rank in self.ranks:
                self._ask_to_leave(rank)
            for rank in self.ranks:
                rank.left.wait(asking.remaining())
        for rank in self.ranks:
            self.rungs[rank.rank] = "exited" if rank.rank in before else "asked" if rank.left.is_set() else "KILL"
            if connected:
                with contextlib.suppress(Exception):  # it has ended since
                    ray.kill(rank.actor, no_restart=True)
        for rung, seconds in (("KILL", _KILL_S), ("exited", _KILL_S), ("asked", _GO_S)):
            patience = Deadline.after(seconds)
            for rank in self.ranks:
                if self.rungs[rank.rank] == rung and not rank.await_end(patience):
                    rank.kill()
        floor = Deadline.after(max(deadline.remaining() or 0.0, _KILL_FLOOR_S))
        for rank in self.ranks:
            rank.await_end(floor)
            if connected:
                rank.gone.wait(floor.remaining())
        if hard := {rank: rung for rank, rung in self.rungs.items() if ask and rung == "KILL"}:
            logger.warning("ranks did not leave when asked: %s", hard)

    def _ask_to_leave(self, rank: RayRank) -> None:
        if rank.gone.is_set() or rank.exit_code is not None or rank.state() == "stopped":
            return
        with contextlib.suppress(Exception):  # as above
            _then(rank.actor.leave.remote(), lambda future: rank.left.set() if future.exception() is None else None)

    def close(self) -> None:
        """Close all descriptors; after `end`."""
        for rank in self.ranks:
            rank.close()


def forwarded(environment: dict[str, str]) -> dict[str, str | None]:
    """The driver's variables that its ranks get on every node: those that libraries read, never those of a machine."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_FORWARDED) and not name.endswith("_SOCKET_IFNAME")
    }


def _then(ref: Any, done: Callable[[Any], None]) -> None:
    """Call `done(future)` on a thread of Ray's when the answer is there."""
    ref.future().add_done_callback(done)


def _reason(error: BaseException) -> str:
    """Ray's own reason in one line: what it says after the facts that we tell better, without its list of guesses."""
    text = re.split(r"\s*(?:Some common causes include|There are some potential root causes)", str(error))[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not _TOLD_BETTER.match(line)]
    return " ".join(telling) or type(error).__name__
