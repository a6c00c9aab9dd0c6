"""What a signal to the command leaves: the terminal as it was, and no process."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from mpexec.cli.interrupt import end_on_signals, end_process_in, run_interruptibly, stop_on_signals
from mpexec.cli.progress import progress


def on_a_terminal(act: Callable[[], None]) -> tuple[int, bytes]:
    """What `act` does in a forked process with a progress line: its exit code, and all that the terminal was sent."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.environ["TERM"] = "xterm"
            sys.stderr = os.fdopen(2, "w", closefd=False)
            with progress("loading"):
                act()
        finally:
            os._exit(0)
    screen = b""
    try:
        while piece := os.read(terminal, 4096):
            screen += piece
    except OSError:  # EIO: it has ended
        pass
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), screen


def interrupted_at_once() -> None:
    end_on_signals()
    os.kill(os.getpid(), signal.SIGTERM)


def interrupted_twice_amid_clean_up() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    run_interruptibly(work())


def interrupted_twice_amid_a_stop() -> None:
    async def work() -> None:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            await stop.wait()
            os.kill(os.getpid(), signal.SIGTERM)

    run_interruptibly(work())


def out_of_patience() -> None:
    end_process_in(0.0, 143)
    signal.pause()


@pytest.mark.parametrize(
    "act", [interrupted_at_once, interrupted_twice_amid_clean_up, interrupted_twice_amid_a_stop, out_of_patience]
)
def test_however_a_signal_ends_the_command_the_cursor_is_back_and_the_line_is_gone(act: Callable[[], None]) -> None:
    exit_code, screen = on_a_terminal(act)
    assert exit_code == 143
    assert screen.count(b"\x1b[?25l") == screen.count(b"\x1b[?25h") == 1
    assert screen.endswith(b"\r\x1b[K\x1b[?25h")


ASK = """
from mpexec.cli.child import run_python
run_python("import time; print('asked', flush=True); time.sleep(60)")
"""


def test_a_python_that_is_asked_something_ends_with_the_command() -> None:
    with subprocess.Popen([sys.executable, "-c", ASK], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"asked\n"
        command.terminate()
        assert select.select([command.stdout], [], [], 20)[0]
        assert command.stdout.read() == b""  # nobody has the other end open any more
