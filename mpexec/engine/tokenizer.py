"""Text to token ids and back, in the driver: the `tokenizers` library alone, without transformers and torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mpexec.engine.stopping import StopStrings
from mpexec.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT = "\ufffd"  # what a decoder puts for bytes that are no whole character
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_WINDOW = 8  # tokens that are decoded again to give the next one its context


class Tokenizer:
    """The `tokenizer.json` of a model folder."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._byte_tokens = frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
        self._unseen = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a model folder's tokenizer.

        Raises:
            ConfigError: The folder has none, the file is damaged, or the library is not installed.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json: save a fast tokenizer there, or send token ids")
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError("text prompts need the package tokenizers: pip install 'mpexec[hf]'") from error
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises the bare class
            raise ConfigError(f"{file} is not a tokenizer that this version of the library reads: {error}") from error

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of a prompt.

        Args:
            text: The prompt. Special tokens that it spells out become such tokens.
            special_tokens: Add those that the model expects around a prompt. False is for a text that has them already.

        Raises:
            ConfigError: The text holds a lone surrogate, which no tokenizer can read.
        """
        try:
            return tuple(self._backend.encode(text, add_special_tokens=special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise ConfigError(f"the prompt {text!r} is not valid Unicode text: {error}") from error

    def decode(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """The text of a whole answer; special tokens are left out."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """The text of a token by itself, special ones included; a part of a character has no text of its own."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def ends_in_byte(self, token_ids: list[int]) -> bool:
        """True if the last visible token stands for one byte, whose meaning depends on the bytes around it."""
        if not self._byte_tokens:
            return False
        visible = (token for token in reversed(token_ids) if token not in self._unseen)
        return next(visible, None) in self._byte_tokens


class TextStream:
    """The text of one answer, piece by piece.

    A piece never ends inside a character, nor inside a stop string, and all pieces together equal `decode` of all
    tokens, up to the first stop string.

    Args:
        tokenizer: Of the model.
        stop: Strings that end the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # context tokens, then tokens whose text has not been given out
        self._shown = ""  # text of the context tokens
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """True once a stop string has come; the text is complete."""
        return self._stops.found

    def push(self, token_ids: tuple[int, ...], *, last: bool) -> str:
        """Take new tokens and return the text that is certain by now; with `last`, all that is left."""
        return self._stops.push(self._decode(token_ids, last), last=last)

    def _decode(self, token_ids: tuple[int, ...], last: bool) -> str:
        """The text of which no later token can change anything."""
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window)
        if not last and self._may_change(text):
            return ""
        piece = text[len(self._shown) :]
        self._trim(text)
        return piece

    def _may_change(self, text: str) -> bool:
        """True while the next token may alter the end of this text."""
        unfinished = text.endswith(_REPLACEMENT) or not text.startswith(self._shown)
        return unfinished or self._tokenizer.ends_in_byte(self._window)

    def _trim(self, text: str) -> None:
        """Keep a few tokens as context, unless they have no text or start inside a character."""
        self._shown = text
        if len(self._window) <= 2 * _WINDOW:
            return
        context = self._window[-_WINDOW:]
        shown = self._tokenizer.decode(context)
        if shown and text.endswith(shown):
            self._window, self._shown = context, shown
