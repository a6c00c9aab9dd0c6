"""Stop strings: found wherever the text is cut into pieces, never shown, nor half of one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpexec.engine.stopping import StopStrings
from mpexec.engine.tokenizer import TextStream, Tokenizer
from mpexec.models import default_model_path

LETTERS = st.text("ab🙂", min_size=1, max_size=5)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is to be shown, letter by letter: up to the first moment at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        if ended := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ended))], True
    return text, False


@given(pieces=st.lists(st.text("ab🙂", max_size=6), max_size=12), stops=st.lists(LETTERS, min_size=1, max_size=4))
def test_the_shown_text_ends_before_the_stop_string_that_is_complete_first(pieces: list[str], stops: list[str]) -> None:
    text = StopStrings(tuple(stops))
    shown = ""
    for number, piece in enumerate(pieces, 1):
        shown += text.push(piece, last=number == len(pieces))
        # What is shown can never turn out to be the beginning of a stop string.
        assert expected("".join(pieces), stops)[0].startswith(shown)
    assert (shown, text.found) == expected("".join(pieces), stops)


def test_what_may_be_the_beginning_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    text = StopStrings(("END",))
    assert [text.push(piece, last=False) for piece in ("one E", "N", "E", "ND", "more")] == ["one ", "", "EN", "", ""]
    assert text.found


def test_half_a_stop_string_at_the_end_of_the_text_is_text() -> None:
    text = StopStrings(("END",))
    assert [text.push("the EN", last=False), text.push("", last=True)] == ["the ", "EN"]
    assert not text.found


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert StopStrings(()).push("END", last=False) == "END"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


@pytest.mark.parametrize("stop", ["light", "t there be l", "🙂", " and", "e\n"])
def test_a_stop_string_across_tokens_and_characters_of_several_bytes_is_found(tokenizer: Tokenizer, stop: str) -> None:
    text = "And God said, Let there be light: 🙂 there was light, and the\nnight."
    stream = TextStream(tokenizer, (stop,))
    pieces = []
    for token in tokenizer.encode(text):
        assert not stream.stopped
        pieces.append(stream.push((token,), last=False))
        if stream.stopped:
            break
    assert stream.stopped
    assert "".join(pieces) == text[: text.index(stop)]
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_up_to_a_stop_string_are_their_decoded_text(tokenizer: Tokenizer, seed: int) -> None:
    dice = random.Random(seed)
    token_ids = [dice.randrange(dice.choice([260, 2048])) for _ in range(60)]
    whole = tokenizer.decode(token_ids)
    stop = whole[len(whole) // 2 :][:3]
    stream = TextStream(tokenizer, (stop,))
    shown = "".join(stream.push((token,), last=n == len(token_ids)) for n, token in enumerate(token_ids, 1))
    assert stream.stopped
    assert shown == whole[: whole.index(stop)]
