"""The environment of ranks: an outer job's variables are replaced by the rank's own; `os.environ` never changes."""

from __future__ import annotations

import os
from collections.abc import Mapping

# What torchrun sets for its own workers. A rank that saw them would believe it belonged to that job.
_OUTER_JOB = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
_OUTER_JOB_PREFIX = "TORCHELASTIC_"

_READ_AT_IMPORT = (
    *("ATEN_", "CUDA_", "GLOO_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_"),
    *("PYTHON", "PYTORCH_", "TORCH_"),
)
# Read later than at import: CUDA_VISIBLE_DEVICES when CUDA starts, and the thread count is set again in each rank.
_READ_LATER = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def rank_environment(
    rank: int, world_size: int, spec_env: Mapping[str, str | None], *, threads: int | None = None
) -> dict[str, str | None]:
    """Changes to the driver's environment for one rank; a value of None removes the variable.

    Args:
        spec_env: The user's entries; they win over all others.
        threads: Value for `OMP_NUM_THREADS` where neither the driver's environment nor the user sets it.
    """
    changes: dict[str, str | None] = {
        name: None for name in os.environ if name in _OUTER_JOB or name.startswith(_OUTER_JOB_PREFIX)
    }
    changes["RANK"] = changes["LOCAL_RANK"] = str(rank)
    changes["WORLD_SIZE"] = changes["LOCAL_WORLD_SIZE"] = str(world_size)
    if threads is not None and "OMP_NUM_THREADS" not in os.environ:
        changes["OMP_NUM_THREADS"] = str(threads)
    changes.update(spec_env)
    return changes


def apply_changes(base: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """`base` with `changes` applied, as a new dictionary."""
    merged: dict[str, str | None] = {**base, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The entries that the interpreter or torch reads while it is loaded, so that a later change has no effect."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def fork_server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a fork server for ranks with `environment`: theirs, with one thread per maths library.

    A library that starts threads while it is loaded would make every fork of that server unsafe.
    """
    names = (*_OUTER_JOB, "OMP_NUM_THREADS")
    own = {k: v for k, v in environment.items() if k not in names and not k.startswith(_OUTER_JOB_PREFIX)}
    own["OMP_NUM_THREADS"] = "1"
    for name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        own.setdefault(name, "1")
    return own
