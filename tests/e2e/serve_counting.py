"""`mpexec serve` with two ranks that count instead of computing: it is there at once and writes at a steady pace."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

from engine_agents import CountingAgent

from mpexec import Engine, EngineConfig
from mpexec.agent.steps import StepInput
from mpexec.cli import main
from mpexec.engine.engine import ModelPlan
from mpexec.executor import build_executor_async
from mpexec.http import served

STEP_S = 0.01


class SteadyAgent(CountingAgent):
    """Needs some time for each step, as a model does."""

    def forward(self, inputs: StepInput) -> Any:
        """One token more for every slot."""
        time.sleep(STEP_S)
        return super().forward(inputs)


async def make_counting_engine(
    path: Path, tp: int, *, config: EngineConfig, dtype: str, device: str, start_method: Any
) -> Engine:
    executor = await build_executor_async(
        SteadyAgent,
        "mp",
        world_size=tp,
        start_method=start_method,
        device="cpu",
        init_process_group=False,
        stop_timeout=0.8 * config.stop_timeout,
    )
    return Engine(executor, ModelPlan.read(path, tp, config), config)


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)
    served.make_engine = make_counting_engine
    sys.exit(main(["serve", *sys.argv[1:]]))
