"""Large arguments and results: what is kept in the object store, and for how long. On one node with a small store."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy
import ray

from on_ray.checking import Checks, await_none, cluster_address, local_cluster, make
from on_ray.meeting import meeting

CHECKS = Checks()
MIB = 1 << 20
STORE = 300 * MIB  # less than any of the checks below would need if anything were kept
AT_ONCE = 32


def store() -> Any:
    """What the cluster says of its object store."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    return get_memory_info_reply(get_state_from_address(cluster_address())).store_stats


def await_empty_store() -> None:
    """Objects go when the last call that was given them has ended, and Ray takes a moment to notice."""
    await_none(lambda: store().object_store_bytes_used > MIB, "objects", 10.0)


@CHECKS.over((2_500,), (10_000,), slow=[(10_000,)])
def many_calls_with_an_array_leave_the_store_as_it_was(calls: int) -> Any:
    executor = make()
    before = store()
    highest, waiting = 0, deque[Future[Any]]()
    array = numpy.zeros(150 * 1024, dtype=numpy.uint8)
    for number in range(calls):
        array[0] = number % 256
        waiting.append(executor.submit_rpc("size", args=(array,)))
        if len(waiting) == AT_ONCE:
            assert waiting.popleft().result(60.0) == [array.nbytes] * 2
        if number % 500 == 499:
            highest = max(highest, store().object_store_bytes_used)
    for future in waiting:
        assert future.result(60.0) == [array.nbytes] * 2
    await_empty_store()
    after = store()
    assert after.spilled_bytes_total == before.spilled_bytes_total
    # More than are under way, because Ray frees in batches, and far fewer than have been.
    assert highest <= STORE / 2
    return {"most MiB in the store": highest // MIB, "objects": after.cumulative_created_objects}


@CHECKS
def an_argument_is_in_the_store_once_for_two_ranks_of_a_node() -> Any:
    executor = make()
    with meeting() as place:
        before = store()
        array = numpy.ones(16 * MIB, dtype=numpy.uint8)
        future = executor.submit_rpc("hold", args=(array, place.path))
        place.pids(2)
        during = store()
        for _ in range(2):
            place.go()
        assert future.result(30.0) == [array.nbytes] * 2
    used = during.object_store_bytes_used - before.object_store_bytes_used
    assert 16 * MIB <= used <= 17 * MIB, used
    await_empty_store()
    return {"MiB": round(used / MIB, 2)}


@CHECKS
def results_that_are_kept_block_no_further_call_and_outlive_the_executor() -> Any:  # F137
    executor = make()
    kept = [executor.collective_rpc("grow", args=(MIB, number % 100), timeout=30.0) for number in range(150)]
    await_empty_store()
    executor.release()
    return _check_kept(kept)


def _check_kept(kept: list[list[Any]]) -> int:
    for number, values in enumerate(kept):
        for rank, value in enumerate(values):
            assert value.shape == (MIB,) and (value == number % 100 + rank).all()
    return len(kept)


@CHECKS
def sixty_four_mebibytes_go_there_and_back_unchanged() -> Any:
    executor = make()
    array = numpy.random.default_rng(1).integers(0, 256, 64 * MIB, dtype=numpy.uint8)
    echoed = executor.collective_rpc("give_back", args=(array,), reply_ranks=0, timeout=60.0)
    assert numpy.array_equal(echoed, array)
    text = array.tobytes()
    assert executor.collective_rpc("give_back", args=(text,), reply_ranks=1, timeout=60.0) == text
    del echoed
    await_empty_store()


@CHECKS
def a_rank_cannot_write_into_the_array_of_another() -> Any:
    executor = make()
    array = numpy.ones(64 * MIB, dtype=numpy.uint8)
    with meeting() as place:
        os.mkfifo(place.path + ".written")
        replies = executor.collective_rpc("scribble", args=(array, place.path + ".written"), timeout=60.0)
    assert replies[1][1] == array.nbytes
    assert array.all()
    return {"writable": [writable for writable, _ in replies]}


@CHECKS
def a_tensor_can_be_changed_in_place_by_each_rank_alone() -> Any:
    import torch

    executor = make()
    tensor = torch.ones(MIB)
    assert executor.collective_rpc("add_one", args=(tensor,), timeout=60.0) == [2.0 * MIB] * 2
    assert bool((tensor == 1).all())
    returned = executor.collective_rpc("give_back", args=(tensor,), reply_ranks=0, timeout=60.0)
    returned += 1
    assert bool((returned == 2).all())


class _Cluster:
    """The cluster, and what is to be seen after it has gone."""

    def __enter__(self) -> None:
        self._cluster = local_cluster(num_cpus=2, object_store_memory=STORE)
        self._cluster.__enter__()

    def __exit__(self, *error: Any) -> None:
        kept: list[list[Any]] = []
        executor = make()
        kept += [executor.collective_rpc("grow", args=(MIB, number)) for number in range(3)]
        executor.release()
        self._cluster.__exit__(*error)
        assert not ray.is_initialized()
        _check_kept(kept)


if __name__ == "__main__":
    CHECKS.run(_Cluster())
