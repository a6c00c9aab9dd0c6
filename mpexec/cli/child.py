"""A Python process that is asked something, for what this one had better not import."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

# The kernel ends it with the thread that has started it: a signal to this process alone leaves nothing behind. Ctrl-C
# reaches both, and this process alone answers for it.
_END_WITH_PARENT = """
import ctypes, os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9))  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != {parent}:
    os._exit(1)
"""


def run_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code to its end in a new process of this interpreter, which does not outlive this one.

    To be called in the main thread. Takes the options of `subprocess.run`, and raises as it does.
    """
    whole = _END_WITH_PARENT.format(parent=os.getpid()) + code
    return subprocess.run([sys.executable, "-c", whole], text=True, check=False, **options)
