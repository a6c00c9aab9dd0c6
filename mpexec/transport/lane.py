"""The control lane: whole messages with descriptors between driver and rank, in order, with no wait that has no end.

One end of an AF_UNIX SOCK_SEQPACKET pair. A packet is one byte of kind and a pickle; a pickle above 32 KiB travels in a
memfd whose descriptor comes first among those of the packet, so that no message can outgrow the socket's buffer.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import pickle
import select
import socket
import threading
from collections.abc import Sequence
from typing import Any

from mpexec.deadline import Deadline
from mpexec.errors import SerializationError, TransportError
from mpexec.messages import unpicklable
from mpexec.transport import linux

_INLINE, _IN_MEMFD = b"\0", b"\1"
_INLINE_LIMIT = 32 << 10
_PACKET_LIMIT = 64 << 10
# the kernel's SCM_MAX_FD
_MAX_FDS = 253
_INT_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS * _INT_BYTES)
_SEND_SECONDS = 5.0


class LaneClosed(TransportError):
    """The peer closed its end (it exited, as a rule), or this end is closed."""


class LaneTimeout(TransportError):
    """The deadline passed first; nothing was sent or received, and the lane stays usable."""


class _OwnedSocket(linux.OwnedFd):
    """A socket object that lets go of its number together with the owner, so that neither closes a later descriptor."""

    __slots__ = ("sock",)

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        super().__init__(sock.fileno())

    def close(self) -> None:
        self.sock.detach()
        super().close()


class ControlLane:
    """One end of the lane. `send` may be called from any thread; receiving is meant for one thread at a time.

    Owned by the process that made it: in a child forked later this end is closed and every call raises `LaneClosed`.
    """

    def __init__(self, fd: int) -> None:
        """Take over `fd`, one end of a SOCK_SEQPACKET pair, and make it non-blocking."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)
        sock.setblocking(False)
        self._owned = _OwnedSocket(sock)
        # Re-entrant: a finalizer that the collector runs on the sending thread may send too.
        self._sending = threading.RLock()

    def fileno(self) -> int:
        """The number to poll for reading; -1 once closed."""
        return self._owned.fd

    @property
    def closed(self) -> bool:
        """True once this end is closed."""
        return self._owned.closed

    def send(self, message: Any, fds: Sequence[int] = (), deadline: Deadline | None = None) -> None:
        """Send one message; `fds` are duplicated into it and stay the caller's.

        Waits for room until `deadline`, five seconds unless given.

        Raises:
            SerializationError: The message cannot be pickled; nothing was sent.
            LaneTimeout: The peer did not read in time; nothing was sent.
            LaneClosed: One of the two ends is closed.
        """
        if len(fds) >= _MAX_FDS:
            raise TransportError(f"one control message carries at most {_MAX_FDS - 1} descriptors, not {len(fds)}")
        try:
            data = pickle.dumps(message, protocol=5)
        except Exception as error:  # pickling runs user code, which may raise anything
            raise unpicklable(message, error, "a control message") from error
        deadline = Deadline.after(_SEND_SECONDS) if deadline is None else deadline
        if len(data) <= _INLINE_LIMIT:
            self._send_packet([_INLINE, data], list(fds), deadline)
            return
        memory = linux.memfd_create("mpexec-lane", 0)
        try:
            _write_all(memory, data)
            self._send_packet([_IN_MEMFD], [memory, *fds], deadline)
        finally:
            os.close(memory)

    def _send_packet(self, parts: list[bytes], fds: list[int], deadline: Deadline) -> None:
        if self.closed:
            raise LaneClosed("this end of the control lane is closed")
        left = deadline.remaining()
        if not self._sending.acquire(timeout=-1 if left is None else left):
            raise LaneTimeout("another thread is still sending on this control lane; its peer does not read")
        try:
            while not self._try_send(parts, fds):
                if not _wait(self.fileno(), select.POLLOUT, deadline):
                    raise LaneTimeout("the peer of this control lane does not read")
        finally:
            self._sending.release()

    def _try_send(self, parts: list[bytes], fds: list[int]) -> bool:
        """True once sent, False when there is no room: a packet goes whole or not at all."""
        try:
            # not `socket.send_fds`, which drops its flags: SIGPIPE ends a program that has restored its default action
            self._owned.sock.sendmsg(parts, _ancillary(fds), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise LaneClosed("the peer of this control lane is gone") from error
        except OSError as error:
            if self.closed:
                raise LaneClosed("this end of the control lane was closed meanwhile") from error
            raise TransportError(f"cannot send a control message with {len(fds)} descriptors: {error}") from error
        return True

    def recv(self, deadline: Deadline) -> tuple[Any, list[int]]:
        """Wait for the next message; the descriptors that came with it are the caller's to close.

        Raises:
            LaneTimeout: None came before the deadline.
            LaneClosed: The peer is gone and everything it had sent was received.
            SerializationError: The message cannot be rebuilt here; its descriptors are closed, the lane goes on.
        """
        while True:
            got = self.try_recv()
            if got is not None:
                return got
            if not _wait(self.fileno(), select.POLLIN, deadline):
                raise LaneTimeout("no control message came before the deadline")

    def try_recv(self) -> tuple[Any, list[int]] | None:
        """The next message as `recv` gives it, or None when none is there now; raises as `recv` does."""
        packet = self._try_recv_packet()
        if packet is None:
            return None
        data, fds = packet
        try:
            body = memoryview(data)[1:] if data[:1] == _INLINE else _read_all(fds.pop(0))
            return pickle.loads(body), fds
        except Exception as error:  # unpickling runs user code, which may raise anything
            _close_all(fds)
            raise SerializationError(f"a control message cannot be rebuilt: {type(error).__name__}: {error}") from error

    def _try_recv_packet(self) -> tuple[bytes, list[int]] | None:
        while True:
            try:
                data, ancillary, flags, _ = self._owned.sock.recvmsg(
                    _PACKET_LIMIT, _ANCILLARY_BYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The peer died with messages of ours unread. The kernel says so once, ahead of what the peer had
                # still sent; those messages come next.
                continue
            except OSError as error:
                raise LaneClosed("this end of the control lane is closed") from error
            fds = _descriptors(ancillary)
            if not data:
                raise LaneClosed("the peer of this control lane is gone")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                _close_all(fds)
                raise TransportError("a control message came in part: the limit of open descriptors is reached")
            return data, fds

    def hang_up(self) -> None:
        """End the lane for both sides, and wake whoever polls or waits on either; the number stays open."""
        with contextlib.suppress(OSError):  # closed already, here or there
            self._owned.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; again changes nothing. Whoever polls the number must have stopped before."""
        self._owned.close()


def lane_pair() -> tuple[ControlLane, linux.OwnedFd]:
    """This process's end of a new lane, and the other end, blocking and close-on-exec, to hand to a rank."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return ControlLane(ours.detach()), linux.OwnedFd(theirs.detach())


def _ancillary(fds: list[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return list(fds)


def _wait(fd: int, events: int, deadline: Deadline) -> bool:
    """True when `fd` is ready or has hung up, False at the deadline."""
    if fd < 0:
        raise LaneClosed("this end of the control lane is closed")
    poller = select.poll()
    poller.register(fd, events)
    return bool(poller.poll(deadline.poll_ms()))


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read_all(fd: int) -> mmap.mmap | bytes:
    """The content of a memory file, which is closed."""
    try:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
