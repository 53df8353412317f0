"""The wait for a device whose work may never end."""

import contextlib
import threading
import time

import pytest
import torch.distributed as dist

from pipegrid.survive.connections import require_no_watchdog
from pipegrid.survive.device import DeviceEnd
from pipegrid.survive.errors import SurviveError
from pipegrid.transport import streams


class Cuda:
    """In the place of `torch.cuda`: `synchronize` returns when the event ``ends`` is set."""

    def __init__(self):
        self.ends = threading.Event()

    def is_initialized(self):
        return True

    is_available = is_initialized

    def current_device(self):
        return 1

    def synchronize(self, device):
        assert str(device) == "cuda:1"
        self.ends.wait(20)


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    monkeypatch.setattr(streams, "cuda", made)
    yield made
    made.ends.set()


def test_a_process_without_a_device_waits_for_none():
    DeviceEnd(0.0).wait("step 1", str, first=False)


def test_it_returns_when_the_device_is_done(cuda):
    end = DeviceEnd(10.0)
    threading.Timer(0.1, cuda.ends.set).start()
    end.wait("step 1", str, first=False)
    assert cuda.ends.is_set()
    end.close()


def test_a_device_that_does_not_end_is_an_error_at_the_deadline(cuda):
    end = DeviceEnd(0.3)
    with pytest.raises(RuntimeError, match=r"cuda:1 has not done step 1 after 0\.3 s"):
        end.wait("step 1", str, first=False)


def test_in_the_first_function_others_may_load_and_compile(cuda):
    end, began = DeviceEnd(0.1), time.monotonic()
    threading.Timer(0.4, cuda.ends.set).start()
    end.wait("step 1", str, first=True)
    assert time.monotonic() - began > 0.3
    end.close()


def test_a_death_ends_the_wait(cuda):
    end, began = DeviceEnd(20.0), time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 3 is lost"):
        end.wait("step 1", lambda: "rank 3 is lost", first=False)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("setting", "ends"), [(None, True), ("3", True), ("2", True), ("0", False)])
def test_torchs_watchdog_would_end_those_that_live(monkeypatch, setting, ends):
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl-legacy")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    if setting is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", setting)
    with pytest.raises(SurviveError, match=r"nccl-legacy.*HANDLING=0") if ends else contextlib.nullcontext():
        require_no_watchdog()
