"""Generation over pipeline stages: a first pass over the whole graph, then one pass over one module per token."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, evolve, field
from torch import Tensor

from pipegrid.schedules import PipelineConfig, get_forward_backward_func
from pipegrid.topology.fields import Count, Index, checked
from pipegrid.training.errors import GenerationError
from pipegrid.training.generation.memory import Memory, cache_of
from pipegrid.training.generation.part import ModulePart
from pipegrid.training.generation.sampling import Sampling
from pipegrid.training.stages import Stage
from pipegrid.transport.adapted import as_communicator
from pipegrid.transport.collectives.waiting import finish
from pipegrid.transport.graph import ModuleGraph
from pipegrid.transport.streams import has_streams


@torch.no_grad()
def generate(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    max_new_tokens: int,
    p2p_communicator: Any,
    pg_collection: Any,
    module: str | None = None,
    schedule: str = "1f1b",
    sampling: Sampling | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int = 0,
) -> list[Tensor]:
    """New tokens after the prompts of each microbatch, as ``generate`` of Hugging Face makes them. All ranks call it.

    The first pass is a forward-only step of the whole graph with the prompts. Then each token is a forward-only step
    of ``module`` alone: encoders rest. Every stage keeps the keys and values of its own layers, by microbatch; the last
    one chooses tokens, and the first reads them in the next step. With as many microbatches as stages, every stage is
    busy. Data lanes go on by themselves, each with its own prompts.

    Args:
        forward_step_func: as of the step functions: called for the first pass. On the last stage the output has
            ``logits``; its loss function is not called. Prompts of unequal length are padded on the left, and have an
            ``attention_mask``.
        data_iterator: as of the step functions.
        model: as of the step functions; of ``module``, a `Stage` or a list of stages, made by `pipeline_stage`.
        num_microbatches: M.
        max_new_tokens: passes, the first included; fewer where all rows have ended.
        p2p_communicator: with ``variable_seq_lengths=True``: a prompt and a token have other shapes.
        pg_collection: this rank's groups, by module where there are several; the ``pp`` group carries tokens, and the
            rank in the ``dp`` group is the data lane, by which `Sampling` draws.
        module: whose tokens; None is the last of the graph.
        schedule: of both kinds of step.
        sampling: how to draw; None takes the greatest logit.
        eos_token_id: tokens that end a row.
        pad_token_id: what follows the end of a row that others outlast.

    Returns:
        On ranks of ``module``, tokens ``[batch, new]`` of each microbatch; elsewhere an empty list.

    Raises:
        GenerationError: shapes that are fixed, a module without stages made by `pipeline_stage`, a model without a
            cache, prompts padded on the right, or no ``pp`` group.
    """
    checked(max_new_tokens, Count, "max_new_tokens", GenerationError)
    checked(num_microbatches, Count, "num_microbatches", GenerationError)
    checked(pad_token_id, Index, "pad_token_id", GenerationError)
    communicator = as_communicator(p2p_communicator)
    job = communicator.job
    graph = job.graph
    name = module or (graph.sinks[-1] if graph is not None else "model")
    if graph is not None and name not in graph.order:
        raise GenerationError(f"module is {name!r}; the graph has the modules {', '.join(graph.order)}")
    if communicator.fixed_shapes:
        raise GenerationError("prompts and tokens differ in shape; give a communicator with variable_seq_lengths=True")
    own = _stages_of(model, name, graph, job.stages)
    group = _pipeline_group(pg_collection, name, own)
    step = partial(
        get_forward_backward_func(schedule=schedule),
        num_microbatches=num_microbatches,
        forward_only=True,
        collect_non_loss_data=True,
    )
    with _remembering(own, num_microbatches, max_new_tokens), evaluating(model):
        logits = step(
            forward_step_func=_choosing(forward_step_func, own),
            data_iterator=data_iterator,
            model=model,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
        )
        if not own:
            return []
        texts = _Texts(
            stages=own,
            group=group,
            lane=0 if (dp := getattr(_groups_of(pg_collection, name), "dp", None)) is None else dp.rank(),
            device=next(own[0].parameters()).device,
            microbatches=num_microbatches,
            sampling=sampling,
            ends=() if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else [*eos_token_id],
            pad=pad_token_id,
            deadline=communicator.deadline,
        )
        texts.append(logits)
        alone = graph is None or len(graph.modules) == 1
        part = p2p_communicator if alone else ModulePart(p2p_communicator, name)
        with contextlib.nullcontext() if alone else _unmonitored(own):
            for _ in range(max_new_tokens - 1):
                if texts.ended:
                    break
                logits = step(
                    forward_step_func=_choosing(texts.forward_step, own),
                    data_iterator=[iter(range(num_microbatches)) for _ in own],
                    model=list(own),
                    p2p_communicator=part,
                )
                texts.append(logits)
        return texts.tokens


def _stages_of(model: Any, name: str, graph: ModuleGraph | None, numbers: Sequence[int]) -> list[Stage]:
    """This rank's stages of the module that writes; none on ranks of others."""
    if graph is not None and name not in {graph.module_of(stage)[0] for stage in numbers}:
        return []
    held = model[name] if isinstance(model, Mapping) else model
    stages = list(held) if isinstance(held, (list, tuple)) else [held]
    for stage in stages:
        if not isinstance(stage, Stage):
            raise GenerationError(
                f"{type(stage).__name__} of module {name!r} is no stage that pipeline_stage(...) has made"
            )
    return stages


