"""SamplingParams: how one prompt is to be continued, every value checked when it is made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from mpexec.agent.steps import Sampling
from mpexec.config import LEAST_SCALE, MAX_LOGPROBS, check_flags, is_temperature
from mpexec.errors import ConfigError

MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters; the stream may hold back as many
MAX_STOP_TOKENS = 128
MAX_INTEGER = (1 << 63) - 1  # what goes to an engine in another process has room for it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    Attributes:
        max_new_tokens: Most tokens to generate; the context limit may end the text earlier.
        temperature: 0 takes the most likely token each time; from 1e-5 on a token is drawn.
        seed: Starts the random numbers of this request; the same seed gives the same text, whatever else runs. With
            16-bit weights other requests may change how logits are rounded, and so a text. No effect at temperature 0.
        ignore_eos: Go on after a token that the model ends a text with.
        top_k: Draw from the k most likely tokens only; 0 is all.
        top_p: Draw from the most likely tokens that together have this probability; 1 is all.
        min_p: Draw only tokens at least this share as likely as the most likely one; 0 is all.
        repetition_penalty: Above 1, tokens that prompt or answer have already become less likely; 1 changes nothing.
            At least 1e-5.
        logprobs: Report each token's log probability, and as many of the most likely tokens; None reports nothing.
        stop: Strings that end the text, one or up to 16; the text ends before them. A tuple once made.
        stop_token_ids: Further tokens that end the text; they have no text of their own. A tuple once made.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._check("max_new_tokens", _is_integer(self.max_new_tokens) and 1 <= self.max_new_tokens <= MAX_INTEGER,
                    "an integer from 1 to 2**63 - 1")  # fmt: skip
        self._check("temperature",
                    _within(self.temperature, 0, sys.float_info.max) and is_temperature(self.temperature),
                    f"0 (greedy) or a finite number of at least {LEAST_SCALE:g}")  # fmt: skip
        self._check("seed", _is_integer(self.seed) and 0 <= self.seed <= MAX_INTEGER, "an integer from 0 to 2**63 - 1")
        self._check("top_k", _is_integer(self.top_k) and 0 <= self.top_k < 1 << 31,
                    "0 (all tokens) or an integer of at least 1")  # fmt: skip
        self._check("top_p", _within(self.top_p, 0, 1) and self.top_p > 0, "a number above 0, up to 1 (all tokens)")
        self._check("min_p", _within(self.min_p, 0, 1), "a number from 0 (all tokens) to 1")
        self._check("repetition_penalty",
                    _within(self.repetition_penalty, LEAST_SCALE, sys.float_info.max),
                    f"a finite number of at least {LEAST_SCALE:g}; 1 is no penalty")  # fmt: skip
        self._check("logprobs",
                    self.logprobs is None or (_is_integer(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
                    f"None or an integer from 0 to {MAX_LOGPROBS}")  # fmt: skip
        check_flags(ignore_eos=self.ignore_eos)
        self._take_stops()
        self._take_plain_numbers()

    def _check(self, name: str, is_good: bool, remedy: str) -> None:
        if not is_good:
            raise ConfigError(f"{name}={getattr(self, name)!r}: use {remedy}")

    def _take_stops(self) -> None:
        """Make tuples of the stops, so that what was checked cannot change."""
        strings = (self.stop,) if isinstance(self.stop, str) else items_of(self.stop)
        self._check(
            "stop",
            strings is not None and len(strings) <= MAX_STOPS and all(is_stop(one) for one in strings),
            f"a string, or up to {MAX_STOPS} of them, of 1 to {MAX_STOP_LENGTH} characters of valid Unicode text each",
        )
        tokens = items_of(self.stop_token_ids)
        self._check(
            "stop_token_ids",
            tokens is not None
            and len(tokens) <= MAX_STOP_TOKENS
            and all(_is_integer(one) and 0 <= one < 1 << 31 for one in tokens),
            f"up to {MAX_STOP_TOKENS} token ids, integers of at least 0",
        )
        object.__setattr__(self, "stop", tuple("".join(one) for one in strings or ()))
        object.__setattr__(self, "stop_token_ids", tuple(int(one) for one in tokens or ()))

    def _take_plain_numbers(self) -> None:
        """Make plain numbers of NumPy's and the like, and of integers as large as only a float may be."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("max_new_tokens", "seed", "top_k"):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "logprobs", None if self.logprobs is None else int(self.logprobs))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as the tuple that it is."""
        return cast("tuple[str, ...]", self.stop)

    def sampling(self) -> Sampling:
        """What the agent needs of it."""
        return Sampling(
            temperature=self.temperature,
            seed=self.seed,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            logprobs=self.logprobs,
        )


def is_stop(value: Any) -> bool:
    """True for text that can end an answer; a lone surrogate is in no text that a model writes."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_STOP_LENGTH:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _within(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def items_of(value: Any) -> tuple[Any, ...] | None:
    """The items of a sequence; None for what is none, a text included."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else None
