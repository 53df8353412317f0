"""A choice under the plan that `search` finds at its costs, in place of its named schedule's."""

from __future__ import annotations

from pipegrid.core.fields import Amount, Count, checked_arguments
from pipegrid.planner.choice import Candidate, Choice, GivenChoice
from pipegrid.planner.errors import JobError
from pipegrid.search import search

SEARCHED = "search"
"""The schedule of a choice whose plan a search has found."""


@checked_arguments(JobError)
def refined(choice: GivenChoice, *, memory: Amount, ahead: Count | None = None, effort: Amount = 1.0) -> Choice:
    """``choice`` with the best plan of its grids, layouts and microbatch size that `search` finds, if one is shorter.

    Encoders, on the same ranks or on their own, fill the bubbles of the module with the loss; frozen ones run at most
    ``ahead`` microbatches ahead of it.

    Args:
        choice: of a `Planned`, such as its winner.
        memory: bytes of a GPU; activations get what the rest of the fullest position leaves.
        ahead: the most microbatches that a frozen module is ahead of those that it feeds; pass it to `lower` as well.
        effort: of the search.

    Examples:
        >>> module = ModuleCosts("language", [Layers("decoder", count=8, flops=1e12)], message="8MB", pp=[2])
        >>> job = Job([module], global_batch=16, device=Device(4e14, memory="80GB"), links=Network("450GB", "50GB"))
        >>> winner = plan(job, gpus=2, limit=20).winner
        >>> refined(winner, memory=80e9, effort=0.1).step <= winner.step
        True
    """
    plan = choice.plan
    found = search(
        choice.costs,
        max(choice.simulation.peak(), min(memory - each.total + each.activations for each in choice.memory)),
        num_positions=plan.num_positions,
        num_microbatches=plan.num_microbatches,
        graph=plan.graph,
        placement=plan.placement,
        forward_only=[module.name for module in choice.shape.job.modules if module.frozen],
        ahead=ahead,
        effort=effort,
    )
    better = Candidate(choice.shape, SEARCHED, choice.microbatch).cost(found.plan)
    return better if better.step < choice.step and better.peak <= max(memory, choice.peak) else choice
