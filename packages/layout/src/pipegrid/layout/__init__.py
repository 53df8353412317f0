"""Layer layout strings to pipeline stages, and exact balancing of stages."""

from pipegrid.layout.balance import Balance, balance
from pipegrid.layout.errors import LayoutError, LayoutInfeasibleError, LayoutSyntaxError
from pipegrid.layout.even import even
from pipegrid.layout.grammar import LayerType, LayoutGrammar
from pipegrid.layout.in_flight import in_flight_1f1b
from pipegrid.layout.layout import PipelineParallelLayerLayout
from pipegrid.layout.profile import LayerMemory
from pipegrid.layout.report import LayoutReport, report

__all__ = [
    "Balance",
    "LayerMemory",
    "LayerType",
    "LayoutError",
    "LayoutGrammar",
    "LayoutInfeasibleError",
    "LayoutReport",
    "LayoutSyntaxError",
    "PipelineParallelLayerLayout",
    "balance",
    "even",
    "in_flight_1f1b",
    "report",
]
