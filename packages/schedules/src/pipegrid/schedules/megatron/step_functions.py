"""Megatron's step functions: the plan of each, and its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.generators import find_schedule, require_slices
from pipegrid.schedules.gradients.lanes import collection_of
from pipegrid.schedules.lowering import Receives
from pipegrid.schedules.megatron.call_cache import Derived, Inputs, StepArguments
from pipegrid.schedules.megatron.config import checked_option, config_of, option
from pipegrid.schedules.megatron.counts import get_tensor_shapes, require_job, size_of
from pipegrid.schedules.megatron.place import Place, Sharding, Ties, interleaved_proof, one_module, place_of, step_proof
from pipegrid.schedules.megatron.shapes import AnnouncedShapes, ExpectedShape, announced_shapes, expected_shape
from pipegrid.schedules.megatron.step import require_one_config, run_step, single
from pipegrid.schedules.runtime import describe
from pipegrid.schedules.verify import Proof
from pipegrid.topology.fields import Count, checked, checked_arguments

ForwardStepFunc = Callable[..., Any]


@checked_arguments(StepArgumentError)
def get_forward_backward_func(
    pp_size: Count | None = None,
    vp_size: Count | None = None,
    pg_collection: Any = None,
    *,
    schedule: str | None = None,
    num_slices: Count = 1,
) -> Callable[..., list[Any]]:
    """The step function for a pipeline of ``pp_size`` stages with ``vp_size`` chunks on each, or of a named schedule.

    Sizes come from the arguments, or from the ``pp`` group of ``pg_collection``. A ``schedule``, such as
    ``"zero_bubble_v"``, needs no sizes: see `forward_backward_with_schedule`, also for ``num_slices``.

    Raises:
        StepArgumentError: no pipeline size, chunks without a pipeline, or slices without a schedule.
        PlanError: no schedule has that name, or it has no slices.
    """
    if schedule is not None:
        known = find_schedule(schedule)
        require_slices(known, num_slices)
        return partial(forward_backward_with_schedule, schedule=known.name, num_slices=num_slices)
    if num_slices > 1:
        raise StepArgumentError(f"num_slices={num_slices} without a schedule; name one with slices, such as 'seq1f1b'")
    if pp_size is None and hasattr(pg_collection, "pp"):
        pp_size = size_of(pg_collection.pp)
    if pp_size is None:
        raise StepArgumentError(
            "the pipeline size is unknown: there is no global parallel state. Pass pp_size=... (of several modules the "
            "communicator's total_stages), or a pg_collection with a `pp` group"
        )
    if vp_size is not None and vp_size > 1:
        if pp_size == 1:
            raise StepArgumentError(f"vp_size={vp_size} with pp_size=1; one rank has no chunks to interleave")
        return forward_backward_pipelining_with_interleaving
    return forward_backward_no_pipelining if pp_size == 1 else forward_backward_pipelining_without_interleaving


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
    p2p_communicator: Any = None,
    pg_collection: Any = None,
) -> list[Any]:
    """Forward and backward of every microbatch in turn, on one stage.

    Arguments as in `forward_backward_pipelining_without_interleaving`; ``seq_length``, ``micro_batch_size`` and
    ``decoder_seq_length`` describe messages and have no effect here. A ``p2p_communicator`` has one stage, and none is
    needed.

    Returns:
        The ``info`` of every microbatch's loss function.
    """
    del seq_length, micro_batch_size, decoder_seq_length
    if adjust_tensor_shapes_fn is not None:
        raise StepArgumentError("adjust_tensor_shapes_fn adjusts shapes of messages; without a pipeline there are none")
    stages = 1 if p2p_communicator is None else require_job(p2p_communicator).total_stages
    if stages != 1:
        raise StepArgumentError(f"p2p_communicator has {stages} stages; pp_size={stages} gives the function for them")

    def derive() -> Derived:
        return Derived(
            lambda ties, count, sharding: step_proof(one_module(1), count, ties, sharding=sharding),
            {0: single(model, "model")},
            _of_one_stage,
        )

    arguments = StepArguments("one stage", None, num_microbatches, forward_only, collect_non_loss_data)
    return run_step(derive, arguments, Inputs(forward_step_func, data_iterator, model, first_val_step, pg_collection))


def _of_one_stage(data_iterator: Any) -> dict[int, Any]:
    return {0: single(data_iterator, "data_iterator")}


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any] | list[Iterator[Any]] | Mapping[str, Iterator[Any]] | None,
    model: torch.nn.Module | list[torch.nn.Module] | Mapping[str, torch.nn.Module],
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
            With several modules, ``output`` is a dict ``{module name: payload}``, and the argument of the model's
            ``set_input_tensor`` is a dict keyed by source module.
        data_iterator: read by ``forward_step_func`` on stages that need data; a list of one is its item. On a rank with
            several modules a dict by module, or one iterator for all of them.
        model: this rank's stage, with a ``config`` (`PipelineConfig`); a list of one is its item. On a rank with
            several modules a dict by module; all have the same config.
        num_microbatches: M, the same on every rank.
        seq_length: tokens of a sample. Neighbours agree on shapes by themselves; the sizes serve a check only: with one
            module whose config has a ``hidden_size`` and fixed shapes, a stage that sends another shape than
            ``(seq_length / cp / (tp with sequence parallelism), micro_batch_size, hidden_size)`` fails before the send.
        micro_batch_size: samples of a microbatch, likewise.
        decoder_seq_length: tokens of a sample in the decoder, likewise; both lengths pass the check.
        forward_only: no backward, no gradients.
        collect_non_loss_data: return the results of ``loss_func(output, non_loss_data=True)``.
        first_val_step: the first step of a validation phase.
        adjust_tensor_shapes_fn: ``f(receive_shapes, send_shapes)``, called with the shapes that ``seq_length`` and the
            other sizes imply; messages are checked against its result. For a pipeline of one module.
        p2p_communicator: a `P2PCommunicator` or a `MultiModulePipelineCommunicator`.
        pg_collection: this rank's process groups; with a ``dp`` or ``dp_cp`` group, gradients are reduced after
            the last backward unless the model's wrapper does so or ``finalize_model_grads_func`` is set.

    Returns:
        On a last stage the ``info`` of every microbatch's loss function, in order; elsewhere an empty list.

    Raises:
        StepArgumentError: an argument that cannot be used, has no effect, or contradicts another.
        ReductionError: these groups and options do not give correct gradients; nothing was sent.
        GradientError: ``pg_collection`` is not a collection of process groups.
        PipelineError: the step failed; the text has this rank's action in the plan.
    """

    def derive() -> Derived:
        place = place_of(p2p_communicator)
        if adjust_tensor_shapes_fn is not None and len(place.graph.modules) > 1:
            raise StepArgumentError(
                "adjust_tensor_shapes_fn has one list of shapes, and the modules of a graph have one each; neighbours "
                "agree on shapes without it"
            )
        models = _models(place, model)
        return Derived(
            _proof_at(place, "1f1b"),
            models,
            partial(_by_stage, place, one_each=True),
            place.frozen,
            _shapes_at(place, arguments, models, pg_collection, adjust_tensor_shapes_fn),
            keep=adjust_tensor_shapes_fn is None,
        )

    sizes = seq_length, micro_batch_size, decoder_seq_length
    arguments = StepArguments(
        "one stage of each module", p2p_communicator, num_microbatches, forward_only, collect_non_loss_data, sizes
    )
    return run_step(derive, arguments, Inputs(forward_step_func, data_iterator, model, first_val_step, pg_collection))


