"""Names of a package that load their module on first use, so that the package imports where torch is absent."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``: each of ``modules``, relative to it, with the names that it defines."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def getattribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return getattribute
