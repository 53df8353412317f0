"""All gloo groups of a rank's lanes are served by one thread; and the names of torch that this stands on."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import LaneSpec, open_lanes
from pipegrid.transport.backends.gloo import BACKEND, one_loop

from .two_ranks import until

SPECS = [LaneSpec(0, 1, "a"), LaneSpec(0, 1, "b"), LaneSpec(1, 0, "a"), LaneSpec(1, 0, "b")]
over_gloo = pytest.mark.ranks(2, backend="gloo")  # lanes of a device group move payloads elsewhere


def loop_threads():
    """The threads of this process that serve gloo's connections, by the name that gloo gives them."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("this system does not list threads in /proc/self/task")
    return [int(task.name) for task in tasks.iterdir() if (task / "comm").read_text().strip() == "gloo_tcp_loop"]


def loops():
    return len(loop_threads())


@over_gloo
def test_lanes_that_are_opened_together_share_one_thread(ranks):
    before = loops()
    if before == 0:  # the default group has one
        pytest.skip("the gloo of this torch does not name its threads")
    with open_lanes(SPECS) as lanes:
        until(lambda: loops() == before + 1)  # threads take a moment to have their names, or to be gone
        other = open_lanes([LaneSpec(0, 1, "c")])
        until(lambda: loops() == before + 2)
        other.close()
        assert len({id(lane.group) for lane in lanes.values()}) == len(SPECS)
        # Each has a connection of its own all the same.
        if ranks.rank == 0:
            lanes[SPECS[0]].abort("only this one")
            lanes[SPECS[1]].isend(torch.ones(3)).wait()
        else:
            assert lanes[SPECS[1]].irecv().result().tolist() == [1, 1, 1]


@over_gloo
def test_no_loop_preempts_a_thread_that_may_hold_its_connection(ranks):
    """Neither the lanes' own nor that of the default group, over which a step's collectives go."""
    if not loops():
        pytest.skip("the gloo of this torch does not name its threads")
    with open_lanes(SPECS):
        assert {os.sched_getscheduler(thread) for thread in loop_threads()} == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


@over_gloo
def test_a_group_on_a_loop_is_an_ordinary_group(ranks):
    with open_lanes(SPECS) as lanes:
        group = lanes[SPECS[0]].group
        assert (dist.get_backend(group), dist.get_process_group_ranks(group)) == (BACKEND, [0, 1])
        total = torch.tensor(ranks.rank + 1)
        dist.all_reduce(total, group=group)
        assert total == 3


@over_gloo
def test_what_is_behind_a_group_moves_what_the_group_would(ranks):
    """Lanes call it themselves: a message of one side by the group meets a receive of the other by what is behind."""
    with open_lanes(SPECS[:1]) as lanes:
        backend = lanes[SPECS[0]].mover._send.__self__
        group, peer = lanes[SPECS[0]].group, 1 - ranks.rank
        assert isinstance(backend, dist.ProcessGroupGloo)
        assert (backend.rank(), backend.size()) == (group.rank(), group.size())
        for sender, verbs in enumerate((backend, group)):
            data = torch.full((3,), float(ranks.rank))
            if ranks.rank == sender:
                verbs.send([data], peer, 77).wait(timedelta(seconds=20))
            else:
                (group if verbs is backend else backend).recv([data], peer, 77).wait(timedelta(seconds=20))
                assert data.tolist() == [sender] * 3


def test_torchs_own_variable_names_the_interfaces(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    _, loop = one_loop()
    assert len(loop._devices) == 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    _, loop = one_loop()
    with pytest.raises(RuntimeError):  # with the first group, whose creation may name one
        _ = loop._devices


def test_options_of_gloo_have_the_fields_that_we_set():
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = timedelta(seconds=3)
    options.group_name, options.global_ranks_in_group = "lane", [4, 7]
    assert (options._threads, options._timeout, len(options._devices)) == (1, timedelta(seconds=3), 1)


def test_the_backend_is_registered_once_and_takes_no_device_from_gloo():
    assert one_loop()[0] == one_loop()[0] == BACKEND
    assert dist.Backend.backend_list.count(BACKEND) == 1
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert set(dist.Backend.default_device_backend_map) & set("cpu") == set()
