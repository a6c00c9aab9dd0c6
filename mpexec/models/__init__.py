"""Small language models that come with the package, to try, test and measure with. Importing this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpexec.agent.checkpoint import read_checkpoint

DEFAULT_MODEL = "kjv-small"
_DESCRIPTIONS = {"kjv-small": "4-layer Llama trained on the King James Bible; for trying, testing and measuring"}


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model folder inside the package.

    Attributes:
        name: Its name and that of its folder.
        path: The folder, absolute; a Hugging Face model with tokenizer.
        description: One line.
        parameters: Number of weights.
        bytes: Size of all its files.
    """

    name: str
    path: Path
    description: str
    parameters: int
    bytes: int


def bundled_models() -> tuple[BundledModel, ...]:
    """Return every model that comes with the package, the default one first.

    Raises:
        ConfigError: The installation lacks a model's files.
    """
    return tuple(_describe(name, description) for name, description in _DESCRIPTIONS.items())


def default_model_path() -> Path:
    """Return the folder of the model that is used where none is named."""
    return Path(__file__).resolve().parent / DEFAULT_MODEL


def _describe(name: str, description: str) -> BundledModel:
    folder = Path(__file__).resolve().parent / name
    facts = read_checkpoint(folder)
    return BundledModel(
        name=name,
        path=folder,
        description=description,
        parameters=facts.parameters or 0,
        bytes=sum(file.stat().st_size for file in folder.iterdir()),
    )
