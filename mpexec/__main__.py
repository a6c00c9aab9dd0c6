"""`python -m mpexec` is the `mpexec` command."""

import sys

from mpexec.cli import main

if __name__ == "__main__":
    sys.exit(main())
