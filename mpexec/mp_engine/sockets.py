"""ZMQ sockets on an event loop, and where they meet: a folder that only this user can enter, or TCP with keys.

`zmq.asyncio` makes a future for every message; here a message is handed to a function, so a turn of the loop may take
many. libzmq's descriptor is edge-triggered: it tells once that something has changed, and any use of the socket may
take that from it. So everything is read until nothing is left, and after every sending the socket is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.monitor
import zmq.utils.z85

from mpexec.errors import ConfigError
from mpexec.executor.threads import in_thread

logger = logging.getLogger(__name__)

_TURN_MESSAGES = 64  # taken in a row before the loop's other callbacks get their turn
_HEARTBEAT_MS = 5_000  # over TCP; libzmq's own thread sends and answers them, however busy the loop is
_SILENCE_MS = 30_000  # after which the other side has vanished
_LONGEST_PATH = 100  # a unix socket's path has 107 bytes at most
_PREFIX = "mpexec-engine-"
_NEW_PREFIX = "mpexec-newborn-"


class LoopSocket:
    """A socket whose messages are handed to `receive` on the running loop.

    Args:
        socket: Owned from now on. It takes whatever is sent: SNDHWM is 0, or its traffic cannot reach it.
        receive: Called with the parts of each message. What it raises ends the loop's callback, not the socket.
    """

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)
        self._schedule()

    def send(self, parts: list[bytes]) -> None:
        """Send a message; once closed, drop it.

        Raises:
            zmq.ZMQError: For a ROUTER with EHOSTUNREACH: the client has gone.
        """
        if self._socket.closed:
            return
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        finally:
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # sending may have used up the edge
                self._schedule()

    def read(self, at_most: int = _TURN_MESSAGES) -> bool:
        """Hand over messages that have arrived; False once there are no more."""
        for _ in range(at_most):
            if self._socket.closed:
                return False
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._receive(parts)
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Stop watching and close; again changes nothing. Whatever is unsent after `linger_ms` is dropped."""
        if self._socket.closed:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._socket.close(linger_ms)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        more = True  # also after an error: no edge will tell of what is left
        try:
            more = self.read()
        finally:
            if more:
                self._schedule()


def watch_disconnections(socket: zmq.Socket[bytes], tell: Callable[[], None]) -> LoopSocket:
    """Call `tell` on the running loop whenever a peer of `socket` is lost, also by a handshake that fails."""
    events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    return LoopSocket(socket.get_monitor_socket(events), lambda _: tell())


