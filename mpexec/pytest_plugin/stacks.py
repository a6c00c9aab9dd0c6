"""Stacks of ranks as a reader of tests wants them: the frames of the test, not those of pytest and of this package."""

from __future__ import annotations

_BENEATH_TESTS = ("/_pytest/", "/pluggy/", "/mpexec/worker/", "/mpexec/processes/", "/mpexec/pytest_plugin/")
_SIDE_THREAD = "/mpexec/worker/control.py"


def trimmed(text: str) -> str:
    """The stacks that `faulthandler` wrote, innermost frame first, down to where pytest called the test.

    Without the frames beneath, and without the side thread that each rank has. Text in another form stays as it is.
    """
    threads = [thread for thread in text.split("\n\n") if _SIDE_THREAD not in thread]
    return "\n\n".join(map(_trimmed_thread, threads)) or text


def _trimmed_thread(text: str) -> str:
    lines = text.split("\n")
    frames = [line for line in lines if not _is_beneath(line)]
    return text if len(frames) == 1 else "\n".join(frames)  # only the title: it was not in a test


def _is_beneath(line: str) -> bool:
    return line.startswith("  File ") and any(part in line for part in _BENEATH_TESTS)
