"""The public names, and that the package needs nothing beyond the standard library and attrs."""

from __future__ import annotations

import subprocess
import sys

import pipegrid.layout


def test_the_public_names():
    assert sorted(pipegrid.layout.__all__) == [
        "LayerMemory",
        "LayoutError",
        "LayoutGrammar",
        "PipelineParallelLayerLayout",
        "balance",
        "even",
        "report",
    ]
    further = (  # imported from it as well
        "Balance",
        "LayerType",
        "LayoutInfeasibleError",
        "LayoutReport",
        "LayoutSyntaxError",
        "in_flight_1f1b",
    )
    assert all(hasattr(pipegrid.layout, name) for name in (*pipegrid.layout.__all__, *further))


def test_it_works_where_torch_and_its_like_are_absent():
    program = """
import sys
for name in ("torch", "numpy", "rich", "matplotlib"):
    sys.modules[name] = None  # importing it raises ImportError
import pipegrid.layout
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.layout import balance
layout = PipelineParallelLayerLayout("Ett|ttL", 2)
assert layout.validate_layer_layout(4) is False
assert balance([1, 1, 1], 2).report.svg()
print(layout.get_layer_id_list(pp_rank=1))
third = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(sorted(name for name in third if sys.modules[name] is not None and not name.startswith("_")))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    ids, imported = result.stdout.splitlines()
    assert ids == "[2, 3]"
    assert set(imported.strip("[]").replace("'", "").split(", ")) <= {"attr", "attrs", "pipegrid", "sitecustomize"}
