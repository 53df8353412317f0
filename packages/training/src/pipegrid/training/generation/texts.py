"""Texts in progress: the tokens of each microbatch, chosen on the last stage and known on all stages of a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrid.gradients.all_reduce import reduce_few
from pipegrid.monitor.collectives import Waiting
from pipegrid.stages import Stage
from pipegrid.training.errors import GenerationError
from pipegrid.training.generation.sampling import Sampling
from pipegrid.transport.base import Communicator
from pipegrid.transport.collectives.starting import start

_SOURCES: WeakKeyDictionary[Communicator, dict[str, int]] = WeakKeyDictionary()
"""By communicator and module, the rank of the pp group with the last stage, once a call has found it.

Each call finds it anew beside its passes, and waits for it at its end: ranks may know it from different calls.
"""


class Texts:
    """The tokens of all microbatches of a replica, the same on all stages of it.

    Args:
        stages: of this rank.
        module: their module's name.
        pg_collection: this rank's groups; ``pp`` carries tokens, and the rank in ``dp`` is the replica.
        microbatches: M.
        sampling: as of `generate`, as are ``ends`` and ``pad``.
        ends: tokens that end a row; none where it goes on to the last.
        pad: what follows the end of a row.
        communicator: whose deadline is that for a token to come from the last stage, and which has one last stage.

    Raises:
        GenerationError: stages are on several ranks, and there is no ``pp`` group.
        CollectiveFailedError: from `append` and `end`, where a stage has not come for them within the deadline.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        module: str,
        pg_collection: Any,
        microbatches: int,
        sampling: Sampling | None,
        ends: Sequence[int],
        pad: int,
        communicator: Communicator,
    ) -> None:
        self.stages, self.microbatches = stages, microbatches
        self._module, self._known = module, _SOURCES.setdefault(communicator, {})
        groups = pg_collection[module] if isinstance(pg_collection, Mapping) else pg_collection
        self._group: dist.ProcessGroup | None = None
        if len(stages) < stages[0].assignment.num_stages:
            self._group = getattr(groups, "pp", None)
            if self._group is None:
                raise GenerationError(
                    f"pg_collection has no pp group of module {module!r}, over which its last stage sends tokens to "
                    'the others; make it with grid.create_pg("pp") before ProcessGroupCollection.from_grid(grid)'
                )
        self._device = next(stages[0].parameters()).device
        self._waiting = Waiting(communicator.deadline, what="the exchange of tokens between stages")
        self._ends = torch.tensor(ends, dtype=torch.long, device=self._device)
        self._sampling, self._pad = sampling, pad
        self._columns: list[list[Tensor]] = [[] for _ in range(microbatches)]
        self._going: list[Tensor] = []
        self._generators: list[torch.Generator] = []
        if sampling is not None:
            dp = getattr(groups, "dp", None)
            self._generators = sampling.generators(microbatches, self._device, lane=0 if dp is None else dp.rank())
        if self._group is not None:  # last: what fails before leaves no message that another call would meet
            self._find_source = _rank_of_last_stage(stages, self._group, self._waiting)

    def forward_step(self, numbers: Iterator[int], stage: Stage) -> tuple[Any, None]:
        """Forward of the last token of each row."""
        return stage(input_ids=self._columns[next(numbers)][-1].unsqueeze(1)), None

    def append(self, logits: Sequence[Tensor]) -> None:
        """Choose the next token of each row from ``logits``, one per microbatch on the last stage, for all stages."""
        if not self._going:
            self._going = [torch.ones(rows, dtype=torch.bool, device=self._device) for rows in self._rows()]
        chosen = [self._choose(number, one) for number, one in enumerate(logits)] if len(logits) else None
        everywhere = torch.split(self._from_last_stage(chosen), list(self._rows()))
        for number, (tokens, going) in enumerate(zip(everywhere, self._going, strict=True)):
            if going.any():
                kept = torch.where(going, tokens, self._pad)
                self._columns[number].append(kept)
                self._going[number] = going & ~torch.isin(kept, self._ends)

    def _rows(self) -> Iterator[int]:
        for kv_cache in self.stages[0].kv_caches or ():
            assert kv_cache.mask is not None  # the first pass has come
            yield len(kv_cache.mask)

    def _choose(self, number: int, logits: Tensor) -> Tensor:
        if self._sampling is None:
            return logits.argmax(dim=-1)
        return self._sampling.draw(logits, self._generators[number])

    def _from_last_stage(self, chosen: Sequence[Tensor] | None) -> Tensor:
        """The tokens of the last stage, on every stage."""
        tokens = (
            torch.zeros(sum(self._rows()), dtype=torch.long, device=self._device)
            if chosen is None
            else torch.cat(list(chosen))
        )
        if self._group is not None:
            known = self._known.get(self._module)
            source = self._find_source() if known is None else known
            work = start(dist.broadcast, tokens, group_src=source, group=self._group)
            self._waiting.wait(work, tokens, self._group, host=True)
        return tokens

    @property
    def ended(self) -> bool:
        """Whether every row has ended."""
        return not any(bool(going.any()) for going in self._going)

    def end(self) -> list[Tensor]:
        """Tokens ``[batch, new]`` by microbatch, when none are to come."""
        if self._group is not None:
            self._known[self._module] = self._find_source()
        return [torch.stack(columns, dim=1) for columns in self._columns]


def _rank_of_last_stage(stages: Sequence[Stage], group: dist.ProcessGroup, waiting: Waiting) -> Callable[[], int]:
    """Find out, beside the passes, which rank of ``group`` has the last stage; the result waits for it, once."""
    has = any(stage.is_last for stage in stages)
    rank = torch.tensor([group.rank() if has else 0.0], dtype=torch.float64, device=next(stages[0].parameters()).device)
    found = reduce_few(rank, group, host=True)

    @cache
    def source() -> int:
        found(waiting)
        return int(rank)

    return source
