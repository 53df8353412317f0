"""The graph of modules, from `pipegrid.core.graph`."""

from pipegrid.core.graph import ModuleGraph, ModuleGraphError

__all__ = ["ModuleGraph", "ModuleGraphError"]
