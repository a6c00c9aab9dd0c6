"""Frozen settings, validated when they are made: what to run on every rank, how many ranks there are, and limits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mpexec.errors import ConfigError

StartMethod = Literal["spawn", "forkserver", "fork"]
START_METHODS: tuple[StartMethod, ...] = ("spawn", "forkserver", "fork")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")  # of the weights and the cache of a language model


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of one executor, in order. All are on this machine here.

    Attributes:
        world_size: Number of ranks, at least 1; there is no upper limit.
    """

    world_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or isinstance(self.world_size, bool) or self.world_size < 1:
            raise ConfigError(f"world_size must be an integer of at least 1, not {self.world_size!r}")

    @property
    def ranks(self) -> range:
        """All ranks, ascending."""
        return range(self.world_size)

    @property
    def output_rank(self) -> int:
        """The rank whose agent's outputs go to the driver."""
        return 0

    def select(self, ranks: int | range | tuple[int, ...] | list[int] | None, what: str = "ranks") -> tuple[int, ...]:
        """The ranks meant by a caller: None is all, an integer is one, else each once, ascending.

        Raises:
            ConfigError: A value is not a rank of this topology, or none is left.
        """
        if ranks is None:
            return tuple(self.ranks)
        try:
            chosen = (ranks,) if isinstance(ranks, int) else tuple(sorted(set(ranks)))
        except TypeError:
            chosen = (-1,)
        bad = [r for r in chosen if not isinstance(r, int) or isinstance(r, bool) or not 0 <= r < self.world_size]
        if bad or (not chosen and what == "ranks"):
            raise ConfigError(f"{what}={ranks!r}: ranks are integers from 0 to {self.world_size - 1}, at least one")
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a rank needs to know; it travels to every rank as one value.

    Attributes:
        agent: Called inside each rank as `agent(*agent_args, **agent_kwargs)`; gives a `ModelAgent`.
        world_size: Number of ranks.
        worker_cls: A `BaseWorker` subclass; None means `BaseWorker` itself.
        start_method: "spawn", "forkserver" or "fork".
        device: "auto" (CUDA where torch sees a device for every local rank, else the CPU), "cpu" or "cuda".
        env: Environment variables of the ranks, applied before any import of theirs; a value of None removes one.
        env_per_rank: As `env`, one mapping per rank, applied on top.
        init_process_group: Set up `torch.distributed` (gloo or NCCL). False leaves torch out of the ranks until the
            agent imports it.
        threads: `torch.set_num_threads` in each rank; None means usable cores divided by ranks, at least 1.
        init_timeout: Seconds without progress of a rank after which the start fails.
        stop_timeout: Seconds that `stop` and `release` together may take with a rank that does not answer.
        failure_grace: Seconds after a call's first failure for which the other ranks may still answer; None waits.
        collective_timeout: Seconds that a collective may take: the timeout of the default process group.
        shared_views: Large arrays and tensors arrive as writable views of memory that all ranks share.
        ring_bytes: Size of the call ring and of each rank's reply ring; a multiple of 4096.
        allow_unsafe_fork: Permit "fork" from a driver with threads or with torch imported.
        max_outputs: Bound of `forward_async` calls whose output has not been taken.
    """

    agent: Callable[..., Any]
    world_size: int
    worker_cls: type[Any] | None = None
    agent_args: tuple[Any, ...] = ()
    agent_kwargs: Mapping[str, Any] = field(default_factory=dict)
    start_method: StartMethod = "spawn"
    device: str = "auto"
    env: Mapping[str, str | None] = field(default_factory=dict)
    env_per_rank: tuple[Mapping[str, str | None], ...] = ()
    init_process_group: bool = True
    threads: int | None = None
    init_timeout: float = 600.0
    stop_timeout: float = 5.0
    failure_grace: float | None = 1.0
    collective_timeout: float = 600.0
    shared_views: bool = False
    ring_bytes: int = 4 << 20
    allow_unsafe_fork: bool = False
    max_outputs: int = 64

    def __post_init__(self) -> None:
        Topology(self.world_size)
        if not callable(self.agent):
            raise ConfigError(f"agent must be a ModelAgent class or a callable that makes one, not {self.agent!r}")
        if self.start_method not in START_METHODS:
            raise ConfigError(f"start_method={self.start_method!r}: use one of {', '.join(START_METHODS)}")
        if self.device not in DEVICES:
            raise ConfigError(f"device={self.device!r}: use 'auto', 'cpu' or 'cuda'; each rank takes its own index")
        for name in ("init_timeout", "stop_timeout", "collective_timeout"):
            _positive(name, getattr(self, name))
        if self.failure_grace is not None and not self.failure_grace >= 0:
            raise ConfigError(f"failure_grace={self.failure_grace!r}: use seconds of at least 0, or None to wait")
        if self.ring_bytes < 65536 or self.ring_bytes % 4096:
            raise ConfigError(f"ring_bytes={self.ring_bytes!r}: use a multiple of 4096 of at least 65536")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads!r}: use at least 1, or None to divide the cores")
        if self.max_outputs < 1:
            raise ConfigError(f"max_outputs={self.max_outputs!r}: use at least 1")
        if self.env_per_rank and len(self.env_per_rank) != self.world_size:
            raise ConfigError(f"env_per_rank has {len(self.env_per_rank)} entries for {self.world_size} ranks")
        for mapping in (self.env, *self.env_per_rank):
            _check_env(mapping)

    @property
    def topology(self) -> Topology:
        """The ranks, in order."""
        return Topology(self.world_size)

    def with_changes(self, **changes: Any) -> WorkerSpec:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

    def threads_per_rank(self) -> int:
        """Threads for each rank: as asked, else the usable cores divided by the ranks."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.world_size)


