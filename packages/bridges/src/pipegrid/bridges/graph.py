"""The graph of modules, from `pipegrid.transport.graph`."""

from pipegrid.transport.graph import ModuleGraph, ModuleGraphError

__all__ = ["ModuleGraph", "ModuleGraphError"]
