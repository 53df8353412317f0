"""Which outputs of a forward may be freed once they are sent: those that nothing but their own node has kept.

Freeing an output takes its storage away from whoever else saved it. A node keeps what it made itself apart from that;
but where another output, or the loss, was computed from this one, a node of that graph may have saved it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge

from pipegrid.schedules.errors import StepArgumentError


def freeable(tensors: Sequence[torch.Tensor], roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``tensors`` from which none of ``roots`` was computed.

    Args:
        tensors: outputs that are no leaves.
        roots: whatever a backward starts from: they are among them.
    """
    if len({id(root) for root in roots}) < 2:  # the common case: one output, and no graph but its own
        return list(tensors)
    edges = [(tensor, get_gradient_edge(tensor)) for tensor in tensors]
    wanted = {(edge.node, edge.output_nr): tensor for tensor, edge in edges}
    seen: set[Node] = {get_gradient_edge(root).node for root in roots}
    stack = list(seen)
    while stack and wanted:
        for node, output in stack.pop().next_functions:
            if node is None:
                continue
            wanted.pop((node, output), None)
            if node not in seen:
                seen.add(node)
                stack.append(node)
    return list(wanted.values())


def free_storage(out: torch.Tensor) -> None:
    """Free the storage of a sent activation; its ``grad_fn`` stays for the backward.

    Raises:
        StepArgumentError: a view, whose base would be freed as well.
    """
    require_deallocatable(out)
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def require_deallocatable(out: torch.Tensor | None) -> None:
    """Raise for a view, whose base would be freed as well. A leaf is never freed, so it may be a view."""
    if out is None or out.grad_fn is None:
        return
    if out._base is not None:  # noqa: SLF001 -- the documented way to ask whether a tensor is a view
        raise StepArgumentError(
            f"an output of shape {tuple(out.shape)} is a view of another tensor and cannot be deallocated; return "
            "output.clone(), or set deallocate_pipeline_outputs=False"
        )
