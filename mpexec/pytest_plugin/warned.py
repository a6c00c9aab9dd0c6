"""Warnings of ranks, handed to the driver's summary of warnings."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import pytest


def forward_warnings(config: pytest.Config, facts: list[dict[str, Any]]) -> None:
    """Record warnings of one phase; one that several ranks gave counts once."""
    seen: set[tuple[Any, ...]] = set()
    for fact in facts:
        identity = fact["module"], fact["name"], fact["text"], fact["filename"], fact["lineno"]
        if identity not in seen:
            seen.add(identity)
            config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": _message(fact),
                    "when": fact["when"],
                    "nodeid": fact["nodeid"],
                    "location": fact["location"],
                }
            )


def _message(fact: Mapping[str, Any]) -> warnings.WarningMessage:
    where = fact["filename"], fact["lineno"]
    with contextlib.suppress(Exception):  # a class of the user's may demand other arguments, a lazy module may fail
        # What the driver has not loaded it does not load for this: it may demand a GPU.
        category = getattr(sys.modules.get(fact["module"]), fact["name"], None)
        if isinstance(category, type) and issubclass(category, Warning):
            return warnings.WarningMessage(category(fact["text"]), category, *where)
    return warnings.WarningMessage(UserWarning(f"{fact['name']}: {fact['text']}"), UserWarning, *where)
