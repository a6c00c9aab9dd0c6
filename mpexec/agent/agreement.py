"""Work that succeeds on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from mpexec.errors import ConfigError

T = TypeVar("T")


def together(world_size: int, work: Callable[[], T], same: Callable[[T], Any] = lambda _: None) -> T:
    """Do this rank's share of some work; all ranks go on when all have done theirs, and none if one refuses.

    Every rank of the default process group must call this together. So no rank is left in a collective of what comes
    next, and all replies are there at once. An error that is no refusal is raised without a word to the peers: the
    failure of this rank's call ends them.

    Args:
        world_size: Ranks in the process group; with one nothing is exchanged.
        work: Refuses by `ConfigError` or `ValueError`, and has then changed nothing.
        same: What must be equal on all ranks, a plain value, of the result.

    Raises:
        ConfigError: Another rank has refused; the message has its rank and its words. Or the results differ.
        BaseException: What this rank's own work raised.
    """
    result: Any = None
    refusal: Exception | None = None
    try:
        result = work()
    except (ConfigError, ValueError) as error:
        refusal = error
    if world_size > 1:
        said: list[Any] = [None] * world_size
        dist.all_gather_object(said, (str(refusal), None) if refusal is not None else (None, same(result)))
        refusal = refusal or _refusal_of_others(said)
    if refusal is not None:
        raise refusal
    done: T = result
    return done


def _refusal_of_others(said: list[tuple[str | None, Any]]) -> ConfigError | None:
    for rank, (words, value) in enumerate(said):
        if words is not None:
            return ConfigError(f"rank {rank}: {words}")
        if value != said[0][1]:
            return ConfigError(f"rank {rank} was given others than rank 0: give the same to every rank")
    return None
