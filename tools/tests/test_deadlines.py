"""Collectives and calls of a store are made where a deadline ends them: a rank that waits for a dead one must not hang.

The tables say for each file what ends its waits. A new place goes through one of these, or has its reason here.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each starts its collectives with `start`, and leaves the wait to what is named here.
COLLECTIVES = {
    "bridges/colocated.py": "CollectiveWaits, with the bridge's deadline",
    "bridges/replication.py": "CollectiveWaits, with the bridge's deadline",
    "bridges/steps.py": "CollectiveWaits, with the bridge's deadline",
    "gradients/all_reduce.py": "Waiting, with a deadline or a monitor",
    "gradients/reduction/tied.py": "Waiting, with the timeout that tie_parameters is given",
    "training/generation/texts.py": "finish, with the communicator's deadline",
    "transport/backends/nccl.py": "NcclTicket.hold, with the seconds that members have to connect",
    "transport/collectives/gathering.py": "its callers: Waiting or CollectiveWaits",
}
INSIDE_COMPUTES = {
    "schedules/runtime/turns.py": "exchanges of experts inside autograd: a part of a compute, as in the model",
    "gradients/output_layer.py": "tensor parallelism inside autograd: a part of a compute, as in the model",
}
ELSEWHERE = {"transport/backends/nccl.py": "a device's group, which an abort ends"}
WAITS = {
    "schedules/runtime/turns.py": "inside a compute: what a stage has started by itself",
    "transport/backends/nccl.py": "orders a stream, or of a work that has ended",
    "transport/collectives/starting.py": "inside a compute: ended by the cut of a monitor that sees the job fail",
    "transport/collectives/waiting.py": "orders a stream, or of a work that has ended",
}
STORES = {
    "monitor/collectives.py": "bounded",
    "monitor/control.py": "a bounded_store",
    "monitor/epochs/stored_epochs.py": "a bounded_store",
    "monitor/first_failure.py": "bounded",
    "monitor/last_seen.py": "a bounded_store",
    "topology/job/job_store.py": "bounded; the server of a store waits for no client",
    "topology/rendezvous.py": "bounded",
    "training/restart/torchelastic.py": "bounded",
    "transport/control/connector.py": "BoundedCalls",
}
OF_DIST = {
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
}
OF_A_GROUP = {
    *("_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "monitored_barrier"),
}
OF_A_STORE = {"add", "check", "compare_set", "delete_key", "get", "multi_get", "multi_set", "num_keys", "set", "wait"}


parsed = functools.cache(ast.parse)


def is_torch_distributed(node: ast.AST) -> bool:
    return ast.unparse(node) in ("dist", "torch.distributed", "distributed", "distributed_c10d")


def is_collective(node: ast.AST) -> bool:
    """Whether the node names a collective of torch, or imports one."""
    match node:
        case ast.Attribute(value=value, attr=name):
            return name in OF_A_GROUP or (name in OF_DIST and is_torch_distributed(value))
        case ast.Call(func=ast.Name("getattr"), args=[value, ast.Constant(value=name), *_]):
            return name in OF_DIST and is_torch_distributed(value)
        case ast.ImportFrom(module=str(module), names=imported) if module.startswith("torch.distributed"):
            functional = module.endswith(("_functional_collectives", "nn.functional"))
            return functional or any(each.name in OF_DIST | {"_functional_collectives"} for each in imported)
    return False


def collectives(source: str) -> list[int]:
    """The lines with a collective of torch."""
    return sorted(node.lineno for node in ast.walk(parsed(source)) if is_collective(node))


def calls(source: str) -> list[int]:
    """The lines that call a collective, in place of giving it to `start`, which keeps what is under way."""
    nodes = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)]
    return sorted(node.lineno for node in nodes if isinstance(node.func, ast.Attribute) and is_collective(node.func))


def bare_waits(source: str) -> list[int]:
    """The lines with ``work.wait()``."""
    found = []
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="wait"), args=[], keywords=[]):
                if next(names(value), "") == "work":
                    found.append(node.lineno)
    return found


def names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute):
            yield each.id if isinstance(each, ast.Name) else each.attr


def store_calls(source: str) -> list[int]:
    """The lines that call a method of what is called a store, or connect to one."""
    found = []
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in OF_A_STORE:
                if any(each.endswith("store") for each in names(value)):
                    found.append(node.lineno)
            case ast.Call(func=ast.Name("TCPStore") | ast.Attribute(attr="TCPStore")):
                found.append(node.lineno)
    return found


def sources() -> dict[str, str]:
    """The packages' sources by path below ``pipegrid``; not of a backend that is implemented there, and of tests."""
    files = sorted(ROOT.glob("packages/*/src/pipegrid/**/*.py"))
    found = {str(file).split("/src/pipegrid/")[1]: file.read_text(encoding="utf-8") for file in files}
    return {path: source for path, source in found.items() if not path.startswith(("testing/", "fake_nccl/"))}


@pytest.mark.parametrize(
    "source",
    [
        "dist.barrier()",
        "torch.distributed.all_gather_object(found, own, group=group)",
        'gather = getattr(dist, "all_gather_single", None) or other',
        "group.allreduce([tensor]).wait()",
        "from torch.distributed import all_reduce",
        "from torch.distributed.nn.functional import all_gather",
        "from torch.distributed import _functional_collectives as funcol",
    ],
)
def test_the_lint_finds_a_planted_collective(source):
    assert collectives(source) == [1]


@pytest.mark.parametrize(
    "source", ["self.gather(values)", "torch.gather(x, 0, index)", "all_reduce(x, group)(waiting)"]
)
def test_the_lint_leaves_what_is_no_collective(source):
    assert not collectives(source)


def test_the_lint_finds_planted_calls_and_waits():
    assert calls("dist.broadcast(x, src=0, async_op=True)") == [1]
    assert calls("group.allreduce([x])") == [1]
    assert not calls("start(dist.broadcast, x, src=0, group=group)")
    assert bare_waits("gather_text(text, group, device, lambda work, _: None if work is None else work.wait())") == [1]
    assert not bare_waits("work.wait(timedelta(seconds=1))")


@pytest.mark.parametrize(
    "source", ['control_store("pipelines").add("made", 1)', "self._store.wait(keys)", "TCPStore(host, port)"]
)
def test_the_lint_finds_a_planted_call_of_a_store(source):
    assert store_calls(source) == [1]


@pytest.mark.parametrize("source", ["bounded(store.add, key, 1, seconds=1.0)", "self.stored.get(name)"])
def test_the_lint_leaves_bounded_calls_and_other_objects(source):
    assert not store_calls(source)


def test_collectives_are_started_where_a_deadline_ends_them():
    found = {path: source for path, source in sources().items() if collectives(source)}
    assert set(found) == {*COLLECTIVES, *INSIDE_COMPUTES}
    assert {path for path, source in found.items() if calls(source)} == {*ELSEWHERE}
    assert {path for path, source in sources().items() if bare_waits(source)} == {*WAITS}


def test_calls_of_a_store_are_made_where_a_deadline_ends_them():
    assert {path for path, source in sources().items() if store_calls(source)} == {*STORES}
