"""Backends by kind: what torch's names mean, resolved by what torch made."""

import re
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import P2PUsageError, open_lanes
from pipegrid.transport.backends import NcclTicket, kind_of, nccl_options
from pipegrid.transport.collectives.waiting import finish
from pipegrid.transport.control import opening
from pipegrid.transport.control.opening import resolve_device

from .two_ranks import THERE, config, until

SOURCES = Path(__file__).parents[2]
NCCL_NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")


class Old:
    """In the place of `ProcessGroupNCCL`, which needs a build with CUDA; its options are those of all three."""

    class Options:
        def __init__(self):
            self.is_high_priority_stream, self.config = False, SimpleNamespace(max_ctas=None)


class New:
    """In the place of `ProcessGroupNCCL2`."""


def made(backend):
    return SimpleNamespace(_get_backend=lambda device: backend)


@pytest.fixture(autouse=True)
def _classes(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Old, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", New, raising=False)


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is current, and backends that serve it, as far as devices are resolved."""
    monkeypatch.setattr(opening, "current_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)


def test_nccl_is_what_torch_made():
    old, new = kind_of("nccl", made(Old())), kind_of("nccl", made(New()))
    assert (old.waits, old.keeps_sends, old.connects) == ("orders", False, "lazy")
    assert (new.waits, new.keeps_sends, new.connects) == ("orders_and_raises", True, "eager")
    assert kind_of("nccl") == new, "without a group, the strictest"


def test_names_of_their_own():
    assert kind_of("nccl-legacy").ends_process == 60
    assert kind_of("nccl2").order.lone == "group"
    assert kind_of("nccl-lazy").order.lone == "pair"
    assert not kind_of("gloo").in_streams
    assert not kind_of("fake").peers


@pytest.mark.parametrize(("devices", "keeps", "ends"), [(["cuda"], True, 16), (["cpu"], False, 60)])
def test_an_unknown_backend_is_as_nccl2_where_it_serves_an_accelerator(monkeypatch, devices, keeps, ends):
    monkeypatch.setitem(dist.Backend.backend_capability, "somebodys", devices)
    kind = kind_of("somebodys")
    assert (kind.name, kind.devices, kind.options, kind.waits) == ("somebodys", tuple(devices), False, "orders")
    assert (kind.keeps_sends, kind.ends_process) == (keeps, ends)


@pytest.mark.parametrize("name", NCCL_NAMES)
def test_all_of_nccl_has_a_stream_of_high_priority_and_few_thread_blocks(name):
    options = nccl_options(name, 4)
    assert options.is_high_priority_stream
    assert options.config.max_ctas == 4
    assert nccl_options("gloo", 4) is None


@pytest.mark.parametrize("name", NCCL_NAMES)
def test_lanes_beside_nccl_of_any_name_are_on_the_gpu(world, monkeypatch, gpu, name):
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: f"cpu:gloo,cuda:{name}")
    assert resolve_device(None, None) == (name, torch.device("cuda", 1))


@pytest.mark.parametrize("name", NCCL_NAMES)
def test_a_backend_of_which_torch_has_made_no_group_yet(world, monkeypatch, gpu, name):
    """torch 2.15 notes the devices of nccl2 and its like at their first group."""
    monkeypatch.delitem(dist.Backend.backend_capability, name, raising=False)
    assert resolve_device(name, None) == (name, torch.device("cuda", 1))
    with pytest.raises(P2PUsageError, match=r"does not move tensors of cpu"):
        resolve_device(name, "cpu")


def test_a_default_group_on_another_gpu_is_an_error_that_names_both(world, gpu):
    """As nccl2 binds it, by LOCAL_RANK, where the program has chosen another GPU since."""
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    with pytest.raises(P2PUsageError, match=r"tensors of cuda:1.*bound to cuda:0.*set_device.*LOCAL_RANK"):
        open_lanes([], backend="nccl")
    with pytest.raises(P2PUsageError, match=r"tensors of cuda:3.*bound to cuda:0"):
        open_lanes([], backend="nccl", device="cuda:3")
    assert resolve_device("nccl", "cuda:0") == ("nccl", torch.device("cuda", 0))
    assert resolve_device("gloo", "cuda:1") == ("gloo", torch.device("cuda", 1))


def test_staged_payloads_of_a_job_over_gloo_are_on_the_gpu(world, gpu):
    assert resolve_device("gloo", None) == ("gloo", torch.device("cpu"))
    assert resolve_device("gloo", None, staged=True) == ("gloo", torch.device("cuda", 1))


class Work:
    """Counts the calls that reach the driver on a GPU."""

    def __init__(self):
        self.calls = []

    def wait(self):
        self.calls.append("wait")

    def is_completed(self):
        self.calls.append("is_completed")
        return True

    def get_future_result(self):
        self.calls.append("get_future_result")
        return SimpleNamespace(done=lambda: False)


def test_a_wait_that_raises_is_not_followed_by_a_question():
    for name, calls in (
        ("nccl2", ["wait"]),
        ("nccl-lazy", ["wait"]),
        ("nccl-legacy", ["wait", "is_completed", "get_future_result"]),
    ):
        work = Work()
        NcclTicket((work,), None, kind_of(name)).order()
        assert work.calls == calls


def test_a_send_that_is_polled_and_never_waited_for_lets_its_tensors_go_once():
    for name, waits in (("nccl2", 1), ("nccl-legacy", 0)):
        polled, ordered = Work(), Work()
        ticket = NcclTicket((polled,), None, kind_of(name))
        assert ticket.done()
        assert ticket.done()
        assert polled.calls.count("wait") == waits
        ticket = NcclTicket((ordered,), None, kind_of(name))
        ticket.order()
        ticket.done()
        assert ordered.calls.count("wait") == 1


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="nccl2")
def test_an_idle_lane_keeps_no_send_that_nobody_waits_for(ranks):
    with open_lanes([THERE], config=config(), agreed={THERE: torch.ones(4)}) as lanes:
        if ranks.rank == 0:
            sent = torch.ones(4)
            gone = weakref.ref(sent)
            handle = lanes[THERE].isend(sent)
            del sent
            until(handle.is_completed)
            until(lambda: gone() is None)
        else:
            assert lanes[THERE].irecv().result().tolist() == [1] * 4
        ranks.barrier()


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="nccl2")
def test_a_collective_that_is_late_is_polled_so_that_its_group_lives_on(ranks):
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True) if ranks.rank == 0 else None
    if ranks.rank == 0:
        late = finish(work, None, on_device=False, end=time.monotonic() + 0.2)
        assert late is not None
        assert late.why == "late"
        assert ranks.fake_device.violations == []  # a wait with a timeout would have ended the process
    ranks.barrier()
    work = work or dist.all_reduce(x, async_op=True)
    assert finish(work, None, on_device=False) is None
    assert x.item() == 2


@pytest.mark.ranks(2, backend="gloo")  # NCCL's fake reports a group that is destroyed with work under way
def test_a_wait_for_a_collective_of_a_group_that_is_destroyed_meanwhile_is_no_error_of_torchs(ranks):
    group = dist.new_group([0, 1])
    x = torch.ones(1)
    work = dist.all_reduce(x, group=group, async_op=True)
    dist.destroy_process_group(group)
    late = finish(work, group, on_device=False, end=time.monotonic() + 20.0)
    assert late is None or late.why == "lost"
    ranks.barrier()


def strings(source):
    """The string literals of one line."""
    return re.findall(r"[\"']([^\"']*)[\"']", source)


def test_two_files_alone_know_the_names_of_nccl():
    """The table of order models, which needs no torch, and that of kinds: others ask `kind_of`.

    A file that writes a program or versions for its user, a test world, or an example of a docstring may name them.
    """
    allowed = {"order.py", "kinds.py", "script.py", "world.py", "settings.py", "flight_recorder.py"}
    found = [
        f"{path.name}:{number}"
        for path in SOURCES.glob("*/src/**/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if path.name not in allowed and not re.search("``|^ *>>> ", line) and set(strings(line)) & set(NCCL_NAMES)
    ]
    assert found == []


def test_only_works_of_a_cpu_are_waited_for_with_a_timeout():
    """Past it, nccl2 takes the group of a device for failed, and torch's watchdog ends the process."""
    cpu_only = {
        "survive/neighbours.py": "gloo's group",
        "transport/backends/gloo.py": "gloo's payloads",
        "transport/collectives/small_all_gather.py": "over gloo",
        "transport/collectives/waiting.py": "branch without streams",
        "transport/lane/ending.py": "end notices, over gloo",
        "transport/lane/stream_waits.py": "headers, over gloo",
        "transport/backends/wire.py": "gloo's control channel",
    }
    pattern = re.compile(r"(?:\bwork\w*|works\.popleft\(\))\.(?:wait|synchronize)\(\s*[^)\s]")
    found = {
        path.as_posix().rpartition("/pipegrid/")[2]
        for path in SOURCES.glob("*/src/**/*.py")
        if pattern.search(path.read_text()) and not {"testing", "fake_nccl"} & {*path.parts}
    }
    assert found == set(cpu_only), "where only works of a CPU are waited for, name the file in cpu_only with the reason"
