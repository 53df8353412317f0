"""Generation over pipeline stages: a first pass over the whole graph, then one pass over one module per token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from attrs import evolve
from torch import Tensor

from pipegrid.core.fields import Count, Index, checked, index_of, instance, integer
from pipegrid.core.graph import ModuleGraph
from pipegrid.schedules import PipelineConfig, get_forward_backward_func
from pipegrid.schedules.megatron.call import flat
from pipegrid.stages import Stage
from pipegrid.training.errors import GenerationError
from pipegrid.training.generation.kv_cache import kv_cache_of
from pipegrid.training.generation.part import ModulePart
from pipegrid.training.generation.sampling import Sampling
from pipegrid.training.generation.texts import Texts
from pipegrid.transport.base import Communicator, as_communicator

_SAMPLING = instance(Sampling, "a Sampling, or None for the greatest logit")


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
    batch: str | None = None,
) -> list[Tensor]:
    """New tokens after the prompts of each microbatch, as ``generate`` of Hugging Face makes them. All ranks call it.

    The first pass is a forward-only step of the whole graph with the prompts. Then each token is a forward-only step
    of ``module`` alone: encoders rest. Every stage has a KV cache of its own layers for each microbatch; the last
    one chooses tokens, and the first reads them in the next step. With as many microbatches as stages, every stage is
    busy. Replicas go on by themselves, each with its own prompts.

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
            rank in the ``dp`` group is the replica, by which `Sampling` draws.
        module: whose tokens; None is the last of the graph.
        schedule: of both kinds of step.
        sampling: how to draw; None takes the greatest logit.
        eos_token_id: tokens that end a row.
        pad_token_id: what follows the end of a row that others outlast.
        batch: signature of the prompts, as of `forward_backward_with_schedule`.

    Returns:
        On ranks of ``module``, tokens ``[batch, new]`` of each microbatch; elsewhere an empty list.

    Raises:
        GenerationError: arguments of other types, shapes that are fixed, a module without stages made by
            `pipeline_stage`, a model without a cache, prompts padded on the right, or no ``pp`` group.
    """
    checked(max_new_tokens, Count, "max_new_tokens", GenerationError)
    checked(num_microbatches, Count, "num_microbatches", GenerationError)
    checked(pad_token_id, Index, "pad_token_id", GenerationError)
    checked(sampling, Annotated[Any, _SAMPLING] | None, "sampling", GenerationError)
    several = index_of(eos_token_id) is None and isinstance(eos_token_id, Iterable)
    ends: Any = eos_token_id if several else () if eos_token_id is None else (eos_token_id,)
    ends = [checked(end, Annotated[int, integer()], "eos_token_id", GenerationError) for end in ends]
    communicator = as_communicator(p2p_communicator)
    name, own = _stages_of(model, module, communicator)
    each = range(num_microbatches)
    caches = [[kv_cache_of(one.whole, one.assignment, one.number, max_new_tokens) for _ in each] for one in own]
    given = (num_microbatches, sampling, ends, pad_token_id, communicator)
    texts = Texts(own, name, pg_collection, *given) if own else None
    step = partial(
        get_forward_backward_func(schedule=schedule),
        num_microbatches=num_microbatches,
        forward_only=True,
        collect_non_loss_data=True,
    )
    with _holding(own, "kv_caches", caches), evaluating(model):
        logits = step(
            forward_step_func=_choosing(forward_step_func, own),
            data_iterator=data_iterator,
            model=model,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
            batch=batch,
        )
        if texts is not None:
            step = partial(step, batch=batch and f"a token after {batch}")
            _go_on(texts, logits, step, max_new_tokens - 1, p2p_communicator, name, communicator.job.graph)
    return [] if texts is None else texts.end()


def _go_on(
    texts: Texts,
    logits: Sequence[Tensor],
    step: Callable[..., Any],
    passes: int,
    communicator: Any,
    name: str,
    graph: ModuleGraph | None,
) -> None:
    """Run a pass over module ``name`` per token, from the ``logits`` of the first on, until all rows have ended."""
    texts.append(logits)
    alone = graph is None or len(graph.modules) == 1
    part = communicator if graph is None or alone else ModulePart(as_communicator(communicator), name, graph)
    configs = [stage.config for stage in texts.stages]
    if not alone:  # the job's monitor waits for all its ranks, and those of other modules take no further steps
        configs = [evolve(one, monitor=None) if isinstance(one, PipelineConfig) else one for one in configs]
    with _holding(texts.stages, "config", configs):
        for _ in range(passes):
            if texts.ended:
                break
            logits = step(
                forward_step_func=_choosing(texts.forward_step, texts.stages),
                data_iterator=[iter(range(texts.microbatches)) for _ in texts.stages],
                model=list(texts.stages),
                p2p_communicator=part,
            )
            texts.append(logits)


def _stages_of(model: Any, module: str | None, communicator: Communicator) -> tuple[str, list[Stage]]:
    """The name of the module that writes, and this rank's stages of it; none on ranks of others."""
    job = communicator.job
    graph = job.graph
    name = module or (graph.sinks[-1] if graph is not None else "model")
    if graph is not None and name not in graph.order:
        raise GenerationError(f"module is {name!r}; the graph has the modules {', '.join(graph.order)}")
    if communicator.fixed_shapes:
        raise GenerationError("prompts and tokens differ in shape; give a communicator with variable_seq_lengths=True")
    if graph is not None and name not in {graph.module_of(stage)[0] for stage in job.stages}:
        return name, []
    held = model[name] if isinstance(model, Mapping) else model
    stages = list(held) if isinstance(held, (list, tuple)) else [held]
    for stage in stages:
        if not isinstance(stage, Stage):
            raise GenerationError(
                f"{type(stage).__name__} of module {name!r} is no stage that pipeline_stage(...) has made"
            )
    return name, stages


@contextlib.contextmanager
def _holding(held: Sequence[Any], name: str, values: Sequence[Any]) -> Iterator[None]:
    """Attribute ``name`` of each of ``held`` has these values, and at the end those of before."""
    before = [getattr(one, name) for one in held]
    try:
        for one, value in zip(held, values, strict=True):
            setattr(one, name, value)
        yield
    finally:
        for one, value in zip(held, before, strict=True):
            setattr(one, name, value)


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """All models of this rank in evaluation mode, and each module back in the mode that it had."""
    models = flat(model)[1]
    held = [module for one in models for module in one.modules()]
    held += [module.whole for module in held if isinstance(module, Stage)]  # no submodule
    with _holding(held, "training", [module.training for module in held]):
        for one in models:
            one.eval()
        yield


def _choosing(forward_step_func: Callable[..., Any], own: Sequence[Stage]) -> Callable[..., Any]:
    """The forward step, with the last logits of each row in place of a loss."""

    def forward_step(batches: Any, stage: Any) -> Any:
        output, _ = forward_step_func(batches, stage)
        if stage not in own or not stage.is_last:
            return output, None
        return output, lambda result, **_: result.logits[:, -1].float()

    return forward_step
