"""Megatron's step functions: each names what it runs, and runs one step of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Count, checked_arguments
from pipegrid.gradients.groups import collections_by_name
from pipegrid.plans.generators import find_schedule, require_slices
from pipegrid.plans.plan import Routes
from pipegrid.schedules.megatron.call import LastStep, LossSums, StepCall
from pipegrid.schedules.megatron.counts import size_of
from pipegrid.schedules.megatron.place import INTERLEAVED, NO_PIPELINE, ONE_STAGE_EACH, StepKind
from pipegrid.schedules.megatron.step import run_step

ForwardStepFunc = Callable[..., Any]


@checked_arguments(StepArgumentError)
def get_forward_backward_func(
    pp_size: Count | None = None,
    vp_size: Count | None = None,
    pg_collection: Any = None,
    *,
    schedule: str | None = None,
    num_slices: Count = 1,
    schedule_pg_collection: Any = None,
) -> Callable[..., list[Any]]:
    """The step function for a pipeline of ``pp_size`` stages with ``vp_size`` chunks on each, or of a named schedule.

    Sizes come from the arguments, or from the ``pp`` group of ``pg_collection``, which has a second name,
    ``schedule_pg_collection``. Collections of several modules (`MultiModuleProcessGroupCollection`, or a dict) give the
    step function of a graph of modules, `forward_backward_pipelining_without_interleaving`, whatever ``pp_size`` is.
    A ``schedule``, such as ``"zero_bubble_v"``, needs no sizes: see `forward_backward_with_schedule`, also for
    ``num_slices``.

    Raises:
        StepArgumentError: no pipeline size, chunks without a pipeline or of a graph of modules, slices without a
            schedule, or ``pg_collection`` under both names.
        PlanError: no schedule has that name, or it has no slices.

    Examples:
        >>> get_forward_backward_func(pp_size=1).__name__
        'forward_backward_no_pipelining'
        >>> get_forward_backward_func(pp_size=4).__name__
        'forward_backward_pipelining_without_interleaving'
        >>> get_forward_backward_func(pp_size=4, vp_size=2).__name__
        'forward_backward_pipelining_with_interleaving'
    """
    if schedule_pg_collection is not None:
        if pg_collection is not None:
            raise StepArgumentError("pg_collection and schedule_pg_collection are names of one argument; give one")
        pg_collection = schedule_pg_collection
    if schedule is not None:
        known = find_schedule(schedule)
        require_slices(known, num_slices)
        return partial(forward_backward_with_schedule, schedule=known.name, num_slices=num_slices)
    if num_slices > 1:
        raise StepArgumentError(f"num_slices={num_slices} without a schedule; name one with slices, such as 'seq1f1b'")
    if pg_collection is not None and collections_by_name(pg_collection) is not None:
        if vp_size is not None and vp_size > 1:
            raise StepArgumentError(
                f"vp_size={vp_size} with process groups of several modules; schedule='interleaved_1f1b' has chunks of "
                "their stages"
            )
        return forward_backward_pipelining_without_interleaving
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
    routes: Routes | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Forward and backward of every microbatch in turn, on one stage.

    Arguments as in `forward_backward_pipelining_without_interleaving`; ``seq_length``, ``micro_batch_size`` and
    ``decoder_seq_length`` describe messages and have no effect here. A ``p2p_communicator`` has one stage, and none is
    needed.

    Returns:
        The ``info`` of every microbatch's loss function.
    """
    del seq_length, micro_batch_size, decoder_seq_length
    call = StepCall(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
        p2p_communicator=p2p_communicator,
        pg_collection=pg_collection,
        routes=routes,
        force_all_reduce=force_all_reduce,
    )
    return run_step(NO_PIPELINE, call)


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
    routes: Routes | None = None,
    force_all_reduce: bool | None = False,
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
        routes: where replicas differ (`Routes`), equal on every rank of the job, such as those of `agree_on_routes`:
            microbatches that skip a module, replicas with unequal numbers of them (``num_microbatches`` is then that of
            this rank's replica), calls of a module for several. Routes of one replica say what all of them do. The loss
            is the mean over all microbatches of all replicas. A plain ``data_iterator`` has an item for each call of
            the module: none for a microbatch that skips it, and one for all that share a call. Where microbatches move
            it is a `UnitBatches`, and ``pg_collection`` has the groups of the living ranks.
        force_all_reduce: every replica ends the step with whole gradients, as it does without where the step function
            reduces. A ``finalize_model_grads_func`` is called with ``force_all_reduce=True``; a model of which each
            replica keeps a shard of the gradients (``fully_shard``), or a wrapper of another library, is an error.

    Returns:
        On a last stage the ``info`` of every microbatch's loss function, in order; elsewhere an empty list. With routes
        of the microbatches that this rank computes.

    Raises:
        StepArgumentError: an argument that cannot be used, has no effect, or contradicts another.
        DisagreementError: ranks run other steps, or have other routes; nothing was sent.
        GradientError: these groups and options do not give correct gradients; nothing was sent; ``pg_collection`` is
            not a collection of process groups.
        PipelineError: the step failed; the text has this rank's action in the plan.
    """
    call = StepCall(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
        p2p_communicator=p2p_communicator,
        pg_collection=pg_collection,
        routes=routes,
        force_all_reduce=force_all_reduce,
    )
    return run_step(ONE_STAGE_EACH, call)


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
    routes: Routes | None = None,
    force_all_reduce: bool | None = False,
    batch: str | None = None,
    sums: LossSums | None = None,
    last: LastStep | None = None,
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
    - ``batch`` is the signature of the microbatches, for a communicator with ``shapes="learned"``; see
      `PipelineRuntime.step`.
    - ``sums``, with ``calculate_per_token_loss``: what sums the tokens of the job, and other numbers, in place of an
      all-reduce behind the last backward.
    - ``last`` is what the caller keeps from step to step, with its models: a step that finds nothing changed in them
      derives nothing again.

    Raises:
        StepArgumentError: no communicator, or lists without an item for each stage.
        PlanError: a graph or a placement that the schedule does not fit.
    """
    call = StepCall(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        p2p_communicator=p2p_communicator,
        pg_collection=pg_collection,
        routes=routes,
        force_all_reduce=force_all_reduce,
        batch=batch,
        sums=sums,
        last=last,
    )
    return run_step(StepKind(schedule, num_slices), call)


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
    routes: Routes | None = None,
    force_all_reduce: bool | None = False,
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
    call = StepCall(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
        p2p_communicator=p2p_communicator,
        pg_collection=pg_collection,
        routes=routes,
        force_all_reduce=force_all_reduce,
    )
    return run_step(INTERLEAVED, call)
