"""Where the prompts of one run come from: arguments, a file, or stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from mpexec.errors import ConfigError


def read_prompts(arguments: tuple[str, ...], file: str | None) -> list[str]:
    """The prompts from the one place where there are some.

    Raises:
        ConfigError: None, from two places, an empty one, or a file that cannot be read as text.
    """
    if arguments and file is not None:
        raise ConfigError("prompts come as arguments or from --prompts, not both: leave one out")
    if arguments:
        prompts, where = list(arguments), "prompt {} of {}"
    elif file is not None and file != "-":
        prompts, where = _lines(file, _read_file(file)), f"line {{}} of {file}"
    elif file == "-" or (sys.stdin is not None and not sys.stdin.isatty()):
        prompts, where = _lines("stdin", _read_stdin()), "line {} of stdin"
    else:
        raise ConfigError("no prompt: give one as an argument, with --prompts FILE, or pipe some in, one a line")
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise ConfigError(
                f"{where.format(number, len(prompts))} is empty ({prompt!r}): write some text or leave it out"
            )
    return prompts


def _read_file(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the prompts file {file}: {error.strerror}; give a text file, one prompt a line"
        ) from error


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise ConfigError("no prompt: stdin is closed; give one as an argument or with --prompts FILE")
    return sys.stdin.buffer.read()


def _lines(name: str, content: bytes) -> list[str]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"line {line} of {name} is not UTF-8 text ({error.reason}): save it as UTF-8") from error
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    if lines == [""]:
        raise ConfigError(f"{name} has no prompt: write one a line, or give one as an argument")
    return lines