# The limits of sampling stand here, where the command line finds them without the engine.
MAX_LOGPROBS = 20
LEAST_SCALE = 1e-5  # of a temperature above 0, and of a penalty: scores divided by less may overflow


def is_temperature(value: float) -> bool:
    """False for one so small that scores divided by it may overflow."""
    return value == 0 or value >= LEAST_SCALE


PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Where a `RayExecutor` puts its ranks.

    Attributes:
        address: Of the cluster ("host:port"); "auto" for any that runs on this machine, "local" for a new one. None
            joins the one that this process is connected to, that of `RAY_ADDRESS`, or the one that `ray start` has
            started on this machine; where there is none, a local one is started.
        placement_strategy: How the bundles of a placement group of our own are spread: "PACK", "SPREAD",
            "STRICT_PACK" or "STRICT_SPREAD".
        placement_group: A placement group of the user's, which stays when the executor is released.
        bundle_indices: Bundles of that group, one for each rank, in the order of the ranks; None takes the first ones.
        placement_timeout: Seconds to wait for room in the cluster. None waits 60 s where the cluster is large enough,
            and not at all where it is too small as it stands; a number waits in both cases, for a cluster that grows.
        cpus_per_rank: CPUs that Ray reserves for each rank.
        resources_per_rank: Further resources that it reserves, by name. A GPU for each rank follows from the device.
        runtime_env: Ray's `runtime_env` of the actors.
    """

    address: str | None = None
    placement_strategy: str = "PACK"
    placement_group: Any = None
    bundle_indices: tuple[int, ...] | None = None
    placement_timeout: float | None = None
    cpus_per_rank: float = 1.0
    resources_per_rank: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.address is not None and (not isinstance(self.address, str) or not self.address):
            raise ConfigError(f"address={self.address!r}: use 'host:port', 'auto' or 'local'")
        if self.address is not None and "://" in self.address:
            raise ConfigError(
                f"address={self.address!r}: Ray Client is not supported; run this program on a node of the cluster and "
                "give 'host:port' or 'auto'"
            )
        if self.placement_strategy not in PLACEMENT_STRATEGIES:
            raise ConfigError(
                f"placement_strategy={self.placement_strategy!r}: use one of {', '.join(PLACEMENT_STRATEGIES)}"
            )
        if self.placement_timeout is not None:
            _positive("placement_timeout", self.placement_timeout)
        if self.bundle_indices is not None:
            if self.placement_group is None:
                raise ConfigError(f"bundle_indices={self.bundle_indices!r}: they need a placement_group")
            object.__setattr__(self, "bundle_indices", tuple(self.bundle_indices))
        amounts = {"cpus_per_rank": self.cpus_per_rank, **self.resources_per_rank}
        for name, amount in amounts.items():
            if not isinstance(amount, int | float) or isinstance(amount, bool) or not 0 <= amount < math.inf:
                raise ConfigError(f"{name}={amount!r}: use a number of at least 0")
        if own := {"CPU", "GPU", "memory", "object_store_memory"} & set(self.resources_per_rank):
            raise ConfigError(
                f"resources_per_rank names {sorted(own)}: CPUs are cpus_per_rank, GPUs follow from device"
            )


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that are for every executor, and those that only `RayOptions` has."""
    placing = {name: value for name, value in options.items() if name in RayOptions.__dataclass_fields__}
    return {name: value for name, value in options.items() if name not in placing}, placing


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of the engine.

    Attributes:
        max_slots: Requests decoded together.
        max_queue: Requests that may wait for a slot; one more raises `QueueFullError`, unless it asks to wait.
        max_length: Tokens of prompt and answer together; None is what the model allows, but no more than 4096.
        prefill_chunk: Tokens of prompts that one step takes in, so that a long prompt does not hold up running answers
            for longer than that. A longer prompt is cut into pieces; a shorter one is not.
        stop_timeout: Seconds that `stop` may take.
        stall_timeout: Seconds for which requests may run without a step that ends, until health says "stalled"; None
            for ever.
    """

    max_slots: int = 8
    max_queue: int = 1024
    max_length: int | None = None
    prefill_chunk: int = 512
    stop_timeout: float = 5.0
    stall_timeout: float | None = 120.0

    def __post_init__(self) -> None:
        for name in ("max_slots", "max_queue", "prefill_chunk"):
            if not _is_whole(value := getattr(self, name)) or value < 1:
                raise ConfigError(f"{name}={value!r}: use an integer of at least 1")
        if self.max_length is not None and (not _is_whole(self.max_length) or self.max_length < 2):
            raise ConfigError(f"max_length={self.max_length!r}: use an integer of at least 2 tokens, or None")
        _positive("stop_timeout", self.stop_timeout)
        if self.stall_timeout is not None:
            _positive("stall_timeout", self.stall_timeout)


def check_flags(**flags: Any) -> None:
    """Refuse what is neither True nor False, by its name.

    Raises:
        ConfigError: One is not.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: use True or False")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(name: str, seconds: Any) -> None:
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
        raise ConfigError(f"{name}={seconds!r}: use seconds above 0")


def _check_env(mapping: Mapping[str, str | None]) -> None:
    for name, value in mapping.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(f"env name {name!r}: use a string without '=' and NUL")
        if value is not None and (not isinstance(value, str) or "\0" in value):
            raise ConfigError(f"env[{name!r}]={value!r}: use a string, or None to remove the variable")
