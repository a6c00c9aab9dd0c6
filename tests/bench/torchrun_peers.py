"""What the engine is measured against: loops that torchrun starts, one process for each rank.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.torchrun_peers PEER SOCKET

Rank 0 takes tasks from a unix socket, [prompts, new tokens] each, tells the others by a broadcast, and answers with
[seconds, tokens]. Between tasks nothing runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]


def bare_loop(world_size: int, rank: int) -> Generate:
    """The agent's own forward and cache, step after step: nothing is queued, and nothing is sent but what ranks add."""
    from mpexec.agent.causal_lm import CausalLMAgent
    from mpexec.agent.steps import Prefill, StepInput
    from mpexec.models import default_model_path

    agent = CausalLMAgent(str(default_model_path()), max_slots=8)
    agent.rank, agent.local_rank, agent.world_size = rank, rank, world_size
    agent.build_model()

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        slots = tuple(range(len(prompts)))
        agent.reset()
        start = StepInput(0, prefill=tuple(Prefill(slot, tuple(prompts[slot])) for slot in slots))
        outputs = [agent.forward(start)]
        for number in range(1, new_tokens):
            outputs.append(agent.forward(StepInput(number, decode=slots)))
        return [[output.tokens[slot] for output in outputs] for slot in slots]

    return generate


def transformers_generate(world_size: int, rank: int) -> Generate:
    """transformers' own `generate`, with its own sharding and cache."""
    import torch
    import transformers

    from mpexec.agent.loading import _tensor_parallel_options, _undisturbed
    from mpexec.models import default_model_path

    path = default_model_path()
    with _undisturbed("cpu", rank):  # else it shards onto an accelerator wherever there is one
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype="float32", local_files_only=True, **_tensor_parallel_options(world_size)
        )
    model = model.eval()

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                max_new_tokens=new_tokens, min_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        tokens: list[list[int]] = output[:, inputs.shape[1] :].tolist()
        return tokens

    return generate


PEERS = {"bare": bare_loop, "transformers": transformers_generate}


def main() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    peer, address = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    dist.init_process_group("gloo")
    generate = PEERS[peer](world_size, rank)
    driver = Client(address) if rank == 0 else None
    while (task := _next_task(driver)) is not None:
        dist.barrier()
        began = time.perf_counter()
        tokens = generate(*task)
        seconds = time.perf_counter() - began
        if driver is not None:
            driver.send([seconds, tokens])
    dist.destroy_process_group()


def _next_task(driver: Connection | None) -> Any:
    """The same for every rank; None at the end."""
    import torch.distributed as dist

    task = [None]
    if driver is not None:
        try:
            task = [driver.recv()]
        except EOFError:  # the benchmark is over
            task = [None]
    dist.broadcast_object_list(task)
    return task[0]


if __name__ == "__main__":
    main()
