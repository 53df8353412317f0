"""Groups on real ranks: they reduce what arithmetic says, whatever the ranks did before and in whichever order."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.topology import (
    GroupConnectionError,
    GroupCreationTimeoutError,
    GroupRequest,
    GroupSpec,
    HyperCommGrid,
    RankRole,
    control_store,
    create_grid_groups,
    create_groups,
    destroy_groups,
    place,
    torch_compat,
)


def total(group, device="cpu"):
    """All-reduce of 3**rank: tells exactly which ranks took part."""
    value = torch.tensor([3 ** dist.get_rank()], dtype=torch.int64, device=device)
    dist.all_reduce(value, group=group)
    return value.item()


def expected(ranks):
    return sum(3**rank for rank in ranks)


def check(grid, ranks, requests):
    """Every group of the grid, in the order of ``requests``, reduces over the ranks that enumeration says."""
    for request in requests:
        group = grid.get_pg(request.dims, view=request.view)
        if ranks.rank not in grid.ranks:
            assert group is None
            continue
        mine = grid.group_ranks(request.dims, view=request.view)
        assert [group for group in grid.get_rank_enum(request.dims, view=request.view) if ranks.rank in group] == [
            list(mine)
        ]
        assert dist.get_process_group_ranks(group) == list(mine)
        assert dist.get_rank(group) == mine.index(ranks.rank)
        assert total(group, ranks.device) == expected(mine)


def requests(*given):
    return [item if isinstance(item, GroupRequest) else GroupRequest(item) for item in given]


@pytest.mark.ranks(8)
def test_all_groups_of_ten_grids_reduce_what_arithmetic_says(ranks):
    whole = requests("tp", "cp", "dp", ("tp", "cp"), ("dp", "cp"), ("tp", "dp"), ("tp", "cp", "dp"))
    expert = requests(*(GroupRequest(dims, "expert") for dims in ("expt_tp", "ep", "expt_dp", ("ep", "expt_dp"))))
    jobs = {
        "the whole world": (HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]), whole),
        "with size-1 dims": (HyperCommGrid([1, 8, 1], ["tp", "cp", "dp"]), whole),
        "an offset": (HyperCommGrid([2, 3], ["tp", "dp"], 1), requests("tp", "dp", ("dp", "tp"))),
        "a view": (HyperCommGrid([4, 2], ["tp", "dp"]), requests("tp", "dp", *expert)),
        "disjoint, low": (HyperCommGrid([2, 2], ["tp", "pp"]), requests("tp", "pp")),
        "disjoint, high": (HyperCommGrid([4], ["dp"], 4), requests("dp")),
        "equal, one": (HyperCommGrid([2, 4], ["tp", "dp"]), requests("tp", "dp")),
        "equal, two": (HyperCommGrid([4, 2], ["tp", "dp"]), requests("tp", "dp")),
        "overlapping": (HyperCommGrid([5], ["dp"], 2), requests("dp")),
        "nested": (HyperCommGrid([3], ["dp"], 3), requests("dp")),
    }
    jobs["a view"][0].register_view("expert", [2, 2, 2], ["expt_tp", "ep", "expt_dp"])
    assert len(jobs) == 10
    create_grid_groups(dict(jobs.values()))
    for grid, wanted in jobs.values():
        check(grid, ranks, wanted)
    assert jobs["with size-1 dims"][0].group_count == 2
    assert jobs["equal, one"][0].get_pg("tp") is jobs["the whole world"][0].get_pg("tp")
    for grid, _ in jobs.values():
        grid.destroy()


@pytest.mark.ranks(8)
def test_grids_one_after_another_as_a_script_makes_them(ranks):
    grids = place({"images": {"tp": 1, "dp": 4}, "language": {"tp": 2, "pp": 2}}, world_size=8)
    for grid, dims in ((grids["images"], "dp"), (grids["language"], "tp"), (grids["language"], "pp")):
        group = grid.create_pg(dims)
        assert (group is None) == (not grid.is_current_rank_in_grid())
        check(grid, ranks, requests(dims))
    role = RankRole.from_grid_map(grids, ["images"])
    assert role.has_language_module == (ranks.rank >= 4)
    assert role.is_last_stage("language") == (ranks.rank >= 6)


@pytest.mark.ranks(4)
def test_ranks_with_different_histories_agree(ranks):
    """Torch's own names count the groups that a process has made so far; ranks would wait for one another."""
    for _ in range(ranks.rank):
        create_groups([GroupSpec((ranks.rank,), "of my own")])
    if ranks.rank in {0, 3}:
        for _ in range(3):
            destroy_groups(create_groups([GroupSpec((0, 3), "in private")]))
    if ranks.rank in {1, 2}:
        kept = create_groups([GroupSpec((1, 2), "kept"), GroupSpec((1, 2), "lane", shared=False)])
        dist.destroy_process_group(next(iter(kept.values())))
    everyone = [
        GroupSpec((0, 3), "a"),
        GroupSpec((1, 2), "kept"),
        GroupSpec((0, 1, 2, 3), "all"),
        GroupSpec((2, 1), "b"),
    ]
    for _ in range(2):
        groups = create_groups(everyone)
        for spec, group in groups.items():
            assert dist.get_process_group_ranks(group) == list(spec.ranks)
            assert total(group, ranks.device) == expected(spec.ranks)
        destroy_groups(groups)


