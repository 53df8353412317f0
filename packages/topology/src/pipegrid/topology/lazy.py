"""Names of a package that are imported on first use: `import package` then needs no torch.

At the end of a package's `__init__`, whose `TYPE_CHECKING` block imports the same names for type checkers::

    __getattr__, __dir__ = lazy_names(__name__, __all__, {"Lane": "lane", "open_lanes": "opening"})
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, public: list[str], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``.

    Where torch is not installed, the lazy names leave ``public`` (the package's ``__all__``), so
    ``from package import *`` works there, too.

    Args:
        package: its name.
        public: its ``__all__``; changed in place.
        modules: name to the module inside of ``package`` that defines it.
    """
    if importlib.util.find_spec("torch") is None:
        public[:] = [name for name in public if name not in modules]

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return load, lambda: sorted(public)
