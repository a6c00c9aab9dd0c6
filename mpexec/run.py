"""`python -m mpexec.run` is `mpexec run`, as `python -m torch.distributed.run` is `torchrun`."""

import sys

from mpexec.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