@pytest.mark.ranks(3)
def test_groups_that_overlap_in_a_cycle_do_not_deadlock(ranks):
    own_order = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}[ranks.rank]
    groups = create_groups([GroupSpec(pair, "pair") for pair in own_order])
    assert {spec.ranks: total(group, ranks.device) for spec, group in groups.items()} == {
        pair: expected(pair) for pair in own_order
    }


@pytest.mark.ranks(3)
def test_grids_that_overlap_in_a_cycle_do_not_deadlock(ranks):
    pairs = [HyperCommGrid([2], ["dp"], 0), HyperCommGrid([2], ["dp"], 1)]
    wide = HyperCommGrid([3], ["dp"])
    mine = [*pairs, wide]
    mine = mine[ranks.rank :] + mine[: ranks.rank]
    create_grid_groups({grid: ["dp"] for grid in mine})
    for grid in (*pairs, wide):
        check(grid, ranks, requests("dp"))


@pytest.mark.ranks(4)
def test_destroy_then_create_again(ranks):
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    for _ in range(3):
        grid.create_pgs(["tp", "dp", ("tp", "dp")])
        check(grid, ranks, requests("tp", "dp", ("tp", "dp")))
        grid.destroy()
        grid.destroy()
        assert grid.group_count == 0
    if ranks.rank < 2:
        create_groups([GroupSpec((0, 1), "meanwhile")])
    grid.create_pg("dp")
    check(grid, ranks, requests("dp"))


@pytest.mark.ranks(4)
def test_creating_from_some_members_only_is_a_clear_error_at_the_deadline(ranks):
    spec, pair = GroupSpec((0, 1, 2, 3), "language/dp"), GroupSpec((0, 1), "images/tp")
    before = len(dist.distributed_c10d._world.pg_map)
    if ranks.rank in {0, 1}:
        text = (
            r"waited 1 s to create group 'language/dp' of ranks \[0, 1, 2, 3\], but ranks \[(1, )?2, 3\] did not come"
        )
        with pytest.raises(GroupCreationTimeoutError, match=text):
            create_groups([spec, pair], timeout=timedelta(seconds=1))
        assert len(dist.distributed_c10d._world.pg_map) == before, "what was made before the failure is gone again"
    ranks.barrier()
    groups = create_groups([spec], timeout=timedelta(seconds=30))
    assert total(groups[spec], ranks.device) == expected(range(4))


@pytest.mark.ranks(2)
def test_creation_returns_when_all_members_are_connected(ranks):
    """A member that returned and destroyed the group would cut off one that still connects to it."""
    connect, store = torch_compat.make_group, control_store("connected")

    def connect_slowly(**arguments):
        group = connect(**arguments)
        time.sleep(0.5)
        store.set("rank 1", "is connected")
        return group

    if ranks.rank == 1:
        torch_compat.make_group = connect_slowly
    try:
        groups = create_groups([GroupSpec((0, 1), "both")])
    finally:
        torch_compat.make_group = connect
    assert store.check(["rank 1"])
    destroy_groups(groups)


@pytest.mark.ranks(8)
def test_groups_may_be_destroyed_at_once(ranks):
    for size in (2, 4, 8) * 4:
        specs = [GroupSpec(range(first, first + size), "of a size", shared=False) for first in range(0, 8, size)]
        destroy_groups(create_groups(specs))


