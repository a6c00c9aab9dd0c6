"""Behind the fixture `faults`: ranks die, stop, hang or fail at a point of the test's choice."""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

from mpexec.config import WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import ConfigError, StartupError
from mpexec.executor.base import State
from mpexec.executor.mp import MPExecutor
from mpexec.executor.threads import in_thread
from mpexec.processes.process import process_state
from mpexec.pytest_plugin.misdeeds import Fault
from mpexec.pytest_plugin.points import ArmedWorker, arm, commit
from mpexec.transport.linux import OwnedFd, pidfd_open, pidfd_send_signal

_ARM_S = 30.0  # for the call that tells a rank of a fault: it answers unless it is busy
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}


class Faults:
    """Makes ranks misbehave, each fault once.

    A fault happens at a point: `at="forward"` on the entry into that method of the agent or worker, `after="forward"`
    on its return, `nth=3` the third time only, counted from when the fault was given. Any method will do, plain or
    coroutine, public or not, `build_model` and `start` included; inside a coroutine method `hang` and `slow` wait as a
    coroutine, and the rank goes on serving others. Without a point the fault happens now.

    Faults given before `mp_executor(...)` travel with the agent of the next executor that it makes. Those given later
    are told to a rank of the last one that it made and that has not been released, or of `executor`, an `MPExecutor`
    from elsewhere; the rank must be able to answer a call then.

    Every method gives the `Fault`, for `wait` and `fired`, and raises `ConfigError` for a rank, point or value that
    cannot work.
    """

    def __init__(self) -> None:
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._read_end, self._write_end = OwnedFd(read_end), OwnedFd(write_end)
        self._heard = b""
        self._given: list[Fault] = []
        self._carried_next: list[Fault] = []
        self._pids: dict[int, int] = {}  # of faults that have happened, by their number
        self._executor: MPExecutor | None = None
        self._touched: list[MPExecutor] = []

    # -- what can go wrong ---------------------------------------------------------------------------------------------

    def kill(self, rank: int, **point: Any) -> Fault:
        """End the process by SIGKILL, as the kernel's out-of-memory killer does."""
        return self._give("kill", rank, point)

    def stop(self, rank: int, **point: Any) -> Fault:
        """Stop the process by SIGSTOP: it lives and does nothing, until somebody sends SIGCONT."""
        return self._give("stop", rank, point)

    def segv(self, rank: int, **point: Any) -> Fault:
        """End the process by SIGSEGV, as broken C code does."""
        return self._give("segv", rank, point)

    def hang(self, rank: int, **point: Any) -> Fault:
        """Wait in Python for an event that never comes."""
        return self._give("hang", rank, point)

    def hang_in_c(self, rank: int, **point: Any) -> Fault:
        """Wait for ever in C code that keeps the interpreter to itself: no other thread of the rank runs."""
        return self._give("hang_in_c", rank, point)

    def slow(self, rank: int, seconds: float, **point: Any) -> Fault:
        """Wait for `seconds`, then go on."""
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= 0:
            raise ConfigError(f"seconds={seconds!r}: use a number of at least 0")
        return self._give("slow", rank, point, seconds=float(seconds))

    def raises(self, rank: int, error: BaseException, **point: Any) -> Fault:
        """Raise `error`, which must survive pickling. Without a point it is a background failure, for `wait_tasks`."""
        if not isinstance(error, BaseException):
            raise ConfigError(f"error={error!r}: give an exception, such as RuntimeError('no memory')")
        return self._give("raises", rank, point, error=error)

    def unpicklable(self, rank: int, **point: Any) -> Fault:
        """With `after`, return a value that cannot be pickled; with `at`, raise such an exception."""
        if not point.get("at") and not point.get("after"):
            raise ConfigError(
                f"faults.unpicklable({rank!r}) needs a point: after='forward' for the value that it returns, "
                "at='forward' for an exception"
            )
        return self._give("unpicklable", rank, point)

    def _give(self, kind: str, rank: int, point: dict[str, Any], **facts: Any) -> Fault:
        executor, facts = _checked(kind, rank, **point), {**point, **facts}
        facts.pop("executor", None)
        fault = Fault(len(self._given) + 1, kind, rank, **facts, report_to=self._path(), pipe=os.readlink(self._path()))
        target = executor or self._living()
        if target is None:
            if not fault.point:
                raise ConfigError(f"{fault} would happen now, but there is no executor: make one, or name a point")
            self._carried_next.append(fault)
        else:
            target.topology.select(rank, f"rank of {fault}")
            self._touched.append(target)
            self._send(target, fault)
        self._given.append(fault)
        return fault

    def _path(self) -> str:
        """Ranks open the pipe through /proc: it needs no name that could be left behind."""
        return f"/proc/{os.getpid()}/fd/{self._write_end.fd}"

    def _living(self) -> MPExecutor | None:
        executor = self._executor
        return None if executor is None or executor.state is State.RELEASED else executor

    def _send(self, executor: MPExecutor, fault: Fault) -> None:
        if fault.point:
            executor.collective_rpc(arm, args=(fault,), ranks=fault.rank, reply_ranks=(), timeout=_ARM_S)
        elif fault.kind in _SIGNALS:
            process = executor._group.processes[fault.rank]
            if process.is_over():  # its number may be another process's by now
                raise ConfigError(f"{fault}: that rank (pid {process.pid}) is gone already")
            pidfd_send_signal(process.pidfd.fd, _SIGNALS[fault.kind])  # not as one of ours: it is to be news
            self._pids[fault.number] = process.pid
        else:
            executor.notify(commit, args=(fault,), ranks=fault.rank)

    # -- when it has -------------------------------------------------------------------------------------------------

    @property
    def fired(self) -> tuple[Fault, ...]:
        """The faults that have happened up to now, in the order in which they were given."""
        self._listen(Deadline.after(0.0))
        return tuple(fault for fault in self._given if fault.number in self._pids)

    def wait(self, *faults: Fault, timeout: float = 30.0) -> None:
        """Wait until these faults, or all that were given, have happened: a rank that is killed is dead then, one that
        is stopped stands still, any other is at its misdeed. Blocks this thread; one thread at a time.

        Raises:
            TimeoutError: Some have not, within `timeout` seconds; it names them.
        """
        self._wait(faults, timeout, threading.Event())

    def _wait(self, faults: tuple[Fault, ...], timeout: float, given_up: threading.Event) -> None:
        deadline = Deadline.after(timeout)
        wanted = faults or tuple(self._given)
        while missing := [str(fault) for fault in wanted if fault.number not in self._pids]:
            if not self._listen(deadline):
                raise TimeoutError(f"not reached within {timeout} s: {', '.join(missing)}")
            if given_up.is_set():
                return
        for fault in wanted:
            _await_effect(fault, self._pids[fault.number], deadline)

    async def wait_async(self, *faults: Fault, timeout: float = 30.0) -> None:
        """As `wait`, without blocking the loop."""
        given_up = threading.Event()

        def give_up() -> None:
            given_up.set()
            os.write(self._write_end.fd, b"\n")  # an empty report, which ends the listening

        await in_thread(lambda: self._wait(faults, timeout, given_up), name="mpexec-faults", cancel=give_up)

    def _listen(self, deadline: Deadline) -> bool:
        """Take in what ranks report; False if nothing comes in time."""
        poller = select.poll()
        poller.register(self._read_end.fd, select.POLLIN)
        if not poller.poll(deadline.poll_ms()):
            return False
        *lines, self._heard = (self._heard + os.read(self._read_end.fd, 65536)).split(b"\n")
        for number, pid in (line.split() for line in lines if line):
            self._pids[int(number)] = int(pid)
        return True

    # -- for mp_executor ---------------------------------------------------------------------------------------------

    def carried_by(self, spec: WorkerSpec) -> WorkerSpec:
        """The spec with all faults on board that were given ahead of it.

        Raises:
            ConfigError: One of them is for a rank that it does not have.
        """
        faults, self._carried_next = tuple(self._carried_next), []
        for fault in faults:
            spec.topology.select(fault.rank, f"rank of {fault}")
        armed: Any = ArmedWorker(spec.worker_cls, faults)
        return spec.with_changes(worker_cls=armed) if faults else spec

    def adopt(self, executor: MPExecutor, *, armed: bool) -> None:
        """From now on this executor is meant; `armed` if faults were carried by its spec."""
        self._executor = executor
        if armed:
            self._touched.append(executor)

    def concern(self, executor: MPExecutor) -> bool:
        """True if a fault was meant for this executor: then its failures are no surprise."""
        return executor in self._touched

    def close(self) -> None:
        """End the listening.

        Raises:
            ConfigError: A fault was given for an executor that never came.
        """
        self._read_end.close()
        self._write_end.close()
        if self._carried_next:
            given = ", ".join(map(str, self._carried_next))
            raise ConfigError(f"{given}: no executor was made after that; mp_executor makes it, or give executor=")


