"""Bare processes of `multiprocessing`, each with a Pipe to this one, and the comparator of the round trips."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.bench.fresh import BenchError


@contextlib.contextmanager
def spawned(target: Callable[..., None], *every: tuple[Any, ...]) -> Iterator[list[Connection]]:
    """Spawn a process for each tuple of arguments, which gets a Pipe before them; gives our ends.

    The processes are killed after the block.
    """
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as opened:
        pipes = []
        for args in every:
            ours, theirs = context.Pipe()
            pipes.append(opened.enter_context(ours))
            process = context.Process(target=target, args=(theirs, *args), daemon=True)
            process.start()
            opened.callback(process.join)
            opened.callback(process.kill)
            theirs.close()
        yield pipes


def hear_each(pipes: list[Connection]) -> list[Any]:
    """The first message of each process, as soon as all have sent one.

    Raises:
        BenchError: One has ended instead; its stderr, which is ours, says why.
    """
    heard: dict[Connection, Any] = {}
    while silent := [pipe for pipe in pipes if pipe not in heard]:
        ready = wait(silent)
        try:
            heard.update((pipe, pipe.recv()) for pipe in silent if pipe in ready)
        except EOFError:
            raise BenchError("a process has ended before it was ready") from None
    return [heard[pipe] for pipe in pipes]


def echo(pipe: Connection) -> None:
    """What a child of the round trips does: every message is pickled once, here and there."""
    while True:
        pipe.send_bytes(pickle.dumps(pickle.loads(pipe.recv_bytes()), 5))


@contextlib.contextmanager
def pipe_workers(world_size: int) -> Iterator[Callable[[Any], list[Any]]]:
    """Spawn the children; gives the function that makes one round trip with all of them."""
    with spawned(echo, *[()] * world_size) as pipes:

        def call(value: Any) -> list[Any]:
            message = pickle.dumps(value, 5)
            for pipe in pipes:
                pipe.send_bytes(message)
            return [pickle.loads(pipe.recv_bytes()) for pipe in pipes]

        yield call
