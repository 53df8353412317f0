"""The letters of layout strings: the five standard kinds of layer, and kinds that a user registers."""

from __future__ import annotations

import difflib
import enum
import string
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from pipegrid.layout.errors import LayoutError


class LayerType(enum.StrEnum):
    """The standard kinds of layer; each equals its name: ``LayerType.mtp == "mtp"``."""

    embedding = "embedding"
    loss = "loss"
    encoder = "encoder"
    decoder = "decoder"
    mtp = "mtp"


STANDARD_SYMBOLS: Mapping[str, str] = MappingProxyType(
    {"E": LayerType.embedding, "e": LayerType.encoder, "t": LayerType.decoder, "m": LayerType.mtp, "L": LayerType.loss}
)


def _checked(symbols: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(symbols, Mapping):
        raise LayoutError(f"symbols must map a letter to a kind of layer, got {symbols!r}; example: {{'v': 'vision'}}")
    for symbol, kind in symbols.items():
        if symbol not in set(string.ascii_letters) or not (isinstance(kind, str) and kind.isidentifier()):
            raise LayoutError(f"symbols has {symbol!r}: {kind!r}; it must be one ASCII letter and a name")
        if STANDARD_SYMBOLS.get(symbol, kind) != kind:
            raise LayoutError(f"symbol {symbol!r} is {STANDARD_SYMBOLS[symbol]!s} in every layout, not {kind!r}")
    return MappingProxyType({**STANDARD_SYMBOLS, **symbols})


@attrs.frozen
class LayoutGrammar:
    """The letters of a layout string and their kinds of layer.

    ``LayoutGrammar(symbols={"v": "vision"})`` reads ``vvv|vvv`` as six layers of kind ``vision``. The standard letters
    ``E`` embedding, ``e`` encoder, ``t`` decoder, ``m`` mtp and ``L`` loss are always present.

    Attributes:
        symbols: letter to kind of layer, the standard ones included. Of several letters for one kind, all are read and
            the one registered last is written.

    Examples:
        >>> vision = LayoutGrammar(symbols={"v": "vision"})
        >>> PipelineParallelLayerLayout("vvv|vvv", 2, grammar=vision).stages
        (('vision', 'vision', 'vision'), ('vision', 'vision', 'vision'))
    """

    symbols: Mapping[str, str] = attrs.field(factory=dict, converter=_checked, hash=False)
    _letter: Mapping[str, str] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_letter", {kind: symbol for symbol, kind in self.symbols.items()})

    def __reduce__(self) -> tuple[type[LayoutGrammar], tuple[dict[str, str]]]:
        return type(self), (dict(self.symbols),)  # a read-only view does not pickle

    @property
    def registered(self) -> dict[str, str]:
        """The symbols beyond the standard ones."""
        return {symbol: str(kind) for symbol, kind in self.symbols.items() if symbol not in STANDARD_SYMBOLS}

    def symbol(self, kind: str) -> str:
        """The letter of ``kind``."""
        return self._letter[self.kind(kind)]

    def kind(self, name: object, *, where: str = "") -> str:
        """The kind of layer called ``name``: a LayerType where it is a standard one, else the registered name.

        Args:
            name: a LayerType or a name.
            where: prefix of the error text, such as ``"stage 3, layer 1: "``.
        """
        if isinstance(name, LayerType):
            return name
        if isinstance(name, str) and name in LayerType.__members__:
            return LayerType[name]
        if isinstance(name, str) and name in self._letter:
            return name
        near = difflib.get_close_matches(str(name), map(str, self._letter), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise LayoutError(f"{where}{name!r} is not a kind of layer{hint}; the grammar has {self.describe()}")

    def describe(self) -> str:
        """The letters with their kinds, for error texts."""
        return ", ".join(f"{symbol} {kind!s}" for symbol, kind in self.symbols.items())


def grammar_of(grammar: LayoutGrammar | None) -> LayoutGrammar:
    """The grammar; the standard one for None."""
    grammar = LayoutGrammar() if grammar is None else grammar
    if not isinstance(grammar, LayoutGrammar):
        raise LayoutError(f"grammar is {grammar!r:.60}; it must be LayoutGrammar(symbols={{'v': 'vision'}}), or None")
    return grammar
