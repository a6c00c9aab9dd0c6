"""The comparator of the round trips: N processes of `multiprocessing`, one Pipe each, every message pickled once."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


def echo_until_told(pipe: Connection) -> None:
    """What a child does."""
    while (value := pickle.loads(pipe.recv_bytes())) is not None:
        pipe.send_bytes(pickle.dumps(value, 5))


@contextlib.contextmanager
def pipe_workers(world_size: int) -> Iterator[Callable[[Any], list[Any]]]:
    """Spawn the children; gives the function that makes one round trip with all of them."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=echo_until_told, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)

    def call(value: Any) -> list[Any]:
        message = pickle.dumps(value, 5)
        for pipe in pipes:
            pipe.send_bytes(message)
        return [pickle.loads(pipe.recv_bytes()) for pipe in pipes]

    yield call
    for pipe in pipes:
        pipe.send_bytes(pickle.dumps(None, 5))
    for process in processes:
        process.join()
