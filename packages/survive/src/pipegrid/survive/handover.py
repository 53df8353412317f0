"""The state of a job on a rank between two steps, and its transfer to a new process in place of a dead one.

The two are peers: the same stages in two replicas, so the state of one is that of the other, tensor by tensor, without
a change of layout. Nothing that arrives is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from pipegrid.checkpoint.stored.plain import dtype_name, dtype_of, from_plain, raw_bytes, to_plain
from pipegrid.gradients.dtensors import is_dtensor, local_of
from pipegrid.gradients.main_grad import Modules, named_modules, parameters_of
from pipegrid.stages.errors import CheckpointError
from pipegrid.stages.generators import as_tensors, capture, of_tensors, restore
from pipegrid.survive.errors import SurviveError

_PLACES = ("grad", "main_grad")


class Stateful(Protocol):
    """An object with a state of tensors and plain data: an optimizer, a learning-rate scheduler, a data position.

    Examples:
        >>> import torch
        >>> part: Stateful = torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=0.1)
        >>> sorted(part.state_dict())
        ['param_groups', 'state']
    """

    def state_dict(self) -> Any:
        """The state, of tensors and plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a state of `state_dict`."""


@frozen(eq=False)
class JobState:
    """The state of a rank: parameters, buffers, gradients, random generators, ``parts`` and the number of the step."""

    modules: Modules
    parts: Mapping[str, Stateful]

    def __attrs_post_init__(self) -> None:
        try:
            tensors = list[Tensor]()
            to_plain({name: part.state_dict() for name, part in self.parts.items()}, "state", tensors)
        except CheckpointError as error:
            raise SurviveError(f"a new process cannot get the state of this rank: {error}") from error
        groups = chain.from_iterable(getattr(part, "param_groups", ()) for part in self.parts.values())
        trained = chain.from_iterable(group["params"] for group in groups)
        if any(map(is_dtensor, (*tensors, *trained))):
            raise SurviveError("state has an optimizer of DTensors, whose states no new process gets: leave out state=")

    def hand_over(self, group: dist.ProcessGroup, joining: Collection[int], step: int | None) -> int | None:
        """Send the state to the new processes of ``group``, from its first other rank; receive it on those.

        All ranks of ``group`` call this; those ``joining`` are without the state. Returns the step of the one that
        sends.

        Raises:
            SurviveError: the modules of a new process are others.
            RuntimeError: a connection has ended.
            CheckpointError: the state of the rank that sends is no plain data any more.
        """
        ranks, here = dist.get_process_group_ranks(group), dist.get_rank()
        source = next((rank for rank in ranks if rank not in joining), None)
        if source is None:
            raise RuntimeError(f"none of the ranks {ranks} has the state that {here} is to get")
        if here in joining:
            return self._receive(_Wire(group, ranks.index(source)))
        for rank in ranks if here == source else ():
            if rank in joining:
                self._send(_Wire(group, ranks.index(rank)), step)
        return step

    def _held(self) -> dict[str, Tensor]:
        """Parameters and buffers on this rank, by names."""
        return {
            f"{number}/{module}/{name}": local_of(tensor.detach())
            for number, (module, stage) in enumerate(named_modules(self.modules))
            for name, tensor in chain(stage.named_parameters(), stage.named_buffers())
        }

    @torch.no_grad()
    def _send(self, wire: _Wire, step: int | None) -> None:
        held, tensors = self._held(), list[Tensor]()
        rest = {
            "step": step,
            "gradients": [
                {place: getattr(parameter, place) for place in _PLACES if getattr(parameter, place, None) is not None}
                for _, parameter in parameters_of(self.modules)
            ],
            "generators": as_tensors(capture()),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }
        plain = to_plain(rest, "state", tensors)
        tensors = [local_of(tensor.detach()) for tensor in tensors]
        wire.send_text(json.dumps({"held": _outline(held), "sent": [_shape(each) for each in tensors], "rest": plain}))
        for tensor in (*held.values(), *tensors):
            wire.send(tensor)

    @torch.no_grad()
    def _receive(self, wire: _Wire) -> int | None:
        said, held = json.loads(wire.receive_text()), self._held()
        if said["held"] != _outline(held):
            theirs, mine = ({tuple(map(str, one)) for one in each} for each in (said["held"], _outline(held)))
            few = sorted(theirs ^ mine)[:4]
            raise SurviveError(f"the modules of this rank are not those of its peer; only one of them has {few}")
        for tensor in held.values():
            tensor.copy_(wire.receive(tensor.shape, tensor.dtype))
        tensors = [wire.receive(shape, dtype_of(dtype)) for shape, dtype in said["sent"]]
        rest = from_plain(said["rest"], tensors)
        for (_, parameter), gradients in zip(parameters_of(self.modules), rest["gradients"], strict=True):
            for place in _PLACES:
                if place in gradients or getattr(parameter, place, None) is not None:
                    found = gradients.get(place)
                    setattr(parameter, place, None if found is None else found.to(parameter.device))
        for name, part in self.parts.items():
            part.load_state_dict(rest["parts"][name])
        restore(of_tensors(rest["generators"]))
        step: int | None = rest["step"]
        return step


def _shape(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), dtype_name(tensor.dtype)]


def _outline(held: Mapping[str, Tensor]) -> list[list[Any]]:
    return [[name, *_shape(tensor)] for name, tensor in held.items()]


@frozen(eq=False)
class _Wire:
    """Tensors to or from the rank ``other`` of ``group``, on the host where its backend serves that."""

    group: dist.ProcessGroup
    other: int

    @property
    def _device(self) -> torch.device:
        served = dict(part.split(":") for part in dist.get_backend_config(self.group).split(","))
        return torch.device("cpu" if "cpu" in served else next(iter(served)))

    def send(self, tensor: Tensor) -> None:
        if tensor.numel():
            dist.send(tensor.to(self._device).contiguous(), group=self.group, group_dst=self.other)

    def receive(self, shape: Any, dtype: torch.dtype) -> Tensor:
        found = torch.empty(shape, dtype=dtype, device=self._device)
        if found.numel():
            dist.recv(found, group=self.group, group_src=self.other)
        return found

    def send_text(self, text: str) -> None:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.send(torch.tensor([len(data)]))
        self.send(data)

    def receive_text(self) -> str:
        size = int(self.receive((1,), torch.int64))
        data = self.receive((size,), torch.uint8).cpu()  # whose memory is read: it is to live until then
        return bytes(raw_bytes(data)).decode()
