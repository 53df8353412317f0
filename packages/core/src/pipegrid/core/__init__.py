"""The words that all packages share: checked fields, edges, lanes, graphs of modules, order models. No torch."""

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.errors import P2PError, P2PUsageError, StepArgumentError
from pipegrid.core.fields import Count, Index, Name, checked, checked_arguments, checked_fields
from pipegrid.core.graph import ModuleGraph, ModuleGraphError
from pipegrid.core.order import ORDER_MODELS, OrderModel
from pipegrid.core.lanes import LaneSpec, LaneStats

__all__ = [
    "ORDER_MODELS",
    "Count",
    "Direction",
    "Edge",
    "Index",
    "LaneSpec",
    "LaneStats",
    "ModuleGraph",
    "ModuleGraphError",
    "Name",
    "OrderModel",
    "P2PError",
    "P2PUsageError",
    "StepArgumentError",
    "checked",
    "checked_arguments",
    "checked_fields",
]
