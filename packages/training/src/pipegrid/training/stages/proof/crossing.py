"""From a traced forward to what crosses each boundary besides what a stage sends there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from pipegrid.training.stages.proof.operators import named_leaves
from pipegrid.training.stages.proof.trace import Forward
from pipegrid.training.stages.proof.traced import Operation, Traced


@frozen
class Crossing:
    """A value that is made before a boundary and used behind it.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor, such as ``torch.float32``.
        nbytes: of the tensor.
        made: where, in words.
        used: where, in words; the first use behind the boundary.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    made: str
    used: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.dtype.removeprefix('torch.')} {self.shape} {self.made}, used {self.used}"


def crossings(forward: Forward, first: str, encoded: int | None) -> Mapping[int, Sequence[Crossing]]:
    """Per boundary, the values that cross it and are not sent there.

    Args:
        forward: a trace.
        first: the first layer. It alone takes what arrives before it; the model's own code has a stand-in there.
        encoded: the boundary at the end of the encoder, whose value later boundaries send as well.
    """
    found: dict[int, dict[tuple[int, str], Crossing]] = {boundary: {} for boundary in range(forward.passed)}
    for tensor in forward.crossing:
        for made, used in tensor.uses:
            if id(used) not in forward.live:
                continue
            for boundary in range(made.passed, used.passed):
                at = [boundary] if encoded is None or boundary <= encoded else [boundary, encoded]
                sent = any(tensor is one for where in at for one in forward.sent[where])
                if not sent or (boundary == 0 and used.part != first):
                    found[boundary].setdefault((id(made), used.line), _crossing(tensor, made, used))
    return {boundary: tuple(values.values()) for boundary, values in found.items()}


def _crossing(tensor: Traced, made: Operation, used: Operation) -> Crossing:
    # Of what a part has made the part is named, of the model's own code the line.
    return Crossing(tuple(tensor.shape), str(tensor.dtype), tensor.nbytes, f"made {place(made)}", place(used))


def place(operation: Operation) -> str:
    """Where an operation ran, in words."""
    name = operation.name.removeprefix("aten.").partition(".")[0]
    return f"by {name} in {operation.part or 'the model'} ({operation.line})"


def returned(forward: Forward, boundary: int) -> Mapping[str, Traced]:
    """What the forward returns and a stage behind ``boundary`` cannot make, by its place in the result."""
    sent = forward.sent[boundary]
    return {
        path: leaf
        for path, leaf in named_leaves(forward.result)
        if isinstance(leaf, Traced)
        and leaf.cell.placed
        and leaf.made.passed <= boundary
        and not any(leaf is one for one in sent)
    }