class SocketSet:
    """The sockets of one end of a connection, in a ZMQ context of their own. Once ended, it may be opened again."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: list[LoopSocket] = []

    @property
    def ended(self) -> bool:
        """True before `opening` and after `end` or `end_async`; one that is only closed still has its context."""
        return self._context is None

    @contextlib.contextmanager
    def opening(self, kind: int) -> Iterator[zmq.Socket[bytes]]:
        """A new socket in a new context, which the block binds or connects. Should that fail, nothing is left."""
        self._context = zmq.Context()
        socket = self._context.socket(kind)
        try:
            yield socket
        except BaseException:
            socket.close(0)
            self.end()
            raise

    def add(self, socket: LoopSocket) -> None:
        """Close it with the others; those that were added first are closed first."""
        self._sockets.append(socket)

    def watch(
        self, socket: zmq.Socket[bytes], receive: Callable[[list[bytes]], None], tell: Callable[[], None]
    ) -> LoopSocket:
        """Add `socket`, whose messages go to `receive`, and have `tell` called whenever a peer of it is lost."""
        watched = LoopSocket(socket, receive)
        self._sockets += [watch_disconnections(socket, tell), watched]
        return watched

    def close(self, linger_ms: int = 0) -> None:
        """Close every socket; again changes nothing. Whatever is unsent `linger_ms` after the end is dropped."""
        for socket in self._sockets:
            socket.close(linger_ms)
        self._sockets.clear()

    def end(self) -> None:
        """Close without last words and end the context, in any state and also after the loop has been closed."""
        self.close()
        context, self._context = self._context, None
        if context is not None:
            context.term()

    async def end_async(self, linger_ms: int = 0) -> None:
        """Close and end the context, which waits for the last words, as long as a socket lingers for them."""
        self.close(linger_ms)
        context, self._context = self._context, None
        if context is not None:
            await in_thread(context.term, name="mpexec-rpc-close")


# -- a folder of one's own -----------------------------------------------------------------------------------------


class SocketFolder:
    """A new folder of mode 0700 with a short path, for one unix socket. Removed by `remove`, whoever calls it first.

    A folder whose maker was killed before it could remove it is removed by the next one that is made: its lock is free.
    """

    def __init__(self) -> None:
        new = _make_folder()
        self._lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now does it get a name by which another process could find it, and take it for a stale one.
        self.path = new.rename(new.with_name(new.name.replace(_NEW_PREFIX, _PREFIX)))
        _remove_stale(self.path)

    @property
    def address(self) -> str:
        """Where a server of this folder listens."""
        return f"ipc://{self.path}/socket"

    def remove(self) -> None:
        """Remove the folder; again changes nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _make_folder() -> Path:
    """Make it in the first place that is there, writable, and not too deep.

    Raises:
        ConfigError: There is none.
    """
    refusals = []
    for parent in dict.fromkeys((os.environ.get("TMPDIR") or "/tmp", "/tmp", "/dev/shm", "/var/tmp")):
        try:
            parent = os.path.abspath(parent)
            if len(os.fsencode(parent)) + len(_NEW_PREFIX) + len("/12345678/socket") > _LONGEST_PATH:
                raise OSError(f"{parent}: too long for a unix socket")
            return Path(tempfile.mkdtemp(prefix=_NEW_PREFIX, dir=parent))  # mode 0700
        except OSError as error:
            refusals.append(str(error))
    raise ConfigError("no folder for the engine's socket: " + "; ".join(refusals) + ". Point TMPDIR to a short one.")


def _remove_stale(ours: Path) -> None:
    for folder in ours.parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if folder == ours or folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


# -- keys for TCP --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """CURVE keys of a server: its own pair, and the public keys of the clients that may connect."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """CURVE keys of a client: its own pair, and the server's public key."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


def make_keys() -> tuple[ServerKeys, ClientKeys]:
    """Keys for a server and one client of it."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return (
        ServerKeys(server_public, server_secret, frozenset({client_public})),
        ClientKeys(client_public, client_secret, server_public),
    )


def check_address(address: str, keys: ServerKeys | ClientKeys | None) -> None:
    """Refuse whatever would be open to others.

    Raises:
        ConfigError: It is neither a unix socket nor TCP with keys.
    """
    if address.startswith("ipc:///"):
        return
    if not address.startswith("tcp://"):
        raise ConfigError(f"address={address!r}: use ipc:///absolute/path or tcp://host:port")
    if keys is None:
        raise ConfigError(f"address={address!r}: TCP is open to everybody; give CURVE keys, see make_keys()")


def _expect_heartbeats(socket: zmq.Socket[bytes]) -> None:
    """A process that ends closes its connections; a machine or a network that is lost closes none."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


def use_server_keys(socket: zmq.Socket[bytes], keys: ServerKeys) -> LoopSocket:
    """Make `socket`, before it is bound, accept the clients of `keys` only; the socket that answers for it comes back.

    libzmq asks at the address inproc://zeromq.zap.01 (its RFC 27) whether a client's public key is known.
    """
    gate = socket.context.socket(zmq.REP)
    gate.bind("inproc://zeromq.zap.01")

    def decide(parts: list[bytes]) -> None:
        version, request_id = parts[0], parts[1]
        known = len(parts) > 6 and parts[5] == b"CURVE" and zmq.utils.z85.encode(parts[6]) in keys.clients
        status = (b"200", b"OK", b"client", b"") if known else (b"400", b"unknown key", b"", b"")
        answering.send([version, request_id, *status])

    answering = LoopSocket(gate, decide)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"mpexec")
    _expect_heartbeats(socket)
    return answering


def use_client_keys(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Make `socket`, before it is connected, prove who it is and refuse any other server."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    _expect_heartbeats(socket)
