"""Room in a Ray cluster: one bundle for each rank, and which rank sits where."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from mpexec.config import RayOptions, WorkerSpec
from mpexec.deadline import Deadline
from mpexec.errors import ConfigError, StartupError
from mpexec.executor.ray_cluster import is_session

logger = logging.getLogger(__name__)

_DEFAULT_TIMEOUT_S = 60.0
_SLICE_S = 1  # of the wait for room, after which is asked whether the start goes on; Ray counts whole seconds

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RankBundle:
    """Where one rank is going to be.

    Attributes:
        index: Of its bundle.
        node_id: Ray's name of the node.
        address: Of that node.
        local_rank: This rank among those of its node.
        local_size: How many ranks its node has.
    """

    index: int
    node_id: str
    address: str
    local_rank: int
    local_size: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles for all ranks, index = rank.

    Attributes:
        group: The placement group.
        is_ours: It goes when the executor does.
        need: Resources of each rank.
        session: Of the cluster.
    """

    group: PlacementGroup
    is_ours: bool
    need: Resources
    bundles: tuple[RankBundle, ...]
    session: str

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, each once, in the order of the ranks."""
        return tuple(dict.fromkeys(bundle.node_id for bundle in self.bundles))

    def remove(self) -> None:
        """Give the room back, where it is ours and still held."""
        if self.is_ours and is_session(self.session):
            remove_placement_group(self.group)


def place(spec: WorkerSpec, options: RayOptions, session: str, goes_on: Callable[[], bool]) -> Placement:
    """Find room for all ranks and give them seats: those of the driver's node first, then node by node.

    Bundles that the user has named keep the order in which they are named.

    Args:
        spec: What the ranks run.
        options: Where they are to be.
        session: Of the cluster.
        goes_on: False ends the wait.

    Raises:
        ConfigError: The user's group does not fit.
        StartupError: There is no room. A group of our own has been removed.
    """
    need = resources_of_rank(spec, options)
    group = options.placement_group
    if group is not None:
        indices = _check_group(group, options.bundle_indices, need, spec.world_size)
        _await_room(group, need, spec.world_size, options, goes_on)
        bundles = _seats(group, indices, in_order=options.bundle_indices is not None)
        return Placement(group, False, need, bundles, session)
    group = placement_group([dict(need)] * spec.world_size, strategy=options.placement_strategy)
    try:
        _await_room(group, need, spec.world_size, options, goes_on)
        return Placement(group, True, need, _seats(group, range(spec.world_size), in_order=False), session)
    except BaseException:
        remove_placement_group(group)
        raise


def resources_of_rank(spec: WorkerSpec, options: RayOptions) -> dict[str, float]:
    """What Ray reserves for each rank.

    Raises:
        ConfigError: Nothing, which Ray cannot place.
    """
    need = {"CPU": float(options.cpus_per_rank), **options.resources_per_rank}
    if spec.device == "cuda" or (spec.device == "auto" and spec.init_process_group and _has_gpus(spec, options)):
        need["GPU"] = 1.0
    need = {name: amount for name, amount in need.items() if amount}
    if not need:
        raise ConfigError("cpus_per_rank=0: Ray places nothing that needs nothing; give resources_per_rank too")
    return need


def _has_gpus(spec: WorkerSpec, options: RayOptions) -> bool:
    """True if each rank can have one: in the user's bundles, else in the cluster."""
    if isinstance(options.placement_group, PlacementGroup):
        return all(bundle.get("GPU", 0) >= 1 for bundle in options.placement_group.bundle_specs)
    return bool(ray.cluster_resources().get("GPU", 0) >= spec.world_size)


