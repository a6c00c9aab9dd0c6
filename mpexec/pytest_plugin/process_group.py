"""The process group of a test: a fresh one for each test, from one store for each group of ranks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
_JOIN_S = 60.0
_NO_LIMIT_S = 1800.0
# A test's own deadline comes first: it shows the stacks of all ranks, which a collective's timeout does not.
_BEYOND_DEADLINE_S = 10.0


class TestProcessGroup:
    """Makes and destroys the default process group of one rank.

    Args:
        device: "cpu" or "cuda:<index>".
    """

    __test__ = False

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self._rank = rank
        self._world_size = world_size
        self._backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        self._device = None if device == "cpu" else torch.device(device)
        self._store: Any = None
        self._offered: Any = None

    def serve(self) -> int:
        """Open the store, on rank 0; its port."""
        self._store = self._tcp_store(0, serves=True)
        return int(self._store.port)

    def meet(self, port: int) -> None:
        """Connect to the store, and set the variables by which code of users finds it."""
        if self._store is None:
            self._store = self._tcp_store(port, serves=False)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update(
            RANK=str(self._rank),
            LOCAL_RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            LOCAL_WORLD_SIZE=str(self._world_size),
            MASTER_ADDR=HOST,
            # A test that makes a process group of its own with env:// uses the store that is there.
            TORCHELASTIC_USE_AGENT_STORE="True",
        )

    def _tcp_store(self, port: int, *, serves: bool) -> Any:
        listening = None
        if serves:  # by itself it would listen on every network of this machine
            sock = socket.create_server((HOST, 0))
            port, listening = sock.getsockname()[1], sock.detach()
        return dist.TCPStore(  # type: ignore[attr-defined]  # the stubs lack it
            HOST,
            port,
            self._world_size,
            is_master=serves,
            timeout=timedelta(seconds=_JOIN_S),
            wait_for_workers=False,
            master_listen_fd=listening,
        )

    def join(self, number: int, seconds: float | None) -> None:
        """Make the default group of test `number`; returns when all ranks have joined.

        Args:
            seconds: The deadline of the test; a collective may take somewhat longer.
        """
        self._offer_store(number)
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(f"test-{number}", self._store),  # type: ignore[attr-defined]
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=_NO_LIMIT_S if seconds is None else seconds + _BEYOND_DEADLINE_S),
            device_id=self._device,
        )

    def _offer_store(self, number: int) -> None:
        """A store for groups that the test makes itself with env://, without what an earlier test left in its own."""
        key = f"port-{number}"
        if self._rank == 0:
            self._offered = self._tcp_store(0, serves=True)  # takes the place of the last test's, which ends
            self._store.set(key, str(self._offered.port))
        os.environ["MASTER_PORT"] = self._store.get(key).decode()

    def leave(self) -> None:
        """Destroy the default group and all others, those that the test has left included."""
        if dist.is_initialized():
            dist.destroy_process_group()