def _proof_at(place: Place, schedule: str, num_slices: int = 1) -> Callable[[Ties, int, Sharding], Proof]:
    return lambda ties, count, sharding: step_proof(
        place.graph,
        count,
        ties,
        placement=place.placement,
        collectives=place.collectives,
        frozen=place.frozen,
        schedule=schedule,
        sharding=sharding,
        num_slices=num_slices,
    )


def _by_stage(place: Place, data_iterator: Any, *, one_each: bool) -> dict[int, Any]:
    """The data iterator of each stage; ``one_each``: a rank has one stage of each module, so a list of one is one."""
    if not one_each:
        return place.by_stage(data_iterator, "data_iterator")
    data_iterator = single(data_iterator, "data_iterator")
    if len(place.stages) == 1 and not isinstance(data_iterator, Mapping):
        return {place.stages[0]: data_iterator}
    return place.by_stage(data_iterator, "data_iterator")


def _shapes_at(
    place: Place,
    arguments: StepArguments,
    models: Mapping[int, torch.nn.Module],
    pg_collection: Any,
    adjust: Callable[..., Any] | None = None,
) -> AnnouncedShapes | ExpectedShape | None:
    """Expected shapes of messages, of a pipeline of one module: from ``adjust``, or those that its config fixes."""
    if len(place.graph.modules) > 1:
        return None
    collection = None if pg_collection is None else collection_of(pg_collection, place.modules[0])
    seq_length, micro_batch_size, decoder_seq_length = arguments.sizes
    options: dict[str, Any] = {
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
        "decoder_seq_length": decoder_seq_length,
        "config": config_of(next(iter(models.values()))),
        "tp_group": getattr(collection, "tp", None),
        "cp_group": getattr(collection, "cp", None),
    }
    return expected_shape(**options) if adjust is None else announced_shapes(adjust, get_tensor_shapes(**options))


def forward_backward_with_schedule(
    *,
    schedule: str,
    forward_step_func: ForwardStepFunc,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int = 1,
    micro_batch_size: int = 1,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    num_slices: int = 1,
) -> list[Any]:
    """One step of a named schedule, for one module or a graph of modules (`schedule_for`).

    Arguments and result as for `forward_backward_pipelining_without_interleaving`, except:

    - ``model`` and ``data_iterator``, of a module with several stages on this rank, are lists with one item for each
      stage in their order; with several modules, such lists by module. Each stage reads all microbatches, in order.
    - ``p2p_communicator`` has the placement of the schedule:
      ``MultiModulePipelineCommunicator(..., stage_placement={"language": stage_places(schedule, pp, vpp)})`` or
      ``P2PCommunicator(..., placement=stage_places(schedule, pp, vpp))``.
    - ``num_slices`` cuts each microbatch along its sequence, in a schedule with slices (``"seq1f1b"``), for one module:
      ``forward_step_func`` is called for each slice in the order of the sequence, and the iterator has an item for
      each. Modules with an attribute ``current_slice`` find the `pipegrid.schedules.Slice` there, with which attention
      keeps its keys and values. The losses of the slices add up to that of the microbatch: a loss function returns
      ``(loss, info)`` with the slice's share of the mean (its sum over the tokens of the microbatch), or with
      ``calculate_per_token_loss`` ``(sum, num_tokens, info)`` of the slice. The result has an info for each slice.
      Slices of several lengths need ``variable_seq_lengths``; ``seq_length`` and the other sizes are not checked.

    Raises:
        StepArgumentError: no communicator, or lists without an item for each stage.
        PlanError: a graph or a placement that the schedule does not fit.
    """

    def derive() -> Derived:
        chunks = len(model) if isinstance(model, (list, tuple)) else 1
        place = place_of(p2p_communicator, several=True, num_chunks=chunks)
        one_each = len(place.stages) == 1
        models = place.by_stage(single(model, "model") if one_each else model, "model")
        require_one_config(models)
        return Derived(
            _proof_at(place, schedule, num_slices),
            models,
            partial(_by_stage, place, one_each=one_each),
            place.frozen,
            None if num_slices > 1 else _shapes_at(place, arguments, models, pg_collection),
        )

    sizes = seq_length, micro_batch_size, decoder_seq_length
    arguments = StepArguments(
        f"{schedule}.{num_slices}", p2p_communicator, num_microbatches, forward_only, collect_non_loss_data, sizes
    )
    return run_step(derive, arguments, Inputs(forward_step_func, data_iterator, model, first_val_step, pg_collection))


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: Callable[..., Any],
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
    """One step of interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), for one module.

    Chunk ``c`` of rank ``r`` is stage ``c * P + r`` of ``P * V`` stages. Arguments and result as for
    `forward_backward_pipelining_without_interleaving`, except:

    - ``model`` is the list of this rank's V chunks. The config of the first is read, where
      ``microbatch_group_size_per_vp_stage`` is the number N of microbatches that a chunk runs before the next chunk
      (default P), and with ``overlap_p2p_comm`` receives are posted one compute ahead, which hides transfers.
      ``no_sync_func``, ``grad_sync_func`` and ``param_sync_func`` may be lists, one per chunk.
    - ``data_iterator`` is a list with one iterator per chunk (None where a chunk needs no data).
    - ``p2p_communicator`` is a `P2PCommunicator`, whose stages are placed round-robin on its ranks (no placement).

    Raises:
        StepArgumentError: the lists differ in length, or not ``P <= N <= M and (M % N == 0 or M % N >= P)``.
    """

    def derive() -> Derived:
        job = require_job(p2p_communicator)
        if job.graph is not None:
            raise StepArgumentError(
                "p2p_communicator serves a graph of modules; get_forward_backward_func(schedule='interleaved_1f1b') "
                "interleaves them"
            )
        ranks, here = job.total_stages, job.current_stage
        chunks = job.num_chunks or (len(model) if isinstance(model, Sequence) else 1)
        if chunks < 2:
            raise StepArgumentError(
                f"model is {describe(model)}; interleaving takes a list of at least two chunks. With one, use "
                "forward_backward_pipelining_without_interleaving"
            )
        place = Place(one_module(ranks * chunks), tuple(range(here, ranks * chunks, ranks)))
        models = place.by_stage(model, "model")
        config = config_of(models[here])
        group_size = checked_option(config, "microbatch_group_size_per_vp_stage") or ranks
        _require_group_size(group_size, ranks, checked(num_microbatches, Count, "num_microbatches", StepArgumentError))
        receives: Receives = "early" if option(config, "overlap_p2p_comm") else "late"
        extra_warmup = int(bool(option(config, "overlap_moe_expert_parallel_comm")))
        return Derived(
            lambda ties, count, sharding: interleaved_proof(
                ranks, chunks, count, group_size, receives, ties, extra_warmup, sharding
            ),
            models,
            partial(_by_stage, place, one_each=False),
            shapes=_shapes_at(place, arguments, models, pg_collection, adjust_tensor_shapes_fn),
            interleaved=True,
            keep=adjust_tensor_shapes_fn is None,
        )

    sizes = seq_length, micro_batch_size, decoder_seq_length
    arguments = StepArguments(
        "interleaved", p2p_communicator, num_microbatches, forward_only, collect_non_loss_data, sizes
    )
    return run_step(derive, arguments, Inputs(forward_step_func, data_iterator, model, first_val_step, pg_collection))


def _models(place: Place, model: Any) -> dict[int, torch.nn.Module]:
    """The model of each of this rank's stages."""
    model = single(model, "model")
    if len(place.stages) > 1 and not isinstance(model, Mapping):
        raise StepArgumentError(
            f"this rank runs the modules {list(place.modules)}; give model as a dict with one entry for each of them"
        )
    models = place.by_stage(model, "model")
    require_one_config(models)
    return models


def _require_group_size(group_size: int, ranks: int, num_microbatches: int) -> None:
    last = num_microbatches % group_size
    if not ranks <= group_size <= num_microbatches or 0 < last < ranks:
        raise StepArgumentError(
            f"{num_microbatches} microbatches in groups of {group_size} over {ranks} ranks: the interleaved step needs "
            "ranks <= group size <= microbatches, and a last group that is full or has at least as many microbatches "
            "as ranks. A PipelineRuntime runs interleaved_1f1b without this limit"
        )
