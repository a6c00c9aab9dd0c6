"""How the processes of a launched job find each other: by names that each can work out, without a port and a wait.

Each binds a datagram socket to a name of its own in the abstract namespace, which ends with the process, and only then
calls out to the others: whoever comes later finds who came earlier. The kernel tells the sender's user with every
message; what another user sends is dropped unread. What is exchanged here are fixed bytes and descriptors: a worker
says hello with a descriptor of its own process, and is answered with its end of a control lane.

The kernel vouches for who sends, not for who receives: a name may be another user's by the time its lane arrives. So
nothing is read from a lane as a message, and nothing sent over it, until the process that said hello has said over it
that it has it.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpexec.deadline import Deadline
from mpexec.errors import StartupError
from mpexec.processes.attached import AttachedProcess
from mpexec.processes.launched import LaunchedJob
from mpexec.processes.process import RankProcess
from mpexec.processes.start import death_pipe
from mpexec.transport.lane import ControlLane, lane_pair
from mpexec.transport.linux import OwnedFd, pidfd_open

PHASE = "attach"

_HELLO, _COME, _LANE, _HAVE_IT = b"hello ", b"come", b"lane", b"have it"
_BYTES = 64
_CREDENTIALS = struct.Struct("iII")
_MAX_FDS = 4
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the driver sends over the lane when all have come; the descriptors that come with it follow its own pidfd.

    Attributes:
        rank: The rank of the executor that the process is to be.
        payload: Bytes for the rank.
        fd_names: Names of the descriptors behind the first, which is the end of a death pipe.
        env: Changes to the process's environment, None removes.
    """

    rank: int
    payload: bytes
    driver_pid: int
    fd_names: tuple[str, ...]
    env: Mapping[str, str | None]


class _Letter(NamedTuple):
    """What came from a process of this user; the descriptors close themselves."""

    content: bytes
    pid: int
    fds: list[OwnedFd]


class _Post:
    """The socket of one process of a job."""

    def __init__(self, job: LaunchedJob) -> None:
        self._key = job.key
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.sock.bind(self._name(job.rank))
        except OSError as error:
            self.sock.close()
            raise StartupError(
                f"process {job.rank} of the job cannot attach: {error.strerror}. Another process that is told of the "
                "same job (RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID) is waiting at its place.",
                phase=PHASE,
            ) from error

    def _name(self, rank: int) -> bytes:
        return f"\0mpexec-attach-{self._key}-{rank}".encode()

    def send(self, rank: int, content: bytes, deadline: Deadline, fds: Sequence[int] = ()) -> bool:
        """Send to a process; False if it is not there, or does not read what was sent before until `deadline`."""
        left = deadline.remaining()
        # The kernel's own limit: a datagram socket that is not connected cannot be polled for room at the other end.
        # Zero would be no limit.
        whole, part = (0, 0) if left is None else divmod(max(1, int(left * 1e6)), 1_000_000)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, part))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.sock.sendmsg([content], rights, socket.MSG_NOSIGNAL, self._name(rank))
        except (ConnectionRefusedError, BlockingIOError):
            return False
        return True

    def receive(self) -> _Letter | None:
        """What has come, None if there is nothing or it is not from this user."""
        return _receive(self.sock)

    def close(self) -> None:
        self.sock.close()


def _receive(sock: socket.socket) -> _Letter | None:
    """What has come over a socket that tells who sends (SO_PASSCRED), as `_Post.receive` gives it."""
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        content, ancillary, _, _ = sock.recvmsg(_BYTES, _ANCILLARY_BYTES, flags)
    except (BlockingIOError, ConnectionResetError):
        return None
    fds, sender = array.array("i"), None
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            sender = _CREDENTIALS.unpack(data)
    owned = [OwnedFd(fd) for fd in fds]
    if sender is None or sender[1] != os.getuid():
        return None
    return _Letter(content, sender[0], owned)


