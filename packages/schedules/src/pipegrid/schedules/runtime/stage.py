"""What the runtime asks of a stage, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from attrs import frozen

if TYPE_CHECKING:
    from pipegrid.transport.edge import Edge
    from pipegrid.transport.protocol import Payload


@frozen
class Forwarded:
    """What a forward produced.

    Attributes:
        outputs: what each outgoing edge carries; the same payload may go to several.
        loss: the scalar to differentiate, on a stage without outgoing edges; None in a forward-only run. Another
            stage may have one as well (an auxiliary loss, as for the balance of experts): its backward starts from
            that and from the gradients of its outputs, so that the step differentiates the sum of all losses.
    """

    outputs: Mapping[Edge, Payload]
    loss: torch.Tensor | None = None


class Stage(Protocol):
    """The computation of one stage.

    If it has an attribute ``model`` that is an `torch.nn.Module`, errors name the parts of it.
    """

    def forward(self, microbatch: int, inputs: Mapping[Edge, Payload]) -> Forwarded:
        """Run microbatch ``microbatch``, given what each incoming edge delivered."""
        ...
