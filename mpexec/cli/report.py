"""One message on stderr for whatever ended a command."""

from __future__ import annotations

import json
import sys
from typing import Any

from mpexec.errors import ConfigError, EngineStoppedError, RemoteTraceback, StartupError


class ReaderGoneError(Exception):
    """Whoever read our stdout has closed it."""


class ToldError(Exception):
    """The user has been told; what is left is the exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class StalledError(Exception):
    """The model has not made a step for too long; the message is made for the user as it is."""


def complain(message: str) -> None:
    """Print a message of this command to stderr, if somebody is there to read it."""
    start = "\n" if message.startswith("\n") else ""
    tell(f"{start}mpexec: {message.lstrip()}")


def tell(line: str) -> None:
    """Print a line to stderr as it is, if somebody is there to read it."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        return  # nobody is left to tell; the exit code still does


def print_json_line(value: Any) -> None:
    """Print a value as one line of JSON to stdout, in UTF-8 whatever the locale is."""
    import click

    click.echo(json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace"))


def printable(text: str) -> str:
    """What somebody else has named, on one line, with nothing in it that a terminal would obey."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def describe_failure(failure: BaseException) -> str:
    """What happened, for people: the root cause, with its notes and the traceback of the rank it comes from."""
    if isinstance(failure, StalledError):
        return str(failure)
    if isinstance(failure, EngineStoppedError) and failure.__cause__ is not None:
        failure = failure.__cause__
    if isinstance(failure, StartupError) and isinstance(failure.__cause__, ConfigError):
        return f"StartupError: {failure}"  # it says what to do, and where in the code that was found tells nobody more
    lines: list[str] = []
    prefix = ""
    error: BaseException | None = failure
    while error is not None:
        if isinstance(error, RemoteTraceback):
            lines.append(str(error).strip("\n"))
        else:
            lines.append(f"{prefix}{type(error).__name__}: {error}")
            # What the other ranks were at helps whoever debugs a program, not whoever runs this command.
            lines += [note for note in getattr(error, "__notes__", []) if note and not note.startswith("all ranks:")]
        error, prefix = error.__cause__, "caused by "
    return "\n".join(lines)
