"""``python -m pipegrid.schedules``: the command line of `pipegrid.search`."""

import sys

from pipegrid.search.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
