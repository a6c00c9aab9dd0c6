"""Warnings of ranks, handed to the driver's summary of warnings."""

from __future__ import annotations

import importlib
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
    category = _category(fact["module"], fact["name"])
    try:
        message = category(fact["text"])
    except Exception:  # a class of the user's may demand other arguments
        category, message = UserWarning, UserWarning(f"{fact['name']}: {fact['text']}")
    return warnings.WarningMessage(message, category, fact["filename"], fact["lineno"])


def _category(module: str, name: str) -> type[Warning]:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):  # defined in a test module or in a function
        return UserWarning
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning
