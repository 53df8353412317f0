"""The proofs of a cut that its stages ask for, one for each kind of call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.training.errors import CutError
from pipegrid.training.stages.assignment import Assignment
from pipegrid.training.stages.calls import PIXELS, accepted_by
from pipegrid.training.stages.proof.boundaries import CutProof
from pipegrid.training.stages.proof.outline import Outline
from pipegrid.training.stages.proof.proof import proof_of
from pipegrid.training.stages.torch_compat import mapped_by_place, tree_leaves
from pipegrid.training.stages.tree import meta_copy


class Proofs:
    """What crosses the boundaries of a cut, by what calls are made of: names, dtypes, None or not, flags.

    Shared by the stages of one `pipeline_stage`.
    """

    def __init__(self, model: nn.Module, assignment: Assignment, layout: str) -> None:
        self.outline = Outline(meta_copy(model, buffers=False), assignment, layout)
        self._dropped = PIXELS if "inputs_embeds" in accepted_by(model) else ()
        self._found: dict[object, tuple[CutProof, tuple[str, ...]]] = {}

    def require(
        self, stage: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], hidden: Tensor | None
    ) -> tuple[str, ...]:
        """Prove a call, unless one like it has been.

        Args:
            stage: that is called.
            args: of the call of the whole model.
            kwargs: likewise.
            hidden: of a stage that is called without the ids, what stands for the result of the embedding.

        Returns:
            the places in the model's output of what the last stage cannot make.

        Raises:
            CutError: more than what stages send crosses a boundary.
        """
        known = len(self._found)
        proof, missing = self.found(stage, args, kwargs, hidden)
        if not proof.holds:
            proof.require()
            if len(self._found) > known:
                warnings.warn(
                    f"layout {self.outline.layout} is not proved: {'; '.join(proof.unproved)}. check_stages compares "
                    "its loss and gradients with those of the whole model",
                    stacklevel=4,
                )
        return missing

    def found(
        self, stage: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], hidden: Tensor | None = None
    ) -> tuple[CutProof, tuple[str, ...]]:
        """The proof of a call, which may not hold, and what `require` returns. Arguments as there."""
        given = sorted((name, _kind(one)) for name, one in kwargs.items())
        key = (stage.training, hidden is None, *map(_kind, args), *given)
        if key not in self._found:
            self.outline.model.train(stage.training)
            self.outline.require_no_layerdrop()
            embedded = {} if hidden is None else {"inputs_embeds": hidden}
            self._found[key] = proof_of(self.outline, args, kwargs, hidden=embedded, dropped=self._dropped)
        return self._found[key]


def _kind(value: Any) -> object:
    """What of an argument may change the operations of a forward."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


class Absent(Tensor):
    """Stands for what the model returns and another stage makes."""

    place: str

    @staticmethod
    def at(place: str) -> Absent:
        """The stand-in for one place of the output."""
        made = torch.empty(()).as_subclass(Absent)
        made.place = place
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise: the value is not here."""
        del func, types
        place = next(one.place for one in tree_leaves((args, kwargs)) if isinstance(one, Absent))
        raise CutError(f"output{place} of the model is made on an earlier stage, and is used on the last one")


def without(result: Any, places: Sequence[str]) -> Any:
    """What the model returns on the last stage, with stand-ins at ``places``."""
    return mapped_by_place(lambda place, leaf: Absent.at(place) if place in places else leaf, result)
