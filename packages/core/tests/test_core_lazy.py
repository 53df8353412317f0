"""Names of a package that are imported on first use."""

import subprocess
import sys

import pytest

PACKAGE = """
from typing import TYPE_CHECKING
from pipegrid.core.lazy import lazy_names
if TYPE_CHECKING:
    from package.lane import Lane, Old as Old, Rare as Rare
__all__ = ["Lane", "Plan"]
Plan = "needs no torch"
__getattr__, __dir__ = lazy_names(__name__, __all__)
"""
PROGRAM = """
import sys
import package
print("package.lane" in sys.modules, dir(package))
try:
    package.Lame
except AttributeError as error:
    print(error)
from package import *
print("Lane" in globals(), "Rare" in globals(), Plan)
if "Lane" in globals():
    print(package.Rare, package.Old)
"""


@pytest.mark.parametrize("torch", [True, False])
def test_a_lazy_name_loads_its_module_and_is_public_only_with_torch(tmp_path, torch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    (tmp_path / "package" / "lane.py").write_text(
        "import torch\nLane = Old = 'needs torch'\nRare = 'rare'\n", encoding="utf-8"
    )
    program = PROGRAM if torch else f"import sys\nsys.modules['torch'] = None\n{PROGRAM}"
    command = [sys.executable, "-W", "ignore", "-c", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"False {['Lane', 'Plan'] if torch else ['Plan']}",
        "module 'package' has no attribute 'Lame'",
        f"{torch} False needs no torch",
        *(["rare needs torch"] if torch else []),
    ]
