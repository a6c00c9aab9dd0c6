"""The Ray cluster of this process: joined or started, shared by its executors, and left by the last of them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from typing import Any

import ray

from mpexec.errors import ConfigError, StartupError
from mpexec.executor.settings import kept_settings

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_users = 0
_ours = False  # this module has called `ray.init`


def join_cluster(address: str | None, cpus: float) -> None:
    """Connect this process to a cluster, unless it is; each success is to be followed by one `leave_cluster`.

    Args:
        address: "host:port", "auto", or None for whatever there is, a new local cluster at last.
        cpus: CPUs that a new local cluster must have.

    Raises:
        ConfigError: This process is connected to another cluster.
        StartupError: Nothing answers at the address, or no local cluster can be started.
    """
    global _users, _ours
    with _lock:
        if ray.is_initialized():
            _check_same(address)
        else:
            _connect(address, cpus)
            _ours = True
            atexit.register(_leave_at_exit)  # after Ray's own, so that it runs before it
        _users += 1


def leave_cluster() -> None:
    """Undo `join_cluster`. The last one disconnects, which ends a local cluster that was started for it."""
    global _users, _ours
    with _lock:
        _users -= 1
        if _users or not _ours:
            return
        _ours = False
        atexit.unregister(_leave_at_exit)
        with kept_settings():
            ray.shutdown()


def _leave_at_exit() -> None:
    with kept_settings():
        ray.shutdown()


def _check_same(address: str | None) -> None:
    if address in (None, "auto"):
        return
    connected = ray.get_runtime_context().gcs_address
    if connected != address:
        raise ConfigError(
            f"address={address!r}: this process is connected to the Ray cluster at {connected}; leave the address out, "
            "or call ray.shutdown() first"
        )


def _connect(address: str | None, cpus: float) -> None:
    asked = address or os.environ.get("RAY_ADDRESS") or None
    quiet: dict[str, Any] = {"logging_level": logging.WARNING}
    with kept_settings():
        try:
            ray.init(address=asked or "auto", **quiet)
            return
        except (ConnectionError, RuntimeError) as error:
            if asked is not None:
                raise StartupError(f"no Ray cluster at {asked!r}: {error}", phase="join the cluster") from error
        count = max(os.cpu_count() or 1, int(-(-cpus // 1)))
        logger.info("no Ray cluster runs here: starting a local one with %d CPUs", count)
        try:
            ray.init(address="local", num_cpus=count, include_dashboard=False, **quiet)
        except Exception as error:  # whatever Ray makes of a full disk or a missing library
            with contextlib.suppress(Exception):
                ray.shutdown()
            raise StartupError(f"no local Ray cluster could be started: {error}", phase="join the cluster") from error
