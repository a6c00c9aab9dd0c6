"""What is launched: one value from the command line down to each rank."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpexec.errors import ConfigError

DEFAULT_PORT = 29500  # torchrun's, for several machines: there each must know it beforehand
DEFAULT_GRACE_S = 5.0
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Std(enum.IntFlag):
    """Standard streams, numbered as torchrun numbers them."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True)
class Job:
    """A command and how often, where and with what it runs.

    Attributes:
        command: Program and arguments of every rank.
        is_python: The program is Python, to which `mpexec.launcher.startup` lends a quick end after a failure.
        nproc: Ranks on this machine; the same on each machine.
        node_rank: Which of the `nnodes` machines this is.
        master_port: None takes a port that is free, which only one machine can know.
        env: The user's entries for the environment of ranks; they win over all others.
        redirects: Streams that go to a file instead of the console, by local rank.
        tee: Streams that go to a file as well, and to the console with a prefix, by local rank.
        shown: Local ranks whose output goes to the console; None for all.
        log_dir: Where files of `redirects` and `tee` go, in a folder for this run.
        line_prefix: Before each line of a teed stream; `${role_name}`, `${rank}` and `${local_rank}` are filled in.
        max_restarts: How often the whole group is started again after a failure.
        grace: Seconds between the signal that stops a rank and SIGKILL.
        signals: Those that are passed on to the ranks, and end the job.
    """

    command: tuple[str, ...]
    is_python: bool = False
    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    run_id: str = "none"
    role: str = "default"
    env: Mapping[str, str] = field(default_factory=dict)
    redirects: Mapping[int, Std] = field(default_factory=dict)
    tee: Mapping[int, Std] = field(default_factory=dict)
    shown: frozenset[int] | None = None
    log_dir: str | None = None
    line_prefix: str = "[${role_name}${local_rank}]:"
    max_restarts: int = 0
    grace: float = DEFAULT_GRACE_S
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.nnodes < 1:
            raise ConfigError("a job has at least one machine, and at least one rank on each")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank is {self.node_rank}, with {self.nnodes} machines (0 to {self.nnodes - 1})")
        if self.nnodes > 1 and self.max_restarts:
            raise ConfigError(
                "--max-restarts works on one machine only: launchers do not hear of each other's failures"
            )
        for option, ranks in (
            ("--redirects", self.redirects),
            ("--tee", self.tee),
            ("--local-ranks-filter", self.shown or ()),
        ):
            if beyond := sorted(rank for rank in ranks if not 0 <= rank < self.nproc):
                raise ConfigError(f"{option} names local rank {beyond[0]}, and there are {self.nproc}")

    def streams_to_file(self, local_rank: int) -> Std:
        """What of a rank's output is written to files."""
        return self.redirects.get(local_rank, Std.NONE) | self.tee.get(local_rank, Std.NONE)

    @property
    def writes_files(self) -> bool:
        """True if any stream of any rank goes to a file."""
        return any(self.streams_to_file(local_rank) for local_rank in range(self.nproc))

    def rank_variables(self, local_rank: int, port: int, attempt: int, error_file: str) -> dict[str, str]:
        """Torchrun's variables for one rank, and the user's."""
        rank, world_size = self.node_rank * self.nproc + local_rank, self.nnodes * self.nproc
        variables = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "ROLE_RANK": rank,
            "GROUP_RANK": self.node_rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": self.nproc,
            "ROLE_WORLD_SIZE": world_size,
            "GROUP_WORLD_SIZE": self.nnodes,
            "ROLE_NAME": self.role,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": self.max_restarts,
            # rank 0 serves the store: this process has no torch to do it with
            "TORCHELASTIC_USE_AGENT_STORE": False,
            "TORCHELASTIC_ERROR_FILE": error_file,
        }
        return {**{name: str(value) for name, value in variables.items()}, **self.env}
