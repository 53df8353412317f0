"""What each step function runs: this rank's stages, their models, and the proved plan; what excludes each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients.reduction.policy import Models
from pipegrid.plans.generators import SCHEDULES, find_schedule
from pipegrid.plans.passes.lowering import Receives
from pipegrid.plans.verify import Proof
from pipegrid.schedules.megatron.call import CHECKPOINTS, StepCall, by_stage, have_one_config
from pipegrid.schedules.megatron.config import checked_option, option, unwrapped_attribute
from pipegrid.schedules.megatron.forward import modules_with
from pipegrid.schedules.megatron.place import (
    Place,
    PlanNeeds,
    interleaved_proof,
    one_module,
    place_of,
    require_job,
    step_proof,
)
from pipegrid.schedules.runtime import describe


def place_in_job(kind: StepKind, call: StepCall) -> Place:
    """This rank's stages by the communicator; without a placement, every rank has as many as there are models."""
    chunks = len(call.model) if isinstance(call.model, (list, tuple)) else 1
    place = place_of(call.p2p_communicator, several=kind.several, num_chunks=chunks)
    if call.adjust_tensor_shapes_fn is not None and len(place.graph.modules) > 1:
        raise StepArgumentError(
            "adjust_tensor_shapes_fn has one list of shapes, and the modules of a graph have one each; neighbours "
            "agree on shapes without it"
        )
    return place


def place_alone(_: StepKind, call: StepCall) -> Place:
    """The only stage."""
    if call.adjust_tensor_shapes_fn is not None:
        raise StepArgumentError("adjust_tensor_shapes_fn adjusts shapes of messages; without a pipeline there are none")
    stages = 1 if call.p2p_communicator is None else require_job(call.p2p_communicator).total_stages
    if stages != 1:
        raise StepArgumentError(f"p2p_communicator has {stages} stages; pp_size={stages} gives the function for them")
    return Place(one_module(1), (0,))


def place_round_robin(_: StepKind, call: StepCall) -> Place:
    """Every ``ranks``-th stage of one module, from this rank's on."""
    job = require_job(call.p2p_communicator)
    if job.graph is not None:
        raise StepArgumentError(
            "p2p_communicator serves a graph of modules; get_forward_backward_func(schedule='interleaved_1f1b') "
            "interleaves them"
        )
    chunks = job.num_chunks or (len(call.model) if isinstance(call.model, Sequence) else 1)
    if chunks < 2:
        raise StepArgumentError(
            f"model is {describe(call.model)}; interleaving takes a list of at least two chunks. With one, use "
            "forward_backward_pipelining_without_interleaving"
        )
    ranks = job.total_stages
    return Place(one_module(ranks * chunks), tuple(range(job.current_stage, ranks * chunks, ranks)))


def proof_of_schedule(kind: StepKind, place: Place, needs: PlanNeeds, config: Any) -> Proof:
    """The plan of the schedule over the graph of modules."""
    overlap = bool(option(config, "overlap_moe_expert_parallel_comm"))
    return step_proof(evolve(place, stages=()), needs, kind.schedule, kind.num_slices, overlap=overlap)


def proof_of_interleaving(_: StepKind, place: Place, needs: PlanNeeds, config: Any) -> Proof:
    """Interleaved 1F1B with the groups of microbatches, the receives and the pairs of ``config``."""
    chunks = len(place.stages)
    ranks = place.graph.num_stages // chunks
    group_size = checked_option(config, "microbatch_group_size_per_vp_stage") or ranks
    num_microbatches = needs.num_microbatches
    last = num_microbatches % group_size
    if not ranks <= group_size <= num_microbatches or 0 < last < ranks:
        raise StepArgumentError(
            f"{num_microbatches} microbatches in groups of {group_size} over {ranks} ranks: the interleaved step "
            "needs ranks <= group size <= microbatches, and a last group that is full or has at least as many "
            "microbatches as ranks. A PipelineRuntime runs interleaved_1f1b without this limit"
        )
    receives: Receives = "early" if option(config, "overlap_p2p_comm") else "late"
    overlap = bool(option(config, "overlap_moe_expert_parallel_comm"))
    return interleaved_proof(ranks, chunks, needs, group_size, receives, overlap)


