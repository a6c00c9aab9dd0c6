"""Models named as on the hub: from the cache, and clear errors where they cannot be had."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpexec.agent.hub import resolve_model
from mpexec.errors import ConfigError
from mpexec.models import default_model_path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_model(cache: Path) -> Path:
    """Lay out owner/small in a cache as huggingface_hub does; return its folder."""
    repository = cache / "models--owner--small"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for file in default_model_path().iterdir():
        shutil.copy(file, folder)
    repository.joinpath("refs").mkdir()
    repository.joinpath("refs", "main").write_text(COMMIT)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """huggingface_hub with an empty cache and no way to the network."""
    hub = pytest.importorskip("huggingface_hub")
    whole: Callable[..., str] = hub.snapshot_download

    def download(name: str, *, local_files_only: bool, **options: Any) -> str:
        if not local_files_only:
            raise ConnectionError("no route to host")
        return whole(name, cache_dir=tmp_path, local_files_only=True, **options)

    monkeypatch.setattr(hub, "snapshot_download", download)
    return hub


def test_a_folder_is_taken_as_it_is_and_an_impossible_name_left_to_the_reader(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    for name in ("absent", "./absent/model", "/absent/model", "a/b/c", "../absent", "a" * 300):
        assert resolve_model(name) == Path(name)


def test_a_folder_here_wins_over_a_model_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("owner", "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/small") == Path("owner/small")


def test_a_model_in_the_cache_is_found_without_the_network(hub: Any, tmp_path: Path) -> None:
    folder = cached_model(tmp_path)
    assert resolve_model("owner/small") == folder


def test_a_model_that_is_half_in_the_cache_is_fetched_again(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cached_model(tmp_path)
    folder.joinpath("model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"ConnectionError: no route to host"):
        resolve_model("owner/small")
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(ConfigError, match=r"owner/small has no \*\.safetensors, and other weights are not downloaded"):
        resolve_model("owner/small")
    shutil.copy(default_model_path() / "model.safetensors", folder)
    assert resolve_model("owner/small") == folder


def test_a_model_that_cannot_be_had_is_named_with_the_remedy(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"owner/large cannot be had: .*no route .* connect to the network .* folder"):
        resolve_model("owner/large")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"owner/large cannot be had: HF_HUB_OFFLINE is set; unset it, or copy"):
        resolve_model("owner/large")


def test_a_name_that_no_model_of_the_hub_has_is_refused(hub: Any) -> None:
    for name in ("owner/small..er", "owner/" + "a" * 100):
        with pytest.raises(ConfigError, match=r"cannot be had: .* Check the name, or give a folder"):
            resolve_model(name)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"no model folder at owner/large; .* pip install 'mpexec\[hf\]'"):
        resolve_model("owner/large")


def test_looking_for_a_model_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from mpexec.agent.hub import resolve_model; resolve_model('.');"
        "heavy = [name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules];"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
