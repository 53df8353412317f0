"""Payloads that are not read yet, in memory that their stage may write again.

A stage may return the same memory for every microbatch: a preallocated output, or the static one of a captured graph. A
message is read later, on a device in the order of its stream, and a stage on the same rank reads when its turn comes.

- A tensor without a graph is copied before its stage runs again, where something else holds its memory as well.
- One with a graph is not, since the graph holds many outputs for the backward. Its version says whether it was written.
- A second payload at the place of a first one that is not read is an error, whatever wrote it: the first one's tensor
  lives, so no new tensor can be there.

Nothing here holds the memory of a message after its send: the communicator does until it has read it.
"""

from __future__ import annotations

import weakref
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
_NOTHING = torch.empty(0)


# What an unread tensor is known by: its version where it has a graph; the address of its memory, 0 where the same may
# come again unchanged; and for one with a graph a tensor without memory that has its version. Made for each message.
Mark: TypeAlias = tuple[int | None, int, torch.Tensor | None]
_COPIED: Mark = (None, 0, None)
Marks: TypeAlias = Mark | list[Mark]
Payload: TypeAlias = Any
Aliased: TypeAlias = tuple[Payload, Marks]


@define(eq=False)
class Unread:
    """The unread payloads of one edge and direction, by microbatch.

    ``local``: a stage on the same rank reads them. ``kept``: what waits for its send.
    """

    edge: Edge
    direction: Direction
    local: bool = False
    num_slices: int = 1
    kept: dict[int, Aliased] = field(factory=dict, init=False)
    _left: dict[int, Marks] = field(factory=dict, init=False)  # from the send on until its end
    _places: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = field(factory=dict, init=False)  # by address

    def begin(self) -> None:
        """Drop the state of an earlier step."""
        self.kept.clear()
        self._left.clear()
        self._places.clear()

    def put(self, microbatch: int, payload: Payload, aliased: Aliased | None = None) -> None:
        """Keep what a stage has returned; ``aliased``: `without_graph` of it, where several edges carry it.

        Raises:
            StageOutputError: an unread payload is in the same memory.
        """
        if aliased is None or self.local:
            aliased = without_graph(payload, local=self.local)
        kept, marks = self.kept[microbatch] = aliased
        places = self._places
        tensors, each = (tensors_in_order(kept), marks) if isinstance(marks, list) else ((kept,), (marks,))
        for tensor, (_, address, _) in zip(tensors, each, strict=True):
            if address:
                if address in places:
                    self._require_read(microbatch, address, payload)
                places[address] = microbatch, weakref.ref(tensor)

    def _require_read(self, microbatch: int, address: int, payload: Payload) -> None:
        earlier, tensor = self._places[address]
        if earlier != microbatch and tensor() is not None and _may_change(payload, address):
            raise self._written(earlier)

    def settle(self) -> None:
        """The stage runs again: copy what it may write."""
        for microbatch, (payload, marks) in self.kept.items():
            self.kept[microbatch] = self._own(microbatch, payload, marks)

    def take(self, microbatch: int) -> Payload:
        """The payload of ``microbatch`` for its send, or for the stage on the same rank; once.

        Raises:
            StageOutputError: it was written since its stage returned it.
        """
        payload, marks = self.kept.pop(microbatch)
        if isinstance(marks, list) or marks[2] is None or marks[2]._version != marks[0]:  # noqa: SLF001 -- see `_alias`
            payload, marks = self._own(microbatch, payload, marks)
        if self.local:
            for _, address, _ in marks if isinstance(marks, list) else (marks,):
                self._places.pop(address, None)
            return unpacked(_as_leaf(payload, marks))
        if marks is not _COPIED:
            self._left[microbatch] = marks
        return payload

    def end(self, microbatch: int) -> None:
        """The message of ``microbatch`` has left, or what depends on it has come back: it was read.

        Raises:
            StageOutputError: it was written before that.
        """
        marks = self._left.pop(microbatch, None)
        if marks is None:
            return
        for version, address, probe in marks if isinstance(marks, list) else (marks,):
            if probe is not None and probe._version != version:  # noqa: SLF001 -- see `_alias`
                raise self._written(microbatch)
            self._places.pop(address, None)

    def _own(self, microbatch: int, payload: Payload, marks: Marks) -> Aliased:
        if not isinstance(marks, list):
            version, address, probe = marks
            if probe is not None:
                if probe._version != version:  # noqa: SLF001 -- see `_alias`
                    raise self._written(microbatch)
            elif marks is not _COPIED and is_shared(payload):
                self._places.pop(address, None)
                return payload.clone(), _COPIED
            return payload, marks
        found: list[Mark] = []
        each = iter(marks)

        def own(tensor: torch.Tensor) -> torch.Tensor:
            owned, mark = self._own(microbatch, tensor, next(each))
            found.append(mark)  # type: ignore[arg-type]  # of one tensor
            return owned  # type: ignore[no-any-return]

        return map_tensors(payload, own), found

    def _written(self, microbatch: int) -> StageOutputError:
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


def without_graph(payload: Payload, *, local: bool = False) -> Aliased:
    """The tensors as ones of their own, so that the memory's holders can be counted; and what they are known by."""
    if isinstance(payload, torch.Tensor):
        return _alias(payload, local=local)
    marks: list[Mark] = []

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        found, mark = _alias(tensor, local=local)
        marks.append(mark)
        return found

    return map_tensors(payload, alias), marks


def _alias(tensor: torch.Tensor, *, local: bool) -> tuple[torch.Tensor, Mark]:
    if tensor.requires_grad:
        probe = tensor.detach()  # has the tensor's own version
        mark = tensor._version, 0 if tensor.grad_fn is None else tensor.data_ptr(), probe  # noqa: SLF001 -- the documented way to ask for changes in place
        if local:  # the graph of the other stage compares versions from then on
            return probe, mark
        alias = tensor.detach() if type(tensor) not in _PLAIN else tensor.data
        probe.data = _NOTHING
        return alias, mark
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return tensor, _COPIED  # left to the communicator's checks
    return tensor.data, (None, tensor.data_ptr(), None)


def _as_leaf(payload: Payload, marks: Marks) -> Payload:
    """The payload for a stage on the same rank: what had a graph gets a gradient of its own."""
    if not isinstance(marks, list):
        return payload if marks[0] is None else payload.requires_grad_()
    each = iter(marks)
    return map_tensors(payload, lambda tensor: _as_leaf(tensor, next(each)))


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
