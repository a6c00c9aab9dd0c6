"""What mpexec gives to pytest: tests on several ranks (`hooks`), and fixtures for tests of agents (`fixtures`).

pytest takes hooks and fixtures from here by their names. They are loaded when it asks: ranks import parts of this
package too, and have no use for pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "hooks": (
        *("pytest_addoption", "pytest_configure", "pytest_unconfigure"),
        *("pytest_generate_tests", "pytest_pycollect_makeitem", "pytest_collection_modifyitems"),
        *("pytest_runtestloop", "pytest_runtest_protocol"),
    ),
    "fixtures": (
        *("rank", "world_size", "device", "_mpexec_world_size"),
        *("mp_executor", "mp_executor_options", "faults_fixture", "no_leaks"),
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
