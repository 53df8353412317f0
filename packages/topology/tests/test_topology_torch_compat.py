"""The private parts of torch that `torch_compat` uses, pinned by what they do: a torch that changes them fails here."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipegrid.topology import GridError, GroupSpec, HyperCommGrid, WorldError, create_groups, destroy_groups
from pipegrid.topology import torch_compat as compat


@pytest.fixture
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_worlds_records_are_what_we_read_and_write(world):
    backend, store = c10d._world.pg_map[c10d._get_default_group()]
    assert backend == "fake"
    assert store is c10d._get_default_store()
    assert c10d._world.pg_names[world] in c10d._world.pg_names.values()
    assert c10d._world.pg_group_ranks[world] == {rank: rank for rank in range(8)}
    assert c10d._get_default_timeout(dist.Backend("gloo")) == timedelta(minutes=30)


def test_all_groups_of_the_process_are_known_and_those_of_a_device_can_be_aborted(world):
    made = dist.new_group([2, 3])
    assert compat.living_groups() == [world, made]
    assert list(compat.aborts_of([world, made], {"gloo"})) == [world, made]
    assert compat.aborts_of([world, made], {"gloo", "fake"}) == {}
    dist.destroy_process_group(made)
    assert compat.living_groups() == [world]
    assert compat.aborts_of([made], ()) == {}


def test_a_made_group_is_an_ordinary_group(world):
    group = compat.make_group(
        ranks=[5, 2, 7],
        name="ours",
        backend="fake",
        timeout=timedelta(seconds=9),
        creation_timeout=timedelta(seconds=9),
        pg_options=None,
        group_desc="lane",
    )
    assert dist.get_process_group_ranks(group) == [5, 2, 7]
    assert (dist.get_rank(group), dist.get_world_size(group)) == (1, 3)
    assert (dist.get_group_rank(group, 7), dist.get_global_rank(group, 0)) == (2, 5)
    assert (group.group_name, group.group_desc) == ("ours", "lane")
    assert (dist.get_backend(group), compat.is_alive(group), compat.is_name_taken("ours")) == ("fake", True, True)
    dist.destroy_process_group(group)
    assert not compat.is_alive(group)
    assert not compat.is_name_taken("ours")


def test_torchs_own_names_depend_on_history_and_ours_do_not(world):
    """Why there is a module of our own: the day that this fails, `new_group` may serve."""

    def names():
        theirs, ours = dist.new_group([1, 2], use_local_synchronization=True), create_groups([GroupSpec((1, 2), "a")])
        found = theirs.group_name, *(group.group_name for group in ours.values())
        dist.destroy_process_group(theirs)
        destroy_groups(ours)
        return found

    first, _ = names(), create_groups([GroupSpec((2,), "elsewhere"), GroupSpec((2, 3), "elsewhere")])
    second = names()
    assert first[0] != second[0]
    assert first[1] == second[1]


class BoundWorld:
    """A default group with a device bound to it, as far as group creation looks at it; needs no GPU."""

    bound_device_id = torch.device("cuda", 0)

    def rank(self):
        return 1


def test_a_bound_device_is_hidden_from_torch_while_it_makes_a_group(world, monkeypatch):
    """Bound, torch would split the default communicator, which only all ranks of the world together can do."""
    bound, seen = BoundWorld(), {}

    def helper(*positional, device_id, **others):
        seen.update(device_id=device_id, bound=bound.bound_device_id, group_rank=positional[1])
        raise ConnectionError("after the look")

    monkeypatch.setattr(c10d, "_get_default_group", lambda: bound)
    monkeypatch.setattr(c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
    minute = timedelta(minutes=1)
    with pytest.raises(ConnectionError, match="after the look"):
        compat.make_group(
            ranks=[0, 1],
            name="n",
            backend="cuda:gloo",
            timeout=minute,
            creation_timeout=minute,
            pg_options=None,
            group_desc="d",
        )
    assert seen == {"device_id": torch.device("cuda", 0), "bound": None, "group_rank": 1}
    assert bound.bound_device_id == torch.device("cuda", 0)


class Nccl:
    """The options of NCCL in torch 2.15."""

    class Options:
        lazy_init = False


@pytest.mark.parametrize("options", [Nccl.Options, object], ids=["2.15", "before"])
def test_the_places_of_ranks_that_may_be_dead_connect_to_none_of_them(monkeypatch, options):
    monkeypatch.setattr(Nccl, "Options", options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(compat, "connecting_device", lambda served, bound: torch.device("cpu"))
    seen = {}

    def helper(*arguments, device_id, backend_options, **_):
        seen.update(device=device_id, lazy=getattr(backend_options, "lazy_init", None), name=arguments[5])
        raise ConnectionError("after the look")

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
        monkeypatch.setattr(compat, "resolve_backend", lambda backend: "cuda:nccl")
        monkeypatch.setattr(compat, "backends_by_device", lambda backend: {"cuda": "nccl"})
        with pytest.raises(ConnectionError, match="after the look"):
            HyperCommGrid([2, 2], ["dp", "pp"]).create_places("pp")
    finally:
        dist.destroy_process_group()
    assert (seen["device"], seen["lazy"]) == (None, None if options is object else True)
    assert "from rank 1" in seen["name"]  # the other group of these dims has a name of its own


def cpu_only(options, _):
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


@pytest.mark.parametrize("backend", ["cpu:gloo", "gloo_of_the_cpu"])
def test_a_group_for_the_cpu_alone_does_not_take_the_default_groups_device(backend):
    """`init_process_group("nccl", device_id=...)`, and a control group on the CPU."""
    if backend.upper() not in dist.Backend._plugins and ":" not in backend:
        dist.Backend.register_backend(backend, cpu_only, extended_api=True, devices=["cpu"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        (group,) = create_groups([GroupSpec((0,), "control")], backend=backend).values()
        assert group.bound_device_id is None
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == 1
    finally:
        dist.destroy_process_group()


def test_the_device_on_which_a_group_connects(monkeypatch):
    bound, current = torch.device("cuda", 3), torch.device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for served, when_bound, unbound in (
        ({"cuda": "nccl"}, bound, current),
        ({"cpu": "gloo", "cuda": "nccl"}, bound, current),
        ({"cpu": "gloo", "cuda": "gloo"}, bound, None),
        ({"cpu": "gloo"}, None, None),
    ):
        assert compat.connecting_device(served, bound) == when_bound
        assert compat.connecting_device(served, None) == unbound


def test_a_timeout_for_creation_and_one_for_operations():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        spec = GroupSpec((0,), "lane")
        (group,) = create_groups([spec], timeout=timedelta(hours=9), creation_timeout=timedelta(seconds=20)).values()
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=9)
    finally:
        dist.destroy_process_group()


class Nccl2:
    """Bound as `ProcessGroupNCCL2` of torch 2.15 is: the timeout is the group's to set."""

    def __init__(self):
        self.timeouts = []
        self.set_timeout = self.timeouts.append