def _check_group(group: Any, indices: tuple[int, ...] | None, need: Resources, world_size: int) -> tuple[int, ...]:
    if not isinstance(group, PlacementGroup):
        raise ConfigError(f"placement_group={group!r}: use what ray.util.placement_group returns")
    specs: list[dict[str, float]] = group.bundle_specs
    if indices is None:
        if len(specs) < world_size:
            raise ConfigError(f"placement_group has {len(specs)} bundles for {world_size} ranks, which need one each")
        indices = tuple(range(world_size))
    bad = [i for i in indices if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < len(specs)]
    if bad or len(set(indices)) != len(indices) or len(indices) != world_size:
        raise ConfigError(
            f"bundle_indices={list(indices)!r}: name {world_size} different bundles, one for each rank, from 0 to "
            f"{len(specs) - 1}"
        )
    for index in indices:
        if short := {name: amount for name, amount in need.items() if specs[index].get(name, 0) < amount}:
            raise ConfigError(f"bundle {index} of placement_group has {specs[index]}, but a rank needs {short}")
    return indices


def _await_room(
    group: PlacementGroup, need: Resources, world_size: int, options: RayOptions, goes_on: Callable[[], bool]
) -> None:
    seconds = options.placement_timeout
    if seconds is None:
        can_ever = options.placement_group is not None or _fits(need, world_size, options.placement_strategy)
        seconds = _DEFAULT_TIMEOUT_S if can_ever else 0.0
    deadline = Deadline.after(seconds) if seconds else None
    told = False
    while True:
        left = deadline.remaining() if deadline is not None else 0.0
        assert left is not None
        if group.wait(timeout_seconds=_SLICE_S):
            return
        if not goes_on():
            raise StartupError("the start was cancelled by its caller", phase="placement")
        if not told:
            gc.collect()  # an executor that nobody refers to any more may hold the room
        if left <= 0:
            raise StartupError(
                _no_room_text(need, world_size, options, seconds),
                phase="placement",
            )
        if not told:
            told = True
            logger.info("waiting for room in the Ray cluster\n%s", _table(need, world_size))


def _fits(need: Resources, world_size: int, strategy: str) -> bool:
    """True if the cluster as it stands could hold all ranks, were it empty."""
    counts = [min(int(node.get(name, 0) // amount) for name, amount in need.items()) for node in _nodes().values()]
    if strategy == "STRICT_PACK":
        return max(counts, default=0) >= world_size
    if strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in counts) >= world_size
    return sum(counts) >= world_size


def _nodes() -> dict[str, dict[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _no_room_text(need: Resources, world_size: int, options: RayOptions, seconds: float) -> str:
    waited = f"after {seconds:g} s (placement_timeout)" if seconds else "as it stands"
    return (
        f"no room in the Ray cluster for {world_size} ranks {waited}, "
        f"placement_strategy {options.placement_strategy!r}:\n{_table(need, world_size)}\n"
        "Ask for less, free what others hold, or add nodes and give a longer placement_timeout."
    )


def _table(need: Resources, world_size: int) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    rows: list[tuple[str, ...]] = [("resource", "each rank", "asked", "in the cluster", "free now")]
    for name, amount in need.items():
        numbers = (amount, amount * world_size, total.get(name, 0.0), free.get(name, 0.0))
        rows.append((name, *(f"{number:g}" for number in numbers)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for node in ray.nodes():
        if node["Alive"]:
            own = ", ".join(f"{name} {node['Resources'].get(name, 0):g}" for name in need)
            lines.append(f"  node {node['NodeManagerAddress']} has in all: {own}")
    return "\n".join(lines)


def _seats(group: PlacementGroup, indices: Sequence[int], *, in_order: bool) -> tuple[RankBundle, ...]:
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    if lost := {node_of[index] for index in indices} - nodes.keys():
        raise StartupError(f"nodes {sorted(lost)} were lost while the ranks were given their seats", phase="placement")

    def order(index: int) -> tuple[bool, str, str, int]:
        node_id = node_of[index]
        return node_id != here, nodes[node_id]["NodeManagerAddress"], node_id, index

    chosen = list(indices) if in_order else sorted(indices, key=order)
    sizes, seen = Counter(node_of[index] for index in chosen), Counter[str]()
    bundles = []
    for index in chosen:
        node_id = node_of[index]
        bundles.append(
            RankBundle(
                index=index,
                node_id=node_id,
                address=nodes[node_id]["NodeManagerAddress"],
                local_rank=seen[node_id],
                local_size=sizes[node_id],
            )
        )
        seen[node_id] += 1
    return tuple(bundles)
