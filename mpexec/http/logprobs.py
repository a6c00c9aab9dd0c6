"""Log probabilities of an answer's tokens, as OpenAI's two endpoints show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from mpexec.agent.steps import TokenLogprobs

TextOf = Callable[[int], str]
_LOWEST = -9999.0  # JSON has no infinity


class Logprobs(Protocol):
    """Collects what one body says of the tokens of one choice."""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Take further tokens."""

    def take(self) -> dict[str, Any]:
        """What has come since the last time."""
        ...


class CompletionLogprobs:
    """As `/v1/completions` has them: lists side by side.

    Args:
        text_of: The text of a token by itself.
        offset: Characters of the choice's text before its first token.
    """

    def __init__(self, text_of: TextOf, offset: int = 0) -> None:
        self._text_of = text_of
        self._offset = offset
        self._begin()

    def _begin(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float] = []
        self._top: list[dict[str, float]] = []
        self._offsets: list[int] = []

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Take further tokens."""
        for token, known in zip(token_ids, logprobs, strict=True):
            text = self._text_of(token)
            self._tokens.append(text)
            self._values.append(_number(known.chosen))
            self._top.append({self._text_of(other): _number(value) for other, value in reversed(known.top)})
            self._offsets.append(self._offset)
            self._offset += len(text)

    def take(self) -> dict[str, Any]:
        """What has come since the last time."""
        body = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._begin()
        return body


class ChatLogprobs:
    """As `/v1/chat/completions` has them: an object for each token."""

    def __init__(self, text_of: TextOf) -> None:
        self._text_of = text_of
        self._content: list[dict[str, Any]] = []

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Take further tokens."""
        for token, known in zip(token_ids, logprobs, strict=True):
            self._content.append({**self._one(token, known.chosen), "top_logprobs": list(self._several(known.top))})

    def _several(self, known: Iterable[tuple[int, float]]) -> Iterable[dict[str, Any]]:
        return (self._one(token, value) for token, value in known)

    def _one(self, token: int, value: float) -> dict[str, Any]:
        text = self._text_of(token)
        known = "\ufffd" not in text  # which stands for a part of a character
        return {"token": text, "logprob": _number(value), "bytes": list(text.encode()) if known else None}

    def take(self) -> dict[str, Any]:
        """What has come since the last time."""
        content, self._content = self._content, []
        return {"content": content, "refusal": None}


def _number(value: float) -> float:
    return max(value, _LOWEST)
