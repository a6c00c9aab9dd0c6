"""An agent's module that misbehaves in ranks before there is an agent: at its import, or in the rendezvous.

The variables that say so are set in the ranks only, so that the driver imports it like any other module.
"""

from __future__ import annotations

import os
from typing import Any

from faults.misdeeds import announce, misbehave

from mpexec import ModelAgent

_MOMENT = os.environ.get("MPEXEC_FAULT_MOMENT", "")
_MANNER = os.environ.get("MPEXEC_FAULT_MANNER", "")
_CULPRIT = os.environ.get("MPEXEC_FAULT_RANK", "") == os.environ.get("RANK")

if _CULPRIT and _MOMENT == "before_import":
    announce(os.environ.get("MPEXEC_FAULT_ANNOUNCE", ""))
    misbehave(_MANNER)


def _misbehave_in_rendezvous() -> None:
    import torch.distributed as dist

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        misbehave(_MANNER)

    dist.init_process_group = init_process_group


if _CULPRIT and _MOMENT == "rendezvous":
    _misbehave_in_rendezvous()


class LateAgent(ModelAgent):
    """An agent that is never reached by the culprit."""
