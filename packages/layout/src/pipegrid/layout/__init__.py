"""Layer layout strings to pipeline stages, and exact balancing of stages.

Names outside ``__all__`` (results and rarer errors) are imported from here as well.
"""

from pipegrid.layout.balancing.balance import Balance as Balance, balance
from pipegrid.layout.errors import (
    LayoutError,
    LayoutInfeasibleError as LayoutInfeasibleError,
    LayoutSyntaxError as LayoutSyntaxError,
)
from pipegrid.layout.balancing.even import even
from pipegrid.layout.grammar import LayerType as LayerType, LayoutGrammar
from pipegrid.layout.balancing.in_flight import in_flight_1f1b as in_flight_1f1b
from pipegrid.layout.layout import PipelineParallelLayerLayout
from pipegrid.layout.balancing.profile import LayerMemory
from pipegrid.layout.balancing.report import LayoutReport as LayoutReport, report

__all__ = ["LayerMemory", "LayoutError", "LayoutGrammar", "PipelineParallelLayerLayout", "balance", "even", "report"]
