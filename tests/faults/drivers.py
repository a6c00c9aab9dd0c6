"""Programs that use an executor, run as processes of their own, and watched from outside."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import leaks

ROOT = Path(__file__).parents[2]
PREAMBLE = """\
import json, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from faults.agents import HostAgent
from mpexec import ModelAgent, MPExecutor

OPTIONS = dict(world_size=2, device="cpu", init_process_group=False)

def make(agent=HostAgent, **options):
    return MPExecutor(agent, **{**OPTIONS, "start_method": os.environ["START_METHOD"], **options})

def say(*values):
    print(json.dumps(values), flush=True)

"""


class Pipe:
    """A named pipe in which ranks announce what they are about to do."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "announced")
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._text = b""

    def pids(self, count: int, seconds: float = 60.0) -> list[int]:
        """Wait for that many announcements; the pids in them."""
        _read_until(self._fd, lambda: self._text.count(b"\n") >= count, self._add, seconds)
        return [int(line) for line in self._text.split()]

    def _add(self, chunk: bytes) -> None:
        self._text += chunk

    def close(self) -> None:
        os.close(self._fd)


class Driver:
    """One program: `PREAMBLE`, then `body` beneath the main guard.

    Args:
        folder: Where the script and its stderr go.
        body: What the program does.
        head: Code before the guard.
        guarded: False puts the body at the top level.
        stdin: True feeds the script to `python -`.
        start_method: Default of `make` in the program.
        env: Further variables.
    """

    def __init__(
        self,
        folder: Path,
        body: str,
        *,
        head: str = "",
        guarded: bool = True,
        stdin: bool = False,
        start_method: str = "spawn",
        env: Mapping[str, str] | None = None,
        command: tuple[str, ...] = (),
    ) -> None:
        body = textwrap.dedent(body)
        text = PREAMBLE + textwrap.dedent(head) + "\n"
        text += 'if __name__ == "__main__":\n' + textwrap.indent(body, "    ") if guarded else body
        number = len(list(folder.glob("driver*.py")))
        script = folder / f"driver{number}.py"
        script.write_text(text)
        self._stderr_path = folder / f"stderr{number}"
        self._out = b""
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        with open(self._stderr_path, "wb") as stderr, open(script if stdin else os.devnull, "rb") as source:
            self.process = subprocess.Popen(
                [*command, sys.executable, "-B", "-W", "always::ResourceWarning", "-" if stdin else str(script)],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": path, "START_METHOD": start_method, **(env or {})},
                start_new_session=True,
            )
        self.pid = self.process.pid

    def hear(self, seconds: float = 60.0) -> list[Any]:
        """The next thing it says."""
        assert self.process.stdout is not None
        try:
            _read_until(self.process.stdout.fileno(), lambda: b"\n" in self._out, self._add, seconds)
        except EOFError:
            raise AssertionError(f"it ended: {self.stderr}") from None
        line, _, self._out = self._out.partition(b"\n")
        said: list[Any] = json.loads(line)
        return said

    def _add(self, chunk: bytes) -> None:
        self._out += chunk

    def interrupt(self) -> None:
        """Ctrl-C: the signal goes to everything that the terminal would reach."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL, to the driver alone."""
        self.process.kill()
        self.process.wait()

    def family(self) -> set[int]:
        """Children and grandchildren as of now."""
        return leaks.children_of(self.pid)

    def end(self, seconds: float = 60.0) -> int:
        """Wait for its end; the exit status."""
        return self.process.wait(seconds)

    @property
    def stderr(self) -> str:
        """All it has written there, its ranks too."""
        return self._stderr_path.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _read_until(fd: int, enough: Any, add: Any, seconds: float) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    end = time.monotonic() + seconds
    while not enough():
        assert poller.poll(max(0.0, end - time.monotonic()) * 1000), "nothing came in time"
        chunk = os.read(fd, 65536)
        if not chunk:
            raise EOFError
        add(chunk)
