"""ModelPlan: what a prompt may be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpexec.agent.checkpoint import read_checkpoint
from mpexec.config import EngineConfig
from mpexec.engine.engine import ModelPlan
from mpexec.errors import ConfigError
from mpexec.models import default_model_path


@pytest.mark.parametrize(
    "context, window, max_length, told",
    [
        (32768, None, 4096, r"4096 tokens \(the default; max_length raises it up to 32768\): shorten"),
        (32768, 8192, 4096, r"4096 tokens \(the default; max_length raises it up to 8192\): shorten"),
        (32768, None, 64, r"64 tokens \(max_length raises it up to 32768\): shorten"),
        (512, None, 512, "512 tokens: shorten"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_the_limit_and_what_raises_it(
    context: int, window: int | None, max_length: int, told: str
) -> None:
    facts = replace(read_checkpoint(default_model_path()), context_length=context, sliding_window=window)
    plan = ModelPlan(facts, 1, max_length, None)
    assert len(plan.encode([1] * (max_length - 1))) == max_length - 1
    with pytest.raises(ConfigError, match=f"has {max_length} tokens; prompt and answer together may have {told}"):
        plan.encode([1] * max_length)


def test_without_a_limit_a_text_may_have_what_the_model_allows() -> None:
    plan = ModelPlan.read(default_model_path(), 1, EngineConfig())
    assert plan.max_length == plan.facts.longest == 1024
