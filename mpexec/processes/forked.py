"""A rank that comes from a fork, of the driver or of its fork server: what it must forget, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import sys
import threading
import traceback
import weakref
from typing import NoReturn

from mpexec.processes import boot, streams


def become_rank(control: int, death_fd: int, stdout: int, stderr: int) -> NoReturn:
    """Turn this forked process into a rank and run its entry. Nothing of the parent's code runs, not even at exit."""
    code = 1
    try:
        with contextlib.suppress(OSError):  # the parent, which does the same, was faster
            os.setpgid(0, 0)
        _forget_parent()
        _redirect(stdout, stderr)
        boot.run_rank(control, death_fd, forked=True)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
    finally:
        code = _run_exit_handlers(code)
        streams.flush_standard_streams()
        os._exit(code)


def _forget_parent() -> None:
    """Drop what the parent would do at its end or on a signal, and what every child would otherwise have in common."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    boot.reset_signals()
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    if "multiprocessing.process" in sys.modules:
        # a rank may have children although its driver was a daemonic process
        with contextlib.suppress(AssertionError):
            sys.modules["multiprocessing.process"].current_process().daemon = False
    _reseed()


def _reseed() -> None:
    """Random numbers as in a new interpreter, where each library takes its first seed from the system."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        # the CPU's generator only: `torch.seed` would queue work for CUDA as well
        torch.default_generator.seed()


def _redirect(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        if source > 2:
            os.close(source)


def _exit_code(error: SystemExit) -> int:
    """What the interpreter makes of `SystemExit`."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _run_exit_handlers(code: int) -> int:
    """As an interpreter that ends: wait for threads that are not daemons, then run what this rank registered itself."""
    try:
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        return code or 1
    return code
