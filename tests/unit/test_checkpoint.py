"""Facts of model folders, and what is refused before any rank starts."""

import errno
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpexec.agent.checkpoint import check_tensor_parallel, read_checkpoint, weight_files
from mpexec.errors import ConfigError
from mpexec.models import bundled_models, default_model_path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_size": 96,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


def write(folder: Path, *, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    folder.joinpath("config.json").write_text(json.dumps(config))
    if generation is not None:
        folder.joinpath("generation_config.json").write_text(json.dumps(generation))
    return folder


def write_weights(file: Path, shapes: dict[str, list[int]]) -> None:
    entries, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(end))


def write_index(folder: Path, *files: str) -> None:
    index = {"weight_map": {f"tensor{number}": file for number, file in enumerate(files)}}
    folder.joinpath("model.safetensors.index.json").write_text(json.dumps(index))


def test_facts_come_from_the_json_files_and_the_weight_headers(tmp_path: Path) -> None:
    write(tmp_path, generation={"eos_token_id": [9, 2]})
    write_weights(tmp_path / "model-1.safetensors", {"a": [10, 3], "b": [5]})
    write_weights(tmp_path / "model-2.safetensors", {"c": []})
    facts = read_checkpoint(str(tmp_path))
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (3, 12, 4, 8)
    assert (facts.vocab_size, facts.context_length, facts.eos_token_ids) == (1000, 512, (2, 9))
    assert (facts.parameters, facts.sliding_window) == (36, None)


def test_optional_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    facts = read_checkpoint(write(tmp_path, num_key_value_heads=None, head_dim=20, eos_token_id=None))
    assert (facts.kv_heads, facts.head_dim, facts.eos_token_ids, facts.parameters) == (12, 20, (), None)


@pytest.mark.parametrize(
    "keys, window",
    [
        ({"sliding_window": 64}, 64),
        ({"sliding_window": 64, "use_sliding_window": False}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 3}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
    ],
)
def test_a_sliding_window_is_seen_where_a_layer_uses_it(
    tmp_path: Path, keys: dict[str, Any], window: int | None
) -> None:
    assert read_checkpoint(write(tmp_path, **keys)).sliding_window == window


def test_folders_that_cannot_be_used_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model folder at .*absent"):
        read_checkpoint(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no config.json"):
        read_checkpoint(tmp_path)
    tmp_path.joinpath("config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"not valid JSON"):
        read_checkpoint(tmp_path)
    for name in ("BertForMaskedLM", "GPT2LMHeadModel"):
        with pytest.raises(ConfigError, match=rf"{name}, which is not supported: .* end in ForCausalLM"):
            read_checkpoint(write(tmp_path, architectures=[name]))
    with pytest.raises(ConfigError, match=r"has no 'hidden_size'"):
        read_checkpoint(write(tmp_path, hidden_size=None))
    write(tmp_path).joinpath("model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ConfigError, match=r"not a whole safetensors file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_that_may_not_be_read_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(tmp_path, generation={})
    write_index(tmp_path, "one.safetensors")
    read = Path.read_text

    def refuse(file: Path, **options: Any) -> str:
        if file.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return read(file, **options)

    write_weights(tmp_path / "one.safetensors", {"tensor0": [1]})
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/{name} cannot be read: Permission denied; use "):
        read_checkpoint(tmp_path)


def test_a_path_that_cannot_be_is_refused_with_the_reason(tmp_path: Path) -> None:
    for read in (read_checkpoint, weight_files):
        with pytest.raises(ConfigError, match=r"aaaa.* cannot be read: File name too long; use "):
            read(tmp_path / ("a" * 300))


@pytest.mark.parametrize(
    "changes",
    [{"num_attention_heads": "many"}, {"num_hidden_layers": [3]}, {"num_attention_heads": 0}, {"architectures": 3},
     {"architectures": [3]}, {"layer_types": [3], "sliding_window": 3}, {"vocab_size": math.inf}],
    ids=str,
)  # fmt: skip
def test_values_of_no_use_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_checkpoint(write(tmp_path, **changes))


def test_the_index_says_which_files_belong_to_the_model(tmp_path: Path) -> None:
    write(tmp_path)
    write_weights(tmp_path / "model-00001-of-00002.safetensors", {"tensor0": [3]})
    write_weights(tmp_path / "model-00002-of-00002.safetensors", {"tensor1": [4]})
    write_weights(tmp_path / "consolidated.safetensors", {"again": [7]})
    write_index(tmp_path, "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [file.name for file in weight_files(tmp_path)] == names
    assert read_checkpoint(tmp_path).parameters == 7


def test_the_whole_model_is_preferred_to_copies_beside_it_and_safetensors_to_bin(tmp_path: Path) -> None:
    write(tmp_path)
    tmp_path.joinpath("pytorch_model.bin").write_bytes(b"12345")
    assert read_checkpoint(tmp_path).nbytes == 5
    write_weights(tmp_path / "model.safetensors", {"a": [2]})
    write_weights(tmp_path / "consolidated.safetensors", {"b": [7]})
    assert read_checkpoint(tmp_path).parameters == 2


def test_broken_and_missing_weight_files_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    write_index(tmp_path, "one.safetensors", "two.safetensors")
    write_weights(tmp_path / "one.safetensors", {"tensor0": [100]})
    with pytest.raises(ConfigError, match=r"two\.safetensors is missing \(1 of 2 files are\)"):
        read_checkpoint(tmp_path)
    write_weights(tmp_path / "two.safetensors", {"tensor1": [100]})
    whole = tmp_path.joinpath("two.safetensors").read_bytes()
    for broken in (whole[:-1], whole[:20], b"", b"\xff" * 64, struct.pack("<Q", 2) + b"[]"):
        tmp_path.joinpath("two.safetensors").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"two\.safetensors is not a whole safetensors file"):
            read_checkpoint(tmp_path)
    tmp_path.joinpath("model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ConfigError, match=r"index\.json does not say which file holds which weight"):
        read_checkpoint(tmp_path)


def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(tmp_path: Path) -> None:
    facts = read_checkpoint(write(tmp_path))
    for size in (1, 2, 4):
        check_tensor_parallel(facts, size)
    with pytest.raises(ConfigError, match=r"12 attention heads and 4 key/value heads, which 3 ranks .*: 1, 2, 4$"):
        check_tensor_parallel(facts, 3)
    with pytest.raises(ConfigError, match=r"size 0"):
        check_tensor_parallel(facts, 0)


def test_the_bundled_model_can_be_split_over_four_ranks_and_is_small() -> None:
    (model,) = bundled_models()
    assert model.path == default_model_path()
    assert model.bytes < 8_000_000
    facts = read_checkpoint(model.path)
    check_tensor_parallel(facts, 4)
    assert facts.parameters == model.parameters
    assert facts.context_length >= 1024


def test_reading_facts_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from mpexec.models import bundled_models; from mpexec.agent import steps; bundled_models();"
        "sys.exit(str([name for name in ('torch', 'transformers') if name in sys.modules] or '') or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
