"""``python -m pipegrid.checkpoint show | verify | export PATH``."""

import sys

from pipegrid.checkpoint.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
