"""Text pieces of an answer: whole characters only, and together the decoded answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, processors

from mpexec.engine.tokenizer import TextStream, Tokenizer
from mpexec.errors import ConfigError
from mpexec.models import default_model_path


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """The bundled model's: bytes are letters, and any token may hold a part of a character."""
    return Tokenizer.load(default_model_path())


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As in Llama 2: words with a mark in place of the space, and a token for each byte of a rare character."""
    words = [
        "<unk>",
        "<s>",
        "▁",
        "▁hello",
        "▁world",
        "lo",
        "he",
        "a",
        "▁▁",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.add_special_tokens(["<s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    """The pieces when tokens come one by one."""
    stream = TextStream(tokenizer)
    return [stream.push((token,), last=n == len(token_ids)) for n, token in enumerate(token_ids, 1)]


@pytest.mark.parametrize("seed", range(100))
def test_the_pieces_of_any_tokens_are_their_decoded_text(byte_level: Tokenizer, seed: int) -> None:
    dice = random.Random(seed)
    token_ids = [dice.randrange(dice.choice([260, 2048])) for _ in range(dice.randrange(1, 80))]
    assert "".join(pieces(byte_level, token_ids)) == byte_level.decode(token_ids)


@pytest.mark.parametrize("seed", range(100))
def test_the_pieces_of_byte_tokens_among_words_and_special_tokens_are_their_decoded_text(
    byte_fallback: Tokenizer, seed: int
) -> None:
    dice = random.Random(seed)
    token_ids: list[int] = []
    while len(token_ids) < dice.randrange(1, 80):
        character = dice.choice(["é", "🙂", "日"]).encode()
        some_bytes = [9 + byte for byte in character]
        token_ids += dice.choice([some_bytes, [9 + dice.randrange(256)], [1], [dice.randrange(2, 9)]])
    assert "".join(pieces(byte_fallback, token_ids)) == byte_fallback.decode(token_ids)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_no_piece_holds_half_a_character(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    text = "a 🙂🙂 日本語 héllo 🙂"
    token_ids = [9 + byte for byte in text.encode()] if name == "byte_fallback" else list(tokenizer.encode(text))
    given = pieces(tokenizer, token_ids)
    assert "".join(given) == text
    assert not any("\ufffd" in piece for piece in given)


def test_a_character_that_is_never_finished_comes_with_the_last_token(byte_level: Tokenizer) -> None:
    token_ids = list(byte_level.encode("🙂"))[:-1]
    given = pieces(byte_level, token_ids)
    assert given[:-1] == [""] * (len(token_ids) - 1)
    assert given[-1] == byte_level.decode(token_ids) != ""


def test_several_tokens_at_once_give_the_same_text(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("And God said, Let there be light: and there was light. 🙂")
    stream = TextStream(byte_level)
    halves = [
        stream.push(token_ids[:7], last=False),
        stream.push(token_ids[7:], last=False),
        stream.push((), last=True),
    ]
    assert "".join(halves) == byte_level.decode(token_ids)


def test_text_that_is_not_unicode_and_folders_without_tokenizer_are_refused(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="Unicode"):
        byte_level.encode("\udcff")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_special_tokens_around_a_prompt_can_be_left_out(byte_fallback: Tokenizer) -> None:
    backend = byte_fallback._backend
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    assert byte_fallback.encode("a") == (start, *byte_fallback.encode("a", special_tokens=False))
    assert byte_fallback.encode("<s>a", special_tokens=False)[0] == start
