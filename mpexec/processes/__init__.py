"""Rank processes: started three ways, watched by pidfd, ended by a ladder, their last lines kept.

Names are loaded on first use, so that a starting rank imports only what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpexec.processes.boot import Boot, refuse_while_importing_main
    from mpexec.processes.death import Death
    from mpexec.processes.environment import rank_environment
    from mpexec.processes.fork_server import shutdown_fork_server
    from mpexec.processes.ladder import end_processes
    from mpexec.processes.launching import launch
    from mpexec.processes.logs import RankLog
    from mpexec.processes.monitor import Monitor
    from mpexec.processes.process import RankProcess
    from mpexec.processes.start import RankPlan, main_is_importable

_HOMES = {
    "Boot": "boot",
    "Death": "death",
    "Monitor": "monitor",
    "RankLog": "logs",
    "RankPlan": "start",
    "RankProcess": "process",
    "end_processes": "ladder",
    "launch": "launching",
    "main_is_importable": "start",
    "rank_environment": "environment",
    "refuse_while_importing_main": "boot",
    "shutdown_fork_server": "fork_server",
}

__all__ = [
    "Boot",
    "Death",
    "Monitor",
    "RankLog",
    "RankPlan",
    "RankProcess",
    "end_processes",
    "launch",
    "main_is_importable",
    "rank_environment",
    "refuse_while_importing_main",
    "shutdown_fork_server",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
