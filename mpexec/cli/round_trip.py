"""Two ranks, started as a user's program would start them, for `mpexec doctor`."""

from __future__ import annotations

import statistics
import time
from typing import Any

from mpexec.agent.base import ModelAgent

_WARM_CALLS = 50
_CALLS = 300
_START_S = 60.0
_CALL_S = 30.0


class Echo(ModelAgent):
    """Answers, and sums up with the other ranks."""

    def echo(self, value: int) -> int:
        """The value."""
        return value

    def sum_of_ranks(self) -> int:
        """The sum of 1 + rank over all ranks, by an all-reduce."""
        import torch
        from torch import distributed

        total = torch.tensor([1 + self.rank])
        distributed.all_reduce(total)
        return int(total.item())


def measure_round_trip() -> dict[str, Any]:
    """Start two ranks on the CPU and call them.

    Blocks for the seconds that two imports of torch take. Gives start_s, call_us, sum_is_right; or error, as one line.
    """
    from mpexec.executor.mp import MPExecutor

    began = time.monotonic()
    try:
        with MPExecutor(Echo, world_size=2, device="cpu", init_timeout=_START_S, _warn=False) as executor:
            started = time.monotonic()
            sums = executor.collective_rpc("sum_of_ranks", timeout=_CALL_S)
            times = []
            for number in range(_WARM_CALLS + _CALLS):
                sent = time.perf_counter()
                executor.collective_rpc("echo", args=(number,), timeout=_CALL_S)
                times.append(time.perf_counter() - sent)
    except Exception as failed:  # whatever it is, it is what the doctor is for
        return {"error": f"{type(failed).__name__}: {str(failed).splitlines()[0] if str(failed) else 'no text'}"}
    return {
        "start_s": started - began,
        "call_us": statistics.median(times[_WARM_CALLS:]) * 1e6,
        "sum_is_right": sums == [3, 3],
    }
