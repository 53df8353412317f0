"""The joint graph of a compiled region, and which of its values share memory: parts of torch without a public form.

`tests/autograd/test_torch_facts.py` pins what each does. A torch that lacks one fails at `compile_split`, and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx

from pipegrid.autograd.unsplittable import SplitBackwardError


def require_joint_graphs() -> None:
    """Raise SplitBackwardError unless this torch has what `compile_split` takes from it."""
    for module, name in (_JOINT, _PARTITION, _STORAGE):
        _part(module, name)
    if not hasattr(Tensor, "_is_view"):
        raise _lacking("torch.Tensor._is_view")


def joint_graph(region: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
    """The graph from ``(examples, tangents)`` to the outputs of ``region`` and one gradient (or None) per example.

    Raises:
        RuntimeError, AssertionError, NotImplementedError, ValueError: the region has no such graph.
    """
    made: fx.GraphModule = _part(*_JOINT)(region, tuple(examples), trace_joint=True)
    return made


def forward_and_backward(
    joint: fx.GraphModule, examples: Sequence[Any], *, outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph where the least is saved: forward (outputs, saved values), backward from saved and tangents."""
    made: tuple[fx.GraphModule, fx.GraphModule] = _part(*_PARTITION)(joint, examples, num_fwd_outputs=outputs)
    return made


def is_view(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a view of another, as autograd counts views."""
    return tensor._is_view()  # noqa: SLF001


def storage_key(tensor: Tensor) -> Any:
    """Equal for tensors over one memory, fake ones as well."""
    return _part(*_STORAGE)(tensor.untyped_storage())


RANDOM_STATE = "rng_state_output"  # how the backward of `forward_and_backward` names the states of generators
_JOINT = "torch._functorch.aot_autograd", "aot_export_joint_simple"
_PARTITION = "functorch.compile", "min_cut_rematerialization_partition"
_STORAGE = "torch.multiprocessing.reductions", "StorageWeakRef"


def _part(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _lacking(f"{module}.{name}") from error


def _lacking(name: str) -> SplitBackwardError:
    return SplitBackwardError(
        f'torch {torch.__version__} has no {name}, by which compile="split" cuts a compiled backward in halves; '
        'compile layers whole (compile="whole"), or leave them in eager mode'
    )
