"""Facts about a model folder, read from its JSON files: enough to refuse what cannot work before any rank starts."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpexec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A Hugging Face causal language model on disk.

    Attributes:
        path: The folder.
        model_type: As in `config.json`, for example "llama".
        layers: Number of decoder layers.
        heads: Number of query heads.
        kv_heads: Number of key/value heads.
        head_dim: Width of one head.
        vocab_size: Number of tokens.
        context_length: Most tokens, prompt included, that the model was made for.
        sliding_window: Tokens that a layer looks back, None when every layer sees everything.
        eos_token_ids: Tokens that end a text, ascending; may be empty.
        parameters: Number of stored weights, or None when the folder has no safetensors file.
        nbytes: Size of the weight files in bytes.
    """

    path: Path
    model_type: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    parameters: int | None
    nbytes: int

    @property
    def longest(self) -> int:
        """Most tokens of prompt and answer together: the model's context, or its window if that is less."""
        return min(self.context_length, self.sliding_window or self.context_length)


def read_checkpoint(path: str | Path) -> CheckpointFacts:
    """Read the facts of the model in a local folder; weights are not read, only counted.

    Raises:
        ConfigError: No such folder, no readable `config.json`, a model of another kind, or a key is missing or of no
            use.
    """
    folder = Path(path)
    with _unreadable_is_refused():
        return _read_facts(folder)


def _read_facts(folder: Path) -> CheckpointFacts:
    config = _read_config(folder)
    weights = _find_weights(folder)
    stored = [_count_weights(file) for file in weights if file.suffix == ".safetensors"]
    try:
        _check_architecture(folder, config)
        heads = int(config["num_attention_heads"])
        return CheckpointFacts(
            path=folder,
            model_type=str(config["model_type"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            context_length=int(config["max_position_embeddings"]),
            sliding_window=_sliding_window(config),
            eos_token_ids=_eos_token_ids(folder, config),
            parameters=sum(stored) if stored else None,
            nbytes=sum(file.stat().st_size for file in weights),
        )
    except ConfigError:
        raise
    except KeyError as error:
        key = error.args[0]
        raise ConfigError(f"{folder / 'config.json'} has no {key!r}; it is no decoder that mpexec can run") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"a value in the JSON files of {folder} is none for a decoder: {error}") from None


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    names = list(map(str, config.get("architectures") or []))
    if names and not any(name.endswith("ForCausalLM") for name in names):
        raise ConfigError(
            f"{folder} holds {names[0]}, which is not supported: mpexec runs causal language models that "
            "transformers can split over ranks, whose classes (in config.json) end in ForCausalLM"
        )


@contextmanager
def _unreadable_is_refused() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = error.filename or "the model"
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}; use a folder that you may read") from None


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the model's weights, in order: safetensors where there are any, else `.bin` files.

    Raises:
        ConfigError: Folder or index cannot be read, or the index names a file that is not there.
    """
    with _unreadable_is_refused():
        return _find_weights(folder)


def _find_weights(folder: Path) -> list[Path]:
    for suffix, whole in (("safetensors", "model"), ("bin", "pytorch_model")):
        index = folder / f"{whole}.{suffix}.index.json"
        if index.is_file():
            return _indexed(index)
        # Beside it there may be the same weights in the layout of another library.
        if (folder / f"{whole}.{suffix}").is_file():
            return [folder / f"{whole}.{suffix}"]
        if files := sorted(folder.glob(f"*.{suffix}")):
            return files
    return []


def _indexed(index: Path) -> list[Path]:
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index} does not say which file holds which weight; copy the model again")
    files = [index.parent / name for name in sorted(set(names.values()))]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{missing[0]} is missing ({len(missing)} of {len(files)} files are); copy the model again")
    return files


def check_libraries(tp: int) -> None:
    """Check, without importing any, that the libraries are there that load a model over `tp` ranks.

    Raises:
        ConfigError: One is missing; the message has the command that installs it.
    """
    needed = ("transformers", "safetensors", *(("accelerate",) if tp > 1 else ()))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(f"a language model needs {', '.join(missing)}: pip install 'mpexec[hf]'")


def check_tensor_parallel(facts: CheckpointFacts, tp: int) -> None:
    """Check that the heads can be shared out evenly over `tp` ranks.

    Raises:
        ConfigError: They cannot; the message names the numbers that can work.
    """
    if tp < 1:
        raise ConfigError(f"tensor-parallel size {tp} is not a positive number of ranks")
    if facts.heads % tp == 0 and facts.kv_heads % tp == 0:
        return
    common = math.gcd(facts.heads, facts.kv_heads)
    usable = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    raise ConfigError(
        f"{facts.path.name} has {facts.heads} attention heads and {facts.kv_heads} key/value heads, "
        f"which {tp} ranks cannot share evenly; use one of these tensor-parallel sizes: {usable}"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(f"no model folder at {folder}; give the path of a local folder with a config.json")
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no config.json; it is not a Hugging Face model folder")
    return _read_object(file)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a JSON {type(content).__name__}, not an object")
    return content


def _sliding_window(config: dict[str, Any]) -> int | None:
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    limited = any("sliding" in kind for kind in kinds) if kinds else config.get("use_sliding_window", True)
    return int(window) if window and limited else None


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    generation = _read_object(file) if file.is_file() else {}
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(sorted(int(one) for one in (value if isinstance(value, list) else [value])))


def _count_weights(file: Path) -> int:
    """Add up the shapes in a safetensors header: 8 bytes with its length, little-endian, then JSON."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
        if end > size:
            raise ValueError(f"{end} bytes are announced and {size} are there")
        return sum(math.prod(entry["shape"]) for entry in entries)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file} is not a whole safetensors file ({error}); copy the model again") from None
