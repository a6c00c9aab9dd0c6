"""What the user is told of a failure."""

from __future__ import annotations

from mpexec.cli.report import describe_failure
from mpexec.errors import ConfigError, RemoteTraceback, StartupError


def test_what_a_rank_finds_wrong_with_a_value_is_one_line() -> None:
    found = ConfigError("device='cuda' needs 2 CUDA devices here, but torch sees 0")
    found.__cause__ = RemoteTraceback("Traceback (most recent call last):\n  ...")
    failed = StartupError("rank 1 failed in phase 'device'", rank=1, phase="device")
    failed.__cause__ = found
    assert describe_failure(failed) == str(found)
