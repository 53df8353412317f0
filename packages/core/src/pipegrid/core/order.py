"""Order models: which communications of a rank run one after the other, for each kind of backend. No torch.

A *line* is a queue of launches: the next one starts when all before it have ended. NCCL's lines are the streams of its
communicators. Facts: torch's `ProcessGroupNCCL` and `ProcessGroupNCCL2`, versions 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

Line: TypeAlias = Literal["rank", "group", "pair", "none"]
"""The launches that share a line: all of a rank, those of one group, of one pair of ranks of a group, or none."""


@frozen(kw_only=True)
class OrderModel:
    """The order in which one backend runs the launches of a rank.

    Attributes:
        name: of the model.
        batched: the line of a batch of messages.
        lone: the line of a message outside of a batch.
        connects: two ranks connect in the first batch between them, each way. A rank answers one peer after the other,
            so in the worst case no batch starts before all that such messages join to it have been launched.
        host_waits: a compute holds the host until its inputs are there (gloo); otherwise the host runs ahead, and a
            launch starts when the computes launched before it have ended (the backend's stream waits for the current
            one).

    Examples:
        >>> OrderModel(name="one line").batched
        'group'
    """

    name: str
    batched: Line = "group"
    lone: Line = "group"
    connects: bool = False
    host_waits: bool = False


ORDER_MODELS = {
    model.name: model
    for model in (
        # Two communicators for point-to-point where no device is bound: batches are on the group's, lone messages on
        # one of the pair, in both directions.
        OrderModel(name="nccl-legacy", lone="pair"),
        # A group has one communicator and one stream, for batches, lone messages and collectives.
        OrderModel(name="nccl2"),
        # A primary for batches and collectives, and one communicator for each pair: nothing orders the two.
        OrderModel(name="nccl-lazy", lone="pair"),
        # A device that runs one communication kernel at a time, in the order of the launches of all communicators.
        OrderModel(name="nccl-serial", batched="rank", lone="rank"),
        # nccl2 in a first step, without a warm-up of the connections.
        OrderModel(name="nccl-connecting", connects=True),
        # Messages are independent of each other.
        OrderModel(name="gloo", batched="none", lone="none", host_waits=True),
    )
}
"""The order model of each kind of backend, by name."""
