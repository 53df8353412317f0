"""Edges that skip stages, added to a plan of computes."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from pipegrid.core.edge import Edge
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Plan, require_plan


def with_skips(plan: Plan, skips: Sequence[Edge]) -> Plan:
    """A plan of computes whose stages hand on values to later ones as well, along ``skips`` (`ModuleGraph.skips`).

    The order of computes stays: a stage behind waits for all that lie between, and these for the source of a skip.

    Raises:
        PlanError: the plan communicates already, or an edge that passes no stage of its module.

    Examples:
        >>> plan = with_skips(one_f_one_b(3, 1), [Edge(0, 2)])
        >>> [str(action) for action in lower(plan).actions(0)]
        ['0F0', '0SEND_F0>1', '0SEND_F0>2', '0RECV_B0<2', '0RECV_B0<1', '0B0']
    """
    require_plan(plan)
    if plan.has_communication:
        raise PlanError("the plan communicates already; with_skips takes a plan of computes alone")
    try:
        graph = evolve(plan.graph, skips=sorted({*plan.graph.skips, *skips}))
    except ValueError as error:
        raise PlanError(str(error)) from None
    return evolve(plan, graph=graph)
