"""Train the digit reader: `python train.py`, or `torchrun --nproc-per-node 4 train.py`. See command_line.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The example is a folder of modules, not an installed package; its parent makes it importable by name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from digit_reader.command_line import parse_options
from digit_reader.options import OptionsError


def main(arguments: list[str]) -> int:
    """Check the options, then start the ranks; or, on a rank, train."""
    # torchrun, or `launch` through its machinery, says in the environment that this process is a rank.
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if is_rank:
        arguments = [*arguments, "--processes", os.environ["WORLD_SIZE"]]
    try:
        options = parse_options(arguments)
    except OptionsError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    if not is_rank:
        from digit_reader.opening import opening

        print(opening(options), flush=True)
        from digit_reader.launch import launch  # loads torch; errors of options need not wait for it

        checkpoints = options.checkpoints if options.guarded else None
        return launch(Path(__file__).resolve(), arguments, processes=options.processes, checkpoints=checkpoints)
    from digit_reader.training import train

    return train(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
