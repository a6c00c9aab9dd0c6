"""What is not installed is named at once, with the command that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpexec import Engine
from mpexec.agent.causal_lm import CausalLMAgent
from mpexec.errors import ConfigError
from mpexec.models import default_model_path


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("mpexec.executor.build_executor", start)


@pytest.mark.parametrize(
    "tp, absent, named",
    [
        (1, ("transformers",), "transformers"),
        (2, ("accelerate",), "accelerate"),
        (2, ("transformers", "safetensors", "accelerate"), "transformers, safetensors, accelerate"),
    ],
)
def test_an_engine_without_the_libraries_of_a_model_says_so_before_a_rank_starts(
    tp: int, absent: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch, no_ranks: None
) -> None:
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"^a language model needs {named}: pip install 'mpexec\[hf\]'$"):
        Engine.from_pretrained(tp=tp)


def test_one_rank_needs_no_library_that_splits_models(monkeypatch: pytest.MonkeyPatch, no_ranks: None) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(AssertionError, match="ranks were started"):
        Engine.from_pretrained()


def test_an_agent_without_the_libraries_of_a_model_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = CausalLMAgent(str(default_model_path()))
    agent.world_size = 2
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match=r"needs accelerate: pip install 'mpexec\[hf\]'"):
        agent.build_model()


@pytest.mark.parametrize("absent", ["zmq", "msgspec"])
@pytest.mark.parametrize("name", ["ZMQEngine", "EngineClient"])
def test_an_engine_of_its_own_process_names_what_it_lacks(name: str, absent: str) -> None:
    program = f"import sys; sys.modules[{absent!r}] = None; from mpexec import {name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: ZMQEngine and EngineClient need {absent}: pip install 'mpexec[zmq]'"
    )
