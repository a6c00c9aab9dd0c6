"""What a command says of whatever ended it."""

from __future__ import annotations

from mpexec.cli.report import describe_failure
from mpexec.errors import ConfigError, RemoteTraceback, StartupError


def failure(cause: BaseException) -> StartupError:
    error = StartupError(f"rank 0 failed in phase 'build model': {type(cause).__name__}: {cause}", rank=0)
    error.__cause__ = cause
    cause.__cause__ = RemoteTraceback("Traceback: line 7")
    cause.add_note("raised on rank 0")
    return error


def test_a_value_that_a_rank_refuses_is_told_in_one_line() -> None:
    told = describe_failure(failure(ConfigError("max_slots=9: use 1")))
    assert told == "StartupError: rank 0 failed in phase 'build model': ConfigError: max_slots=9: use 1"


def test_a_rank_that_fails_for_another_reason_is_told_with_its_traceback() -> None:
    told = describe_failure(failure(OSError("disk")))
    assert told.splitlines()[1:] == ["caused by OSError: disk", "raised on rank 0", "Traceback: line 7"]
