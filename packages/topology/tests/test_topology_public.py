"""What the package offers, and that its planning half needs no torch."""

import subprocess
import sys

import pytest

import pipegrid.topology

PUBLIC = {
    "HyperCommGrid",
    "MultiModuleProcessGroupCollection",
    "ProcessGroupCollection",
    "RankRole",
    "control_store",
    "create_grid_groups",
    "replica_of",
    "describe",
    "replica_samples",
    "place",
}
# Imported from the package as well; outside of __all__.
FURTHER = {
    "MIMO_LANGUAGE_MODULE_KEY",
    "creation_order",
    "relation",
    "GridError",
    "WorldError",
    "GridKeyError",
    "ModuleLayout",
    "ModuleStageInfo",
    "Relation",
    "data_lane",
    "replica_bounds",
    "replica_sizes",
    "GroupCreationTimeoutError",
    "GroupRequest",
    "GroupSpec",
    "PlacementError",
    "create_groups",
    "destroy_groups",
    "from_device_mesh",
    "to_device_mesh",
}


def test_public_names_are_these_and_exist():
    assert set(pipegrid.topology.__all__) == PUBLIC
    assert dir(pipegrid.topology) == sorted(pipegrid.topology.__all__)
    for name in PUBLIC | FURTHER:
        assert getattr(pipegrid.topology, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'HyperGrid'"):
        _ = pipegrid.topology.HyperGrid


PLANNING = """
import sys
sys.modules["torch"] = None  # any import of torch fails now
import pipegrid.topology as t
grids = t.place({"images": {"tp": 1, "dp": 2}, "language": {"tp": 2, "pp": 2, "dp": 1}}, world_size=6)
grid = grids["language"]
grid.register_view("expert", [1, 2, 2], ["expt_tp", "ep", "pp"], ["pp"])
print(grid.get_rank_enum("tp"), grid.get_rank_enum(["pp"], view="expert"), grid.coords(5))
print(t.relation(*grids.values()).value, t.replica_of(grids["images"], 1), t.replica_sizes(3, 2))
print(t.RankRole.from_grid_map(grids, ["images"], rank=5).is_last_stage("language"))
print(t.describe(grids) != "", [spec.label for spec in t.creation_order([t.GroupSpec((1, 0), "a")])])
try:
    t.create_groups([])
except t.WorldError as error:
    print(error)
from pipegrid.topology import *
print(replica_samples is t.replica_samples, t.replica_bounds(3, 2))
print(any(name.split(".")[0] == "numpy" for name in sys.modules))
"""


def test_planning_works_with_torch_blocked():
    done = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[[2, 3], [4, 5]] [[2, 4], [3, 5]] {'tp': 1, 'pp': 1, 'dp': 0}",
        "disjoint (1, 2) (2, 1)",
        "True",
        "True ['a']",
        "groups need the default one; call torch.distributed.init_process_group first",
        "True (0, 2, 3)",
        "False",
    ]
