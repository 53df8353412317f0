"""The digit reader cut as a U: head and tail on the edge, the decoders between them in the cloud.

The head sees the strips and the text so far, the tail the words that should have been written. The cloud gets a stream
of vectors ``[batch, sequence, hidden]`` and gives one back; neither strips nor words ever leave the edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from digit_reader.encoder import ImageEncoder
from digit_reader.language import Decoder, LanguageStage
from digit_reader.samples import Samples
from digit_reader.sizes import Sizes
from digit_reader.vocabulary import PAD
from edge_cloud.parallel import parallelise
from pipegrid.schedules import Forwarded
from pipegrid.transport import Edge

TP_SIZES: Final = (1, 2)
"""One process at the edge, two tensor-parallel ones in the cloud."""
LAYOUT: Final = (("embedding",), ("decoder",) * 4, ("loss",))
"""Kinds of layer of each plan stage; the image encoder goes with the embedding."""
SIZES: Final = Sizes()


def stage_module(stage: int, *, seed: int, dtype: torch.dtype, group: ProcessGroup | None = None) -> nn.ModuleDict:
    """The layers of a plan stage; the decoders as this rank's share of them, where there is a tensor-parallel group."""
    names = [f"{kind}_{number}" for number, kind in enumerate(LAYOUT[stage])]
    language = LanguageStage(names, SIZES, seed=seed).to(dtype)
    layers: dict[str, nn.Module] = {"language": language}
    if stage == 0:
        layers["images"] = ImageEncoder(SIZES, seed=seed).to(dtype)
    if group is not None:
        for layer in language.layers.values():
            if isinstance(layer, Decoder):
                parallelise(layer, group)
    return nn.ModuleDict(layers)


@define
class ReaderStage:
    """A plan stage as the runtime wants it.

    Attributes:
        stage: its number.
        model: its layers.
        samples: where the edge draws strips and words; the cloud has none.
        microbatches: the samples of each microbatch of this step.
        outgoing: where its output goes; None at the tail.
        losses: what the tail found, one per microbatch.
    """

    stage: int
    model: nn.ModuleDict
    samples: Samples | None
    microbatches: Sequence[range]
    outgoing: Edge | None
    losses: list[Tensor] = field(factory=list)

    def forward(self, microbatch: int, inputs: Mapping[Edge, Tensor]) -> Forwarded:
        """See `pipegrid.schedules.RuntimeStage`."""
        if self.stage == 0:
            y = self._read(self.microbatches[microbatch])
        else:
            (x,) = inputs.values()
            y = self.model["language"](x)
        if self.outgoing is not None:
            return Forwarded({self.outgoing: y})
        loss = self._compare(y, self.microbatches[microbatch])
        self.losses.append(loss.detach())
        return Forwarded({}, loss)

    def _own(self) -> Samples:
        if self.samples is None:
            raise RuntimeError(f"stage {self.stage} needs strips or words, which only the edge has")
        return self.samples

    def _read(self, indices: range) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        seen = self.model["images"](self._own().strips(indices).to(dtype))
        read: Tensor = self.model["language"](seen, self._own().inputs(indices))
        return read

    def _compare(self, logits: Tensor, indices: range) -> Tensor:
        """The step's mean cross entropy over all words, as far as this microbatch goes."""
        words = sum(int((self._own().targets(each) != PAD).sum()) for each in self.microbatches)
        targets = self._own().targets(indices)
        return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PAD, reduction="sum") / words
