"""The result of a proof of a cut: the values that cross each boundary of a layout, and the faults."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from attrs import frozen

from pipegrid.core.skips import Uses, hops_of_value
from pipegrid.stages.errors import CutError, few


@frozen
class Crossing:
    """A value that is made before a boundary and used behind it."""

    shape: tuple[int, ...]
    dtype: str  # such as ``torch.float32``
    nbytes: int
    made: str  # where, in words
    used: str  # where, in words; the first use behind the boundary

    def __str__(self) -> str:
        return f"{self.dtype.removeprefix('torch.')} {self.shape} {self.made}, used {self.used}"


@frozen
class Boundary:
    """The end of one stage and the begin of the next.

    Attributes:
        stage: the number of the stage behind it.
        after: the layer before it; "" before the first layer.
        sent: shape and dtype of each tensor that the stage before sends.
        nbytes: of these.
        crossing: the values that cross it besides, and cannot be handed on.

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
        where = f"after {self.after}" if self.after else "before the first layer"
        besides = "".join(f"\n    and {one}" for one in self.crossing)
        return f"stage {self.stage}, {where}: {', '.join(self.sent) or 'nothing'}, {size(self.nbytes)}{besides}"


@frozen(kw_only=True)
class Skip(Uses):
    """A value that is handed on to later stages: the part that returns it, and the place in what that returns."""

    value: str
    shape: tuple[int, ...]
    dtype: str  # such as ``torch.float32``
    nbytes: int

    def __str__(self) -> str:
        to = named(list(map(str, sorted({*self.users, *self.held}))))
        what = f"{self.dtype.removeprefix('torch.')} {self.shape}, {size(self.nbytes)}"
        return f"{self.value} of stage {self.source} to stages {to}: {what}"


@frozen
class CutProof:
    """The values that cross the boundaries of a cut.

    Attributes:
        layout: in its short form.
        boundaries: one per stage but the first.
        faults: what else makes stages differ from the whole model, in words: layers out of order, parameters used on a
            stage that does not hold them.
        unproved: what the trace could not decide, in words; `check_stages` compares numbers.
        alone: the layers after which the layout may end a stage: the hidden states alone cross there.
        asked: what the model is asked for besides, by its config or the call, such as ``output_router_logits``.
        skips: the values that stages hand on past others.

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
    skips: tuple[Skip, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the stages compute what the whole model computes."""
        return not self.faults and not self.unproved and not any(one.crossing for one in self.boundaries)

    def traffic(self, placement: Sequence[int]) -> tuple[int, int]:
        """Bytes of a microbatch forward between the positions of stages: with skips, and without.

        Each value goes to each position once; without skips, a stage would pass it on to the next, as it passes on
        hidden states, up to the last that uses it.
        """
        between = [at for at in range(1, len(placement)) if placement[at] != placement[at - 1]]
        hidden = sum(one.nbytes for one in self.boundaries if one.stage in between)
        sent, passed_on = hidden, hidden
        for skip in self.skips:
            hops = hops_of_value(skip, placement)
            sent += skip.nbytes * sum(placement[edge.source] != placement[edge.destination] for edge in hops)
            last = max(skip.users, default=skip.source)
            passed_on += skip.nbytes * sum(skip.source < at <= last and at not in skip.held for at in between)
        return sent, passed_on

    def between_hosts(self, placement: Sequence[int], hosts: Sequence[Hashable]) -> tuple[int, int]:
        """Bytes of values of a microbatch forward between hosts: as they go, and straight from where they are made."""
        found = [0, 0]
        for skip in self.skips:
            for number, near in enumerate((hosts, None)):
                hops = hops_of_value(skip, placement, near)
                found[number] += skip.nbytes * sum(hosts[edge.source] != hosts[edge.destination] for edge in hops)
        return found[0], found[1]

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
        verdict = "proved" if self.holds else "not proved"
        lines = [*map(str, self.boundaries), *map(str, self.skips), *self.faults, *self.unproved]
        return "\n  ".join([f"{self.layout}: {verdict}", *lines])


def named(names: Sequence[str]) -> str:
    """At most five of ``names``, for a text."""
    if len(names) > 6:
        return f"{', '.join(names[:3])} ... {', '.join(names[-2:])}"
    return ", ".join(names) or "none"


def size(nbytes: float) -> str:
    """Bytes in a unit that suits them."""
    unit = min(int(math.log(max(nbytes, 1), 1024)), 3)
    return f"{nbytes / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
