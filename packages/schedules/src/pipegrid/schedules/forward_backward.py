"""The seeds' step functions: build the plan, run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.actions import Action, ActionKind
from pipegrid.schedules.config import config_of, option
from pipegrid.schedules.generators import multi_module_1f1b
from pipegrid.schedules.gradients import collection_of
from pipegrid.schedules.lowering import lower
from pipegrid.schedules.output_layer import settle_deferral
from pipegrid.schedules.plan import Plan
from pipegrid.schedules.reduction import settle_reduction, settle_ties
from pipegrid.schedules.runtime import PipelineRuntime, position_of
from pipegrid.schedules.seed_stage import AnnouncedShapes, SeedStage, announced_shapes
from pipegrid.schedules.tied_parameters import tied_stages
from pipegrid.schedules.verification import verify

ForwardStepFunc = Callable[..., Any]


class StepArgumentError(ValueError):
    """The arguments of a step function contradict each other."""


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, pg_collection: Any = None
) -> Callable[..., list[Any]]:
    """The step function for a pipeline of ``pp_size`` stages with ``vp_size`` chunks on each.

    Sizes come from the arguments, or from the ``pp`` group of ``pg_collection``.

    Raises:
        StepArgumentError: neither is given (there is no global parallel state to read), or chunks are asked for.
    """
    if pp_size is None and pg_collection is not None:
        group = getattr(pg_collection, "pp", None)
        pp_size = 1 if group is None else group.size()
    if pp_size is None:
        raise StepArgumentError(
            "the pipeline size is not known: there is no global parallel state. Pass pp_size=..., or pg_collection=... "
            "with its `pp` group"
        )
    if pp_size == 1:
        return forward_backward_no_pipelining
    if vp_size is not None and vp_size > 1:
        raise StepArgumentError(
            f"vp_size={vp_size}: the interleaved step function does not exist yet; use vp_size=1 (1F1B)"
        )
    return forward_backward_pipelining_without_interleaving


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    pg_collection: Any = None,
) -> list[Any]:
    """Forward and backward of every microbatch in turn, on one stage.

    Arguments as in `forward_backward_pipelining_without_interleaving`; ``seq_length``, ``micro_batch_size`` and
    ``decoder_seq_length`` describe messages, of which there are none here.

    Returns:
        The ``info`` of every microbatch's loss function.
    """
    del seq_length, micro_batch_size, decoder_seq_length
    if adjust_tensor_shapes_fn is not None:
        raise StepArgumentError("adjust_tensor_shapes_fn adjusts shapes of messages; without a pipeline there are none")
    return _run(
        graph=ModuleGraph({"model": 1}),
        stage=0,
        communicator=None,
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        pg_collection=pg_collection,
    )


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
) -> list[Any]:
    """One step of 1F1B (Narayanan et al. 2021, section 2.2.1), for one module or a graph of modules.

    Args:
        forward_step_func: ``f(data_iterator, model[, checkpoint_activations_microbatch]) -> (output, loss_func)``.
            With several modules, ``output`` is a dict ``{module name: payload}``, and what the model's
            ``set_input_tensor`` receives is a dict keyed by the modules it comes from.
        data_iterator: read by ``forward_step_func`` on stages that need data; a list of one is taken as its item.
        model: this rank's stage; a list of one is taken as its item. Its ``config`` is read (`PipelineConfig`).
        num_microbatches: M, the same on every rank.
        seq_length: tokens of a sample. Messages carry their own shapes, so this is for signature's sake.
        micro_batch_size: samples of a microbatch, likewise.
        decoder_seq_length: likewise.
        forward_only: no backward, no gradients.
        collect_non_loss_data: return what ``loss_func(output, non_loss_data=True)`` returns.
        first_val_step: the first step of a validation phase.
        adjust_tensor_shapes_fn: ``f(receive_shapes, send_shapes)``, given the shapes that ``seq_length`` and the
            others imply; neighbours agree on shapes by themselves, so the result is what tensors are checked against.
            For a pipeline of one module.
        p2p_communicator: a `P2PCommunicator` or a `MultiModulePipelineCommunicator`.
        pg_collection: this rank's process groups; with a ``dp`` or ``dp_cp`` group, gradients are reduced after
            the last backward unless the model's wrapper does that or ``finalize_model_grads_func`` is set.

    Returns:
        On a last stage the ``info`` of every microbatch's loss function, in order; elsewhere an empty list.

    Raises:
        StepArgumentError: no communicator, chunks, or an argument that would be ignored.
        ReductionError: the gradients could not be made right with what was given; nothing was sent.
        PipelineError: the step failed; the message says where in the plan this rank stood.
    """
    if p2p_communicator is None:
        raise StepArgumentError(
            "p2p_communicator is needed: there is no global parallel state to make one from. Pass "
            "P2PCommunicator(pp_group, config) or MultiModulePipelineCommunicator(grids, topology, config)"
        )
    graph, stage = place_of(p2p_communicator)
    if adjust_tensor_shapes_fn is not None and len(graph.modules) > 1:
        raise StepArgumentError(
            "adjust_tensor_shapes_fn knows one list of shapes, and the modules of a graph have one each. Remove it: "
            "neighbours agree on the shapes of what is sent"
        )
    groups = None if pg_collection is None else collection_of(pg_collection, graph.module_of(stage)[0])
    shapes = announced_shapes(
        adjust_tensor_shapes_fn,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config_of(_single(model, "model")),
        tp_group=getattr(groups, "tp", None),
        cp_group=getattr(groups, "cp", None),
    )
    return _run(
        graph=graph,
        stage=stage,
        communicator=p2p_communicator,
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        pg_collection=pg_collection,
        shapes=shapes,
    )


def place_of(communicator: Any) -> tuple[ModuleGraph, int]:
    """The graph that a communicator serves, and this rank's stage in it.

    Raises:
        StepArgumentError: this rank holds several stages; one call of a step function runs one.
    """
    graph = getattr(communicator, "graph", None)
    if graph is None:
        return ModuleGraph({"model": communicator.total_stages}), communicator.current_stage
    stages = communicator.stages
    if len(stages) != 1:
        names = [graph.module_of(stage) for stage in stages]
        raise StepArgumentError(
            f"this rank holds the stages {names} of several modules; a step function runs one stage per rank. Place "
            "the modules on separate ranks"
        )
    return graph, stages[0]


@lru_cache(maxsize=64)
def step_plan(graph: ModuleGraph, num_microbatches: int, tied: tuple[tuple[str, tuple[int, ...]], ...] = ()) -> Plan:
    """The verified 1F1B plan that the step function runs: for drawing, simulating, or a recording.

    ``tied`` has the name and the stages of each tied parameter (`tied_stages`). Pure, so remembering it changes
    nothing but the time of the second step.
    """
    plan = lower(multi_module_1f1b(graph, num_microbatches), tied=dict(tied))
    verify(plan)
    return plan


def _run(
    *,
    graph: ModuleGraph,
    stage: int,
    communicator: Any,
    forward_step_func: ForwardStepFunc,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool,
    collect_non_loss_data: bool,
    first_val_step: bool | None,
    pg_collection: Any,
    shapes: AnnouncedShapes | None = None,
) -> list[Any]:
    model = _single(model, "model")
    config = config_of(model)
    if num_microbatches < 1:
        raise StepArgumentError(f"num_microbatches={num_microbatches}: a step needs at least 1")
    if collect_non_loss_data and not forward_only:
        raise StepArgumentError("collect_non_loss_data has no loss to differentiate; set forward_only=True as well")
    ties = () if forward_only else settle_ties(models=(model,), config=config, stages=(stage,))
    plan = step_plan(graph, num_microbatches, tied_stages(ties))
    position_of(plan, (stage,))
    finish = finish_output_layer = None
    if not forward_only:
        is_last_stage = all(edge.source != stage for edge in graph.stage_edges)
        groups = None if pg_collection is None else collection_of(pg_collection, graph.module_of(stage)[0])
        finish_output_layer = settle_deferral(
            config, model, is_last_stage=is_last_stage, tp_group=getattr(groups, "tp", None)
        )
        finish = settle_reduction(
            model=model,
            config=config,
            communicator=communicator,
            graph=graph,
            stage=stage,
            pg_collection=pg_collection,
        )
        if option(config, "param_sync_func") is not None:
            option(config, "param_sync_func")(model.parameters())
    seed_stage = SeedStage(
        forward_step_func,
        _single(data_iterator, "data_iterator"),
        model,
        config,
        graph,
        stage,
        num_microbatches,
        cp_group_size=_cp_size(pg_collection, graph.module_of(stage)[0]),
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        shapes=shapes,
        outstanding=min(graph.distance_to_sink[stage], num_microbatches) + 1,
    )
    with contextlib.ExitStack() as no_sync:
        if option(config, "no_sync_func") is not None:
            no_sync.enter_context(option(config, "no_sync_func")())
        sync_early = option(config, "grad_sync_func") is None or stage in map(_first_of(graph), graph.sources)
        hooks = [*option(config, "hooks")]
        if sync_early and not forward_only:
            # Without a pipeline the last backward follows the last forward, in which DDP decides whether to reduce.
            kind = ActionKind.F if graph.num_stages == 1 else ActionKind.B
            hooks.append(_LeaveBefore(Action(kind, stage, num_microbatches - 1), no_sync))
        runtime = PipelineRuntime(
            plan,
            {stage: seed_stage},
            communicator,
            hooks=hooks,
            reducers={tie.name: _after(finish_output_layer, tie.reduce) for tie in ties},
            deallocate_outputs=bool(option(config, "deallocate_pipeline_outputs")),
            deadline=option(config, "deadline"),
            loss_scale=option(config, "grad_scale_func"),
            monitor=option(config, "monitor"),
        )
        if forward_only:
            runtime.eval()
        else:
            runtime.step()
    if finish is not None and finish_output_layer is not None:
        finish_output_layer()
        if option(config, "grad_sync_func") is not None and not sync_early:
            option(config, "grad_sync_func")(model.parameters())
        finish(seed_stage.num_tokens)
    return seed_stage.infos


def _after(first: Callable[[], None] | None, then: Callable[[], None]) -> Callable[[], None]:
    """A ``REDUCE`` of a tied weight needs the gradients that the output layer has put aside."""

    def both() -> None:
        if first is not None:
            first()
        then()

    return both


def _first_of(graph: ModuleGraph) -> Callable[[str], int]:
    return lambda module: graph.stage(module, 0)


class _LeaveBefore:
    """Leaves the no-sync context just before one action, so that the last backward reduces gradients."""

    def __init__(self, action: Action, context: contextlib.ExitStack) -> None:
        self._action = action
        self._context = context

    def before(self, action: Action) -> None:
        if action == self._action:
            self._context.close()

    def after(self, action: Action) -> None:
        """Nothing to do."""


def _single(value: Any, name: str) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, torch.nn.Module):
        return value
    if len(value) != 1:
        raise StepArgumentError(
            f"{name} is a list of {len(value)}: without interleaving a rank has one chunk; pass one, not several"
        )
    return value[0]


def _cp_size(pg_collection: Any, module: str) -> int:
    group = None if pg_collection is None else getattr(collection_of(pg_collection, module), "cp", None)
    return 1 if group is None else int(group.size())
