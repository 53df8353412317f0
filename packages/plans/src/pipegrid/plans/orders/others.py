"""Plans from what other programs plan with: torch's schedule objects, and Megatron's schedule table. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pipegrid.core.fields import Index, checked, shown
from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders.orders import Orders
from pipegrid.plans.orders.read import orders_from_csv
from pipegrid.plans.plan import Action, ActionKind, Plan, chain, from_csv


def plan_of_torch(schedule: Any) -> Plan:
    """The plan that a schedule object of torch 2.11 to 2.15 runs, with the messages that it has.

    Those of torch 2.15 also wait for their sends (``4WAIT_SEND_F7``): `orders_of_torch` has these waits, a plan none.

    Raises:
        PlanError: it has no order that it runs. A schedule of one stage (`ScheduleGPipe`, `Schedule1F1B`) runs a loop
            of its own, and keeps an order for pictures: take `gpipe` or `one_f_one_b`.
        PlanSyntaxError: it has an action that plans do not have.
    """
    return from_csv(_csv_of_torch(schedule))


def orders_of_torch(schedule: Any, *, batched: bool = True) -> Orders:
    """What each rank of a schedule object of torch launches on its one group, and where it waits for its sends.

    torch launches each message alone; what is proved of batches of one (``batched``), whose lines are longer, holds of
    these as well.

    Raises:
        PlanError: as `plan_of_torch`.
    """
    return orders_from_csv(_csv_of_torch(schedule), batched=batched)


def _csv_of_torch(schedule: Any) -> str:
    """The table that a schedule object runs."""
    name = type(schedule).__name__
    if any(base.__name__ == "PipelineScheduleSingle" for base in type(schedule).__mro__):
        raise PlanError(
            f"{name} runs a loop of its own, and its pipeline_order is for pictures; take the plan of the same name"
        )
    table = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
    if not table:
        raise PlanError(f"{name} tells no order; it has neither pipeline_order_with_comms nor pipeline_order")
    rows = [",".join("" if action is None else str(action) for action in table[rank]) for rank in sorted(table)]
    return "\n".join(rows) + "\n"


def plan_of_megatron(
    schedule_table: Sequence[tuple[int, int]], num_warmup_microbatches: Sequence[int], *, forward_only: bool = False
) -> Plan:
    """The computes of an interleaved schedule of Megatron-LM, which plans by a table and one number per rank.

    Rank r runs the forwards in the order of the table, the first of them alone, then a backward after each forward, in
    the order of the table with the chunks reversed, then the backwards that are left. A chunk c of it is stage
    ``c * ranks + r``. Its messages are those that `lower` adds: Megatron's own follow from the same numbers.

    Args:
        schedule_table: (microbatch, chunk) of each forward, as ``get_schedule_table`` makes it.
        num_warmup_microbatches: per pipeline rank, its forwards before the first backward.
        forward_only: without backwards, as in an evaluation.

    Raises:
        PlanError: an entry that is no such pair, one that is there twice or not at all, or more forwards before
            the first backward than there are.
    """
    name = "num_warmup_microbatches"
    warmup = checked(num_warmup_microbatches, tuple[Index, ...], name, partial(PlanError, path=name))
    entries = [_entry(entry, f"schedule_table[{number}]") for number, entry in enumerate(schedule_table)]
    microbatches, chunks = (1 + max((entry[part] for entry in entries), default=-1) for part in (0, 1))
    if not entries or len(set(entries)) != len(entries) or len(entries) != microbatches * chunks:
        raise PlanError(
            f"schedule_table has {len(entries)} entries up to microbatch {microbatches - 1} and chunk {chunks - 1}; it "
            "must have each microbatch with each chunk, once",
            path="schedule_table",
        )
    if not warmup or max(warmup) > len(entries):
        raise PlanError(
            f"{name} is {list(warmup)}; it must have a number for each rank, of at most the {len(entries)} forwards",
            path=name,
        )
    ranks = len(warmup)

    def row(rank: int) -> list[Action]:
        forwards = [Action(ActionKind.F, chunk * ranks + rank, microbatch) for microbatch, chunk in entries]
        if forward_only:
            return forwards
        backwards = [
            Action(ActionKind.B, (chunks - 1 - chunk) * ranks + rank, microbatch) for microbatch, chunk in entries
        ]
        first = warmup[rank]
        paired = [action for pair in zip(forwards[first:], backwards, strict=False) for action in pair]
        return [*forwards[:first], *paired, *backwards[len(forwards) - first :]]

    return Plan(
        positions=[row(rank) for rank in range(ranks)],
        graph=chain(chunks * ranks),
        placement=[stage % ranks for stage in range(chunks * ranks)],
        num_microbatches=microbatches,
        forward_only=range(chunks * ranks) if forward_only else (),
    )


def _entry(entry: Sequence[int], path: str) -> tuple[int, int]:
    numbers = checked(entry, tuple[Index, ...], path, partial(PlanError, path=path))
    if len(numbers) != 2:
        raise PlanError(f"{path} is {shown(entry)}; it must be (microbatch, chunk)", path=path)
    return numbers[0], numbers[1]