@frozen
class StepKind:
    """What a step function runs; calls of equal kinds may share a plan.

    Attributes:
        schedule: as in `schedule_for`.
        num_slices: likewise.
        several: a rank may have several stages of a module.
        place: finds this rank's stages in the job of a call's communicator.
        proof: makes the plan with its proof.
    """

    schedule: str
    num_slices: int = 1
    several: bool = True
    place: Callable[[StepKind, StepCall], Place] = place_in_job
    proof: Callable[[StepKind, Place, PlanNeeds, Any], Proof] = proof_of_schedule


NO_PIPELINE = StepKind("1f1b", several=False, place=place_alone)
ONE_STAGE_EACH = StepKind("1f1b", several=False)
INTERLEAVED = StepKind("interleaved_1f1b", place=place_round_robin, proof=proof_of_interleaving)


def models_by_stage(kind: StepKind, place: Place, model: Any) -> Models:
    """The argument ``model`` of a call by stage; those of a schedule have one config, else that of the first counts."""
    if not kind.several and len(place.stages) > 1 and not isinstance(model, Mapping):
        raise StepArgumentError(
            f"this rank runs the modules {list(place.modules)}; give model as a dict with one entry for each of them"
        )
    models: Models = by_stage(place.held, model, "model")
    if kind != INTERLEAVED and not have_one_config(list(models.values())):
        raise StepArgumentError("the models on this rank have different configs; a step has one")
    return models


def require_in_place(models: Mapping[int, Any], graph: ModuleGraph) -> None:
    """Raise StepArgumentError for a stage of a layout (``stage_of_layout``) that the communicator places otherwise."""
    for stage, model in models.items():
        own: tuple[int, int] | None = unwrapped_attribute(model, "stage_of_layout")
        module, number = graph.module_of(stage)
        if own is None or own == (number, graph.depth(module)):
            continue
        raise StepArgumentError(
            f"the model of stage {number} is stage {own[0]} of the {own[1]} of its layout, and the communicator has "
            f"{graph.depth(module)} stages of module {module!r}, pp x chunks. Give a layout with as many stages, and "
            "communicator and models one placement, that of the schedule: stage_places(schedule, pp)"
        )


def require_compatible(kind: StepKind, call: StepCall, models: Models, config: Any) -> None:
    """Raise StepArgumentError for arguments and options of the config that exclude each other."""
    if option(config, "overlap_moe_expert_parallel_comm"):
        known = find_schedule(kind.schedule)
        if not known.pairs or kind.num_slices > 1:
            paired = ", ".join(name for name, other in SCHEDULES.items() if other.pairs)
            raise StepArgumentError(
                f"config.overlap_moe_expert_parallel_comm is set, and {known.name} has no pairs; these do: {paired}"
            )
    if option(config, "weighted_microbatches") and not option(config, "calculate_per_token_loss"):
        raise StepArgumentError(
            "config.weighted_microbatches is set, which says what calculate_per_token_loss counts; set both"
        )
    if call.collect_non_loss_data and not call.forward_only:
        raise StepArgumentError("collect_non_loss_data has no loss to differentiate; set forward_only=True as well")
    if option(config, "check"):
        for stage, model in models.items():
            if unwrapped_attribute(model, "proofs") is None:
                raise StepArgumentError(
                    f"config.check is set, and the {type(model).__name__} of stage {stage} is not made by "
                    "`pipeline_stage` of pipegrid.training: there is no whole model to compare with; leave check "
                    "out of its config"
                )


def require_sliced(models: Mapping[int, Any], config: Any, num_slices: int) -> None:
    """Raise StepArgumentError for a model, or an option, that does not work with slices."""
    for name in (CHECKPOINTS, "no_sync_func", "defer_embedding_wgrad_compute", "shard"):
        value = option(config, name)
        if value is not None and value is not False:
            raise StepArgumentError(
                f"config.{name} is set, which counts whole microbatches: num_slices is {num_slices}"
            )
    for stage, model in models.items():
        if not modules_with(model.modules(), "current_slice")["current_slice"]:
            raise StepArgumentError(
                f"num_slices is {num_slices}, and no module of stage {stage} has a current_slice, by which attention "
                "sees the earlier slices; set current_slice = None on each attention module (or on any)"
            )
