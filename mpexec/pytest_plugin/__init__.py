"""What mpexec gives to pytest. Loaded on first use: ranks import parts of this package, and must not import pytest."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "faults_fixture": "faults",
    "mp_executor": "executors",
    "mp_executor_options": "executors",
    "no_leaks": "leaks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
