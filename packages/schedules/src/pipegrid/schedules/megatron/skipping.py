"""A stage of a module whose stages hand on values: past others (`ModuleGraph.skips`), or to the next one alone.

The model has two methods more: ``set_skips(arrived)``, called before its forward, and ``take_skips()``, called after
it. Both have tensors by edge, of stages counted inside of the module. On an edge of the chain these go beside what the
stage returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, evolve

from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.megatron.config import unwrapped_attribute
from pipegrid.schedules.megatron.stage import MegatronStage
from pipegrid.schedules.runtime import Forwarded, Slice


@define(eq=False, kw_only=True)
class SkippingStage(MegatronStage):
    """Runs one microbatch of a stage that takes or gives values past others."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.outgoing = tuple(edge for edge in self.outgoing if edge not in self.graph.skips)

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any], part: Slice | None = None) -> Forwarded:
        """See `MegatronStage.forward`."""
        assert self.call is not None  # set by `begin`
        give, take = (unwrapped_attribute(self.call.model, name) for name in ("set_skips", "take_skips"))
        if give is None or take is None:
            raise StepArgumentError(
                f"the graph has edges past stages, {', '.join(map(str, self.graph.skips))}, and the model of stage "
                f"{self.stage}, a {type(self.call.model).__name__}, has no set_skips(arrived) and take_skips()"
            )
        inside = self.graph.edges_inside(self.graph.module_of(self.stage)[0])
        first = self.graph.stage(self.graph.module_of(self.stage)[0], 0)
        arrived, plain = {}, {}
        for edge, payload in inputs.items():
            values = payload
            if edge not in self.graph.skips:
                plain[edge], values = payload if edge in inside else (payload, None)
            if edge in inside:
                arrived[Edge(edge.source - first, edge.destination - first)] = values
        give(arrived)
        found = super().forward(microbatch, plain, part)
        left = {Edge(edge.source + first, edge.destination + first): values for edge, values in take().items()}
        leaving = [edge for edge in inside if edge.source == self.stage]
        if unknown := sorted(set(left) - set(leaving)):
            raise StageOutputError(
                f"stage {self.stage} hands on values along edges {', '.join(map(str, unknown))} for microbatch "
                f"{microbatch}, and the plan has {', '.join(map(str, leaving)) or 'none'} from it: the first batch of "
                "a job has all that later ones have, and a communicator has graph=stage.graph"
            )
        outputs: dict[Edge, Any] = dict(found.outputs)
        for edge in leaving:
            values = left.get(edge) or [None]  # a message needs a part
            outputs[edge] = values if edge in self.graph.skips else [outputs[edge], values]
        return evolve(found, outputs=outputs)


def takes_part(graph: ModuleGraph, stage: int, model: Any) -> bool:
    """Whether stages of the module of ``stage`` hand on values: past others, or by ``model.hands_on`` to the next."""
    past = bool(graph.skips) and not set(graph.skips).isdisjoint(graph.edges_inside(graph.module_of(stage)[0]))
    return past or bool(unwrapped_attribute(model, "hands_on"))
