"""A proved plan in the runtime of torch.distributed.pipelining. The private names of torch that this takes are here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineScheduleRuntime

from pipegrid.core.order import ORDER_MODELS
from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders import orders_of_torch, prove_order
from pipegrid.plans.plan import Plan, to_torch


def torch_schedule(
    plan: Plan, stages: Sequence[PipelineStage], *, order: Iterable[str] = tuple(ORDER_MODELS), **options: Any
) -> _PipelineScheduleRuntime:
    """A schedule object of torch that runs ``plan``; call its ``step`` like that of any other.

    A plan of computes gets torch's messages, a lowered one keeps its own. What torch made of it is read back and proved
    for one process group: ``order`` names the order models.

    Args:
        plan: of a chain that trains; see `to_torch`.
        stages: those of this rank, where ``plan.placement`` has them; all of one group, a rank for each position.
        order: names in `pipegrid.core.order.ORDER_MODELS`, by default all.
        options: of torch's schedules: ``loss_fn``, ``scale_grads``, ...

    Raises:
        PlanError: a plan that torch does not run, stages that are not those of the rank in the plan, or a deadlock.
    """
    text = to_torch(plan, waits=hasattr(_ComputationType, "WAIT_SEND_F"))  # from torch 2.15 on
    ranks, rank = stages[0].group_size, stages[0].group_rank
    if ranks != plan.num_positions:
        raise PlanError(f"the stages are in a group of {ranks} ranks, the plan has {plan.num_positions} positions")
    numbers = sorted(stage.stage_index for stage in stages)
    if numbers != list(plan.stages_at[rank]) or stages[0].num_stages != plan.num_stages:
        raise PlanError(
            f"rank {rank} has the stages {numbers} of {stages[0].num_stages}; in the plan it has "
            f"{list(plan.stages_at[rank])} of {plan.num_stages}"
        )
    for stage in stages:
        _keep_first_messages_off_its_own_rank(stage)
    schedule = _PipelineScheduleRuntime(list(stages), plan.num_microbatches, **options)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text, encoding="utf-8")
        form: Literal["compute_comms", "compute_only"] = "compute_comms" if plan.has_communication else "compute_only"
        schedule._load_csv(str(path), format=form)  # noqa: SLF001 -- torch has no public way
    orders = orders_of_torch(schedule, batched=True)
    for name in order:
        prove_order(orders, name)
    return schedule


def _keep_first_messages_off_its_own_rank(stage: Any) -> None:
    """Remove messages to the own rank, of a V, from torch 2.11's first step: gloo raises an error for them."""
    messages = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if messages is not None:
        stage._get_init_p2p_neighbors_ops = lambda: [one for one in messages() if one.group_peer != stage.group_rank]  # noqa: SLF001
