"""Slices of a microbatch as a stage sees them: what a slice keeps for the later ones, and the gradients that come back.

What a slice keeps (keys and values) are leaves to the later slices, so each slice has a graph of its own. Backwards run
in reverse: those of the later slices accumulate into the leaves, and the backward of the slice that kept them starts
from these gradients too, beside those of its outputs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import torch
from attrs import define, field
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipegrid.schedules.errors import StageOutputError

Kept: TypeAlias = dict[Hashable, dict[int, torch.Tensor]]
"""By key and slice, the leaf of each tensor that a microbatch's slices have kept."""


@define(eq=False)
class Slice:
    """A slice of a microbatch, the third argument of a stage's forward in a plan with slices.

    A stage keeps with it what later slices of the microbatch need, and reads what earlier ones have kept: for attention
    by `update`. A forward that runs again in the backward, for checkpointed activations, keeps nothing anew.

    Attributes:
        index: place in the sequence, from 0.
        count: slices of a microbatch.
    """

    index: int
    count: int
    _kept: Kept = field(repr=False)
    _training: bool = field(repr=False)
    _made: dict[Hashable, GradientEdge] = field(factory=dict, init=False, repr=False)  # starts of its backward
    _open: bool = field(default=True, init=False, repr=False)  # until the end of its forward

    @property
    def is_first(self) -> bool:
        """Whether no slice comes before it."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether no slice comes after it."""
        return self.index == self.count - 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: Hashable, *, dim: int = -2
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer up to the end of this slice, joined along the tokens' axis ``dim``.

        The first ``keys.shape[dim]`` tokens fewer than the result has are the past: query i of this slice attends to
        the tokens up to ``past + i``.
        """
        return self.extend((layer, "keys"), keys, dim=dim), self.extend((layer, "values"), values, dim=dim)

    def extend(self, key: Hashable, tensor: torch.Tensor, *, dim: int = -2) -> torch.Tensor:
        """``tensor`` behind all that earlier slices have kept under ``key``; and keep it for the later ones."""
        past = self.past(key)
        self.keep(key, tensor)
        return torch.cat([*past, tensor], dim) if past else tensor

    def past(self, key: Hashable) -> tuple[torch.Tensor, ...]:
        """What the earlier slices have kept under ``key``, in the order of the sequence."""
        kept = self._kept.get(key, {})
        return tuple([kept[index] for index in range(self.index) if index in kept])

    def keep(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` for the later slices under ``key``; its gradients from there come into this slice's backward.

        Raises:
            StageOutputError: the second tensor under one key, or one that is made without a graph in training.
        """
        if not self._open:  # the forward of a checkpointed region, again in its backward
            return
        kept = self._kept.setdefault(key, {})
        if self.index in kept:
            raise StageOutputError(f"slice {self.index} keeps a second tensor under {key!r}; each has its own key")
        if self._training and not torch.is_grad_enabled():
            raise StageOutputError(
                f"slice {self.index} keeps a tensor under {key!r} that is made without a graph (no_grad, or a region "
                "checkpointed with use_reentrant=True)"
            )
        differentiable = self._training and tensor.requires_grad
        if differentiable:
            self._made[key] = get_gradient_edge(tensor)
        kept[self.index] = tensor.detach().requires_grad_(differentiable)

    # For the runtime

    def close(self) -> None:
        """The forward has ended."""
        self._open = False

    @property
    def keeps(self) -> bool:
        """Whether it has kept anything."""
        return any(self.index in kept for kept in self._kept.values())

    def leaves(self) -> list[torch.Tensor]:
        """What it may have read that needs a gradient."""
        return [leaf for key in self._kept for leaf in self.past(key) if leaf.requires_grad]

    def starts(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where its backward starts besides its outputs, with the gradients from all later slices; once.

        What it kept is dropped: no slice reads it any more.
        """
        edges, gradients = [], []
        for key, kept in self._kept.items():
            leaf, edge = kept.pop(self.index, None), self._made.get(key)
            if leaf is not None and edge is not None and leaf.grad is not None:
                edges.append(edge)
                gradients.append(leaf.grad)
        self._made.clear()
        return edges, gradients
