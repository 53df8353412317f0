"""Checks of the first call of a step function: arguments, config and models against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients.reduction.policy import Models
from pipegrid.plans.generators import SCHEDULES, find_schedule
from pipegrid.schedules.megatron.call import CHECKPOINTS, StepCall
from pipegrid.schedules.megatron.config import option, unwrapped_attribute
from pipegrid.schedules.megatron.forward import modules_with
from pipegrid.schedules.megatron.kinds import StepKind


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
        if not modules_with(model.modules(), "current_slice")[0]:
            raise StepArgumentError(
                f"num_slices is {num_slices}, and no module of stage {stage} has a current_slice, by which attention "
                "sees the earlier slices; set current_slice = None on each attention module (or on any)"
            )
