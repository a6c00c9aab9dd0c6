"""Untrained models of a few layers, one of each family, and what transformers' own `generate` makes of them."""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mpexec.agent.loading import import_transformers
from mpexec.models import default_model_path

SIZES: dict[str, Any] = {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
# By family: the name that transformers' classes have for it, and what is its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 200}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
# Where the two best logits are closer than this, the order in which floats are added decides between them.
TIE = 1e-5


def small_model(family: str, folder: Path, **changes: Any) -> Path:
    """Save a model, in several files, whose logits are far enough apart to have an order; `changes` to its sizes."""
    transformers = import_transformers()
    name, own = FAMILIES[family]
    torch.manual_seed(17)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


def small_model_that_speaks(family: str, folder: Path) -> Path:
    """As `small_model`, with the tokenizer of the bundled model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model_path() / name, folder)
    return small_model(family, folder, vocab_size=2048)


class Reference:
    """What transformers gives for a model folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._model = import_transformers().AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()

    @cached_property
    def _tokenizer(self) -> Any:
        return import_transformers().AutoTokenizer.from_pretrained(self._path)

    @torch.inference_mode()
    def generate(self, token_ids: list[int], count: int, stop: str | None = None) -> tuple[list[int], list[float]]:
        """The most likely new tokens, and the gap between the two best logits at each."""
        output = self._model.generate(
            input_ids=torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **({} if stop is None else {"stop_strings": [stop], "tokenizer": self._tokenizer}),
        )
        best = torch.cat(output.logits).topk(2).values
        return output.sequences[0, len(token_ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def check_equal(got: list[int], wanted: tuple[list[int], list[float]], fact: str) -> None:
    """Equal, up to the first difference that no order of additions decides: after it the texts differ anyway."""
    tokens, gaps = wanted
    for at, (mine, right) in enumerate(zip(got, tokens, strict=False)):
        if mine != right:
            assert gaps[at] < TIE, f"{fact}: token {at} is {mine}, not {right}, gap {gaps[at]:.2e}"
            return
    assert len(got) == len(tokens), f"{fact}: {len(got)} tokens, not {len(tokens)}"
