"""Where each kind of layer may stand: the rules of the notation, and those of multi-token prediction (MTP).

A layout that breaks a rule can still be written and read, since a layout of one module of several has neither
embedding nor loss. These functions check what a model needs of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipegrid.layout.checks import whole_number
from pipegrid.layout.errors import LayoutError
from pipegrid.layout.grammar import LayerType
from pipegrid.layout.text import write_stage

if TYPE_CHECKING:
    from pipegrid.layout.layout import PipelineParallelLayerLayout


def check_ends(layout: PipelineParallelLayerLayout) -> None:
    """Where there is an embedding it comes first, and once; where there is a loss it comes last, and once.

    Raises:
        LayoutError: with the offending stage.
    """
    last = len(layout.stages) - 1
    for kind, home, index, place in (
        (LayerType.embedding, 0, 0, "first"),
        (LayerType.loss, last, len(layout.stages[last]) - 1, "last"),
    ):
        seen = False
        for stage, layers in enumerate(layout.stages):
            for position, layer in enumerate(layers):
                if layer != kind:
                    continue
                if seen:
                    raise _broken(layout, stage, f"{kind!s} stands there a second time", "keep one")
                if stage != home:
                    raise _broken(
                        layout,
                        stage,
                        f"{kind!s} must stand on the {place} stage, {home}",
                        f"move it to stage {home}, or remove the empty stages beyond it",
                    )
                if position != index:
                    raise _broken(layout, stage, f"{kind!s} must be the {place} layer", f"put it {place}")
                seen = True


def check_counts(layout: PipelineParallelLayerLayout, counts: Mapping[str, int]) -> None:
    """As many layers of each kind as ``counts`` says; kinds that it does not name are free.

    Raises:
        LayoutError: a count is not a whole number >= 0, or differs from the layout's.
    """
    for kind, count in counts.items():
        wanted = whole_number(f"number of {kind!s} layers", count, least=0)
        present = layout.flatten_layout.count(layout.grammar.kind(kind))
        if present != wanted:
            raise LayoutError(
                f"layout {layout.short_text()} has {present} {kind!s} layers, the model {wanted}; "
                f"{'add' if present < wanted else 'remove'} {abs(wanted - present)}"
            )


def check_mtp(layout: PipelineParallelLayerLayout) -> int | None:
    """All MTP layers on one stage, which is the last chunk of a pp rank other than the first; no decoder after them.

    Returns:
        The stage of the MTP layers, None where there are none.

    Raises:
        LayoutError: with the offending stage.
    """
    home = None
    for stage, layers in enumerate(layout.stages):
        if home is not None and LayerType.decoder in layers:
            raise _broken(layout, stage, f"decoder after the mtp layer of stage {home}", "put mtp after all decoders")
        if LayerType.mtp not in layers:
            continue
        if home is not None:
            raise _broken(layout, stage, f"mtp layers on stage {home} too", "put all mtp layers on one stage")
        home = stage
        first = layers.index(LayerType.mtp)
        if LayerType.decoder in layers[first:]:
            raise _broken(layout, stage, "decoder after an mtp layer", "put mtp after all decoders")
        rank, chunk = layout.position(stage)
        last = layout.virtual_pipeline_model_parallel_size - 1
        if chunk != last:
            raise _broken(
                layout,
                stage,
                f"mtp must be in the last chunk of its rank, {last}",
                f"move it to stage {last * layout.pipeline_model_parallel_size + rank} or a later one",
            )
        if rank == 0 and layout.pipeline_model_parallel_size > 1:
            raise _broken(
                layout, stage, "mtp must not be on the first pp rank", f"move it to stage {stage + 1} or later"
            )
    return home


def _broken(layout: PipelineParallelLayerLayout, stage: int, rule: str, remedy: str) -> LayoutError:
    rank, chunk = layout.position(stage)
    text = write_stage(layout.stages[stage], layout.grammar)
    return LayoutError(
        f"stage {stage} (pp rank {rank}, chunk {chunk}) of layout {layout.short_text()} is {text!r}: {rule}; {remedy}",
        stage=stage,
    )
