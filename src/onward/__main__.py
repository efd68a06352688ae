"""`python -m onward`: the command line, also under `torchrun -m onward`."""

import sys

from onward.cli import main

if __name__ == "__main__":
    sys.exit(main())
