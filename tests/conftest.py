"""What all tests share: nothing may be left behind, and executors that are released whatever the test does."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import leaks
import pytest

from mpexec.pytest_plugin.leaks import nothing_left as check

pytest_plugins = ["pytester"]

_folder = leaks.mark_session()


# Variants whose siblings show the same within the time that a change may take; `tools/test --all` runs them all.
SLOW_VARIANTS = re.compile(
    r"""on_ray/test_nodes
    | contract/test_(lifecycle|arrays)\.py::.*[\[-]ray\b     # most start ranks of their own, which takes Ray a second
    | e2e/test_causal_lm_tokens\.py::test_tokens_equal.*\[(qwen|mistral|bundled-1)
    | e2e/test_cli_ray\.py::test_the_answers
    | e2e/test_cli\.py::test_a_killed_rank_is_named.*\[1\]
    | e2e/test_cli\.py::test_a_kill_behind_an_engine_process.*\[engine\]
    | unit/test_bench\.py::test_the_round_trips_of_ray
    | faults/test_cycles\.py::test_fifty_cycles_with_forked_ranks
    | faults/test_matrix\.py::test_.*_fails_the_start\[.*-rank0-
    | faults/test_drivers\.py::test_a_program_that_ends_without_release.*\[.*-spawn
    | faults/test_drivers\.py::test_a_fork_of_the_program_can_end_as_it_likes\[(del|sys_exit)
    """,
    re.VERBOSE,
)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a Ray cluster in this process comes last: nothing else is to run in a process that has one."""
    for item in items:
        if SLOW_VARIANTS.search(item.nodeid):
            item.add_marker(pytest.mark.slow)
    items.sort(
        key=lambda item: getattr(item, "callspec", None) is not None and item.callspec.params.get("kind") == "ray"
    )


def pytest_configure() -> None:
    # A shell that starts a job in the background has it ignore Ctrl-C, and every program that it starts inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    leaks.remove_session(_folder)


@pytest.fixture(autouse=True, scope="session")
def nothing_left_by_the_session() -> Iterator[None]:
    """At the very end the fork server goes too, and then nothing at all is left."""
    with contextlib.suppress(ImportError):  # its first loop opens two descriptors for good
        import uvloop

        uvloop.new_event_loop().close()
    before = leaks.Snapshot()
    yield
    from mpexec import shutdown_fork_server

    shutdown_fork_server()
    try:
        kinds = ("process", "zombie", "thread", "shared memory", "temporary file")
        left = [str(leak) for leak in before.leaks() if leak.kind in kinds]
    finally:
        before.close()
    assert not left, "the session left behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, nothing_left_by_the_session: None) -> Iterator[None]:
    """The test leaves no process, descriptor, thread, name, setting or noise behind; see `leaks`."""
    with check(request.node, leaks.Snapshot()):
        yield


@pytest.fixture(scope="session")
def ray_cluster(nothing_left_by_the_session: None) -> Iterator[None]:
    """A Ray cluster of one node, which the executors of the tests join; its own processes are not looked at."""
    import ray

    from mpexec.executor.settings import kept_settings

    folder = tempfile.mkdtemp(prefix="ray-")
    with kept_settings():
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
    yield
    with kept_settings():
        ray.shutdown()
    shutil.rmtree(folder)


@pytest.fixture
def mp_options() -> dict[str, Any]:
    """Options of an executor that starts within a tenth of a second: two ranks from the fork server, no rendezvous."""
    return {
        "world_size": 2,
        "start_method": "forkserver",
        "device": "cpu",
        "init_process_group": False,
        "init_timeout": 60.0,
    }


@pytest.fixture
def mp_executor_options(mp_options: dict[str, Any]) -> dict[str, Any]:
    return mp_options


@pytest.fixture
def make_executor(mp_executor: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an `MPExecutor` of an agent, with `mp_options` changed as given, and releases it after the test."""
    return mp_executor
