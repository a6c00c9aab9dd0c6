"""The Ray cluster of this process: joined or started, shared by its executors, and left by the last of them."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray._private.utils import read_ray_address

from mpexec.errors import ConfigError, StartupError, TransportError
from mpexec.executor.settings import kept_settings

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
_LOOK_S = 1.0
_QUIET: dict[str, Any] = {"logging_level": logging.ERROR}  # what it warns of is its own signal handlers and tokens

_lock = threading.Lock()
_users = 0
_ours = ""  # the session that this module has begun by `ray.init`
_keeper: _Keeper | None = None  # of a cluster that this module has started


def join_cluster(address: str | None, cpus: float) -> str:
    """Connect this process to a cluster, unless it is; each success is to be followed by one `leave_cluster`.

    Args:
        address: "host:port", "auto", "local" for a new local cluster, or None for that of `RAY_ADDRESS` or `ray start`,
            a new local one at last.
        cpus: CPUs that a new local cluster must have.

    Returns:
        The session's name, for `check_session`.

    Raises:
        ConfigError: This process is connected to another cluster, or `RAY_ADDRESS` is one of Ray Client.
        StartupError: Nothing answers at the address, or no local cluster can be started.
    """
    global _users, _ours
    with _lock:
        if ray.is_initialized():
            _check_same(address)
        else:
            _connect(address, cpus)
            _ours = _session()
        _users += 1
        return _session()


def check_session(session: str) -> None:
    """Raise if this process has left the cluster, by the user's `ray.shutdown`: Ray would start a new one by itself.

    Raises:
        TransportError: It has.
    """
    if not is_session(session):
        raise TransportError("this process has left the Ray cluster of this executor: ray.shutdown() was called")


def is_session(session: str) -> bool:
    """True as long as this process is connected as it was when it joined."""
    return ray.is_initialized() and _session() == session


def within(seconds: float, work: Callable[[], None], what: str) -> bool:
    """Do work that goes through Ray's head node, which may be gone: on a thread of its own, so that it cannot hold us.

    Returns:
        False if it is not done by then; it goes on, and is told of in the log.
    """
    thread = threading.Thread(target=work, name="mpexec-ray-work", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 starts no thread when the interpreter ends
        work()
        return True
    thread.join(seconds)
    if thread.is_alive():
        logger.warning("Ray does not answer: could not %s within %.1f s", what, seconds)
    return not thread.is_alive()


def watch_session(session: str, on_lost: Callable[[], None]) -> Callable[[], None]:
    """Call `on_lost()` within about a second when this process has left the cluster, of which Ray tells nobody.

    Returns:
        Ends the watch.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if not is_session(session):
                on_lost()
                return

    threading.Thread(target=watch, name="mpexec-ray-session", daemon=True).start()
    return over.set


def _session() -> str:
    """The cluster, and the job, which is one connection to it; the tasks of a job that are drivers too share it."""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


def leave_cluster() -> None:
    """Undo `join_cluster`. The last one disconnects, which ends a local cluster that was started for it."""
    global _users, _ours
    with _lock:
        _users -= 1
        if _users or not _ours:
            return
        session, _ours = _ours, ""
        _leave(session)


def _leave(session: str) -> None:
    global _keeper
    if is_session(session):
        with kept_settings():
            ray.shutdown()
    if _keeper is not None:
        _keeper.end()
        _keeper = None


def _check_same(address: str | None) -> None:
    if address in (None, "auto", "local"):
        return
    connected = ray.get_runtime_context().gcs_address
    if canonicalize_bootstrap_address(address) != connected:
        raise ConfigError(
            f"address={address!r}: this process is connected to the Ray cluster at {connected}; leave the address out, "
            "or call ray.shutdown() first"
        )


def _connect(address: str | None, cpus: float) -> None:
    asked = address or os.environ.get("RAY_ADDRESS") or None
    if asked is not None and "://" in asked:  # an `address` has been checked
        raise ConfigError(f"RAY_ADDRESS={asked!r}: Ray Client is not supported; use 'host:port', 'auto' or 'local'")
    with kept_settings():
        if asked is not None and asked != "local":
            try:
                _check_answers(asked)
                ray.init(address=asked, **_QUIET)
            except (OSError, RuntimeError, ValueError) as error:
                raise StartupError(f"no Ray cluster at {asked!r}: {error}", phase="join the cluster") from error
            return
        if asked is None:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # a note of one that is gone
                if _join_noted():
                    return
        _start_local(cpus)


def _check_answers(address: str) -> None:
    """Raise an `OSError` if nothing answers at host and port: Ray itself would try for minutes, and end the process."""
    where = canonicalize_bootstrap_address(address)
    host, _, port = (where or "").rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


def _join_noted() -> bool:
    """Join the cluster that `ray start` has left a note of on this machine; False if there is none.

    "auto" would also take a cluster that another program has started for itself, and that ends with it.
    """
    address = read_ray_address()
    if not address:
        return False
    _check_answers(address)
    ray.init(address=address, **_QUIET)
    return True


def _start_local(cpus: float) -> None:
    """Start a cluster of our own.

    The kernel ends its processes when the thread that has started them ends, so that one stays until it is left.
    """
    global _keeper
    if _keeper is not None:  # of a cluster that the user has ended
        _keeper.end()
        _keeper = None
    count = max(os.cpu_count() or 1, math.ceil(cpus))
    logger.info("starting a local Ray cluster with %d CPUs", count)
    keeper = _Keeper(address="local", num_cpus=count, include_dashboard=False, **_QUIET)
    keeper.start()
    try:
        keeper.tried.wait()
        if keeper.error is not None:
            raise keeper.error
    except BaseException as error:  # also a Ctrl-C: half a start is undone when it is whole
        keeper.tried.wait()
        with contextlib.suppress(Exception):
            ray.shutdown()
        keeper.end()
        if not isinstance(error, Exception):  # whatever Ray makes of a full disk or a missing library is one
            raise
        raise StartupError(f"no local Ray cluster could be started: {error}", phase="join the cluster") from error
    _keeper = keeper


class _Keeper(threading.Thread):
    """Calls `ray.init` and stays until `end`.

    Attributes:
        tried: Set once the cluster runs, or could not be started.
        error: Why it could not.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(name="mpexec-ray", daemon=True)
        self.tried = threading.Event()
        self.error: BaseException | None = None
        self._options = options
        self._over = threading.Event()

    def run(self) -> None:
        """See the class."""
        try:
            ray.init(**self._options)
        except BaseException as error:
            self.error = error
        finally:
            self.tried.set()
        self._over.wait()

    def end(self) -> None:
        """End the thread, and wait for that."""
        self._over.set()
        self.join()
