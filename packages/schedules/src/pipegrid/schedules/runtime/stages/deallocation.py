"""Which outputs of a forward are freed after their send (``deallocate_outputs``)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from pipegrid.autograd import free_storage, require_deallocatable
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime.stages.payloads import flatten

if TYPE_CHECKING:
    from pipegrid.transport.protocol import Payload


@define(eq=False)
class PendingFree:
    """The outputs of one forward, whose storage is freed after ``unsent`` more messages have left."""

    unsent: int
    tensors: Sequence[torch.Tensor]

    def sent(self) -> None:
        """One of the messages has left."""
        self.unsent -= 1
        if self.unsent == 0:
            for tensor in self.tensors:
                free_storage(tensor)


@define(eq=False)
class Deallocation:
    """Judges the outputs of stage ``number``."""

    number: int
    _outputs: dict[int, weakref.ref[torch.Tensor]] = field(factory=dict, init=False)

    def begin(self) -> None:
        """Forget the outputs of earlier steps that are gone."""
        self._outputs = {key: output for key, output in self._outputs.items() if output() is not None}

    def pending(self, away: Sequence[bool], payloads: Sequence[Payload], loss: torch.Tensor | None) -> PendingFree:
        """The outputs of one forward that leave by message (``away``), whose storage goes when they have left."""
        sent = [payload for leaves, payload in zip(away, payloads, strict=True) if leaves]
        # An input passed straight on is a leaf: its storage is not ours.
        tensors = {id(t): t for t in flatten(sent) if t is not None and t.grad_fn is not None}
        for key, tensor in tensors.items():
            require_deallocatable(tensor)
            before = self._outputs.get(key)
            if before is not None and before() is tensor:  # it is freed as soon as it has left the first time
                raise StageOutputError(
                    f"stage {self.number} returned one tensor as the output of two microbatches, which is freed after "
                    "the first send; return output.clone(), or set deallocate_outputs=False"
                )
            self._outputs[key] = weakref.ref(tensor)
        roots = {id(root) for root in flatten([*payloads, loss]) if root is not None and root.requires_grad}
        # With several roots the graph of one may have saved another, so none is freed.
        return PendingFree(len(sent), list(tensors.values()) if len(roots) == 1 else [])