def bad_point(error: StartupError) -> ConfigError | None:
    """The error that a start deserves which failed because a fault names no method."""
    name = getattr(error.__cause__, "fault_point", None)
    return None if name is None else ConfigError(str(error.__cause__), fault_point=name)


def _checked(
    kind: str, rank: int, *, at: str = "", after: str = "", nth: int = 1, executor: Any = None
) -> MPExecutor | None:
    """Refuse what cannot be meant; the executor if there is one."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise ConfigError(f"faults.{kind}: rank={rank!r}: use an integer from 0 on")
    for name, point in (("at", at), ("after", after)):
        if not isinstance(point, str) or (point and not point.isidentifier()):
            raise ConfigError(f"faults.{kind}: {name}={point!r}: use the name of a method of the agent or worker")
    if at and after:
        raise ConfigError(f"faults.{kind}: give at={at!r} or after={after!r}, not both: that would be two faults")
    if not isinstance(nth, int) or isinstance(nth, bool) or nth < 1:
        raise ConfigError(f"faults.{kind}: nth={nth!r}: use an integer from 1 on")
    if nth != 1 and not (at or after):
        raise ConfigError(f"faults.{kind}: nth={nth} needs a point: at= or after=")
    if executor is not None and not isinstance(executor, MPExecutor):
        raise ConfigError(f"faults.{kind}: executor={executor!r}: only an MPExecutor has processes that may fail so")
    return executor


def _await_effect(fault: Fault, pid: int, deadline: Deadline) -> None:
    """Wait until the signal of a fault has done its work."""
    if fault.kind not in _SIGNALS:
        return
    try:
        pidfd = pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        is_over = bool(poller.poll(0 if fault.kind == "stop" else deadline.poll_ms()))
        while not is_over and fault.kind == "stop" and not deadline.expired:
            is_over = process_state(pid, pidfd) != "running"  # the kernel tells nobody but the parent
            os.sched_yield()
    finally:
        os.close(pidfd)
    if not is_over:
        raise TimeoutError(f"{fault}: its signal had no effect in time on pid {pid}")
