"""The modules: their options, default grids and placements. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

IMAGES: Final = "images"
SIGNAL: Final = "signal"
LANGUAGE: Final = "language"

ENCODERS: Final = (IMAGES, SIGNAL)
"""The language model reads their tokens in this order."""

DIMS: Final = MappingProxyType(
    {IMAGES: ("tp", "dp"), SIGNAL: ("tp", "dp", "pp"), LANGUAGE: ("tp", "dp", "pp", "vpp", "layout")}
)
"""The options of each module: sizes of its grid, and how the language model is cut."""

SIGNAL_LAYERS: Final = 2
"""Layers of the signal's encoder: its pipeline has a stage for each at most."""

DECODERS: Final = 4
"""Decoders of the language model, unless a layout says otherwise."""

DEFAULTS: Final[Mapping[tuple[str, tuple[str, ...]], Mapping[str, str]]] = MappingProxyType(
    {
        ("separate", (IMAGES,)): {IMAGES: "dp=2", LANGUAGE: "pp=2"},
        ("separate", (IMAGES, SIGNAL)): {IMAGES: "dp=1", SIGNAL: "dp=1", LANGUAGE: "pp=2"},
        ("colocated", (IMAGES,)): {IMAGES: "dp=4", LANGUAGE: "dp=2,pp=2"},
        ("colocated", (IMAGES, SIGNAL)): {IMAGES: "dp=4", SIGNAL: "dp=2,pp=2", LANGUAGE: "dp=2,pp=2"},
        ("mixed", (IMAGES, SIGNAL)): {IMAGES: "dp=2", SIGNAL: "dp=2", LANGUAGE: "pp=2"},
    }
)
"""Grids for four processes, by placement and encoders."""

PLACEMENTS: Final = MappingProxyType(
    {
        "separate": "every module on ranks of its own",
        "colocated": "all modules on the same ranks",
        "mixed": "the images with the language model, the signal on ranks of its own",
    }
)


def together(placement: str, modules: Sequence[str]) -> list[tuple[str, ...]]:
    """The sets of modules that share ranks."""
    if placement == "separate":
        return []
    return [(IMAGES, LANGUAGE) if placement == "mixed" else tuple(modules)]
