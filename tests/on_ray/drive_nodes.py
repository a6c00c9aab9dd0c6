"""A cluster of two nodes: where the ranks sit, that they generate the same tokens, and what the loss of a node is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ray
from faults.watching import LOAD
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from mpexec import Engine, EngineConfig, MPExecutor, RayExecutor, SamplingParams, State, WorkerDiedError
from mpexec.engine.engine import ModelPlan
from on_ray.checking import Checks, adopt, await_none, cluster_address, make
from on_ray.drive_faults import catch, check_broken, check_usable, wait_tasks
from on_ray.meeting import meeting

CHECKS = Checks()
NODE_DEATH_S = 10.0
PROMPT = "The quick brown fox"
TOKENS = 24
# Ray's own default lets fifteen seconds pass before a node that does not answer is lost.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}

_cluster: Cluster | None = None


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    """The head, on which this program is, and what each check adds."""
    global _cluster
    _cluster = Cluster(
        initialize_head=True,
        # Without a port of its own it takes one that is free.
        head_node_args={"num_cpus": 1, "include_dashboard": True, "dashboard_port": None, "_system_config": HEALTH},
    )
    ray.init(address=_cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
        _cluster.shutdown()


def second_node() -> Any:
    """The node beside the head, of one CPU; a new one if the last one has been killed."""
    assert _cluster is not None
    if not _cluster.worker_nodes:
        await_none(lambda: [node for node in ray.nodes() if node["Alive"]][1:], "nodes", 10.0)
        handler = signal.getsignal(signal.SIGTERM)
        _cluster.add_node(num_cpus=1)
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own
    return next(iter(_cluster.worker_nodes))


def kill_node(node: Any) -> float:
    """Kill all processes of a node at once; the moment at which that began."""
    assert _cluster is not None
    moment = time.monotonic()
    _cluster.remove_node(node, allow_graceful=False)
    return moment


def check_node_lost(executor: RayExecutor, error: BaseException, method: str | None, killed_at: float) -> Any:
    seconds = time.monotonic() - killed_at
    assert type(error) is WorkerDiedError, repr(error)
    assert (error.rank, error.pid, error.method) == (1, executor.pids[1], method)
    assert error.node == executor.describe()["ranks"][1]["node"]
    assert error.node in str(error)
    assert error.reason and error.reason in str(error)
    assert seconds < NODE_DEATH_S * LOAD, f"took {seconds:.1f} s"
    assert executor.state is State.BROKEN
    check_broken(executor, error)
    executor.release()
    return {"seconds": round(seconds, 2), "error": str(error)}


def spread(**options: Any) -> RayExecutor:
    """An executor with a rank on each node."""
    executor = make(placement_strategy="STRICT_SPREAD", **options)
    here = ray.get_runtime_context().get_node_id()
    nodes = [row["node_id"] for row in executor.describe()["ranks"]]
    assert nodes[0] == here and nodes[1] != here
    assert nodes == [seat["node"] for seat in executor.collective_rpc("seat")]
    return executor


def _tokens(make_executor: Callable[[Any], Any]) -> list[int]:
    config = EngineConfig(max_slots=1)
    plan = ModelPlan.read(None, 2, config)

    async def generate() -> list[int]:
        engine = Engine(make_executor(plan.worker_spec(config, device="cpu")), plan, config)
        async with engine:
            params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
            return [token async for piece in engine.generate(PROMPT, params) for token in piece.token_ids]

    return asyncio.run(generate())


@CHECKS
def a_model_over_two_nodes_generates_the_same_tokens_as_over_two_processes() -> Any:
    second_node()
    here = ray.get_runtime_context().get_node_id()
    nodes: list[str] = []

    def on_ray(spec: Any) -> RayExecutor:
        executor = adopt(RayExecutor(spec, placement_strategy="STRICT_SPREAD"))
        nodes.extend(row["node_id"] for row in executor.describe()["ranks"])
        return executor

    found = _tokens(on_ray)
    assert len(set(nodes)) == 2 and nodes[0] == here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert found == _tokens(lambda spec: MPExecutor(spec))
    assert len(found) == TOKENS
    return found


@CHECKS
def a_node_that_dies_ends_the_call_in_flight() -> Any:
    node = second_node()
    executor = spread()
    with meeting() as place:
        future = executor.submit_rpc("announced", args=(place.path, [1], "hang_python"))
        place.pids(1)
        moment = kill_node(node)
        error = catch(lambda: future.result(30.0))
    return check_node_lost(executor, error, "announced", moment)


@CHECKS
def a_node_that_dies_while_nothing_is_called_reaches_wait_tasks() -> Any:
    node = second_node()
    executor, moments = spread(), []
    executor.start()
    check_usable(executor)
    error = wait_tasks(executor, lambda: moments.append(kill_node(node)), 30.0)
    return check_node_lost(executor, error, None, moments[0])


@CHECKS
def a_node_that_dies_is_the_root_cause_while_the_other_rank_sits_in_an_all_reduce() -> Any:
    node = second_node()
    executor = spread(init_process_group=True)
    assert executor.collective_rpc("add_up", args=(1,)) == [3, 3]
    with meeting() as place:
        future = executor.submit_rpc("act_in_all_reduce", args=("", 1, place.path))
        place.pids(2)
        place.await_sleeper()
        moment = kill_node(node)
        error = catch(lambda: future.result(30.0))
    return check_node_lost(executor, error, "act_in_all_reduce", moment)


@CHECKS
def a_node_that_is_drained_serves_until_it_ends_and_the_error_says_that_it_was_drained() -> Any:
    node = second_node()
    executor, moments = spread(), []
    executor.start()
    deadline_ms = int(time.time() * 1000) + 200
    accepted, why = GcsClient(address=cluster_address()).drain_node(
        node.node_id, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "wanted back", deadline_ms
    )
    assert accepted, why
    while time.time() * 1000 <= deadline_ms:
        check_usable(executor)
    error = wait_tasks(executor, lambda: moments.append(kill_node(node)), 30.0)
    assert "preempt" in str(error) or "drain" in str(error), str(error)
    return check_node_lost(executor, error, None, moments[0])


if __name__ == "__main__":
    CHECKS.run(two_nodes())
