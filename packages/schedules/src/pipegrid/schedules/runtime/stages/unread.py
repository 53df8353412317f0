"""Payloads that are not read yet, in memory that their stage may write again.

A stage may return the same memory for every microbatch: a preallocated output, or the static one of a captured graph. A
message is read later, on a device in the order of its stream, and a stage on the same rank reads when its turn comes.

- A tensor without a graph is copied before a stage of its position runs, and at its send, where something else holds
  its memory as well.
- One with a graph is not, since the graph holds many outputs for the backward. Its version says whether it was written
  since a stage of its position ran, or since its send, whichever is first: before that no stage could write it.
- A second payload at the place of a first one that is not read is an error, whatever wrote it, and whichever stage of
  the position returned it. The first one is held until its message is seen to have left, so no new tensor can be
  there. That it has left meanwhile is no excuse: the stage may have written before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from attrs import define, field

from pipegrid.core.edge import Direction, Edge
from pipegrid.reshard import SPLIT_SIZES
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime.stages.payloads import map_tensors, unpacked

# There is no public way to ask; without this one, all are copied. Pinned by `tests/runtime/test_static_outputs.py`.
_holders = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
_ALONE = 2  # the one tensor, and torch's Python object of the storage
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


Payload: TypeAlias = Any
# A payload with what it is known by, flat, since one is made for each message: of a tensor its version where it has a
# graph, else None, and the address of its memory, 0 where the same may come again unchanged; of a tree `_TREE`, and
# its tensors.
Aliased: TypeAlias = tuple[Payload, int | None, Any]
# The same of a microbatch that is kept there.
Kept: TypeAlias = "tuple[Payload, int | None, Any, int, Unread]"
_TREE = -1


@define(eq=False)
class Unread:
    """The unread payloads of one edge and direction, by microbatch.

    ``local``: a stage on the same rank reads them. ``fresh``: what waits for its send, or for that stage, as it was
    returned; ``kept``: the same once another stage has run; ``left``: from the send on until its end. ``places``: what
    is unread, by address, a list where several share the memory; all ways of a position have one table, since their
    stages may share memory. ``returned_by``: the stage, and whether they are outputs or gradients.
    """

    edge: Edge
    direction: Direction
    local: bool = False
    num_slices: int = 1
    fresh: dict[int, Payload] = field(factory=dict, init=False)
    kept: dict[int, Kept] = field(factory=dict, init=False)
    places: dict[int, Kept | list[Kept]] = field(factory=dict, init=False)
    returned_by: tuple[int, Direction] = field(init=False)
    left: dict[int, Kept] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        forward = self.direction is Direction.FORWARD
        self.returned_by = self.edge.source if forward else self.edge.destination, self.direction

    def begin(self) -> None:
        """Drop the state of an earlier step."""
        self.fresh.clear()
        self.kept.clear()
        self.left.clear()
        self.places.clear()

    def put(self, microbatch: int, payload: Payload, aliased: Aliased | None = None) -> None:
        """Keep what a stage has returned; ``aliased``: `without_graph` of it, where several edges carry it.

        Raises:
            StageOutputError: an unread payload is in the same memory. One that no other edge carries is looked at by
                `settle`, or by `take`, whichever comes first.
        """
        if aliased is None or self.local:
            self.fresh[microbatch] = payload
        else:
            self.kept[microbatch] = self._noted(microbatch, payload, aliased)

    def _noted(self, microbatch: int, payload: Payload, aliased: Aliased) -> Kept:
        own, version, parts = aliased
        if version != _TREE:
            kept = own, version, parts, microbatch, self
            self._come(kept, payload)
            return kept
        parts = [(*one, microbatch, self) for one in parts]
        for one in parts:
            self._come(one, payload)
        return own, _TREE, parts, microbatch, self

    def _come(self, kept: Kept, payload: Payload) -> None:
        if kept[2] and self.places.setdefault(kept[2], kept) is not kept:
            self._come_to(kept, payload)

    def _come_to(self, kept: Kept, payload: Payload) -> None:
        """Note a further payload at an address: the same one, or one whose memory a forward cannot change."""
        address = kept[2]
        found = self.places[address]
        there = self.places[address] = found if isinstance(found, list) else [found]
        for _, _, _, earlier, other in there:
            is_same = earlier == kept[3] and other.returned_by == self.returned_by
            if not is_same and _may_change(payload, address):
                raise other.written(earlier)
        there.append(kept)

    def _go_from(self, kept: Kept) -> None:
        """The payload at its address was read, or is a copy elsewhere."""
        found = self.places.pop(kept[2])
        if found is not kept:
            assert isinstance(found, list)
            if left := [one for one in found if one is not kept]:
                self.places[kept[2]] = left

    def settle(self) -> None:
        """A stage of this position runs: copy what it may write."""
        for microbatch in list(self.fresh):
            self.kept[microbatch] = self._own(self._looked_at(microbatch))

    def _looked_at(self, microbatch: int) -> Kept:
        payload = self.fresh.pop(microbatch)  # held here only: `_own` counts the holders of its memory
        return self._noted(microbatch, payload, without_graph(payload))

    def take(self, microbatch: int) -> Payload:
        """The payload of ``microbatch`` for its send, or for the stage on the same rank; once.

        Raises:
            StageOutputError: it was written since its stage returned it, or an unread payload is in the same memory.
        """
        payload = self.fresh.get(microbatch)
        if self.local or not isinstance(payload, torch.Tensor):
            return self._take_any(microbatch)
        # The common case in one go, as `_looked_at`, `_own` and `_take_any` do it.
        del self.fresh[microbatch]
        own, version, address = _alias(payload)
        if version is None:
            payload = own
            if not address:
                return own
            if is_shared(own):
                return own.clone()
        kept = self.left[microbatch] = own, version, address, microbatch, self
        if address and self.places.setdefault(address, kept) is not kept:
            self._come_to(kept, payload)
        return own

    def _take_any(self, microbatch: int) -> Payload:
        kept = self._own(self._looked_at(microbatch) if microbatch in self.fresh else self.kept.pop(microbatch))
        if not self.local:
            self.left[microbatch] = kept
            return kept[0]
        for one in each_of(kept):
            if one[2]:
                self._go_from(one)
        return unpacked(_as_leaf(kept))

    def end(self, microbatch: int) -> None:
        """The message of ``microbatch``, one of ``left``, has left, or what depends on it has come back: it was read.

        Raises:
            StageOutputError: it was written before that, or before its send.
        """
        kept = self.left.pop(microbatch)
        for one in kept[2] if kept[1] == _TREE else (kept,):
            payload, version, address, number, _ = one
            if version is not None and payload._version != version:  # noqa: SLF001 -- see `_alias`
                raise self.written(number)
            if address and self.places.get(address) is one:
                del self.places[address]
            elif address:
                self._go_from(one)

    def _own(self, kept: Kept) -> Kept:
        """The payload as it is now: a copy of what may be written unseen."""
        payload, version, address, microbatch, _ = kept
        if version is None:
            if address and is_shared(payload):
                self._go_from(kept)
                return _marked(payload.clone(), payload), None, 0, microbatch, self
        elif version == _TREE:
            found = [self._own(one) for one in address]
            each = iter(found)
            return map_tensors(payload, lambda _: next(each)[0]), _TREE, found, microbatch, self
        elif payload._version != version:  # noqa: SLF001 -- see `_alias`
            raise self.written(microbatch)
        return kept

    def written(self, microbatch: int) -> StageOutputError:
        """The error of a stage that has written into the payload of ``microbatch``."""
        forward = self.direction is Direction.FORWARD
        name = microbatch if self.num_slices == 1 else "{}.{}".format(*divmod(microbatch, self.num_slices))
        return StageOutputError(
            f"stage {self.edge.source if forward else self.edge.destination} wrote again into "
            f"{'its output' if forward else 'the gradient of its input'} of microbatch {name} before edge {self.edge} "
            "had carried it; return a tensor of its own for each microbatch, such as output.clone()"
        )


def is_shared(tensor: torch.Tensor, *, alone: int = _ALONE) -> bool:
    """Whether anything but ``tensor`` holds its memory: another tensor, a view, a graph.

    ``alone``: `num_holders` when nothing else did.
    """
    return _holders is None or _holders(tensor.untyped_storage()._cdata) > alone  # noqa: SLF001


def num_holders(tensor: torch.Tensor) -> int:
    """How many hold its memory, itself included."""
    return _ALONE if _holders is None else int(_holders(tensor.untyped_storage()._cdata))  # noqa: SLF001


def without_graph(payload: Payload) -> Aliased:
    """The tensors as ones of their own, so that the memory's holders can be counted; and what they are known by."""
    if isinstance(payload, torch.Tensor):
        return _alias(payload)
    each: list[Aliased] = []

    def alias(tensor: torch.Tensor) -> Any:
        each.append(_alias(tensor))
        return each[-1][0]

    return map_tensors(payload, alias), _TREE, each


