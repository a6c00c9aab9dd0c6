"""One function in an interpreter of its own, so that no peer inherits another one's threads, imports or warm caches."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class BenchError(Exception):
    """A benchmark could not be carried out; which is not the same as a slow result."""


def environment() -> dict[str, str]:
    """This process's environment, in which bytecode is kept as usual: mpexec would be compiled anew for every rank."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def call(function: Callable[..., Any], *, timeout: float = 120.0, **arguments: Any) -> Any:
    """Run a module-level function of this package in a fresh interpreter. Blocks; returns what it returned, by JSON.

    Raises:
        BenchError: It raised, wrote no result, or ran past `timeout` seconds.
    """
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", __name__, function.__module__]
    command += [function.__qualname__, json.dumps(arguments)]
    name = f"{function.__qualname__}({arguments})"
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        process_group=0, env=environment(),
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end_group(process)
        raise BenchError(f"{name} did not end within {timeout:g} s") from None
    except BaseException:
        _end_group(process)
        raise
    if process.returncode:
        raise BenchError(f"{name} failed with exit code {process.returncode}:\n{err.strip()[-4000:]}")
    try:
        return json.loads(out.strip().rpartition("\n")[2])
    except ValueError:
        raise BenchError(f"{name} printed no result:\n{out[-1000:]}\n{err[-2000:]}") from None


def call_together(function: Callable[..., Any], every: list[dict[str, Any]], *, timeout: float = 120.0) -> list[Any]:
    """As `call`, for several sets of arguments at the same time."""
    with ThreadPoolExecutor(len(every)) as pool:
        futures = [pool.submit(call, function, timeout=timeout, **arguments) for arguments in every]
        return [future.result() for future in futures]


def _end_group(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """The other side of `call`."""
    module, name, arguments = sys.argv[1:]
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
