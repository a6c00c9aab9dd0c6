"""Take DTensor out of the way of a model that transformers has sharded.

transformers shards the weights and replaces the `forward` of each sharded layer by one that wraps and unwraps DTensors.
For inference the plan needs one collective per row-wise layer and nothing else, so the shards are unwrapped once and
these layers get a plain `forward`. It saves milliseconds per step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from mpexec.agent.vocabulary import Vocabulary

_GATHERED = ("colwise_gather_output", "colwise_rep")

# Embeddings of up to this many bytes are kept whole on every rank, which saves one collective for each step.
WHOLE_EMBEDDING_NBYTES = 256 << 20


def unwrap(model: Any, *, world_size: int) -> Vocabulary:
    """Replace DTensors by their local shards, and the hooks of layers whose style is known by plain collectives.

    The head is left to return this rank's logits; returns what puts them together.
    """
    plan = {**(model.config.base_model_tp_plan or {}), **(getattr(model, "tp_plan", None) or {})}
    head = model.get_output_embeddings()
    vocabulary = Vocabulary(model.config.vocab_size)
    for name, module in model.named_modules():
        style = _style_of(name, plan)
        if module is head and style in _GATHERED:
            style, vocabulary = "colwise", Vocabulary(module.out_features, world_size)
        forward = _plain_forward(module, style, world_size)
        if forward is None:
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(_local(parameter), requires_grad=False))
        module.forward = forward
    return vocabulary


def _plain_forward(module: nn.Module, style: str | None, world_size: int) -> Callable[..., Tensor] | None:
    """Return the forward for a layer of a known style, None for others: those keep transformers' hooks."""
    if style == "moe_tp_experts":
        return experts_forward(module)
    if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
        rows = _local(module.weight)
        if module.num_embeddings * rows[0].nbytes <= WHOLE_EMBEDDING_NBYTES:
            whole = Vocabulary(module.num_embeddings, world_size).gather(rows.t()).t().contiguous()
            module.weight = nn.Parameter(whole, requires_grad=False)
            return partial(type(module).forward, module)
        if type(module) is nn.Embedding:  # others may scale what they look up
            return split_embedding(rows, width=module.num_embeddings, world_size=world_size)
    if not isinstance(module, nn.Linear):
        return None
    weight, bias = _local(module.weight), None if module.bias is None else _local(module.bias)
    if style == "colwise":
        return column_forward(weight, bias)
    if style == "rowwise":
        return row_forward(weight, bias)
    if style in _GATHERED:
        return gathered_forward(weight, bias, width=module.out_features, world_size=world_size)
    return None


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    """Look up a module in a plan whose keys have `*` for layer numbers, with or without the base model's prefix."""
    wildcard = ".".join("*" if part.isdigit() else part for part in name.split("."))
    return plan.get(wildcard) or plan.get(wildcard.partition(".")[2])


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def experts_forward(module: nn.Module) -> Callable[..., Tensor]:
    """Each rank has some of the inner features of every expert; the ranks' results are added up."""
    alone = partial(type(module).forward, module)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = alone(*args, **kwargs)
        dist.all_reduce(output)
        return output

    return forward


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
    """Each rank computes its own output features and every rank gets all `width` of them."""
    features = Vocabulary(width, world_size)
    return lambda inputs: features.gather(linear(inputs, weight, bias))


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
