"""Tokens of CausalLMAgent against transformers' own `generate`: float32, CPU, one and two ranks, a batch of eight."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mpexec import build_executor
from mpexec.agent.causal_lm import CausalLMAgent
from mpexec.agent.loading import import_transformers
from mpexec.agent.steps import Prefill, Sampling, StepInput, StepOutput
from mpexec.errors import ConfigError
from mpexec.models import default_model_path

NEW_TOKENS = 64
LENGTHS = (1, 2, 3, 7, 12, 20, 33, 50)
MODELS = ("bundled", "llama", "qwen2", "qwen3")
# Where transformers' two best logits are closer than this, the order in which floats are added decides between them.
TIE = 1e-5

Step = Callable[[StepInput], StepOutput]


def random_model(kind: str, folder: Path) -> Path:
    """Save a small untrained model whose logits are far enough apart to have an order."""
    transformers = import_transformers()
    sizes: dict[str, Any] = {
        "vocab_size": 503,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
    }
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=False),
        "qwen2": lambda: transformers.Qwen2Config(**sizes, tie_word_embeddings=False),
        "qwen3": lambda: transformers.Qwen3Config(**sizes, head_dim=24, tie_word_embeddings=True),
    }
    torch.manual_seed(17)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def random_prompts(vocabulary: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(5)
    return [torch.randint(1, vocabulary, (length,), generator=source).tolist() for length in LENGTHS]


@torch.inference_mode()
def reference(path: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Return, for each prompt, the new tokens of `generate` and the gap between the two best logits at each."""
    model = import_transformers().AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    results = []
    for prompt in prompts:
        output = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.cat(output.logits).topk(2).values
        results.append((output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return results


def generate(
    step: Step, prompts: list[list[int]], *, temperature: float = 0.0, count: int = NEW_TOKENS
) -> list[list[int]]:
    """Run all prompts in one batch and return their new tokens."""
    slots = range(len(prompts))
    prefill = tuple(Prefill(slot, tuple(prompts[slot]), sampling=Sampling(temperature, slot)) for slot in slots)
    outputs = [step(StepInput(0, prefill=prefill))]
    outputs += [step(StepInput(number, decode=tuple(slots))) for number in range(1, count)]
    step(StepInput(count, free=tuple(slots)))
    assert [output.step_id for output in outputs] == list(range(count))
    return [[output.tokens[slot] for output in outputs] for slot in slots]


@contextmanager
def running(path: Path, ranks: int) -> Iterator[Step]:
    """Start an executor and yield a call that runs one step on all ranks and returns their common answer."""
    with build_executor(
        CausalLMAgent, world_size=ranks, agent_args=(str(path),), start_method="forkserver"
    ) as executor:

        def step(inputs: StepInput) -> StepOutput:
            answers = executor.collective_rpc("forward", args=(inputs,), timeout=30.0)
            assert all(answer == answers[0] for answer in answers), "the ranks disagree"
            assert isinstance(answers[0], StepOutput)
            return answers[0]

        yield step


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "bundled":
        return default_model_path()
    return random_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    return random_prompts(500)


@pytest.fixture(scope="module")
def wanted(model: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    return reference(model, prompts)


@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_tokens_equal_generate(
    ranks: int, model: Path, prompts: list[list[int]], wanted: list[tuple[list[int], list[float]]]
) -> None:
    with running(model, ranks) as step:
        got = generate(step, prompts)
        drawn = [generate(step, prompts, temperature=0.9, count=6) for _ in range(2)]
    assert drawn[0] == drawn[1], "the same seeds gave other tokens"
    wrong = []
    for number, (tokens, (right, gaps)) in enumerate(zip(got, wanted, strict=True)):
        differing = next((at for at in range(NEW_TOKENS) if tokens[at] != right[at]), None)
        if differing is None:
            continue
        # After the first difference the texts differ, so the rest of this prompt says nothing.
        pair, gap = f"{tokens[differing]} for {right[differing]}", gaps[differing]
        fact = f"prompt {number} token {differing}: {pair}, gap {gap:.2e}"
        print(f"{model.name} on {ranks} ranks: {fact}")
        if gap >= TIE:
            wrong.append(fact)
    assert not wrong


def test_sequences_join_and_leave_between_steps_without_changing_each_other(
    model: Path, prompts: list[list[int]], wanted: list[tuple[list[int], list[float]]]
) -> None:
    with running(model, ranks=1) as step:
        first = [step(StepInput(0, prefill=(Prefill(5, tuple(prompts[2])), Prefill(1, tuple(prompts[6]))))).tokens]
        first += [step(StepInput(1, decode=(5, 1))).tokens]
        # Slot 1 is freed and taken again in one step, while slot 5 goes on.
        first += [step(StepInput(2, free=(1,), prefill=(Prefill(1, tuple(prompts[4])),), decode=(5,))).tokens]
        first += [step(StepInput(number, decode=(1, 5))).tokens for number in range(3, 10)]
    assert [tokens[5] for tokens in first] == wanted[2][0][:10]
    assert [tokens[1] for tokens in first] == wanted[6][0][:2] + wanted[4][0][:8]


def test_an_interrupted_sample_resumes_with_the_same_tokens() -> None:
    with running(default_model_path(), ranks=1) as step:
        whole = generate(step, [[5, 6, 7]], temperature=1.0, count=12)[0]
        resumed = Prefill(3, (5, 6, 7, *whole[:6]), sampling=Sampling(1.0))
        tokens = [step(StepInput(0, prefill=(resumed,))).tokens[3]]
        tokens += [step(StepInput(number, decode=(3,))).tokens[3] for number in range(5)]
    assert tokens == whole[6:]


def test_steps_that_do_not_fit_the_slots_are_refused_by_name() -> None:
    agent = CausalLMAgent(str(default_model_path()), max_slots=2, max_length=4)
    agent.build_model()
    agent.forward(StepInput(0, prefill=(Prefill(0, (1, 2, 3)),)))
    with pytest.raises(ValueError, match="slot 0 is in use"):
        agent.forward(StepInput(1, prefill=(Prefill(0, (1,)),)))
    with pytest.raises(ValueError, match="not one of 0 to 1"):
        agent.forward(StepInput(1, prefill=(Prefill(2, (1,)),)))
    with pytest.raises(ValueError, match="prompt of 4 tokens"):
        agent.forward(StepInput(1, prefill=(Prefill(1, (1, 2, 3, 4)),)))
    with pytest.raises(ValueError, match="outside of 0 to 2047"):
        agent.forward(StepInput(1, prefill=(Prefill(1, (2048,)),)))
    with pytest.raises(ValueError, match="slot 1 cannot be decoded"):
        agent.forward(StepInput(1, decode=(0, 1)))
    with pytest.raises(ValueError, match="slot 0 cannot be decoded"):
        agent.forward(StepInput(1, free=(0,), decode=(0,)))
    agent.forward(StepInput(2, decode=(0,)))
    with pytest.raises(ValueError, match="slot 0 is full"):
        agent.forward(StepInput(3, decode=(0,)))
    agent.reset()
    assert agent.forward(StepInput(4, prefill=(Prefill(0, (1,)),))).tokens.keys() == {0}


def test_a_model_that_cannot_be_split_is_refused_with_the_remedy(tmp_path: Path) -> None:
    agent = CausalLMAgent(str(default_model_path()))
    agent.world_size = 3
    with pytest.raises(ConfigError, match="8 attention heads and 4 key/value heads"):
        agent.build_model()
    transformers = import_transformers()
    transformers.AutoModelForCausalLM.from_config(
        transformers.OPTConfig(vocab_size=50, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    agent = CausalLMAgent(str(tmp_path))
    agent.world_size = 2
    with pytest.raises(ConfigError, match=r"opt models have no tensor-parallel plan .* world_size=1"):
        agent.build_model()


def test_arguments_that_cannot_work_are_refused_before_loading() -> None:
    path = str(default_model_path())
    with pytest.raises(ConfigError, match="max_length=1025 is out of range; kjv-small allows 2 to 1024"):
        CausalLMAgent(path, max_length=1025)
    with pytest.raises(ConfigError, match="max_slots=0"):
        CausalLMAgent(path, max_slots=0)
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        CausalLMAgent(path, dtype="float8")


def test_building_leaves_streams_and_environment_alone() -> None:
    before = (sys.stdout, sys.stderr, dict(os.environ))
    CausalLMAgent(str(default_model_path())).build_model()
    assert before == (sys.stdout, sys.stderr, dict(os.environ))
