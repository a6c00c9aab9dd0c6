"""The folder in which drivers put their inspection sockets: nobody but this user writes to it, or stands in for it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from mpexec.errors import ConfigError
from mpexec.transport.linux import OwnedFd

_SOCKET = re.compile(r"(\d+)-[0-9a-f]{8}\.sock")
_UNFINISHED_S = 60.0  # a driver that has not renamed its socket by then has ended
_BACKLOG = 8
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def usual_places() -> list[Path]:
    """Where a folder may be, the first choice first. A login shell and a cron job may see different ones."""
    uid = os.geteuid()
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    runtimes = [given] if given.startswith("/") else []
    places = [Path(runtime) / "mpexec" for runtime in (*runtimes, f"/run/user/{uid}")]
    return list(dict.fromkeys([*places, Path(f"/tmp/mpexec-{uid}")]))


def own_place() -> Path:
    """Where this process puts its sockets: in XDG_RUNTIME_DIR, if there is such a folder, else in /tmp."""
    places = usual_places()
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    return places[0] if given.startswith("/") and os.access(given, os.W_OK | os.X_OK) else places[-1]


class InspectionFolder:
    """A folder of this user alone, held open: what is done with a name in it cannot be led elsewhere.

    Its descriptor also lifts the limit of 107 bytes on the address of a unix socket.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open it.

        Raises:
            ConfigError: It is a link or no folder, belongs to somebody else, or others may enter it.
            FileNotFoundError: There is none, and it is not to be made.
            OSError: It cannot be made.
        """
        if create:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        try:
            self._fd = OwnedFd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except NotADirectoryError as error:  # a link too, with O_DIRECTORY
            raise ConfigError(f"{path} is a link, or no folder: remove it") from error
        facts = os.fstat(self._fd.fd)
        if facts.st_uid != os.geteuid():
            self._fd.close()
            raise ConfigError(f"{path} belongs to user {facts.st_uid}, not to you: set XDG_RUNTIME_DIR to a folder")
        if stat.S_IMODE(facts.st_mode) & 0o077:
            self._fd.close()
            raise ConfigError(f"{path} can be entered by others (mode {stat.S_IMODE(facts.st_mode):o}): chmod 700 it")

    def close(self) -> None:
        """Close the descriptor."""
        self._fd.close()

    def __enter__(self) -> InspectionFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self) -> tuple[socket.socket, str]:
        """A new listening socket, not blocking, and its name. A name that can be seen can be connected to."""
        name = f"{os.getpid()}-{secrets.token_hex(4)}.sock"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listening.bind(self._address(f".{name}"))
            listening.listen(_BACKLOG)
            os.rename(f".{name}", name, src_dir_fd=self._fd.fd, dst_dir_fd=self._fd.fd)
        except BaseException:
            listening.close()
            self.remove(f".{name}")
            raise
        return listening, name

    def connect(self, name: str) -> socket.socket:
        """A connection, not blocking.

        Raises:
            ConnectionRefusedError: The driver has ended.
            BlockingIOError: More wait already than it lets wait.
            OSError: The name is gone, or belongs to a socket of another kind.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(self._address(name))
        except BaseException:
            connection.close()
            raise
        return connection

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""
        if not self._fd.closed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd.fd)

    def sockets(self) -> Iterator[tuple[str, int]]:
        """Names and process ids of the drivers that live; the names of those that have ended are removed."""
        for name in sorted(os.listdir(self._fd.fd)):
            if name.startswith("."):
                self._remove_unfinished(name)
            elif (match := _SOCKET.fullmatch(name)) and not self._is_stale(name):
                yield name, int(match[1])

    def _is_stale(self, name: str) -> bool:
        try:
            self.connect(name).close()
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):  # a folder of that name, for example, is let be
                self.remove(name)
            return True
        except BlockingIOError:
            return False
        except OSError:  # it has gone in this moment
            return True
        return False

    def _remove_unfinished(self, name: str) -> None:
        with contextlib.suppress(OSError):
            if time.time() - os.stat(name, dir_fd=self._fd.fd, follow_symlinks=False).st_mtime > _UNFINISHED_S:
                self.remove(name)

    def _address(self, name: str) -> str:
        return f"/proc/self/fd/{self._fd.fd}/{name}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel knows them. The id is 0 in another pid namespace."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid
