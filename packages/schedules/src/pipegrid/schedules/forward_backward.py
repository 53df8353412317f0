"""The seeds' step functions: build the plan, run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.actions import Action, ActionKind
from pipegrid.schedules.config import config_of, option
from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.gradients import collection_of
from pipegrid.schedules.output_layer import settle_deferral
from pipegrid.schedules.placing import Place, place_of, step_plan
from pipegrid.schedules.reduction import settle_reduction, settle_ties
from pipegrid.schedules.runtime import PipelineRuntime, position_of
from pipegrid.schedules.seed_stage import AnnouncedShapes, SeedStage, announced_shapes
from pipegrid.schedules.tied_parameters import tied_stages

ForwardStepFunc = Callable[..., Any]


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
        place=Place(ModuleGraph({"model": 1}), (0,)),
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
            On a rank with several modules a dict by module, or one iterator that all of them read.
        model: this rank's stage; a list of one is taken as its item. Its ``config`` is read (`PipelineConfig`). On a
            rank with several modules a dict by module; they have one config.
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
        StepArgumentError: no communicator, chunks, an argument that would be ignored, or models that are not those
            of this rank's modules.
        ReductionError: the gradients could not be made right with what was given; nothing was sent.
        PipelineError: the step failed; the message says where in the plan this rank stood.
    """
    if p2p_communicator is None:
        raise StepArgumentError(
            "p2p_communicator is needed: there is no global parallel state to make one from. Pass "
            "P2PCommunicator(pp_group, config) or MultiModulePipelineCommunicator(grids, topology, config)"
        )
    place = place_of(p2p_communicator)
    if adjust_tensor_shapes_fn is not None and len(place.graph.modules) > 1:
        raise StepArgumentError(
            "adjust_tensor_shapes_fn knows one list of shapes, and the modules of a graph have one each. Remove it: "
            "neighbours agree on the shapes of what is sent"
        )
    groups = None if pg_collection is None else collection_of(pg_collection, place.modules[0])
    shapes = announced_shapes(
        adjust_tensor_shapes_fn,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=_config_of_all(_models(place, model)),
        tp_group=getattr(groups, "tp", None),
        cp_group=getattr(groups, "cp", None),
    )
    return _run(
        place=place,
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


def _run(
    *,
    place: Place,
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
    graph, stages = place.graph, place.stages
    models = _models(place, model)
    iterators = place.by_stage(_single(data_iterator, "data_iterator"), "data_iterator")
    config = _config_of_all(models)
    if num_microbatches < 1:
        raise StepArgumentError(f"num_microbatches={num_microbatches}: a step needs at least 1")
    if collect_non_loss_data and not forward_only:
        raise StepArgumentError("collect_non_loss_data has no loss to differentiate; set forward_only=True as well")
    ties = () if forward_only else settle_ties(models=tuple(models.values()), config=config, stages=stages)
    plan = step_plan(
        graph,
        num_microbatches,
        tied_stages(ties),
        placement=place.placement,
        collectives=place.collectives,
        frozen=place.frozen,
    )
    position_of(plan, stages)
    finish = None
    finish_output_layers: list[Callable[[], None]] = []
    if not forward_only:
        for stage, part in models.items():
            groups = None if pg_collection is None else collection_of(pg_collection, place.module_of(stage))
            finish_output_layers.append(
                settle_deferral(
                    config, part, is_last_stage=_is_last(graph, stage), tp_group=getattr(groups, "tp", None)
                )
            )
        finish = settle_reduction(
            models=models,
            config=config,
            communicator=communicator,
            graph=graph,
            pg_collection=pg_collection,
            frozen=place.frozen,
        )
        if option(config, "param_sync_func") is not None:
            for part in models.values():
                option(config, "param_sync_func")(part.parameters())
    seed_stages = {
        stage: SeedStage(
            forward_step_func,
            iterators[stage],
            models[stage],
            config,
            graph,
            stage,
            num_microbatches,
            cp_group_size=_cp_size(pg_collection, place.module_of(stage)),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            shapes=shapes,
            outstanding=min(graph.distance_to_sink[stage], num_microbatches) + 1,
        )
        for stage in stages
    }
    with contextlib.ExitStack() as no_sync:
        if option(config, "no_sync_func") is not None:
            no_sync.enter_context(option(config, "no_sync_func")())
        firsts = {graph.stage(name, 0) for name in graph.sources}
        sync_early = [stage for stage in stages if option(config, "grad_sync_func") is None or stage in firsts]
        hooks = [*option(config, "hooks")]
        if not forward_only:
            # Without a pipeline the last backward follows the last forward, in which DDP decides whether to reduce.
            kind = ActionKind.F if graph.num_stages == 1 else ActionKind.B
            hooks += [_LeaveBefore(Action(kind, stage, num_microbatches - 1), no_sync) for stage in sync_early]
        runtime = PipelineRuntime(
            plan,
            seed_stages,
            communicator,
            hooks=hooks,
            reducers={tie.name: _after(finish_output_layers, tie.reduce) for tie in ties},
            deallocate_outputs=bool(option(config, "deallocate_pipeline_outputs")),
            deadline=option(config, "deadline"),
            loss_scale=option(config, "grad_scale_func"),
            monitor=option(config, "monitor"),
        )
        if forward_only:
            runtime.eval()
        else:
            runtime.step()
    if finish is not None:
        for finish_output_layer in finish_output_layers:
            finish_output_layer()
        for stage in stages:
            if stage not in sync_early:
                option(config, "grad_sync_func")(models[stage].parameters())
        finish({stage: seed_stage.num_tokens for stage, seed_stage in seed_stages.items()})
    return [info for seed_stage in seed_stages.values() for info in seed_stage.infos]


def _is_last(graph: ModuleGraph, stage: int) -> bool:
    return all(edge.source != stage for edge in graph.stage_edges)


def _models(place: Place, model: Any) -> dict[int, torch.nn.Module]:
    """The model of each of this rank's stages."""
    model = _single(model, "model")
    if len(place.stages) > 1 and not isinstance(model, Mapping):
        raise StepArgumentError(
            f"this rank runs the modules {list(place.modules)}; give model as a dict with one entry for each of them, "
            "and data_iterator as a dict or as one iterator for all"
        )
    return place.by_stage(model, "model")


def _config_of_all(models: Mapping[int, torch.nn.Module]) -> Any:
    """The config that all models of a rank have in common.

    Raises:
        StepArgumentError: they have different ones; or ``no_sync_func``, which is left once, with several models.
    """
    first, *others = [config_of(model) for model in models.values()]
    if any(other is not first and other != first for other in others):
        raise StepArgumentError(
            "the models on this rank have different configs; a step has one: give them the same PipelineConfig"
        )
    if others and option(first, "no_sync_func") is not None:
        raise StepArgumentError(
            f"no_sync_func is left before a last backward, and {len(models)} models on this rank have theirs at "
            "different times; leave it out, and pass bare modules with pg_collection"
        )
    return first


def _after(first: Sequence[Callable[[], None]], then: Callable[[], None]) -> Callable[[], None]:
    """A ``REDUCE`` of a tied weight needs the gradients that the output layers have put aside."""

    def all_of_them() -> None:
        for finish in first:
            finish()
        then()

    return all_of_them


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
