"""What mpexec gives to pytest: tests on several ranks (`hooks`), and fixtures for tests of agents (`fixtures`).

pytest takes hooks and fixtures from here by their names.
"""

from mpexec.pytest_plugin.fixtures import (
    _mpexec_world_size,
    device,
    faults_fixture,
    mp_executor,
    mp_executor_options,
    no_leaks,
    rank,
    world_size,
)
from mpexec.pytest_plugin.hooks import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
    pytest_pycollect_makeitem,
    pytest_runtest_protocol,
    pytest_runtest_teardown,
    pytest_runtestloop,
    pytest_unconfigure,
)

__all__ = [
    "_mpexec_world_size",
    "device",
    "faults_fixture",
    "mp_executor",
    "mp_executor_options",
    "no_leaks",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_pycollect_makeitem",
    "pytest_runtest_protocol",
    "pytest_runtest_teardown",
    "pytest_runtestloop",
    "pytest_unconfigure",
    "rank",
    "world_size",
]
