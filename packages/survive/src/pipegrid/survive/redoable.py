"""Finds, before the first step, what would keep a step from running again after a death."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipegrid.autograd.fsdp import fsdp_modules
from pipegrid.gradients.dtensors import is_dtensor
from pipegrid.gradients.layout import marks_of
from pipegrid.gradients.main_grad import Modules, named_modules
from pipegrid.stages.errors import few
from pipegrid.survive.errors import SurviveError

_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
_PARAMETER_HOOKS = {"_backward_hooks": "a gradient hook", "_post_accumulate_grad_hooks": "a hook after its gradient"}
_KNOWN = ("torch", "pipegrid")  # packages whose hooks change only what is kept


def require_redoable(modules: Modules, peers: Collection[int], *, allow: Collection[str] = ()) -> None:
    """Raise unless a step of ``modules`` can be done again by other ranks: with the same result, and no trace.

    `Survivors` calls it. Buffers and random numbers are no fault, since they are restored (`KeptState`).

    Args:
        modules: of this rank.
        peers: the ranks that go on when this one dies, and itself: those of other replicas, among them all that compute
            the same stages.
        allow: hooks of the script's own that may run twice for a microbatch, by the name of the module (``layers.3``,
            or ``""`` for the stage itself) or of the function.

    Raises:
        SurviveError: with all that cannot, by name; or ``allow`` is one string.

    Examples:
        >>> import torch
        >>> require_redoable(torch.nn.Linear(4, 4), peers=[0, 1])
    """
    if isinstance(allow, str):
        raise SurviveError(f"allow is {allow!r}; it must be a list of names, such as [{allow!r}]")
    faults = [
        fault
        for module, stage in named_modules(modules)
        for fault in (*_of_groups(stage, module, {*peers}), *_of_hooks(stage, module, {*allow}))
    ]
    if faults:
        raise SurviveError(f"a step with these modules cannot be done again after a death: {'; '.join(few(faults))}")


def _of_groups(stage: nn.Module, module: str, peers: set[int]) -> Iterator[str]:
    """The parts of ``stage`` that communicate in groups, or over a store, of their own, which a death ends for good."""
    for name, inner in stage.named_modules():
        if isinstance(inner, DistributedDataParallel):
            yield f"{_at(module, name)} is a DistributedDataParallel, whose group is made once: use reduce_gradients"
        if isinstance(inner, nn.SyncBatchNorm):
            yield f"{_at(module, name)} is a SyncBatchNorm, whose group is made once: use a batch norm per replica"
    if getattr(getattr(stage, "config", None), "monitor", None) is not None:
        yield f"the config of {_at(module, '')} has a monitor, which ends with the first failure: Survivors needs none"
    for name, parameter in stage.named_parameters():
        tie = marks_of(parameter).tie
        if tie is not None and not tie.over_replicas:
            yield (
                f"{_at(module, name)} is tied as {tie.name!r} among the ranks of one replica (group=), from which "
                "microbatches move: tie it over all replicas, by tie_parameters(..., grids=grid)"
            )
    sharded = {name for name, _ in fsdp_modules(stage)}
    for name, parameter in stage.named_parameters():
        if is_dtensor(parameter) and _shared_out(parameter, peers):
            inside = name in sharded or any(name.startswith(f"{each}.") or not each for each in sharded)
            yield (
                f"{_at(module, name)} is sharded over replicas{' by fully_shard' * inside}, so a dead rank's shard is "
                "on no other rank, only in a checkpoint: shard over the ranks of one replica, or train without "
                "Survivors, and restart"
            )
            return


def _shared_out(parameter: Any, peers: set[int]) -> bool:
    """Whether a dim of the DTensor's mesh that it is sharded over has ranks of several replicas."""
    groups = [parameter.device_mesh.get_group(dim) for dim in range(parameter.device_mesh.ndim)]
    return any(
        not placement.is_replicate() and len(peers.intersection(dist.get_process_group_ranks(group))) > 1
        for placement, group in zip(parameter.placements, groups, strict=True)
    )


def _of_hooks(stage: nn.Module, module: str, allow: set[str]) -> Iterator[str]:
    """Hooks that the script has registered, whose effects are not known."""
    of_modules = ((name, inner, _HOOKS) for name, inner in stage.named_modules())
    of_parameters = ((name, parameter, _PARAMETER_HOOKS) for name, parameter in stage.named_parameters())
    for name, holder, places in (*of_modules, *of_parameters):
        for place, what in places.items():
            for hook in (getattr(holder, place, None) or {}).values():
                called = _name(hook)
                if called is not None and not allow & {name, called, called.rpartition(".")[2]}:
                    yield (
                        f"{_at(module, name)} has {what} {called}, which would run twice for a microbatch; if that is "
                        f"harmless, give allow={{{name or called!r}}}"
                    )


def _name(hook: Any) -> str | None:
    """The name of a function that is a hook; None of those that change only what is kept."""
    function = getattr(hook, "func", hook)  # of a partial
    if (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0] in _KNOWN:
        return None
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _at(module: str, name: str) -> str:
    path = ".".join(part for part in (module, name) if part)
    return repr(path) if path else "the stage"
