"""Facts of torch without a public name that the fake GPU relies on."""

import pytest
import torch

from pipegrid.fake_nccl import torch_compat
from pipegrid.fake_nccl.torch_compat import TorchDispatchMode, WeakStorage, living

pytestmark = pytest.mark.thorough


class Seen(TorchDispatchMode):
    """The operations inside, with their arguments by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.calls.append((operation, torch_compat.arguments_of(operation, args, kwargs or {})))
        return operation(*args, **(kwargs or {}))


def test_a_weak_storage_expires_when_its_last_tensor_goes_and_gives_the_storage_before():
    x = torch.arange(4)
    view, weak = x[1:], WeakStorage(x.untyped_storage())
    assert weak.cdata == WeakStorage(view.untyped_storage()).cdata
    del x
    assert not weak.expired()
    assert living(weak).data_ptr() == view.untyped_storage().data_ptr()
    del view
    assert weak.expired()
    assert living(weak) is None


def test_the_dispatch_mode_sees_the_operations_of_a_backward_and_their_roles():
    w = torch.ones(2, requires_grad=True)
    with Seen() as seen:
        (w * 2).sum().backward()
        w.grad.add_(1)
        w.grad.view(2, 1)
        torch.equal(w, w)
    named = {torch_compat.name_of(operation): (operation, arguments) for operation, arguments in seen.calls}
    assert {"mul", "sum", "add_", "view", "equal"} <= set(named)
    assert [name for name, (each, _) in named.items() if torch_compat.is_view(each)] == ["expand", "detach", "view"]
    assert torch_compat.written_by(*named["add_"])[0].data_ptr() == w.grad.data_ptr()
    assert torch_compat.written_by(*named["mul"]) == []
    assert [name for name, call in named.items() if torch_compat.reads_values(*call)] == ["equal"]


def test_an_index_reads_values_only_as_a_mask():
    x = torch.arange(4.0)
    with Seen() as seen:
        x[x > 1]
        x[torch.tensor([1, 0])]
        x.nonzero()
    found = [
        torch_compat.reads_values(*call) for call in seen.calls if torch_compat.name_of(call[0]) in ("index", "nonzero")
    ]
    assert found == [True, False, True]


def test_a_work_and_a_group_of_python_are_torchs():
    assert issubclass(type("Group", (torch_compat.GroupBase,), {}), torch.distributed.ProcessGroup)
    future = torch.futures.Future()
    done = type(
        "Work", (torch_compat.WorkBase,), {"wait": lambda self, timeout=None: True, "get_future": lambda _: future}
    )
    assert done().wait()
    assert done().get_future() is future
