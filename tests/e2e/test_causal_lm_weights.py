"""Weights of CausalLMAgent: read file by file, in each type of number, refused where they do not fit, and replaced."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import small_model

from mpexec import build_executor
from mpexec.agent.causal_lm import CausalLMAgent
from mpexec.agent.steps import Prefill, Sampling, StepInput
from mpexec.errors import ConfigError
from mpexec.models import default_model_path

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture-of-experts model in several files: what its files hold is not what the model holds."""
    return small_model("qwen3_moe", tmp_path_factory.mktemp("experts"), tie_word_embeddings=True)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def other_tensors(folder: Path) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(8)
    return {name: one + 0.2 * torch.randn(one.shape, generator=source) for name, one in tensors(folder).items()}


def copy_config(folder: Path, target: Path, **changes: Any) -> Path:
    target.mkdir(exist_ok=True)
    config = {**json.loads(folder.joinpath("config.json").read_text()), **changes}
    target.joinpath("config.json").write_text(json.dumps(config))
    return target


def tokens(call: Call) -> list[int]:
    steps = [StepInput(0, prefill=(Prefill(0, (1, 2, 3)),)), *(StepInput(number, decode=(0,)) for number in range(9))]
    outputs = [call("forward", step).tokens[0] for step in steps]
    call("reset")
    return outputs


def built(path: Path, **options: Any) -> CausalLMAgent:
    agent = CausalLMAgent(str(path), **options)
    agent.build_model()
    return agent


def of_agent(agent: CausalLMAgent) -> Call:
    return lambda name, *args: getattr(agent, name)(*args)


@contextmanager
def of_ranks(path: Path, ranks: int) -> Iterator[Call]:
    """A call that runs a method on all ranks and returns their common answer."""
    with build_executor(
        CausalLMAgent, world_size=ranks, agent_args=(str(path),), start_method="forkserver"
    ) as executor:

        def call(method: Any, *args: Any) -> Any:
            answers = executor.collective_rpc(method, args=args, timeout=60.0)
            assert all(answer == answers[0] for answer in answers), "the ranks disagree"
            return answers[0]

        yield call


def test_every_file_is_reported_once_it_is_begun(folder: Path) -> None:
    agent = CausalLMAgent(str(folder))
    reports: list[str] = []
    agent._report = reports.append
    agent.build_model()
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2
    # A file that takes seconds is reported again.
    loading = [report.split(": ") for report in dict.fromkeys(reports) if report.startswith("loading")]
    assert sorted(file for _, file in loading) == files
    assert [count for count, _ in loading] == [f"loading {number}/{len(files)}" for number in range(1, len(files) + 1)]
    assert reports[-1] == "trying the model"


def test_weights_that_are_not_those_of_the_configuration_are_refused(folder: Path, tmp_path: Path) -> None:
    whole = tensors(folder)
    copy_config(folder, tmp_path)
    save_file({name: one for name, one in whole.items() if "norm" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"not those of its config.json: model.layers.0.input_layernorm.weight is missing.* and \d+ more",
    ):
        built(tmp_path)
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"model.embed_tokens.weight has shape \[503, 64\] where the model has \[503, 72\]"
    ):
        built(copy_config(folder, tmp_path, hidden_size=72))
    # A tensor too many does no harm: folders have those of training, or of a vision part.
    save_file({**whole, "extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert tokens(of_agent(built(copy_config(folder, tmp_path)))) == tokens(of_agent(built(folder)))


def test_a_file_that_breaks_after_the_driver_has_looked_is_named(folder: Path, tmp_path: Path) -> None:
    copy_config(folder, tmp_path)
    save_file(tensors(folder), tmp_path / "model.safetensors")
    agent = CausalLMAgent(str(tmp_path))
    tmp_path.joinpath("model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        agent.build_model()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_each_type_of_number_runs(folder: Path, dtype: str) -> None:
    agent = built(folder, dtype=dtype)
    sampling = Sampling(0.8, top_p=0.9, logprobs=1)
    prefill = (Prefill(0, (5, 6, 7, 8)), Prefill(1, (9,), sampling=sampling))
    outputs = [agent.forward(StepInput(0, prefill=prefill))]
    outputs += [agent.forward(StepInput(number, decode=(0, 1))) for number in range(1, 6)]
    assert agent.model_facts()["dtype"] == dtype
    assert all(0 <= token < 503 for output in outputs for token in output.tokens.values())
    assert all(math.isfinite(output.logprobs[1].chosen) for output in outputs)
    assert all(parameter.dtype == getattr(torch, dtype) for parameter in agent._model.parameters())


@pytest.mark.parametrize("ranks", [1, 2])
def test_replaced_weights_give_the_tokens_of_a_model_loaded_with_them(folder: Path, tmp_path: Path, ranks: int) -> None:
    other = other_tensors(folder)
    save_file(other, copy_config(folder, tmp_path) / "model.safetensors", metadata={"format": "pt"})
    wanted = tokens(of_agent(built(tmp_path)))
    with of_ranks(folder, ranks) as call:
        before = tokens(call)
        assert wanted != before
        for wrong, message in [
            ({**other, "extra.weight": torch.zeros(2)}, "extra.weight is not in the model"),
            ({name: one for name, one in other.items() if "q_norm" not in name}, "q_norm.weight is missing"),
            (
                {**other, "model.norm.weight": torch.zeros(3)},
                r"model.norm.weight has shape \[3\] where the model has \[64\]",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                call("update_params", wrong)
        with pytest.raises(ConfigError, match=r"absent\.safetensors cannot be read"):
            call("update_params", str(tmp_path / "absent.safetensors"))
        assert tokens(call) == before, "a refused update changed something"
        call("update_params", other)
        assert tokens(call) == wanted
        call("update_params", str(folder))
        assert tokens(call) == before
        call("update_params", str(tmp_path / "model.safetensors"))
        assert tokens(call) == wanted


@pytest.mark.slow
def test_weights_that_one_rank_refuses_are_refused_by_all_and_change_nothing(folder: Path, tmp_path: Path) -> None:
    other = other_tensors(folder)
    whole, torn, absent = (tmp_path / name for name in ("whole", "torn", "absent"))
    save_file(other, whole, metadata={"format": "pt"})
    save_file({name: one for name, one in other.items() if "q_norm" not in name}, torn, metadata={"format": "pt"})

    def update(worker: Any, *by_rank: str) -> None:
        worker.agent.update_params(by_rank[worker.rank])

    with of_ranks(folder, 2) as call:
        before = tokens(call)
        for wrong, message in [(torn, "rank 1 was given others than rank 0"), (absent, "absent cannot be read")]:
            with pytest.raises(ConfigError, match=message) as caught:
                call(update, str(whole), str(wrong))
            assert len(caught.value.others.exceptions) == 1, "one rank did not refuse"
        assert tokens(call) == before
        call(update, str(whole), str(whole))
        assert tokens(call) != before


def test_replaced_weights_share_no_memory_with_those_given() -> None:
    agent = built(default_model_path())
    given = {name: one.clone() for name, one in load_file(default_model_path() / "model.safetensors").items()}
    given = {name: one.float() for name, one in given.items()}
    before = [parameter.data_ptr() for parameter in agent._model.parameters()]
    agent.update_params(given)
    wanted = tokens(of_agent(agent))
    for one in given.values():
        one.zero_()
    assert tokens(of_agent(agent)) == wanted
    assert [parameter.data_ptr() for parameter in agent._model.parameters()] == before
