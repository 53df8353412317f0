"""What a proof of a cut says: what crosses each boundary of a layout, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from pipegrid.stages.errors import CutError, few


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


@frozen
class Boundary:
    """Where one stage ends and the next begins.

    Attributes:
        stage: the number of the stage behind it.
        after: the layer before it; "" before the first layer.
        sent: shape and dtype of each tensor that the stage before sends.
        nbytes: of these.
        crossing: the values that cross it besides.

    Examples:
        >>> Boundary(stage=1, after="layers.3", sent=("[2, 8] float32",), nbytes=64, crossing=()).after
        'layers.3'
    """

    stage: int
    after: str
    sent: tuple[str, ...]
    nbytes: int
    crossing: tuple[Crossing, ...]

    def __str__(self) -> str:
        """One line, and one more for each value that crosses besides."""
        where = f"after {self.after}" if self.after else "before the first layer"
        besides = "".join(f"\n    and {one}" for one in self.crossing)
        return f"stage {self.stage}, {where}: {', '.join(self.sent) or 'nothing'}, {_size(self.nbytes)}{besides}"


@frozen
class CutProof:
    """What crosses the boundaries of a cut.

    Attributes:
        layout: in its short form.
        boundaries: one per stage but the first.
        faults: what else makes stages differ from the whole model, in words: layers out of order, parameters used on a
            stage that does not hold them.
        unproved: what the trace could not decide, in words; `check_stages` compares numbers.
        alone: the layers after which the layout may end a stage: the hidden states alone cross there.
        asked: what the model is asked for besides, by its config or the call, such as ``output_router_logits``.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        >>> proof = prove_cut(model, "t|t", (torch.ones(2, 4),), names=Names("0"), loss=torch.sum)
        >>> [(one.stage, one.sent) for one in proof.boundaries]
        [(1, ('float32 (2, 4)',))]
    """

    layout: str
    boundaries: tuple[Boundary, ...]
    faults: tuple[str, ...]
    unproved: tuple[str, ...]
    alone: tuple[str, ...]
    asked: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the stages compute what the whole model computes."""
        return not self.faults and not self.unproved and not any(one.crossing for one in self.boundaries)

    def require(self) -> None:
        """Raise where the stages compute something else than the whole model.

        Raises:
            CutError: names the value, where it is made, and where it is used.
        """
        values = dict.fromkeys(str(value) for one in self.boundaries for value in one.crossing)
        faults = [*self.faults, *values]
        if faults:
            ends = f"A stage may end after {named(self.alone)}; " if self.alone else ""
            ends += f"without {' and '.join(self.asked)} there may be less to send; " if self.asked else ""
            raise CutError(
                f"the stages of layout {self.layout} would not compute what the model computes; a stage has what the "
                "layer before it returned, and what it makes from the batch:\n  "
                + "\n  ".join(few(faults))
                + f"\n{ends}print(prove_cut(model, layout, batch)) shows all"
            )

    def __str__(self) -> str:
        """A line per boundary, then what is wrong."""
        verdict = "proved" if self.holds else "not proved"
        return "\n  ".join([f"{self.layout}: {verdict}", *map(str, self.boundaries), *self.faults, *self.unproved])


def named(names: Sequence[str]) -> str:
    """At most five of ``names``, for a text."""
    if len(names) > 6:
        return f"{', '.join(names[:3])} ... {', '.join(names[-2:])}"
    return ", ".join(names) or "none"


def _size(nbytes: float) -> str:
    unit = min(int(math.log(max(nbytes, 1), 1024)), 3)
    return f"{nbytes / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
