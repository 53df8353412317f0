"""The example of the README, in processes that can import nothing else of pipegrid."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
ALONE = """
import importlib.abc, sys


class Alone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("pipegrid.") and name.split(".")[1] != "fake_nccl":
            raise ModuleNotFoundError(f"{name} is not in this project", name=name)


sys.meta_path.insert(0, Alone())
"""


def test_both_ranks_that_send_first_pass_over_gloo_and_hang_over_the_fake_alone(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(ALONE + code)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in (  # two processes write to one pipe: lines may join
        "gloo, rank 0: received [1.0, 1.0, 1.0, 1.0]",
        "gloo, rank 1: received [0.0, 0.0, 0.0, 0.0]",
        "fake_nccl, rank 0: DistBackendError",
        "fake_nccl, rank 1: DistBackendError",
    ):
        assert line in done.stdout