class Old:
    """As torch 2.11 binds a group and its backend."""

    _device_types = (torch.device("cuda"),)

    def __init__(self):
        self.timeouts = []
        self._set_default_timeout = self.timeouts.append

    def _get_backend(self, device):
        assert device.type == "cuda"
        return self


@pytest.mark.parametrize("kind", [Nccl2, Old])
def test_a_timeout_is_set_by_what_the_backend_binds(monkeypatch, kind):
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    group = kind()
    compat.set_timeout(group, timedelta(days=7))
    assert group.timeouts == [timedelta(days=7)]


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="a build of torch 2.15 or newer with CUDA")
def test_nccl2_has_the_public_name_alone():
    assert hasattr(dist.ProcessGroupNCCL2, "set_timeout")
    assert not hasattr(dist.ProcessGroupNCCL2, "_set_default_timeout")
    assert dist.ProcessGroupNCCL2.Options is dist.ProcessGroupNCCL.Options


class Config:
    def __init__(self, ctas):
        self.max_ctas = ctas
        self.net_name = None


class Options:
    """Shaped as `ProcessGroupNCCL.Options`, which needs a build with CUDA."""

    def __init__(self, *, high=False, ctas=4):
        self.is_high_priority_stream = high
        self.config = Config(ctas)
        self.group_name = "written by torch"
        self.global_ranks_in_group = [0, 1]
        self._timeout = timedelta(minutes=10)

    def method(self):
        raise AssertionError


def test_options_are_described_by_what_was_set_and_not_by_what_torch_writes():
    assert compat.describe_options(None) == "-"
    text = compat.describe_options(Options())
    assert text == "Options(config=(Config(max_ctas=4, net_name=None)), is_high_priority_stream=False)"
    changed = Options()
    changed.group_name, changed.global_ranks_in_group = "another", [4]
    assert compat.describe_options(changed) == text
    assert compat.describe_options(Options(ctas=8)) != text
    assert compat.describe_options(Options(high=True)) != text


def test_options_of_gloo_are_described_by_their_values():
    options = dist.ProcessGroupGloo._Options()
    assert compat.describe_options(options) == compat.describe_options(dist.ProcessGroupGloo._Options())
    assert "0x" not in compat.describe_options(options)


def test_backends(world):
    assert compat.resolve_backend(None) == "fake"
    assert compat.resolve_backend("gloo") == "gloo"
    assert compat.is_fake("fake")
    assert not compat.is_fake("gloo")
    assert not compat.is_fake("cpu:gloo,cuda:nccl")
    assert compat.resolve_timeout("gloo", None) == timedelta(minutes=30)
    assert compat.resolve_timeout("gloo", timedelta(seconds=1)) == timedelta(seconds=1)


def test_backends_that_cannot_do_it_are_errors(world):
    with pytest.raises(GridError, match="the backend 'mpi' does not serve groups here"):
        compat.resolve_backend("mpi")
    with pytest.raises(GridError, match="the backend 'cpu:gloo,cuda:oops' does not serve groups here"):
        compat.resolve_backend("cpu:gloo,cuda:oops")


def test_groups_need_a_world():
    with pytest.raises(WorldError, match=r"call torch\.distributed\.init_process_group first"):
        create_groups([GroupSpec((0,), "a")])
