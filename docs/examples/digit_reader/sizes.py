"""The sizes of both modules, in one value that every rank shares."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class Sizes:
    """Both modules have ``hidden`` features per token, so image tokens enter the language model as they are.

    ``heads`` share them; ``channels`` are those of the image encoder's first convolution. How many decoders there
    are, the layout says.
    """

    hidden: int = field(default=64, validator=validators.ge(1))
    heads: int = field(default=4, validator=validators.ge(1))
    channels: int = field(default=24, validator=validators.ge(1))

    def __attrs_post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} does not divide among heads={self.heads}")
