"""Lanes are opened by members only, in one order, each proved by a message; and they are closed whole."""

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import FakeDevice, register
from pipegrid.topology import GroupSpec, GroupStoreError
from pipegrid.transport import (
    LaneSpec,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPeerError,
    P2PUsageError,
    open_lanes,
)
from pipegrid.transport.backends import GlooMover
from pipegrid.transport.control import connector

from .two_ranks import BACK, DEADLINE, THERE, Counted, config, equal, until, values


def running():
    """The threads of this process, without those of a fake GPU, which last as long as the test."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("fake ")}


def test_a_silent_store_is_not_a_silent_peer():
    """Where members of a group meet, a stopped host of the store says nothing of the other end."""
    spec = GroupSpec((0, 1), "transport/0>1/data", shared=False)
    opens = connector.Connector(0, backend="gloo", device=torch.device("cpu"), config=config())
    with (
        pytest.raises(P2PPeerError, match=r"rank 0 could not open lanes .* did not answer"),
        opens._meeting({spec: [LaneSpec(0, 1)]}),
    ):
        raise GroupStoreError("the store of the default process group did not answer")


class TestOpening:
    @pytest.mark.ranks(3)
    @pytest.mark.parametrize("communicators", ["separate", "shared"])
    def test_each_lane_has_carried_a_message_the_way_that_payloads_go(self, ranks, monkeypatch, communicators):
        if ranks.backend not in ("gloo", "staged", "fake_nccl"):
            pytest.skip(f"counts what gloo and the fake NCCL are asked; {ranks.backend} has another mover")
        specs = [LaneSpec(0, 1, "a"), LaneSpec(0, 1, "b"), LaneSpec(1, 2), LaneSpec(2, 0), LaneSpec(1, 1)]
        seen = []

        def counted(backend, *arguments):
            return GlooMover(Counted(backend, seen), *arguments)

        monkeypatch.setattr(connector, "GlooMover", counted)
        with open_lanes(specs, config=config(communicators=communicators)) as lanes:
            remote = [lane for lane in lanes.values() if not lane.spec.is_local]
            verbs = ["send" if lane.rank == lane.spec.source else "recv" for lane in remote]
            if ranks.fake_device is None:
                assert seen == [(one, 1) for verb in verbs for one in (verb, f"wait for {verb}")]
            else:
                launched = [operation for launch in ranks.fake_device.launches for operation in launch.operations]
                assert [(operation.kind, operation.nbytes) for operation in launched] == [(verb, 1) for verb in verbs]

    @pytest.mark.ranks(3)
    def test_only_members_get_a_lane(self, ranks):
        specs = [LaneSpec(0, 1), LaneSpec(1, 2), LaneSpec(2, 0), LaneSpec(1, 1)]
        with open_lanes(specs, config=config()) as lanes:
            assert list(lanes) == sorted(spec for spec in specs if ranks.rank in spec.pair)
            groups = {id(lane.group) for lane in lanes.values() if lane.group is not None}
            assert len(groups) == sum(not spec.is_local for spec in lanes)

    @pytest.mark.ranks(3)
    def test_in_one_order_whatever_each_rank_knows_and_says_first(self, ranks):
        everything = [LaneSpec(a, b, label) for a in range(3) for b in range(3) if a != b for label in "xy"]
        mine = [spec for spec in everything if ranks.rank in spec.pair]
        given = mine if ranks.rank == 0 else everything[:: -1 if ranks.rank == 1 else 1]
        with open_lanes(given, config=config()) as lanes:
            assert set(lanes) == set(mine)

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("backend", ["gloo", "fake_nccl"])
    def test_beside_a_default_group_that_is_bound_to_a_gpu(self, ranks, backend):
        """As `init_process_group(device_id=)` leaves it; groups of CPU tensors have no use for that device."""
        if backend == "fake_nccl":
            register(FakeDevice(serial=False))
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        with open_lanes([THERE], config=config(), backend=backend) as lanes:
            if ranks.rank == 0:
                lanes[THERE].isend(torch.ones(2)).wait()
            else:
                assert lanes[THERE].irecv().result().tolist() == [1, 1]
            ranks.barrier()

    @pytest.mark.ranks(2, fake_nccl="streams")  # receives in another order than sends
    def test_twice_gives_lanes_of_their_own(self, ranks):
        with open_lanes([THERE], config=config()) as first, open_lanes([THERE], config=config()) as second:
            if ranks.rank == 0:
                sent = [lanes[THERE].isend(torch.tensor(float(n))) for n, lanes in enumerate((first, second))]
                for handle in sent:
                    handle.wait()
            else:
                assert second[THERE].irecv().result().item() == 1
                assert first[THERE].irecv().result().item() == 0

    @pytest.mark.ranks(2)
    def test_on_a_shared_communicator_all_lanes_of_two_ranks_use_one_group(self, ranks):
        specs = [THERE, BACK, LaneSpec(0, 1, "more")]
        with open_lanes(specs, config=config(communicators="shared")) as lanes:
            assert len({id(lane.group) for lane in lanes.values()}) == 1

    @pytest.mark.ranks(2)
    def test_different_settings_are_told_on_both_sides(self, ranks):
        dtype = torch.float32 if ranks.rank == 0 else torch.bfloat16
        with pytest.raises(P2PMismatchError, match=r"lane 0>1\[there\] with different settings.*pipeline_dtype"):
            open_lanes([THERE], config=config(pipeline_dtype=dtype))

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("different", "settings", "specs"),
        [
            ("communicators': ('separate', 'shared')", {"communicators": "shared"}, [THERE, BACK]),
            ("open_deadline': ('20.0', '21.0')", {"open_deadline": DEADLINE + 1}, [THERE, BACK]),
            ("lanes': ('0>1[there], 1>0[back]', '0>1[there]')", {}, [THERE]),
        ],
        ids=["communicators", "deadline", "lanes"],
    )
    def test_groups_that_would_never_meet_are_an_error_at_once_on_both_sides(self, ranks, different, settings, specs):
        began = time.monotonic()
        with pytest.raises(P2PMismatchError, match=r"^ranks \d and \d open lanes with different settings") as found:
            open_lanes(specs if ranks.rank else [THERE, BACK], config=config(**(settings if ranks.rank else {})))
        assert time.monotonic() - began < DEADLINE / 2
        assert ranks.rank or f"{{'{different}}}" in str(found.value)

    @pytest.mark.ranks(2)
    def test_shapes_that_stand_from_the_start_need_no_header(self, ranks):
        example = {"x": torch.empty(2, 3, device="meta"), "n": torch.empty(4, dtype=torch.int64, device="meta")}
        with open_lanes([THERE], config=config(), agreed={THERE: example}) as lanes:
            payload = {"x": values((2, 3)), "n": values((4,), torch.int64)}
            if ranks.rank == 0:
                lanes[THERE].isend(payload).wait()
            else:
                assert equal(payload, lanes[THERE].irecv().result())
            assert lanes[THERE].stats.headers == lanes[THERE].stats.host_syncs == 0

    @pytest.mark.ranks(2)
    def test_shapes_that_stand_are_compared_first(self, ranks):
        example = torch.empty(2 + ranks.rank, 900, device="meta")
        with pytest.raises(P2PMismatchError, match=r"'agreed': \('float32\[[23], 900\]', 'float32\[[23], 900\]'\)"):
            open_lanes([THERE], config=config(), agreed={THERE: example})

    @pytest.mark.ranks(2)
    def test_what_requires_grad_from_the_start_is_compared_first(self, ranks):
        example = [torch.empty(2, requires_grad=True), torch.empty(2, requires_grad=ranks.rank == 0)]
        with pytest.raises(P2PMismatchError, match="different settings.*'gradients': .*True, False"):
            open_lanes([THERE], config=config(), agreed={THERE: example})

    @pytest.mark.ranks(2)
    def test_a_lane_twice_or_past_the_world_is_refused(self, ranks):
        with pytest.raises(P2PUsageError, match="^lane 0>1 is given twice$"):
            open_lanes([LaneSpec(0, 1), LaneSpec(0, 1)])
        with pytest.raises(P2PUsageError, match="^lane 0>2 has a rank beyond the world of 2$"):
            open_lanes([LaneSpec(0, 2)])
        with pytest.raises(P2PUsageError, match="^agreed has lane 1>0.*, which is not to be opened$"):
            open_lanes([THERE], agreed={BACK: torch.ones(1)})

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("gloo", "meta"), ("mpi", None)])
    def test_backend_and_device_must_go_together(self, ranks, backend, device):
        with pytest.raises(P2PUsageError, match="does not move tensors of"):
            open_lanes([LaneSpec(0, 0)], backend=backend, device=device)

    @pytest.mark.ranks(2)
    def test_closed_lanes_free_their_groups_and_say_so(self, ranks):
        lanes = open_lanes([THERE], config=config())
        group = lanes[THERE].group
        assert dist.get_process_group_ranks(group) == [0, 1]
        lanes.close()
        lanes.close()
        with pytest.raises(KeyError):
            dist.get_process_group_ranks(group)
        with pytest.raises(P2PLaneDeadError, match="was closed on rank"):
            lanes[THERE].isend(torch.ones(1)) if ranks.rank == 0 else lanes[THERE].irecv()

    @pytest.mark.ranks(2)
    def test_lanes_that_nothing_holds_any_more_say_so(self, ranks):
        lane = open_lanes([THERE], config=config())[THERE]
        gc.collect()
        with pytest.raises(P2PLaneDeadError, match=r"nothing held the result of open_lanes\(\).*keep it as long as"):
            lane.isend(torch.ones(1)) if ranks.rank == 0 else lane.irecv()

    @pytest.mark.ranks(2)
    def test_no_thread_outlives_its_lanes(self, ranks):
        before = running()
        with open_lanes([THERE], config=config()) as lanes:
            handle = lanes[THERE].isend(torch.ones(1)) if ranks.rank == 0 else lanes[THERE].irecv()
            until(handle.is_completed)
            assert any(thread.name.startswith("pipegrid") for thread in running())
        assert running() <= before
