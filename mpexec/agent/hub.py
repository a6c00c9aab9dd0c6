"""Find the folder of a model that is named as on the Hugging Face hub. Needs no torch."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mpexec.agent.checkpoint import read_checkpoint
from mpexec.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Configuration, tokenizer and safetensors; not the same weights in the layout of another library.
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_UNWANTED = ("consolidated*", "*/*")


def resolve_model(name: str | Path) -> Path:
    """Return the local folder of a model.

    A folder is taken as it is. Any other "owner/model" is looked up in huggingface_hub's cache and downloaded into it
    if it is not there, or not whole; that takes minutes and shows huggingface_hub's own progress on stderr.

    Raises:
        ConfigError: The model is neither here nor can be had; the message says why, and what to do.
    """
    path = Path(name)
    if os.path.isdir(path) or not _NAME.fullmatch(str(name)):
        return path
    try:
        hub = import_module("huggingface_hub")
    except ModuleNotFoundError:
        raise ConfigError(
            f"no model folder at {name}; models of the hub need huggingface_hub: pip install 'mpexec[hf]'"
        ) from None
    try:
        cached = _cached(hub, str(name))
        if cached is not None:
            return cached
        folder = _fetch(hub, str(name), local_files_only=False)
    except Exception as error:  # of the name, the network, the hub or the disk, from several libraries
        reason = _reason(hub, str(name), error)
        raise ConfigError(f"no model folder at {name}, and the hub's {name} cannot be had: {reason}") from error
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"the hub's {name} has no *.safetensors, and other weights are not downloaded; convert it "
            "(save_pretrained of transformers does), and give its folder"
        )
    return folder


def _cached(hub: Any, name: str) -> Path | None:
    """The folder in the cache, if it is there with all its files."""
    try:
        folder = _fetch(hub, name, local_files_only=True)
        return folder if read_checkpoint(folder).nbytes else None
    except (OSError, ConfigError):  # it is not there, or cannot be read
        return None


def _fetch(hub: Any, name: str, *, local_files_only: bool) -> Path:
    return Path(
        hub.snapshot_download(
            name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=local_files_only
        )
    )


def _reason(hub: Any, name: str, error: Exception) -> str:
    """Say what is wrong and what helps."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, hub.errors.HFValidationError):
        return f"{text} Check the name, or give a folder"
    if isinstance(error, hub.errors.GatedRepoError):
        return "its owner asks for your consent first; give it on the model's page and run `hf auth login`"
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return "the hub knows no such model, or it is private; check the name, or run `hf auth login`"
    if hub.constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set; unset it, or copy the model here and give its folder in place of {name}"
    return (
        f"{type(error).__name__}: {text}; connect to the network and try again, "
        f"or copy the model here and give its folder in place of {name}"
    )
