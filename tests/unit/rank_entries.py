"""Entries that the tests of `mpexec.processes` run in ranks, and scripts that they run as drivers."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys

from mpexec.deadline import Deadline
from mpexec.errors import StartupError
from mpexec.processes import Boot, refuse_while_importing_main
from mpexec.transport.lane import LaneClosed


def until_released(boot: Boot) -> None:
    """Wait until the driver closes the lane or sends anything."""
    try:
        boot.lane.recv(Deadline.after(None))
    except LaneClosed:
        return


def echo(boot: Boot) -> None:
    """Report what this rank sees of its plan."""
    facts = {
        "payload": boot.payload,
        "env": os.environ.get("MPEXEC_TEST"),
        "removed": os.environ.get("MPEXEC_REMOVED"),
        "file": os.read(boot.fds["file"], 100),
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "driver": boot.driver_pid,
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "stdin": os.readlink("/proc/self/fd/0"),
        "executable": sys.executable,
    }
    boot.lane.send(("facts", facts))
    until_released(boot)


def say(boot: Boot) -> None:
    """Report, then wait."""
    boot.lane.send(("here", os.getpid()))
    until_released(boot)


def draw(boot: Boot) -> None:
    """Report a random number."""
    boot.lane.send(("drawn", random.random()))
    until_released(boot)


def exit_with_3(boot: Boot) -> None:
    """End with a status of its own."""
    sys.exit(3)


def kill_itself(boot: Boot) -> None:
    """End by the signal that the payload names."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), int(boot.payload))


def abort_after_writing(boot: Boot) -> None:
    """What C code does: text without a newline, then an abort."""
    print("from python")
    ctypes.CDLL(None).printf(b"from printf\n")
    os.write(2, b"boom")
    os.abort()


def write_much(boot: Boot) -> None:
    """Write more lines than are kept, then wait."""
    for number in range(int(boot.payload)):
        print(f"line {number}")
    boot.lane.send(("written", None))
    until_released(boot)


def last_words(boot: Boot) -> None:
    """Send messages and die at once, with an unread message of the driver in the lane."""
    for number in range(10):
        boot.lane.send(("word", number))
    os._exit(5)


def wait_for_a_child(boot: Boot) -> None:
    """Report the status of a child of this rank, then wait."""
    boot.lane.send(("child", subprocess.run([sys.executable, "-c", "raise SystemExit(7)"], check=False).returncode))
    until_released(boot)


def ignore_term(boot: Boot) -> None:
    """Answer neither questions nor SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    boot.lane.send(("here", os.getpid()))
    while True:
        signal.pause()


def with_grandchild(boot: Boot) -> None:
    """Start a process that outlives this one, then wait, or end if the payload says so."""
    grandchild = subprocess.Popen(["sleep", "1000"])
    grandchild.returncode = 0
    boot.lane.send(("grandchild", grandchild.pid))
    if boot.payload != b"exit":
        until_released(boot)


def hold_the_gil(boot: Boot) -> None:
    """Start a grandchild, then sit in C code without letting another thread run."""
    grandchild = subprocess.Popen(["sleep", "1000"])
    boot.lane.send(("pids", os.getpid(), grandchild.pid))
    ctypes.PyDLL(None).sleep(60)


def build_nested(boot: Boot) -> None:
    """Not importing `__main__` any more: starting processes is allowed."""
    try:
        refuse_while_importing_main()
        boot.lane.send(("allowed", None))
    except StartupError as error:
        boot.lane.send(("refused", str(error)))
