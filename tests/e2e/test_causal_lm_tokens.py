"""Tokens of CausalLMAgent against transformers' own `generate`: float32, CPU, 1, 2 and 4 ranks, a batch of eight."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from small_models import Reference, check_equal, small_model

from mpexec import build_executor
from mpexec.agent.causal_lm import CausalLMAgent
from mpexec.agent.loading import import_transformers
from mpexec.agent.steps import GREEDY, Prefill, Sampling, StepInput, StepOutput
from mpexec.errors import ConfigError
from mpexec.models import default_model_path

NEW_TOKENS = 64
LENGTHS = (1, 2, 3, 7, 12, 20, 33, 50)
MODELS = ("bundled", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
# Each family once, and what differs most on one rank and on two; the rest is slow.
QUICK = {("bundled", 1), ("bundled", 2), ("llama", 2), ("mistral", 1), ("qwen2", 2), ("qwen3", 1), ("qwen3_moe", 2)}
CASES = [
    pytest.param(kind, ranks, marks=[] if (kind, ranks) in QUICK else [pytest.mark.slow])
    for kind in MODELS
    for ranks in (1, 2, 4)
]
SAMPLED = (
    Sampling(0.9, seed=4),
    Sampling(1.3, seed=-5, top_k=7),
    Sampling(0.8, seed=2**70, top_p=0.7, logprobs=2),
    Sampling(1.1, seed=4, min_p=0.1, repetition_penalty=1.3),
    Sampling(repetition_penalty=1.5),
    Sampling(1.0, seed=1, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=0.8),
)

Step = Callable[[StepInput], StepOutput]


def random_prompts(vocabulary: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(5)
    return [torch.randint(1, vocabulary, (length,), generator=source).tolist() for length in LENGTHS]


def generate(
    step: Step, prompts: list[list[int]], samplings: Sequence[Sampling] = (), count: int = NEW_TOKENS
) -> list[list[int]]:
    """Run all prompts in one batch and return their new tokens; those without a sampling are greedy."""
    slots = range(len(prompts))
    each = dict(enumerate(samplings))
    prefill = tuple(Prefill(slot, tuple(prompts[slot]), sampling=each.get(slot, GREEDY)) for slot in slots)
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
            assert all(answer.tokens == answers[0].tokens for answer in answers), "the ranks disagree"
            assert isinstance(answers[0], StepOutput)
            return answers[0]

        yield step


@dataclass
class Models:
    """Each model with what `generate` makes of the prompts, made once; and what the agent has sampled from it."""

    folder: Path
    prompts: list[list[int]]
    wanted: dict[str, list[tuple[list[int], list[float]]]] = field(default_factory=dict)
    sampled: dict[str, list[list[int]]] = field(default_factory=dict)

    def get(self, kind: str) -> Path:
        path = default_model_path() if kind == "bundled" else self.folder / kind
        if kind not in self.wanted:
            if kind != "bundled":
                small_model(kind, path)
            reference = Reference(path)
            self.wanted[kind] = [reference.generate(prompt, NEW_TOKENS) for prompt in self.prompts]
        return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), random_prompts(500))


@pytest.mark.parametrize("kind, ranks", CASES)
def test_tokens_equal_generate_and_sampled_ones_depend_on_nothing_but_their_seed(
    kind: str, ranks: int, models: Models
) -> None:
    path = models.get(kind)
    with running(path, ranks) as step:
        got = generate(step, models.prompts)
        drawn = generate(step, models.prompts, SAMPLED, count=6)
        alone = [generate(step, [models.prompts[row]], [SAMPLED[row]], count=6)[0] for row in (1, 3)]
    assert alone == [drawn[1], drawn[3]], "company changed a sample"
    assert models.sampled.setdefault(kind, drawn) == drawn, "another number of ranks gave other samples"
    assert drawn[-1] == got[-1][:6], "samples changed a greedy row"
    for number, (tokens, wanted) in enumerate(zip(got, models.wanted[kind], strict=True)):
        check_equal(tokens, wanted, f"{kind} on {ranks} ranks, prompt {number}")


@pytest.mark.parametrize("kind", ["bundled", "qwen3_moe"])
def test_sequences_join_and_leave_between_steps_without_changing_each_other(kind: str, models: Models) -> None:
    model, prompts, wanted = models.get(kind), models.prompts, models.wanted[kind]
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
        whole = generate(step, [[5, 6, 7]], [Sampling(1.0)], count=12)[0]
        resumed = Prefill(3, (5, 6, 7, *whole[:6]), sampling=Sampling(1.0))
        tokens = [step(StepInput(0, prefill=(resumed,))).tokens[3]]
        tokens += [step(StepInput(number, decode=(3,))).tokens[3] for number in range(5)]
    assert tokens == whole[6:]


@pytest.mark.parametrize("size", [1, 5])
def test_a_prompt_in_pieces_gives_the_tokens_of_the_whole_prompt_while_others_go_on(size: int, models: Models) -> None:
    agent = CausalLMAgent(str(models.get("bundled")))
    agent.build_model()
    prompts, wanted = models.prompts, models.wanted["bundled"]
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    waiting = {slot: list(prompts[number]) for slot, number in {1: 4, 2: 5}.items()}
    agent.forward(StepInput(0, prefill=(Prefill(0, (3, 4, 5)),)))
    for number in range(1, 40):
        pieces = []
        decode = tuple(slot for slot in got if slot not in waiting)
        for slot, rest in list(waiting.items()):
            whole = len(prompts[{1: 4, 2: 5}[slot]])
            piece, waiting[slot] = rest[:size], rest[size:]
            pieces.append(Prefill(slot, tuple(piece), whole - len(rest), is_last=len(rest) <= size))
            if len(rest) <= size:
                del waiting[slot]
        output = agent.forward(StepInput(number, prefill=tuple(pieces), decode=decode))
        assert output.tokens.keys() == {*decode, *(one.slot for one in pieces if one.is_last)}
        for slot, token in output.tokens.items():
            got[slot].append(token)
    assert got[1] == wanted[4][0][: len(got[1])]
    assert got[2] == wanted[5][0][: len(got[2])]
    assert len(got[2]) >= 19


def test_pieces_that_do_not_follow_each_other_are_refused_and_change_nothing() -> None:
    agent = CausalLMAgent(str(default_model_path()), max_slots=2, max_length=8)
    agent.build_model()
    agent.forward(StepInput(0, prefill=(Prefill(0, (1, 2, 3), is_last=False),)))
    for piece, message in [
        (Prefill(0, (4,), start=2), "starts at 2; it holds 3"),
        (Prefill(0, (4,), start=4), "starts at 4; it holds 3"),
        (Prefill(0, (4,)), "slot 0 is in use"),
        (Prefill(1, (4,), start=1), "starts at 1; it holds 0"),
        (Prefill(0, (4, 5, 6, 7, 8), start=3), "a prompt of 8 tokens does not fit"),
        (Prefill(0, (), start=3), "does not fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            agent.forward(StepInput(1, prefill=(piece,)))
    with pytest.raises(ValueError, match="slot 0 cannot be decoded"):
        agent.forward(StepInput(1, decode=(0,)))
    with pytest.raises(ValueError, match="slot 0 is named twice"):
        agent.forward(StepInput(1, prefill=(Prefill(0, (4,), start=3), Prefill(0, (5,), start=4))))
    with pytest.raises(ValueError, match="starts at 3; it holds 0"):
        agent.forward(StepInput(1, free=(0,), prefill=(Prefill(0, (4,), start=3),)))
    pieced = agent.forward(StepInput(1, prefill=(Prefill(0, (4,), start=3),))).tokens[0]
    assert agent.forward(StepInput(2, prefill=(Prefill(1, (1, 2, 3, 4)),))).tokens[1] == pieced


def test_a_sequence_that_is_no_longer_finite_leaves_nothing_to_the_next_in_its_slot() -> None:
    agent = CausalLMAgent(str(default_model_path()), max_slots=2, max_length=32)
    agent.build_model()
    short, long = (1, 2), tuple(range(20))
    agent.forward(StepInput(0, prefill=(Prefill(0, short),)))
    alone = agent.forward(StepInput(1, decode=(0,))).tokens[0]
    agent.forward(StepInput(2, free=(0,), prefill=(Prefill(0, long),)))
    agent._cache.values[:, 0, :, : len(long)] = torch.nan  # as weights that have diverged leave it
    agent.forward(StepInput(3, free=(0,), prefill=(Prefill(0, short), Prefill(1, long))))
    assert agent.forward(StepInput(4, decode=(0, 1))).tokens[0] == alone


def test_log_probabilities_are_those_of_the_model_whatever_is_sampled(models: Models) -> None:
    path = models.get("bundled")
    agent = CausalLMAgent(str(path))
    agent.build_model()
    prompt = models.prompts[3]
    sampled = Sampling(1.5, seed=3, top_k=5, repetition_penalty=1.2, logprobs=3)
    output = agent.forward(StepInput(0, prefill=(Prefill(0, tuple(prompt), sampling=sampled), Prefill(1, (1, 2)))))
    assert output.logprobs.keys() == {0}
    model = import_transformers().AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    with torch.inference_mode():
        logarithms = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    best = logarithms.topk(3)
    found = output.logprobs[0]
    assert found.chosen == pytest.approx(float(logarithms[output.tokens[0]]), abs=1e-4)
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_steps_that_do_not_fit_the_slots_are_refused_by_name() -> None:
    agent = CausalLMAgent(str(default_model_path()), max_slots=2, max_length=4)
    agent.build_model()
    agent.forward(StepInput(0, prefill=(Prefill(0, (1, 2, 3)),)))
    with pytest.raises(ValueError, match="slot 0 is in use"):
        agent.forward(StepInput(1, prefill=(Prefill(0, (1,)),)))
    with pytest.raises(ValueError, match="named twice or not one of 0 to 1"):
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
    with pytest.raises(ConfigError, match=r"opt models have no tensor-parallel plan .* world_size=1 \(--tp 1\)"):
        agent.build_model()


def test_arguments_that_cannot_work_are_refused_before_loading() -> None:
    path = str(default_model_path())
    with pytest.raises(ConfigError, match="max_length=1025 is out of range; kjv-small allows 2 to 1024"):
        CausalLMAgent(path, max_length=1025)
    with pytest.raises(ConfigError, match="max_slots=0"):
        CausalLMAgent(path, max_slots=0)
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        CausalLMAgent(path, dtype="float8")


@pytest.mark.parametrize("slots", [10**9, 10**30])
def test_a_cache_that_the_device_has_no_room_for_is_refused_with_what_would_make_it_smaller(slots: int) -> None:
    agent = CausalLMAgent(str(default_model_path()), max_slots=slots, max_length=500)
    layers, kv_heads, width = agent._facts.layers, agent._facts.kv_heads, agent._facts.head_dim
    size = 2 * 4 * layers * slots * kv_heads * 500 * width
    with pytest.raises(ConfigError, match=f"max_slots={slots} and max_length=500 need a cache of {size} bytes"):
        agent._make_cache()


def test_building_leaves_streams_and_environment_alone() -> None:
    before = (sys.stdout, sys.stderr, dict(os.environ))
    CausalLMAgent(str(default_model_path())).build_model()
    assert before == (sys.stdout, sys.stderr, dict(os.environ))
