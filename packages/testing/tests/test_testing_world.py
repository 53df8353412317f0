"""The device of a rank, on machines with GPUs that this one need not be."""

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch

from pipegrid.testing import world
from pipegrid.testing.messages import RunTest, Settings


def job(backend, *, rank=0, world_size=2, largest_world=4):
    settings = Settings(world_size, backend, deadline=1.0, strict_sends=False, fake_nccl="streams")
    return RunTest("", "", rank, settings, "", largest_world)


@pytest.fixture
def machine(monkeypatch):
    """A machine with GPUs and a loaded NCCL; the devices that were chosen."""

    def has(gpus, nccl=(2, 31, 2)):
        chosen = []
        for name in world._SHARED_GPU_SETTINGS:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "environ", dict(os.environ))

        def version(code):
            ctypes.cast(code, ctypes.POINTER(ctypes.c_int))[0] = nccl[0] * 10000 + nccl[1] * 100 + nccl[2]

        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(world.ctypes, "CDLL", lambda name: SimpleNamespace(ncclGetVersion=version))
        return chosen

    return has


@pytest.mark.parametrize("version", [(2, 29, 7), (2, 31, 2), (3, 0, 1)])
def test_the_version_of_nccl_is_that_of_the_loaded_library(machine, version):
    machine(1, version)
    assert world.nccl_version() == version


@pytest.mark.parametrize("backend", ["nccl", "staged"])
def test_ranks_share_the_gpus_that_there_are(machine, backend):
    chosen = machine(2)
    devices = [world.device_of(job(backend=backend, rank=rank, world_size=5)) for rank in range(5)]
    assert [device.index for device in devices] == [0, 1, 0, 1, 0]
    assert chosen == devices


def test_an_nccl_that_cannot_share_a_gpu_skips_the_test_with_the_numbers(machine):
    machine(2, (2, 30, 7))
    assert world.device_of(job(backend="nccl", rank=1)).index == 1
    assert world.device_of(job(backend="staged", world_size=3)).index == 0
    with pytest.raises(pytest.skip.Exception, match=r"3 ranks on 2 GPUs: NCCL 2\.30\.7 is loaded, .* needs 2\.31\.2"):
        world.device_of(job(backend="nccl", world_size=3))


@pytest.mark.parametrize(("gpus", "shared"), [(1, True), (2, True), (4, False), (8, False)])
def test_ranks_that_share_a_gpu_have_nccls_settings_for_it(machine, gpus, shared):
    """Also in a test of the session that has a GPU for each rank: NCCL reads them once."""
    machine(gpus)
    os.environ["NCCL_MAX_CTAS"] = "2"
    world.device_of(job(backend="nccl", world_size=1))
    found = {name: os.environ.get(name) for name in world._SHARED_GPU_SETTINGS}
    assert found == {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1" if shared else None,
        "NCCL_NVLS_ENABLE": "0" if shared else None,
        "NCCL_MAX_CTAS": "2",
    }


def test_an_nccl_inside_of_torch_has_torchs_version(machine, monkeypatch):
    def missing(name):
        raise OSError(name)

    machine(1)
    monkeypatch.setattr(world.ctypes, "CDLL", missing)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    assert world.nccl_version() == (2, 30, 1)


def test_a_gpu_that_a_test_is_the_first_to_use_is_no_leak(monkeypatch):
    """Else each worker would be replaced after its first test on a GPU, and open it again."""
    used = iter([False, True, True, True])
    monkeypatch.setattr(world, "_has_children", lambda: False)
    monkeypatch.setattr(world, "_held", iter([{"descriptors": 10}]).__next__)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: next(used))
    first, second = [], []
    with world.watch_leaks(first):
        pass
    monkeypatch.setattr(world, "_held", iter([{"descriptors": 70}, {"descriptors": 130}]).__next__)
    with world.watch_leaks(second):
        pass
    assert (first, second) == ([], ["60 descriptors"])


def test_without_a_gpu_staged_is_gloo_on_the_cpu(machine):
    machine(0)
    assert world.device_of(job(backend="staged")) == torch.device("cpu")
    with pytest.raises(pytest.UsageError, match="backend 'nccl' needs a GPU and torch sees none"):
        world.device_of(job(backend="nccl"))


@pytest.mark.ranks(2, backend="staged")
def test_a_staged_world_has_gloo_for_both_devices(ranks):
    x = torch.ones(1, device=ranks.device)
    torch.distributed.all_reduce(x)
    assert x.item() == 2
    assert ranks.backend == "staged"
    assert torch.distributed.get_backend_config() == "cpu:gloo,cuda:gloo"