def _groups_of(pg_collection: Any, name: str) -> Any:
    return pg_collection[name] if isinstance(pg_collection, Mapping) else pg_collection


def _pipeline_group(pg_collection: Any, name: str, own: Sequence[Stage]) -> dist.ProcessGroup | None:
    """The group over which the last stage sends tokens to the others; None where this rank has all stages."""
    if not own or len(own) == own[0].assignment.num_stages:
        return None
    group: dist.ProcessGroup | None = getattr(_groups_of(pg_collection, name), "pp", None)
    if group is None:
        raise GenerationError(
            f"pg_collection has no pp group of module {name!r}, over which its last stage sends tokens to the others; "
            'make it with grid.create_pg("pp") before ProcessGroupCollection.from_grid(grid)'
        )
    return group


@contextlib.contextmanager
def _remembering(stages: Sequence[Stage], microbatches: int, new: int) -> Iterator[None]:
    """Give each stage a memory of every microbatch, and take it away."""
    for stage in stages:
        stage.memories = [
            Memory(cache_of(stage.whole, stage.assignment, stage.number), stage.whole, new) for _ in range(microbatches)
        ]
    try:
        yield
    finally:
        for stage in stages:
            stage.memories = None


@contextlib.contextmanager
def _unmonitored(stages: Sequence[Stage]) -> Iterator[None]:
    """Without the job's monitor, which waits for all its ranks: those of other modules take no further steps."""
    configs = [stage.config for stage in stages]
    for stage, config in zip(stages, configs, strict=True):
        if isinstance(config, PipelineConfig):
            stage.config = evolve(config, monitor=None)
    try:
        yield
    finally:
        for stage, config in zip(stages, configs, strict=True):
            stage.config = config


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """All models of this rank in evaluation mode, and back in the mode that each had."""
    flat = [
        one
        for held in (model.values() if isinstance(model, Mapping) else [model])
        for one in (held if isinstance(held, (list, tuple)) else [held])
    ]
    training = [one.training for one in flat]
    for one in flat:
        one.eval()
    try:
        yield
    finally:
        for one, mode in zip(flat, training, strict=True):
            one.train(mode)


def _choosing(forward_step_func: Callable[..., Any], own: Sequence[Stage]) -> Callable[..., Any]:
    """The forward step, with the last logits of each row in place of a loss."""

    def forward_step(batches: Any, stage: Any) -> Any:
        output, _ = forward_step_func(batches, stage)
        if stage not in own or not stage.is_last:
            return output, None
        return output, lambda result, **_: result.logits[:, -1].float()

    return forward_step


@define(eq=False, kw_only=True)
class _Texts:
    """The tokens of all microbatches of a data lane, the same on all stages of it."""

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
        for memory in self.stages[0].memories or ():
            assert memory.mask is not None  # the first pass has come
            yield len(memory.mask)

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