def each_of(kept: Kept) -> Sequence[Kept]:
    """The tensors of a payload with what they are known by, in the order of `map_tensors`."""
    return kept[2] if kept[1] == _TREE else (kept,)


def _alias(tensor: torch.Tensor) -> Aliased:
    if tensor.requires_grad:
        # A leaf is an input that is passed on, or a parameter. Detached, a tensor keeps its version, which torch
        # documents as the way to ask for changes in place.
        version, address = tensor._version, 0 if tensor.grad_fn is None else tensor.data_ptr()  # noqa: SLF001
        alias = tensor.detach()
    elif type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return tensor, None, 0  # left to the communicator's checks
    else:
        alias, version, address = tensor.data, None, tensor.data_ptr()
    return alias if getattr(tensor, SPLIT_SIZES, None) is None else _marked(alias, tensor), version, address


def _marked(alias: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``alias`` with the mark by which Megatron's models tell a bridge the rows of the samples of ``tensor``."""
    if (samples := getattr(tensor, SPLIT_SIZES, None)) is not None:
        setattr(alias, SPLIT_SIZES, samples)
    return alias


def _as_leaf(kept: Kept) -> Payload:
    """The payload for a stage on the same rank: what had a graph gets a gradient of its own."""
    payload, version, *_ = kept
    if version == _TREE:
        each = iter(kept[2])
        return map_tensors(payload, lambda _: _as_leaf(next(each)))
    return payload if version is None else payload.requires_grad_()


def _may_change(payload: Payload, address: int) -> bool:
    """Whether memory that comes a second time is none of a parameter's, of which a view has a graph."""
    for tensor in tensors_in_order(payload):
        if tensor.data_ptr() == address:
            base = tensor._base  # noqa: SLF001 -- the documented way to ask for it
            if base is None or base.grad_fn is not None or not base.requires_grad:
                return True
    return False


def tensors_in_order(payload: Payload) -> list[torch.Tensor]:
    """The tensors in the order of `map_tensors`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(payload, note)
    return found
