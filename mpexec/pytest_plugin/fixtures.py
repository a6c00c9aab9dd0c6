"""All fixtures of the plug-in. What they are made of is loaded by the first test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from mpexec.pytest_plugin.marker import RANK_PLUGIN

if TYPE_CHECKING:
    import torch

    from mpexec.pytest_plugin.executors import ExecutorFactory
    from mpexec.pytest_plugin.faults import Faults
    from mpexec.pytest_plugin.leaks import NoLeaks

# -- on the ranks ------------------------------------------------------------------------------------------------------


def _seat(request: pytest.FixtureRequest) -> Any:
    plugin = request.config.pluginmanager.get_plugin(RANK_PLUGIN)
    if plugin is None:
        pytest.fail(
            f"the fixture {request.fixturename!r} is for tests on ranks: mark the test with @pytest.mark.ranks(2)",
            pytrace=False,
        )
    return plugin


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> int:
    """The rank that this test runs on, 0 to `world_size - 1`."""
    return int(_seat(request).rank)


@pytest.fixture(scope="session")
def world_size(request: pytest.FixtureRequest) -> int:
    """How many ranks run this test."""
    return int(_seat(request).world_size)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of this rank: `cpu`, or `cuda` with the index of the rank on its machine."""
    import torch

    return torch.device(_seat(request).device)


@pytest.fixture
def _mpexec_world_size(request: pytest.FixtureRequest) -> int:
    """Carries the number of ranks of a test that runs with several."""
    return int(request.param)


# -- in the driver -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mp_executor_options() -> Mapping[str, Any]:
    """Options of every executor that `mp_executor` makes; override it to change them for a module or folder."""
    return {}


@pytest.fixture
def mp_executor(request: pytest.FixtureRequest, mp_executor_options: Mapping[str, Any]) -> Iterator[ExecutorFactory]:
    """Makes an `MPExecutor`: `mp_executor(MyAgent, world_size=2)`. All are released after the test, whatever it did."""
    from mpexec.pytest_plugin.executors import ExecutorFactory

    # Both end after the executors, in whatever order the test names them.
    used = {name: request.getfixturevalue(name) for name in ("no_leaks", "faults") if name in request.fixturenames}
    factory = ExecutorFactory(mp_executor_options, used.get("faults"))
    yield factory
    factory.release_all()


@pytest.fixture(name="faults")  # a module of this package has that name
def faults_fixture(request: pytest.FixtureRequest) -> Iterator[Faults]:
    """Ranks die, stop, hang or fail at a point of the test's choice: `faults.kill(1, at="forward")`."""
    from mpexec.pytest_plugin.faults import Faults

    if "no_leaks" in request.fixturenames:  # its look comes after our end
        request.getfixturevalue("no_leaks")
    made = Faults()
    yield made
    made.close()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[NoLeaks]:
    """The test must leave no process, thread, descriptor, shared memory, task, setting or noise on stderr behind.

    All that it began may still end within three seconds. To have it for all tests of a module, write
    `pytestmark = pytest.mark.usefixtures("no_leaks")`.
    """
    from mpexec.pytest_plugin.leaks import NoLeaks, nothing_left
    from mpexec.pytest_plugin.snapshot import Snapshot

    snapshot = Snapshot()
    with nothing_left(request.node, snapshot):
        yield NoLeaks(snapshot)
