"""docs/concepts/topology.md: its code runs as it stands, and prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "topology.md"

# Ranks of a world without communication: what the page's code creates is counted, not used.
WORLD = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size=24)
"""


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_code_prints_what_the_page_says() -> None:
    views, groups = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (said,) = re.findall(r"print\(.*\)  # (.*)", views)
    assert run(views) == [said]
    assert run(WORLD.format(rank=3) + groups) == ["None"]
    assert "ProcessGroup" in run(WORLD.format(rank=9) + groups)[0]


def test_the_drawn_grid_is_the_one_that_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (call,) = re.findall(r"`(HyperCommGrid\(\[2, 2, 2\].*?\))`", text)
    (said,) = re.findall(r"`(\[\[4, 8\].*?\]\])`", text)
    assert run(f"from pipegrid.topology import *\nprint({call}.get_rank_enum('dp'))") == [said]
