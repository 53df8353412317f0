"""The script of the README and the tutorial is the one in docs/examples, and it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "examples" / "two_modules.py"


def test_the_readme_shows_the_script_that_runs():
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert SCRIPT.read_text().split('"""\n', 1)[1].strip() == shown[1].strip()


def test_the_tutorial_shows_the_script_that_runs():
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.DOTALL)
    assert SCRIPT.read_text().split('"""\n', 1)[1].strip() == shown[0].strip()


def test_the_script_trains():
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