@contextlib.contextmanager
def _as_socket(fd: int) -> Iterator[socket.socket]:
    """A socket that somebody else owns, for a moment; what is set on it stays."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        yield sock


def wait_for_lane(job: LaunchedJob, deadline: Deadline) -> ControlLane:
    """Wait, in a process that is to be a worker, for the first process of the job; this end of the lane to it.

    Raises:
        StartupError: It did not come before the deadline, or somebody has this process's place.
    """
    with contextlib.closing(_Post(job)) as post:
        _say_hello(post, job, deadline)
        poller = select.poll()
        poller.register(post.sock, select.POLLIN)
        while not deadline.expired:  # whatever keeps coming
            poller.poll(deadline.poll_ms())
            letter = post.receive()
            if letter is None:
                continue
            if letter.content == _LANE and len(letter.fds) == 1:
                return _taken(letter.fds[0])
            if letter.content == _COME:
                _say_hello(post, job, deadline)
        raise StartupError(
            f"process 0 of the job has not called MPExecutor.attach: waited for it in process {job.rank} until "
            "init_timeout had passed",
            phase=PHASE,
        )


def _taken(theirs: OwnedFd) -> ControlLane:
    """The lane that the driver has sent; it waits to hear that we have it."""
    with _as_socket(theirs.fd) as sock, contextlib.suppress(ConnectionError):  # a driver that is gone is seen next
        sock.send(_HAVE_IT, socket.MSG_NOSIGNAL)
    return ControlLane(os.dup(theirs.fd))


def _say_hello(post: _Post, job: LaunchedJob, deadline: Deadline) -> None:
    ourselves = OwnedFd(pidfd_open(os.getpid()))
    try:
        # Where it is not there yet, it will call out.
        post.send(0, _HELLO + str(job.rank).encode(), deadline, [ourselves.fd])
    finally:
        ourselves.close()


def _register(poller: select.poll, processes: Sequence[RankProcess]) -> None:
    for process in processes:
        for fd, events in process.end_events().items():
            poller.register(fd, events)


class Meeting:
    """The first process of a job waits for the others. Use it in a `with`, which lets those go that were not taken."""

    def __init__(self, job: LaunchedJob, first_rank: int) -> None:
        """Prepare to meet the others.

        Args:
            first_rank: The executor's rank of process 1.

        Raises:
            StartupError: Somebody has this process's place.
        """
        self._job = job
        self._shift = first_rank - 1
        self._post = _Post(job)
        self._here: dict[int, AttachedProcess] = {}
        self._unproved: set[int] = set()  # those of them that have not said over the lane that they have it
        self._death_ends: dict[int, OwnedFd] = {}

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self._post.close()
        for process in self._here.values():
            process.lane.hang_up()  # an answer to those that wait; it is not theirs to be killed for
            process.close()
        for end in self._death_ends.values():
            end.close()

    def wait(self, deadline: Deadline, own: Sequence[RankProcess] = ()) -> bool:
        """Wait until all have come.

        Args:
            own: Processes that this one has started; somebody else watches them.

        Returns:
            False if one of `own` has ended meanwhile.

        Raises:
            StartupError: One did not come before the deadline, or left or ended meanwhile, or came twice.
        """
        for other in self._job.others:
            self._post.send(other, _COME, Deadline.after(0.0))  # those who are not there yet will say hello
        poller = select.poll()
        poller.register(self._post.sock, select.POLLIN)
        _register(poller, own)
        while self._unproved or len(self._here) < len(self._job.others):
            poller.poll(deadline.poll_ms())
            if any(process.is_over() for process in own):
                return False
            if deadline.expired:  # whatever keeps coming
                raise self._missing()
            self._check_alive()
            self._hear_proofs()
            letter = self._post.receive()
            if letter is not None and letter.content.startswith(_HELLO) and len(letter.fds) == 1:
                process = self._greet(letter, deadline)
                if process is not None:
                    _register(poller, [process])
                    poller.register(process.lane.fileno(), select.POLLIN)
        return True

    def _greet(self, letter: _Letter, deadline: Deadline) -> AttachedProcess | None:
        """Answer a hello with a lane, unless it has been answered already."""
        number = letter.content.removeprefix(_HELLO)
        other = int(number) if number.isdigit() else -1
        if other not in self._job.others:
            return None
        known = self._here.get(other)
        if known is not None:
            if known.pid != letter.pid:
                pids = f"{known.pid} and {letter.pid}"
                raise StartupError(f"two processes are process {other} of the job: pids {pids}", phase=PHASE)
            return None
        with contextlib.ExitStack() as stack:
            lane, theirs = lane_pair()
            stack.callback(lane.close)
            stack.callback(theirs.close)
            with _as_socket(lane.fileno()) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            death_read, death_write = death_pipe()
            stack.callback(death_read.close)
            stack.callback(death_write.close)
            process = AttachedProcess(other + self._shift, letter.pid, letter.fds[0], lane, death_write)
            if not self._post.send(other, _LANE, deadline, [theirs.fd]):
                raise self._ended(other, letter.pid, "ended")
            stack.pop_all()
        theirs.close()
        self._here[other], self._death_ends[other] = process, death_read
        self._unproved.add(other)
        return process

    def _hear_proofs(self) -> None:
        """Only the process that said hello can say that it has the lane; from others it is dropped."""
        for other in tuple(self._unproved):
            process = self._here[other]
            with _as_socket(process.lane.fileno()) as sock:
                letter = _receive(sock)
                if letter is not None and (letter.content, letter.pid) == (_HAVE_IT, process.pid):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)  # messages have descriptors in its place
                    self._unproved.remove(other)

    def _check_alive(self) -> None:
        for other, process in self._here.items():
            if process.is_over():
                raise self._ended(other, process.pid, process.describe_end())

    def _ended(self, other: int, pid: int, how: str) -> StartupError:
        return StartupError(
            f"process {other} of the job (pid {pid}) {how} before all others had called MPExecutor.attach",
            rank=other + self._shift,
            phase=PHASE,
        )

    def _missing(self) -> StartupError:
        missing = [str(other) for other in self._job.others if other not in self._here or other in self._unproved]
        which = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing)}"
        return StartupError(
            f"{which} of the job (of {self._job.world_size}) did not call MPExecutor.attach before init_timeout "
            "had passed",
            rank=int(missing[0]) + self._shift,
            phase=PHASE,
        )

    def take(self, other: int) -> tuple[AttachedProcess, OwnedFd]:
        """Hand out a process that has come, with the end of the death pipe that is to be sent to it."""
        return self._here.pop(other), self._death_ends.pop(other)
