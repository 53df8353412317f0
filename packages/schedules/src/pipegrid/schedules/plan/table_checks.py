"""What a table of steps, in whatever form it is written, must be to its header. Pure."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from attrs import frozen

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import PlanError, PlanFieldError
from pipegrid.schedules.plan.actions import Action
from pipegrid.transport.edge import Edge


@frozen
class Extent:
    """How many stages and microbatches a table has, by the highest numbers in it."""

    num_stages: int
    num_microbatches: int

    @classmethod
    def of(cls, actions: Iterable[Action]) -> Extent:
        """That of ``actions``."""
        stage = microbatch = -1
        for action in actions:
            stage = max(stage, action.stage)
            if action.microbatch is not None:
                microbatch = max(microbatch, action.microbatch)
        return cls(stage + 1, microbatch + 1)

    def require_microbatches(self, count: int) -> None:
        """Refuse ``count`` microbatches where the table has fewer: every stage acts on each.

        Raises:
            PlanFieldError: says how many there are.
        """
        if count > self.num_microbatches:
            raise PlanFieldError(
                f"num_microbatches is {count} and the table has {self.num_microbatches}",
                path=("num_microbatches",),
                expected=f"{self.num_microbatches}, the microbatches that the table has",
            )

    def require_stages(self, graph: ModuleGraph) -> None:
        """Refuse a graph of more stages than the table has: every stage acts.

        Raises:
            PlanFieldError: names the depth that is too large.
        """
        if graph.num_stages <= self.num_stages:
            return
        module, depth = graph.module_of(self.num_stages)
        number = [name for name, _ in graph.modules].index(module)
        raise PlanFieldError(
            f"the graph has {graph.num_stages} stages and the table {self.num_stages}",
            path=("modules", number, "depth"),
            expected=f"a depth of at most {depth}, as the table has only stages 0..{self.num_stages - 1}"
            if depth
            else f"stages of this module in the table, which has only stages 0..{self.num_stages - 1}",
        )


def check_action(
    action: Action,
    *,
    graph: ModuleGraph,
    edges: Container[Edge],
    num_microbatches: int,
    groups: Collection[str],
) -> None:
    """Refuse what cannot be meant: a stage, microbatch, edge or group that the plan does not have.

    Raises:
        PlanError: says what would be right.
    """
    if action.stage >= graph.num_stages:
        raise PlanError(f"a stage in 0..{graph.num_stages - 1}")
    if action.microbatch is not None and action.microbatch >= num_microbatches:
        raise PlanError(f"a microbatch in 0..{num_microbatches - 1}")
    if action.edge is not None and action.edge not in edges:
        known = [str(e) for e in graph.stage_edges if action.stage in (e.source, e.destination)]
        raise PlanError(f"an edge of the graph; stage {action.stage} has {', '.join(known) or 'none'}")
    if action.group is not None and action.group not in groups:
        raise PlanError(f"a declared group; known: {', '.join(sorted(groups)) or 'none'}")
