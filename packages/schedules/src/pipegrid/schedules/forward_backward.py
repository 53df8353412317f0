"""The seeds' step functions: build the plan, run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.generators import multi_module_1f1b
from pipegrid.schedules.interleaving import forward_backward_pipelining_with_interleaving
from pipegrid.schedules.lowering import lower
from pipegrid.schedules.plan import Plan
from pipegrid.schedules.seed_step import StepArgumentError, run_step, single
from pipegrid.schedules.verification import verify

__all__ = [
    "StepArgumentError",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
    "place_of",
    "step_plan",
]

ForwardStepFunc = Callable[..., Any]


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, pg_collection: Any = None
) -> Callable[..., list[Any]]:
    """The step function for a pipeline of ``pp_size`` stages with ``vp_size`` chunks on each.

    Sizes come from the arguments, or from the ``pp`` group of ``pg_collection``.

    Raises:
        StepArgumentError: neither is given (there is no global parallel state to read), or chunks without a pipeline.
    """
    if pp_size is None and pg_collection is not None:
        group = getattr(pg_collection, "pp", None)
        pp_size = 1 if group is None else group.size()
    if pp_size is None:
        raise StepArgumentError(
            "the pipeline size is not known: there is no global parallel state. Pass pp_size=..., or pg_collection=... "
            "with its `pp` group"
        )
    if vp_size is not None and vp_size > 1:
        if pp_size == 1:
            raise StepArgumentError(
                f"vp_size={vp_size} with pp_size=1: chunks of one rank follow each other anyway; use vp_size=1 and one "
                "model"
            )
        return forward_backward_pipelining_with_interleaving
    if pp_size == 1:
        return forward_backward_no_pipelining
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
    return run_step(
        plan=lambda: step_plan(ModuleGraph({"model": 1}), num_microbatches),
        communicator=None,
        forward_step_func=forward_step_func,
        data_iterators={0: single(data_iterator, "data_iterator")},
        models={0: single(model, "model")},
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
        adjust_tensor_shapes_fn: not needed where shapes are agreed between neighbours; refused.
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
    del seq_length, micro_batch_size, decoder_seq_length
    if p2p_communicator is None:
        raise StepArgumentError(
            "p2p_communicator is needed: there is no global parallel state to make one from. Pass "
            "P2PCommunicator(pp_group, config) or MultiModulePipelineCommunicator(grids, topology, config)"
        )
    if adjust_tensor_shapes_fn is not None:
        raise StepArgumentError(
            "adjust_tensor_shapes_fn has no effect: neighbours agree on the shapes of what is sent. Remove it"
        )
    graph, stage = place_of(p2p_communicator)
    return run_step(
        plan=lambda: step_plan(graph, num_microbatches),
        communicator=p2p_communicator,
        forward_step_func=forward_step_func,
        data_iterators={stage: single(data_iterator, "data_iterator")},
        models={stage: single(model, "model")},
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        pg_collection=pg_collection,
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
def step_plan(graph: ModuleGraph, num_microbatches: int) -> Plan:
    """The verified 1F1B plan that the step function runs: for drawing, simulating, or a recording.

    Pure, so remembering it changes nothing but the time of the second step.
    """
    plan = lower(multi_module_1f1b(graph, num_microbatches))
    verify(plan)
    return plan
