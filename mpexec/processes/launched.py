"""The job that a launcher has made this process a part of, as torchrun's variables tell."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from mpexec.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What tells one attempt at one job from all others on a machine.
_TELLING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """A job of `mpexec run`, torchrun or the like, all of it on this machine.

    Attributes:
        rank: This process among those of the job; not a rank of an executor.
        world_size: Processes of the job.
        key: The same in all of them, and in no other job or attempt.
    """

    rank: int
    world_size: int
    key: str

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> LaunchedJob | None:
        """The job that the variables tell of, None if they tell of none.

        Raises:
            ConfigError: They tell of half a job, of an impossible one, or of one on several machines.
        """
        present = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
        if not present:
            return None
        if missing := [name for name in _NEEDED if name not in environ]:
            raise ConfigError(
                f"{' and '.join(present)} is set, but {', '.join(missing)} is not. Start the script with `mpexec run` "
                "or torchrun, or without these variables; inside a rank of an executor there is nothing to attach to."
            )
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        here = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world_size
        if not rank < world_size:
            raise ConfigError(f"RANK={rank} and WORLD_SIZE={world_size}: ranks are integers below the number of ranks")
        if here != world_size:
            raise ConfigError(
                f"WORLD_SIZE={world_size} and LOCAL_WORLD_SIZE={here}: an attached executor stays on one machine. "
                "RayExecutor is the way to several."
            )
        telling = [str(os.getuid()), *(environ.get(name, "") for name in _TELLING)]
        return cls(rank, world_size, hashlib.sha256("\0".join(telling).encode()).hexdigest()[:32])

    @property
    def others(self) -> range:
        """All processes of the job but the first."""
        return range(1, self.world_size)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}={text!r}: an integer of at least 0 was expected")
    return int(text)
