"""Load a Hugging Face model, whole or as this rank's shard, from safetensors files or from tensors in memory.

transformers builds the model, shards it by its own plan and reads of every tensor only the rows or columns that this
rank keeps.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpexec.agent.checkpoint import weight_files
from mpexec.agent.kv_cache import ATTENTION_NAME, slot_attention
from mpexec.agent.sharding import unwrap
from mpexec.agent.vocabulary import Vocabulary
from mpexec.errors import ConfigError

_MOST_NAMED = 5
_REPORT_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What every load of one model has in common.

    Attributes:
        path: The folder; its `config.json` is read, its weights only by `load_model`.
        world_size: Ranks that share the model. With more than one, all of the default process group load together.
        local_rank: This rank among those of the machine.
        device: "cpu" or "cuda:<local_rank>".
        dtype: "float32", "bfloat16" or "float16".
    """

    path: Path
    world_size: int
    local_rank: int
    device: str
    dtype: str


class WrongWeightsError(ValueError):
    """Tensors that are not those of the model; the message names them."""


def load_model(source: ModelSource, report: Callable[[str], None]) -> tuple[Any, Vocabulary]:
    """Return the model in the folder, ready for inference, or this rank's shard of it; and the way to its logits.

    Local files only. `report` is called as each file is begun and then every few seconds, perhaps from another thread.

    Raises:
        ConfigError: transformers is missing, has no causal language model for this folder or no tensor-parallel plan
            for it; or the files cannot be read, or lack tensors of the model.
    """
    files = weight_files(source.path)
    try:
        if not all(file.suffix == ".safetensors" for file in files):
            report(f"loading {source.path.name}")
            return build_model(source, None)
        with open_weights(files, report) as weights:
            return build_model(source, weights)
    except WrongWeightsError as error:
        raise ConfigError(f"the weights in {source.path} are not those of its config.json: {error}") from None


def build_model(
    source: ModelSource, weights: Mapping[str, Any] | None, *, strict: bool = False
) -> tuple[Any, Vocabulary]:
    """Return the model of the folder with these whole tensors, by their names in a checkpoint, sharded for this rank.

    Args:
        weights: Tensors, or slices of safetensors files; None for the `.bin` files of the folder. Parameters may share
            memory with them.
        strict: Refuse unknown names too.

    Raises:
        ConfigError: As `load_model`.
        WrongWeightsError: Names are missing, shapes wrong, or names unknown; the same on all ranks.
    """
    transformers, config = _read_config(source)
    options: dict[str, Any] = {"dtype": source.dtype, "attn_implementation": ATTENTION_NAME, "local_files_only": True}
    with _undisturbed(source.device, source.local_rank), _quiet(transformers.logging):
        if source.world_size > 1:
            options.update(_tensor_parallel_options(source.world_size))
        model, facts = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            str(source.path) if weights is None else None,
            config=config,
            state_dict=None if weights is None else dict(weights),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    _refuse_other_weights(facts, strict=strict)
    model = model.eval().requires_grad_(False)
    if source.world_size == 1:
        return model.to(source.device), Vocabulary(config.vocab_size)
    return model, unwrap(model, world_size=source.world_size)


@contextmanager
def open_weights(files: Sequence[Path], report: Callable[[str], None] | None = None) -> Iterator[dict[str, Any]]:
    """Open safetensors files and yield their tensors by name, as slices that are read when they are indexed.

    Raises:
        ConfigError: A file cannot be read; the message names it.
    """
    safetensors = import_module("safetensors")
    progress = _Progress(len(files), report or (lambda _: None))
    weights: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                opened = stack.enter_context(safetensors.safe_open(str(file), framework="pt"))
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(f"{file} cannot be read ({error}); copy the model again") from None
            weights |= {name: _Slice(opened.get_slice(name), file.name, progress) for name in opened.keys()}  # noqa: SIM118
        yield weights


def shapes(weights: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Names and shapes, in order, of tensors or of what `open_weights` yields."""
    found = []
    for name in sorted(weights):
        one = weights[name]
        found.append((name, list(one.get_shape() if isinstance(one, _Slice) else one.shape)))
    return found


class _Progress:
    """Reports each file once as it is begun, and the last one again every few seconds. Any thread may call it."""

    def __init__(self, files: int, report: Callable[[str], None]) -> None:
        self._files = files
        self._report = report
        self._begun: dict[str, int] = {}
        self._reported = 0.0
        self._lock = threading.Lock()

    def reading(self, file: str) -> None:
        with self._lock:
            now = time.monotonic()
            if file in self._begun and now - self._reported < _REPORT_EVERY_S:
                return
            self._reported = now
            number = self._begun.setdefault(file, len(self._begun) + 1)
            self._report(f"loading {number}/{self._files}: {file}")


class _Slice:
    """A tensor in a safetensors file: what transformers reads of it, it reads when it indexes it."""

    def __init__(self, inner: Any, file: str, progress: _Progress) -> None:
        self._inner = inner
        self._file = file
        self._progress = progress

    def __getitem__(self, index: Any) -> Tensor:
        self._progress.reading(self._file)
        tensor: Tensor = self._inner[index]
        return tensor

    def get_shape(self) -> list[int]:
        return list(self._inner.get_shape())

    def get_dtype(self) -> str:
        return str(self._inner.get_dtype())


def _read_config(source: ModelSource) -> tuple[Any, Any]:
    """Return the module transformers and the model's configuration in it."""
    path = source.path
    transformers = import_transformers()
    transformers.logging.disable_progress_bar()
    transformers.AttentionInterface.register(ATTENTION_NAME, slot_attention)
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"transformers cannot read the configuration in {path}: {error}") from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"transformers has no causal language model of type {config.model_type} ({path})")
    if source.world_size > 1 and not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"{config.model_type} models have no tensor-parallel plan in transformers; "
            f"run {path} with world_size=1 (--tp 1)"
        )
    return transformers, config


def _refuse_other_weights(facts: Mapping[str, Any], *, strict: bool) -> None:
    """Raise for weights that the model lacks or has in another shape: transformers would make up random ones."""
    found = [f"{name} is missing" for name in sorted(facts["missing_keys"])]
    found += [
        f"{name} has shape {list(given)} where the model has {list(wanted)}"
        for name, given, wanted in sorted(facts["mismatched_keys"])
    ]
    found += [f"{name} is not in the model" for name in sorted(facts["unexpected_keys"]) if strict]
    if found:
        rest = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise WrongWeightsError("; ".join(found[:_MOST_NAMED]) + rest)


def import_transformers() -> Any:
    """Return the module `transformers`, with the part that loads models imported too.

    That part imports torch's compiler, which sets an environment variable and makes a cache folder at once, though
    nothing may ever be compiled; both are taken back. Whoever compiles gets them again.

    Raises:
        ConfigError: transformers is not installed.
    """
    if sys.modules.get("transformers.modeling_utils") is not None:  # steps ask, and a temporary folder may be large
        return sys.modules["transformers"]
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
def _quiet(logging: Any) -> Iterator[None]:
    """Have transformers log errors only: what it finds about the weights is said in our own errors."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


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
            warnings.simplefilter("ignore", UserWarning)  # of random numbers for tensors that will be refused
            yield
    finally:
        torch._C._get_accelerator = detect
        sys.stdout, sys.stderr = streams
        for key in os.environ.keys() - environment.keys():
            del os.environ[key]
        os.environ.update(environment)
