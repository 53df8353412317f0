"""Names of a package that are imported on first use: `import package` then needs no torch.

The table of these names is the `TYPE_CHECKING` block of the package's `__init__`, which type checkers read as well::

    if TYPE_CHECKING:
        from package.control.opening import open_lanes
        from package.lane.lane import Lane as Lane  # outside of __all__

    __getattr__, __dir__ = lazy_names(__name__, __all__)
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str, public: list[str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``, for the names that its `TYPE_CHECKING` block imports.

    Where torch is not installed, the lazy names leave ``public`` (the package's ``__all__``), so
    ``from package import *`` works there, too; it is changed in place.
    """
    blocks = [
        node
        for node in ast.parse(inspect.getsource(sys.modules[package])).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    modules = {
        alias.name: node.module
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    if importlib.util.find_spec("torch") is None:
        public[:] = [name for name in public if name not in modules]

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return load, lambda: sorted(public)
