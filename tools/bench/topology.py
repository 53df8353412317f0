"""Cost of rank groups: to enumerate them, to create them, and how many real ones there are.

One process on torch's fake backend, so the time is that of one rank of a large job, without its
network. The peers run in the same process, alternating with ours:

- `torch.distributed.new_subgroups_by_enumeration`, which makes every group of the world on every rank;
- `torch.distributed.device_mesh.init_device_mesh` of the same shape (four dimensions; it has no dp+cp group).

    python tools/bench/topology.py [--quick]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipegrid.topology import GroupRequest, HyperCommGrid, create_grid_groups

TP, CP, PP = 8, 2, 4
DIMS: tuple[str | tuple[str, ...], ...] = ("tp", "cp", "pp", "dp", ("dp", "cp"))
RANK = 5


def grid_of(world: int) -> HyperCommGrid:
    """The benchmark's shape: tp, cp and pp fixed, and as much dp as the world has."""
    return HyperCommGrid([TP, CP, world // (TP * CP * PP), PP], ["tp", "cp", "dp", "pp"], world_size=world)


def seconds(work: Callable[[], object]) -> float:
    """The processor time of one call: nothing here waits, and the machine may be shared."""
    start = time.process_time()
    work()
    return time.process_time() - start


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table in plain text, numbers to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def enumerate_groups(worlds: Sequence[int], repeats: int) -> None:
    """This rank's groups as lists of ranks; the time per member must not grow with the world.

    Besides the members each call has a fixed cost, which small groups do not hide; the last column is what
    members cost that a larger world adds.
    """
    grids = [grid_of(world) for world in worlds]

    def groups(grid: HyperCommGrid) -> list[list[int]]:
        return [list(grid.group_ranks(dims, RANK)) for dims in DIMS]

    def repeat(work: Callable[[HyperCommGrid], object], grid: HyperCommGrid, calls: int) -> None:
        for _ in range(calls):
            work(grid)

    members = [sum(map(len, groups(grid))) for grid in grids]
    times: list[list[float]] = [[] for _ in grids]
    for _ in range(repeats):
        for grid, count, times_of_grid in zip(grids, members, times, strict=True):
            calls = max(1, 50_000 // count)
            times_of_grid.append(seconds(functools.partial(repeat, groups, grid, calls)) / calls)
    taken = [statistics.median(each) for each in times]
    rows = []
    for index, world in enumerate(worlds):
        per_member = taken[index] / members[index]
        further = "-"
        if index:
            added = members[index] - members[index - 1]
            further = f"{(taken[index] - taken[index - 1]) / added * 1e9:.1f}"
        rows.append(
            (
                f"{world:,}",
                f"{members[index]:,}",
                f"{taken[index] * 1e6:.1f}",
                f"{per_member * 1e9:.1f}",
                f"{per_member / (taken[0] / members[0]):.2f}x",
                further,
            )
        )
    print_table(
        f"Enumerate this rank's groups for tp, cp, pp, dp, dp+cp (tp={TP} cp={CP} pp={PP}, dp grows)",
        ("world", "members", "us", "ns per member", "against first", "ns per further member"),
        rows,
    )


def with_world(world: int, work: Callable[[], object]) -> float:
    """Time of ``work`` in a fresh fake world."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=world)
    try:
        return seconds(work)
    finally:
        dist.destroy_process_group()


def create_ours(world: int) -> float:
    """All five in one call."""
    return with_world(world, lambda: create_grid_groups({grid_of(world): DIMS}))


def create_by_enumeration(world: int) -> float:
    """Every group of each of the five, on this rank, as the function wants it."""
    lists = [grid_of(world).get_rank_enum(dims) for dims in DIMS]
    make: Callable[[list[list[int]]], object] = dist.new_subgroups_by_enumeration
    return with_world(world, lambda: [make(groups) for groups in lists])


def create_mesh(world: int) -> float:
    """The same shape as a DeviceMesh."""
    shape = grid_of(world).shape[::-1]
    return with_world(world, lambda: init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "cp", "tp")))


def create_groups(worlds: Sequence[int], largest_enumeration: int, repeats: int) -> None:
    """Creation, ours and the peers'."""
    rows = []
    for first_call in (create_ours, create_mesh):  # imports are not timed
        first_call(1024)
    for world in worlds:
        ours, mesh = [], []
        for _ in range(repeats):
            ours.append(create_ours(world))
            mesh.append(create_mesh(world))
        mine, theirs = statistics.median(ours), statistics.median(mesh)
        every = create_by_enumeration(world) if world <= largest_enumeration else None
        rows.append(
            (
                f"{world:,}",
                f"{mine * 1e3:.1f}",
                "-" if every is None else f"{every * 1e3:.1f}",
                "-" if every is None else f"{every / mine:.0f}x",
                f"{theirs * 1e3:.1f}",
                f"{theirs / mine:.1f}x",
            )
        )
    print_table(
        "Create tp, cp, pp, dp, dp+cp on the fake backend, ms (ratios: how many times faster ours is)",
        ("world", "ours", "by enumeration", "ratio", "init_device_mesh", "ratio"),
        rows,
    )


def count_groups() -> None:
    """Real groups of one rank, before and after equal rank sets share one."""
    cases: list[tuple[str, list[int]]] = [
        ("tp=8 cp=1 dp=16 pp=1", [8, 1, 16, 1]),
        ("tp=1 cp=1 dp=128 pp=1", [1, 1, 128, 1]),
        ("tp=8 cp=2 dp=8 pp=1", [8, 2, 8, 1]),
        ("tp=4 cp=2 dp=4 pp=4", [4, 2, 4, 4]),
    ]
    requests = [*DIMS, ("tp", "pp"), ("tp", "cp"), ("tp", "cp", "dp")]
    experts = [GroupRequest(dims, "expert") for dims in ("expt_tp", "ep", "expt_dp", "pp", ("expt_tp", "ep"))]
    rows = []
    for name, shape in cases:
        grid = HyperCommGrid(shape, ["tp", "cp", "dp", "pp"], world_size=128)
        grid.register_view("expert", [1, 8, 16 // shape[3], shape[3]], ["expt_tp", "ep", "expt_dp", "pp"], ["pp"])
        wanted = [*requests, *[request for request in experts if request.dims != ("pp",)]]

        with_world(128, functools.partial(create_grid_groups, {grid: wanted}))
        rows.append((name, str(len(wanted)), str(grid.group_count), f"{len(wanted) / grid.group_count:.1f}x"))
    print_table(
        "Real groups on one rank of 128, with expert view (expt_tp=1 ep=8)",
        ("shape", "requested", "real", "ratio"),
        rows,
    )


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller worlds")
    quick = parser.parse_args().quick
    enumerate_groups((1024, 16_384, 131_072), repeats=5 if quick else 15)
    create_groups(
        (1024, 4096) if quick else (1024, 4096, 16_384, 131_072),
        largest_enumeration=1024 if quick else 16_384,
        repeats=3 if quick else 7,
    )
    count_groups()


if __name__ == "__main__":
    main()
