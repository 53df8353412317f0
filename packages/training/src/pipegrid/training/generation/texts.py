"""Texts in progress: the tokens of each microbatch, chosen on the last stage and known on all stages of a replica."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from pipegrid.training.errors import GenerationError
from pipegrid.training.generation.sampling import Sampling
from pipegrid.training.stages import Stage
from pipegrid.transport.base import Communicator
from pipegrid.transport.collectives.waiting import finish
from pipegrid.transport.streams import has_streams


@define(eq=False, kw_only=True)
class Texts:
    """The tokens of all microbatches of a replica, the same on all stages of it."""

    stages: Sequence[Stage]
    group: dist.ProcessGroup | None
    lane: int
    device: torch.device
    microbatches: int
    sampling: Sampling | None
    ends: Sequence[int]
    pad: int
    deadline: float
    _columns: list[list[Tensor]] = field(factory=list, init=False)
    _going: list[Tensor] = field(factory=list, init=False)
    _generators: list[torch.Generator] = field(factory=list, init=False)
    _ends: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._columns = [[] for _ in range(self.microbatches)]
        self._ends = torch.tensor(self.ends, dtype=torch.long, device=self.device)
        if self.sampling is not None:
            self._generators = self.sampling.generators(self.microbatches, self.device, lane=self.lane)

    def forward_step(self, numbers: Iterator[int], stage: Stage) -> tuple[Any, None]:
        """Forward of the last token of each row."""
        return stage(input_ids=self._columns[next(numbers)][-1].unsqueeze(1)), None

    def append(self, logits: Sequence[Tensor]) -> None:
        """Choose the next token of each row from ``logits``, one per microbatch on the last stage, for all stages."""
        if not self._going:
            self._going = [torch.ones(rows, dtype=torch.bool, device=self.device) for rows in self._rows()]
        chosen = [self._choose(number, one) for number, one in enumerate(logits)] if len(logits) else None
        everywhere = torch.split(self._from_last_stage(chosen), list(self._rows()))
        for number, (tokens, going) in enumerate(zip(everywhere, self._going, strict=True)):
            if going.any():
                kept = torch.where(going, tokens, self.pad)
                self._columns[number].append(kept)
                self._going[number] = going & ~torch.isin(kept, self._ends)

    def _rows(self) -> Iterator[int]:
        for cache in self.stages[0].kv_caches or ():
            assert cache.mask is not None  # the first pass has come
            yield len(cache.mask)

    def _choose(self, number: int, logits: Tensor) -> Tensor:
        if self.sampling is None:
            return logits.argmax(dim=-1)
        return self.sampling.draw(logits, self._generators[number])

    def _from_last_stage(self, chosen: Sequence[Tensor] | None) -> Tensor:
        """The tokens of the last stage, on every stage."""
        tokens = (
            torch.zeros(sum(self._rows()), dtype=torch.long, device=self.device)
            if chosen is None
            else torch.cat(list(chosen))
        )
        if self.group is not None:
            work = dist.all_reduce(tokens, group=self.group, async_op=True)  # zeros elsewhere
            on_device, end = has_streams(tokens.device), time.monotonic() + self.deadline
            failed = finish(work, self.group, on_device=on_device, host=True, end=end)
            if failed is not None:
                late = f"stages did not exchange tokens within {self.deadline:g} s"
                raise GenerationError(f"{late}: {failed.text or 'one of them has not come'}") from failed.error
        return tokens

    @property
    def ended(self) -> bool:
        """Whether every row has ended."""
        return not any(bool(going.any()) for going in self._going)

    @property
    def tokens(self) -> list[Tensor]:
        """Tokens ``[batch, new]`` by microbatch."""
        return [torch.stack(columns, dim=1) for columns in self._columns]


def texts_of(
    own: Sequence[Stage],
    name: str,
    pg_collection: Any,
    microbatches: int,
    sampling: Sampling | None,
    eos_token_id: int | Iterable[int] | None,
    pad: int,
    communicator: Communicator,
) -> Texts | None:
    """The texts of this rank's replica; None on ranks of other modules than ``name``."""
    if not own:
        return None
    groups = pg_collection[name] if isinstance(pg_collection, Mapping) else pg_collection
    group: dist.ProcessGroup | None = None
    if len(own) < own[0].assignment.num_stages:
        group = getattr(groups, "pp", None)
        if group is None:
            raise GenerationError(
                f"pg_collection has no pp group of module {name!r}, over which its last stage sends tokens to the "
                'others; make it with grid.create_pg("pp") before ProcessGroupCollection.from_grid(grid)'
            )
    return Texts(
        stages=own,
        group=group,
        lane=0 if (dp := getattr(groups, "dp", None)) is None else dp.rank(),
        device=next(own[0].parameters()).device,
        microbatches=microbatches,
        sampling=sampling,
        ends=() if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else [*eos_token_id],
        pad=pad,
        deadline=communicator.deadline,
    )
