"""The model of a run, stage by stage or whole: what each module of the graph is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from digit_reader.encoder import IMAGE_TOKENS, ImageEncoder
from digit_reader.language import LanguageStage
from digit_reader.listener import NAMES, SIGNAL_TOKENS, SignalEncoder
from digit_reader.modules import IMAGES, SIGNAL
from digit_reader.options import Options
from digit_reader.sizes import Sizes
from pipegrid.layout import PipelineParallelLayerLayout

TOKENS = {IMAGES: IMAGE_TOKENS, SIGNAL: SIGNAL_TOKENS}
"""How many tokens each encoder makes of a strip."""


def part_of(options: Options, module: str, stage: int) -> nn.Module:
    """Stage ``stage`` of a module."""
    if module == IMAGES:
        return ImageEncoder(Sizes(), seed=options.seed)
    if module == SIGNAL:
        names = NAMES if options.grids[SIGNAL]["pp"] == 1 else NAMES[stage : stage + 1]
        return SignalEncoder(names, Sizes(), seed=options.seed)
    return _language(options, layer_names(options.stages(), stage))


def whole_of(options: Options, module: str) -> nn.Module:
    """A module cut nowhere."""
    if module == IMAGES:
        return ImageEncoder(Sizes(), seed=options.seed)
    if module == SIGNAL:
        return SignalEncoder(NAMES, Sizes(), seed=options.seed)
    uncut = PipelineParallelLayerLayout([list(options.stages().flatten_layout)], 1)
    return _language(options, layer_names(uncut, 0))


def joined(tokens: Mapping[str, Tensor], encoders: Iterable[str]) -> Tensor:
    """What the language model reads: every encoder's tokens, one encoder after another, ``[batch, seen, hidden]``."""
    parts = [tokens[name] for name in encoders]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def layer_names(layout: PipelineParallelLayerLayout, stage: int) -> list[str]:
    """The layers of a stage by their names in the whole model: ``decoder_3``."""
    rank, chunk = layout.position(stage)
    names = []
    counts: dict[str, int] = {}
    for kind in layout.stages[stage]:
        ids = layout.get_layer_id_list(kind, vp_stage=chunk, pp_rank=rank)
        names.append(f"{kind}_{ids[counts.get(kind, 0)]}")
        counts[kind] = counts.get(kind, 0) + 1
    return names


def _language(options: Options, names: list[str]) -> LanguageStage:
    seen = sum(TOKENS[name] for name in options.encoders)
    return LanguageStage(names, Sizes(), seed=options.seed, seen=seen)
