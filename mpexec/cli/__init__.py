"""The `mpexec` command. What a command needs is imported when it runs, so that `--help` is there at once.

Exit codes: 0 done, 1 a failure while working, 2 bad input (nothing was started), 130 Ctrl-C, 141 the reader of stdout
has gone, 143 SIGTERM.
"""

from __future__ import annotations

import sys

from mpexec.cli.interrupt import end_on_signals


def main(args: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        args: The words after the command's name; None takes them from `sys.argv`.
    """
    end_on_signals()
    try:
        import click  # noqa: F401 - asked for here, to say what to install
        import rich  # noqa: F401
    except ImportError:
        print("mpexec: the command line needs click and rich: pip install 'mpexec[cli]'", file=sys.stderr)
        return 2
    from mpexec.cli.app import run

    return run(args)
