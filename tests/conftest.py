"""What all tests share: nothing may be left behind, and executors that are released whatever the test does."""

from __future__ import annotations

import contextlib
import inspect
import logging
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import leaks
import pytest

pytest_plugins = ["pytester"]

_folder = leaks.mark_session()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = leaks.guard_tasks(item.obj)
    return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a Ray cluster in this process comes last: nothing else is to run in a process that has one."""
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
        left = [
            line for line in before.leaks() if line.startswith(("process", "zombie", "thread", "/dev/shm", "temporary"))
        ]
    finally:
        before.close()
    assert not left, "the session left behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, nothing_left_by_the_session: None) -> Iterator[None]:
    """The test leaves no process, descriptor, thread, name, setting or noise behind; see `leaks`."""
    before = leaks.Snapshot()
    yield
    stderr = "".join(text for _, kind, text in request.node._report_sections if kind in ("stderr", "log"))
    try:
        left = before.leaks(stderr)
    finally:
        before.close()
    assert not left, "left behind:\n" + "\n".join(left)


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
def make_executor(mp_options: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Makes an `MPExecutor` of an agent, with `mp_options` changed as given, and releases it after the test."""
    from mpexec import MPExecutor

    made: list[Any] = []

    def make(agent: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            executor = MPExecutor(agent, **{**mp_options, **options})
        made.append(executor)
        return executor

    yield make
    for executor in reversed(made):
        executor.release()