@pytest.mark.ranks(2)
def test_a_member_that_cannot_connect_is_named_by_the_others(ranks):
    before = len(dist.distributed_c10d._world.pg_map)
    connect = torch_compat.make_group

    def fail(**arguments):
        connect(**arguments)
        raise ConnectionError("no route")

    spec, second = GroupSpec((0, 1), "lane"), timedelta(seconds=1)
    if ranks.rank == 1:
        torch_compat.make_group = fail
        try:
            with pytest.raises(ConnectionError):
                create_groups([spec], creation_timeout=second)
        finally:
            torch_compat.make_group = connect
    else:
        with pytest.raises(
            GroupCreationTimeoutError, match=r"group 'lane' of ranks \[0, 1\], but ranks \[1\] did not conn"
        ):
            create_groups([spec], creation_timeout=second)
        assert len(dist.distributed_c10d._world.pg_map) == before


@pytest.mark.ranks(2)
def test_a_member_that_came_and_ended_before_it_connected_ends_the_others_with_the_group_named(ranks, monkeypatch):
    spec, before = GroupSpec((0, 1), "lane"), len(dist.distributed_c10d._world.pg_map)
    if ranks.rank == 1:

        def die(**arguments):
            raise KeyboardInterrupt

        with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
            changed.setattr(torch_compat, "make_group", die)
            create_groups([spec], creation_timeout=timedelta(seconds=1))
    else:
        with pytest.raises(
            GroupConnectionError, match=r"rank 0 could not create group 'lane' of ranks \[0, 1\]: .*look"
        ):
            create_groups([spec], creation_timeout=timedelta(seconds=1))
    assert len(dist.distributed_c10d._world.pg_map) == before


@pytest.mark.ranks(2)
def test_options_that_differ_between_members_do_not_make_a_group(ranks):
    own = timedelta(seconds=1 + ranks.rank)
    with pytest.raises(GroupCreationTimeoutError, match=f"but ranks \\[{1 - ranks.rank}\\] did not come"):
        create_groups([GroupSpec((0, 1), "tp")], timeout=own)
    grid = HyperCommGrid([2, 1], ["tp", "dp"][:: 1 - 2 * ranks.rank])
    with pytest.raises(GroupCreationTimeoutError, match=f"but ranks \\[{1 - ranks.rank}\\] did not come"):
        create_grid_groups({grid: grid.dim_names[:1]}, timeout=timedelta(seconds=1))


@pytest.mark.ranks(3)
def test_groups_keep_the_order_of_their_ranks_and_carry_point_to_point_traffic(ranks):
    ring = GroupSpec((2, 0, 1), "ring")
    lanes = [GroupSpec((0, 1), "forward", shared=False), GroupSpec((0, 1), "backward", shared=False)]
    groups = create_groups([ring, *lanes])
    group = groups[ring]
    assert dist.get_rank(group) == ring.ranks.index(ranks.rank)
    following = ring.ranks[(dist.get_rank(group) + 1) % 3]
    previous = ring.ranks[(dist.get_rank(group) - 1) % 3]
    sent, received = torch.tensor([ranks.rank], device=ranks.device), torch.tensor([-1], device=ranks.device)
    exchange = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, following, group), dist.P2POp(dist.irecv, received, previous, group)]
    )
    for work in exchange:
        work.wait()
    assert received.item() == previous
    if ranks.rank == 2:
        return
    assert groups[lanes[0]] is not groups[lanes[1]]
    # The two ranks take the lanes in opposite orders: what travels on one does not wait for the other.
    transfers = []
    for lane in lanes if ranks.rank == 0 else lanes[::-1]:
        value = torch.tensor([len(lane.label) if ranks.rank == 0 else 0], device=ranks.device)
        transfers.append(
            (lane, value, dist.isend(value, 1, groups[lane]) if ranks.rank == 0 else dist.irecv(value, 0, groups[lane]))
        )
    for lane, value, work in transfers:
        work.wait()
        assert value.item() == len(lane.label)


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="nccl2")
def test_a_timeout_of_operations_beside_that_of_creation_over_nccl2(ranks):
    """Which binds no `_set_default_timeout`."""
    spec = GroupSpec((0, 1), "lane")
    (group,) = create_groups([spec], timeout=timedelta(hours=9), creation_timeout=timedelta(seconds=20)).values()
    assert group.timeout == 9 * 3600
    ranks.barrier()
