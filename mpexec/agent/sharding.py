"""Load a Hugging Face model, whole or as this rank's shard, and take DTensor out of its way.

transformers shards the weights and replaces the `forward` of each sharded layer by one that wraps and unwraps DTensors.
For inference the plan needs one collective per row-wise layer and one for the logits, and nothing else, so the shards
are unwrapped once and these layers get a plain `forward`. It saves milliseconds per step.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from mpexec.agent.kv_cache import ATTENTION_NAME, slot_attention
from mpexec.errors import ConfigError


def load_model(path: str, *, world_size: int, local_rank: int, device: str, dtype: str) -> Any:
    """Return the model in `path`, ready for inference on `device`; the whole of it, or this rank's shard.

    Local files only. With `world_size > 1` every rank of the default process group must call this together.

    Raises:
        ConfigError: transformers is missing, has no causal language model for this folder, or no tensor-parallel plan
            for it.
    """
    transformers = import_transformers()
    transformers.logging.disable_progress_bar()
    transformers.AttentionInterface.register(ATTENTION_NAME, slot_attention)
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"transformers cannot read the configuration in {path}: {error}") from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"transformers has no causal language model of type {config.model_type} ({path})")
    if world_size > 1 and not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"{config.model_type} models have no tensor-parallel plan in transformers; run {path} with world_size=1"
        )
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION_NAME, "local_files_only": True}
    with _undisturbed(device, local_rank):
        if world_size > 1:
            options.update(_tensor_parallel_options(world_size))
        model = transformers.AutoModelForCausalLM.from_pretrained(path, config=config, **options)
    model = model.eval().requires_grad_(False)
    if world_size == 1:
        return model.to(device)
    unwrap(model, world_size=world_size)
    return model


def import_transformers() -> Any:
    """Return the module `transformers`, with the part that loads models imported too.

    That part imports torch's compiler, which sets an environment variable and makes a cache folder at once, though
    nothing may ever be compiled; both are taken back. Whoever compiles gets them again.

    Raises:
        ConfigError: transformers is not installed.
    """
    key = "TORCHINDUCTOR_CACHE_DIR"
    wanted = os.environ.get(key)
    temporary = Path(tempfile.gettempdir())
    before = set(temporary.glob("torchinductor_*"))
    try:
        import_module("transformers.modeling_utils")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; models need it: pip install 'mpexec[hf]'") from error
    if wanted is None:
        os.environ.pop(key, None)
    for folder in set(temporary.glob("torchinductor_*")) - before:
        with suppress(OSError):  # another process has begun to use it
            folder.rmdir()
    return import_module("transformers")


def _tensor_parallel_options(world_size: int) -> dict[str, Any]:
    """Newer releases of transformers take the plan in a DistributedConfig, older ones as a keyword."""
    try:
        settings = import_module("transformers.distributed").DistributedConfig(tp_plan="auto", tp_size=world_size)
        return {"distributed_config": settings}
    except (ImportError, AttributeError, TypeError):
        return {"tp_plan": "auto"}


@contextmanager
def _undisturbed(device: str, local_rank: int) -> Iterator[None]:
    """Keep what from_pretrained may change, and make it shard onto `device`.

    It binds the accelerator that LOCAL_RANK names, and shards onto an accelerator whenever the machine has one, also
    for ranks that run on the CPU. On ranks above 0 some releases send stdout and stderr to /dev/null for good.
    """
    streams, environment = (sys.stdout, sys.stderr), dict(os.environ)
    detect = torch._C._get_accelerator
    os.environ["LOCAL_RANK"] = str(local_rank)
    if torch.device(device).type == "cpu":
        torch._C._get_accelerator = lambda *_: torch.device("cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch._C._get_accelerator = detect
        sys.stdout, sys.stderr = streams
        for key in os.environ.keys() - environment.keys():
            del os.environ[key]
        os.environ.update(environment)


def unwrap(model: Any, *, world_size: int) -> None:
    """Replace DTensors by their local shards, and the hooks of layers whose style is known by plain collectives."""
    plan = {**(model.config.base_model_tp_plan or {}), **(getattr(model, "tp_plan", None) or {})}
    for name, module in model.named_modules():
        forward = _plain_forward(module, _style_of(name, plan), world_size)
        if forward is None:
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(_local(parameter), requires_grad=False))
        module.forward = forward


def _plain_forward(module: nn.Module, style: str | None, world_size: int) -> Callable[[Tensor], Tensor] | None:
    """Return the forward for a layer of a known style, None for others: those keep transformers' hooks."""
    if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
        return split_embedding(_local(module.weight), width=module.num_embeddings, world_size=world_size)
    if not isinstance(module, nn.Linear):
        return None
    weight, bias = _local(module.weight), None if module.bias is None else _local(module.bias)
    if style == "colwise":
        return column_forward(weight, bias)
    if style == "rowwise":
        return row_forward(weight, bias)
    if style in ("colwise_gather_output", "colwise_rep"):
        return gathered_forward(weight, bias, width=module.out_features, world_size=world_size)
    return None


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    """Look up a module in a plan whose keys have `*` for layer numbers, with or without the base model's prefix."""
    wildcard = ".".join("*" if part.isdigit() else part for part in name.split("."))
    return plan.get(wildcard) or plan.get(wildcard.partition(".")[2])


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def column_forward(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Each rank computes its own output features: nothing to exchange."""
    return lambda inputs: linear(inputs, weight, bias)


def row_forward(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Each rank holds part of the input features; the ranks' products are added up, then the bias once."""

    def forward(inputs: Tensor) -> Tensor:
        output = linear(inputs, weight)
        dist.all_reduce(output)
        return output if bias is None else output.add_(bias)

    return forward


def gathered_forward(weight: Tensor, bias: Tensor | None, *, width: int, world_size: int) -> Callable[[Tensor], Tensor]:
    """Each rank computes its own output features and every rank gets all `width` of them.

    Shards are of equal size but for the last ones, which are padded for the exchange.
    """
    share = -(-width // world_size)
    missing = share - weight.shape[0]

    def forward(inputs: Tensor) -> Tensor:
        part = nn.functional.pad(linear(inputs, weight, bias), (0, missing))
        parts = part.new_empty(world_size, *part.shape)
        dist.all_gather(list(parts.unbind(0)), part)
        return parts.movedim(0, -2).flatten(-2)[..., :width]

    return forward


def split_embedding(weight: Tensor, *, width: int, world_size: int) -> Callable[[Tensor], Tensor]:
    """Each rank holds the vectors of some of the `width` tokens; the others look up zeros, and all are added up."""
    share = -(-width // world_size)
    first = share * dist.get_rank()
    rows = weight.shape[0]

    def forward(token_ids: Tensor) -> Tensor:
        local = token_ids - first
        absent = (local < 0) | (local >= rows)
        output = nn.functional.embedding(local.masked_fill_(absent, 0), weight).masked_fill_(absent[..., None], 0.0)
        dist.all_reduce(output)
        return output

    return forward
