"""Payloads that are not read yet, in memory that their stage may write again.

A stage may return the same memory for every microbatch: a preallocated output, or the static one of a captured graph. A
message is read later, on a device in the order of its stream, and a stage on the same rank reads when its turn comes.

- A tensor without a graph is copied before a stage of its position runs, and at its send, where something else holds
  its memory as well.
- One with a graph is not, since the graph holds many outputs for the backward. Its version says whether it was written.
- A second payload at the place of a first one that is not read is an error, whatever wrote it, and whichever stage of
  the position returned it. The first one is held until its message is seen to have left, so no new tensor can be
  there. That it has left meanwhile is no excuse: the stage may have written before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from attrs import define, field

from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime.stages.payloads import map_tensors, unpacked
from pipegrid.transport.edge import Direction, Edge

# There is no public way to ask; without this one, all are copied. Pinned by `tests/runtime/test_static_outputs.py`.
_holders = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
_ALONE = 2  # the one tensor, and torch's Python object of the storage
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


# A payload with what it is known by, flat, since it is made for each message: of a tensor the version where it has a
# graph, else None, and the address of its memory, 0 where the same may come again unchanged; of a tree `_TREE`, and
# its tensors.
Payload: TypeAlias = Any
Aliased: TypeAlias = tuple[Payload, int | None, Any]
_TREE = -1


@define(eq=False)
class Unread:
    """The unread payloads of one edge and direction, by microbatch.

    ``local``: a stage on the same rank reads them. ``kept``: what waits for its send, or for that stage; ``left``: from
    the send on until its end. ``places``: what is unread, by address; all ways of a position have one, since their
    stages may share memory. ``returned_by``: the stage, and whether they are outputs or gradients.
    """

    edge: Edge
    direction: Direction
    local: bool = False
    num_slices: int = 1
    kept: dict[int, Aliased] = field(factory=dict, init=False)
    places: dict[int, tuple[tuple[Unread, int], ...]] = field(factory=dict, init=False)
    returned_by: tuple[int, Direction] = field(init=False)
    left: dict[int, Aliased] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        forward = self.direction is Direction.FORWARD
        self.returned_by = self.edge.source if forward else self.edge.destination, self.direction

    def begin(self) -> None:
        """Drop the state of an earlier step."""
        self.kept.clear()
        self.left.clear()
        self.places.clear()

    def put(self, microbatch: int, payload: Payload, aliased: Aliased | None = None) -> None:
        """Keep what a stage has returned; ``aliased``: `without_graph` of it, where several edges carry it.

        Raises:
            StageOutputError: an unread payload is in the same memory.
        """
        if aliased is None or self.local:
            aliased = _alias(payload) if isinstance(payload, torch.Tensor) else without_graph(payload)
        self.kept[microbatch] = aliased
        for _, _, address in (aliased,) if aliased[1] != _TREE else aliased[2]:
            if address:
                own = ((self, microbatch),)
                if self.places.setdefault(address, own) is not own:
                    self._come_to(address, microbatch, payload)

    def _come_to(self, address: int, microbatch: int, payload: Payload) -> None:
        """Note a further payload at ``address``: the same one, or one whose memory a forward cannot change."""
        for other, earlier in self.places[address]:
            is_same = earlier == microbatch and other.returned_by == self.returned_by
            if not is_same and _may_change(payload, address):
                raise other.written(earlier)
        self.places[address] += ((self, microbatch),)

    def _go_from(self, address: int, microbatch: int) -> None:
        """The payload at ``address`` was read, or is a copy elsewhere."""
        found = self.places.pop(address, ())
        if len(found) > 1:
            self.places[address] = tuple([one for one in found if one[0] is not self or one[1] != microbatch])

    def settle(self) -> None:
        """A stage of this position runs: copy what it may write."""
        for microbatch, aliased in self.kept.items():
            self.kept[microbatch] = self._own(microbatch, aliased)

    def take(self, microbatch: int) -> Payload:
        """The payload of ``microbatch`` for its send, or for the stage on the same rank; once.

        Raises:
            StageOutputError: it was written since its stage returned it.
        """
        aliased = self._own(microbatch, self.kept.pop(microbatch))
        if self.local:
            for _, _, address in each_of(aliased):
                self._go_from(address, microbatch)
            return unpacked(_as_leaf(aliased))
        payload, version, address = aliased
        if address or version is not None:  # no copy
            self.left[microbatch] = aliased
        return payload

    def end(self, microbatch: int) -> None:
        """The message of ``microbatch``, one of ``left``, has left, or what depends on it has come back: it was read.

        Raises:
            StageOutputError: it was written before that.
        """
        aliased = self.left.pop(microbatch)
        for tensor, version, address in (aliased,) if aliased[1] != _TREE else aliased[2]:
            if version is not None and tensor._version != version:  # noqa: SLF001 -- see `_alias`
                raise self.written(microbatch)
            self._go_from(address, microbatch)

    def _own(self, microbatch: int, aliased: Aliased) -> Aliased:
        """The payload as it is now: a copy of what may be written unseen."""
        payload, version, address = aliased
        if version is None:
            if address and is_shared(payload):
                self._go_from(address, microbatch)
                return payload.clone(), None, 0
        elif version == _TREE:
            found = [self._own(microbatch, one) for one in each_of(aliased)]
            each = iter(found)
            return map_tensors(payload, lambda _: next(each)[0]), _TREE, found
        elif payload._version != version:  # noqa: SLF001 -- see `_alias`
            raise self.written(microbatch)
        return aliased

    def written(self, microbatch: int) -> StageOutputError:
        """The error of a stage that has written into the payload of ``microbatch``."""
        forward = self.direction is Direction.FORWARD
        name = microbatch if self.num_slices == 1 else "{}.{}".format(*divmod(microbatch, self.num_slices))
        return StageOutputError(
            f"stage {self.edge.source if forward else self.edge.destination} wrote again into "
            f"{'its output' if forward else 'the gradient of its input'} of microbatch {name} before edge {self.edge} "
            "had carried it; return a tensor of its own for each microbatch, such as output.clone()"
        )


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether anything but ``tensor`` holds its memory: another tensor, a view, a graph."""
    return _holders is None or _holders(tensor.untyped_storage()._cdata) > _ALONE  # noqa: SLF001


def without_graph(payload: Payload) -> Aliased:
    """The tensors as ones of their own, so that the memory's holders can be counted; and what they are known by."""
    if isinstance(payload, torch.Tensor):
        return _alias(payload)
    each: list[Aliased] = []

    def alias(tensor: torch.Tensor) -> Any:
        each.append(_alias(tensor))
        return each[-1][0]

    return map_tensors(payload, alias), _TREE, each


def each_of(aliased: Aliased) -> Sequence[tuple[torch.Tensor, int | None, int]]:
    """The tensors of a payload with what they are known by, in the order of `map_tensors`."""
    return aliased[2] if aliased[1] == _TREE else (aliased,)


def _alias(tensor: torch.Tensor) -> Aliased:
    if tensor.requires_grad:
        # A leaf is an input that is passed on, or a parameter. Detached, a tensor keeps its version, which torch
        # documents as the way to ask for changes in place.
        return tensor.detach(), tensor._version, 0 if tensor.grad_fn is None else tensor.data_ptr()  # noqa: SLF001
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return tensor, None, 0  # left to the communicator's checks
    return tensor.data, None, tensor.data_ptr()


def _as_leaf(aliased: Aliased) -> Payload:
    """The payload for a stage on the same rank: what had a graph gets a gradient of its own."""
    payload, version, _ = aliased
    if version == _TREE:
        each = iter(each_of(aliased))
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
