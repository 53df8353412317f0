"""A pipeline layout: the layers of each stage, the place of each stage, and the position rules.

A layout that breaks a position rule is still a layout: the module of a model with several has neither embedding nor
loss. `check_rules` is what a model requires.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import attrs

from pipegrid.core.strict_json import read_json
from pipegrid.layout.errors import LayoutError
from pipegrid.layout.fields import integer
from pipegrid.layout.grammar import LayerType, LayoutGrammar, grammar_of
from pipegrid.layout.parser import parse
from pipegrid.layout.text import align, name_layers, write, write_stage

_SHORT = 80  # characters of a layout that an error repeats

Stages = Sequence[Sequence[str]]
"""Kinds of layer of each stage, in model order."""


@attrs.frozen(init=False, repr=False)
class PipelineParallelLayerLayout:
    """The layers of each pipeline stage, for one number of pp ranks.

    ``PipelineParallelLayerLayout("Et*3|(tt|)*29,m|L", 16)`` has 32 stages on 16 ranks, so two chunks per rank. Stage
    ``s`` is on pp rank ``s % pp``, chunk ``s // pp`` (chunk-major). A stage may be empty: it passes its input on.

    Layouts are immutable, and equal if their stages and their number of ranks are; ``str(layout)`` is the canonical
    text, the same for equal layouts, and parses back to an equal layout.

    Args:
        layout: a layout string, or a list of stages in model order, each a list of `LayerType` or names.
        pipeline_model_parallel_size: number of pp ranks; it must divide the number of stages.
        grammar: the letters and kinds of the layout; None is the standard ones.

    Attributes:
        stages: kinds of layer of each stage, in model order.
        pipeline_model_parallel_size: number of pp ranks.
        grammar: the letters and kinds.

    Raises:
        LayoutSyntaxError: the string does not follow the grammar.
        LayoutError: an unknown kind of layer, or a number of stages that the number of ranks does not divide.

    Examples:
        >>> layout = PipelineParallelLayerLayout("Et*3|(tt|)*6,tL", 4)  # 8 stages on 4 ranks: two chunks each
        >>> len(layout.stages), layout.get_layer_id_list(pp_rank=1, vp_stage=1)
        (8, [11, 12])
    """

    stages: tuple[tuple[str, ...], ...]
    pipeline_model_parallel_size: int
    grammar: LayoutGrammar = attrs.field(eq=False)
    _input: str | tuple[tuple[str, ...], ...] = attrs.field(eq=False)

    def __init__(
        self,
        layout: str | Sequence[Sequence[str]],
        pipeline_model_parallel_size: int,
        *,
        grammar: LayoutGrammar | None = None,
    ) -> None:
        grammar = grammar_of(grammar)
        stages = parse(layout, grammar) if isinstance(layout, str) else _listed(layout, grammar)
        pp = integer(pipeline_model_parallel_size, "pipeline_model_parallel_size", least=1)
        if len(stages) % pp:
            raise LayoutError(f"{len(stages)} stages do not divide by pipeline_model_parallel_size {pp}")
        given = layout if isinstance(layout, str) else tuple(map(tuple, layout))
        self.__attrs_init__(stages, pp, grammar, given)

    @staticmethod
    def from_str(
        layout: str, pipeline_model_parallel_size: int, *, grammar: LayoutGrammar | None = None
    ) -> PipelineParallelLayerLayout:
        """The layout of a layout string."""
        return PipelineParallelLayerLayout(layout, pipeline_model_parallel_size, grammar=grammar)

    @staticmethod
    def parse_str_to_list(layout_str: str, *, grammar: LayoutGrammar | None = None) -> list[list[str]]:
        """The stages of a layout string as lists of kinds of layer."""
        return [list(stage) for stage in parse(layout_str, grammar_of(grammar))]

    @staticmethod
    def get_num_stages_from_str(layout_str: str, *, grammar: LayoutGrammar | None = None) -> int:
        """Number of stages of a layout string."""
        return len(parse(layout_str, grammar_of(grammar)))

    @property
    def input_data(self) -> str | list[list[str]]:
        """The constructor's ``layout``."""
        return self._input if isinstance(self._input, str) else [list(stage) for stage in self._input]

    @property
    def virtual_pipeline_model_parallel_size(self) -> int:
        """Number of chunks on each pp rank."""
        return len(self.stages) // self.pipeline_model_parallel_size

    @property
    def layout(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """The kinds of layer at ``layout[pp_rank][vp_stage]``."""
        pp = self.pipeline_model_parallel_size
        return tuple(self.stages[rank::pp] for rank in range(pp))

    @property
    def flatten_layout(self) -> tuple[str, ...]:
        """The kinds of all layers, in model order."""
        return tuple(layer for stage in self.stages for layer in stage)

    def position(self, stage: int) -> tuple[int, int]:
        """The pp rank and the chunk of a stage."""
        stage = integer(stage, "stage", least=0, most=len(self.stages) - 1)
        chunk, rank = divmod(stage, self.pipeline_model_parallel_size)
        return rank, chunk

    def stage(self, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        """The stage at chunk ``vp_stage`` of ``pp_rank``; None is the only chunk, or the only rank."""
        pp, vpp = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        return _index("vp_stage", vp_stage, vpp) * pp + _index("pp_rank", pp_rank, pp)

    def get_num_layers_to_build(
        self, layer_type: str = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Number of layers of a kind on the stage at (``pp_rank``, ``vp_stage``)."""
        return self.stages[self.stage(vp_stage, pp_rank)].count(self.grammar.kind(layer_type))

    def get_layer_offset(
        self, layer_type: str = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Number of layers of a kind before the stage at (``pp_rank``, ``vp_stage``), in model order."""
        kind = self.grammar.kind(layer_type)
        return sum(stage.count(kind) for stage in self.stages[: self.stage(vp_stage, pp_rank)])

    def get_layer_id_list(
        self, layer_type: str = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> list[int]:
        """Global ids, from 0 in model order, of the layers of a kind on the stage at (``pp_rank``, ``vp_stage``)."""
        offset = self.get_layer_offset(layer_type, vp_stage, pp_rank)
        return list(range(offset, offset + self.get_num_layers_to_build(layer_type, vp_stage, pp_rank)))

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None = 0) -> bool:
        """Check the layout against a language model with these numbers of decoder and MTP layers.

        The embedding is the first layer of the first stage, the loss the last layer of the last stage, each once;
        MTP layers follow all decoders, on one stage, which is the last chunk of a pp rank other than the first (with
        one pp rank, of that one). Encoders and registered kinds may be anywhere between.

        Args:
            num_layers: decoder layers of the model.
            mtp_num_layers: MTP layers of the model; None means 0.

        Returns:
            Whether MTP is on a stage of its own, not on the last rank with the loss. The model then builds a copy of
            the embedding and of the output layer there.

        Raises:
            LayoutError: the broken rule and, where it is one stage's, the stage.
        """
        mtp = 0 if mtp_num_layers is None else mtp_num_layers
        counts: dict[str, int] = {
            LayerType.embedding: 1,
            LayerType.loss: 1,
            LayerType.decoder: num_layers,
            LayerType.mtp: mtp,
        }
        check_rules(self.stages, self.pipeline_model_parallel_size, self.grammar, counts)
        return mtp > 0 and not any(LayerType.mtp in layers for layers in self.layout[-1])

    def validate_counts(self, counts: Mapping[str, int]) -> None:
        """Check the layout of one module of several against its number of layers per kind.

        Unlike `validate_layer_layout` it requires no embedding and no loss; those of the layout, and its MTP layers,
        keep the position rules. Kinds that ``counts`` does not name must not occur.
        """
        absent = dict.fromkeys(sorted(set(self.flatten_layout)), 0)
        named = {self.grammar.kind(kind): count for kind, count in counts.items()}
        check_rules(self.stages, self.pipeline_model_parallel_size, self.grammar, absent | named)

    def pretty_repr(self) -> str:
        """The table of pp ranks by chunks in words, consecutive equal ranks in one row."""
        rows = [["", *(f"VPP rank {chunk}" for chunk in range(self.virtual_pipeline_model_parallel_size))]]
        for stages, run in groupby(enumerate(self.layout), key=itemgetter(1)):
            ranks = [rank for rank, _ in run]
            label = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
            rows.append([f"PP rank {label}", *map(name_layers, stages)])
        return align(rows)

    def to_json(self) -> str:
        """The layout as JSON; `from_json` reads it back to an equal layout with an equal grammar."""
        data = {"layout": str(self), "pipeline_model_parallel_size": self.pipeline_model_parallel_size}
        if self.grammar.registered:
            data["symbols"] = self.grammar.registered
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> PipelineParallelLayerLayout:
        """The layout of the JSON that `to_json` returns; `LayoutError` for another text."""
        try:
            data = read_json(text)
        except (TypeError, ValueError) as error:
            raise LayoutError(f"not a layout in JSON: {error}") from error
        required = {"layout", "pipeline_model_parallel_size"}
        if not isinstance(data, dict) or not required <= set(data) <= required | {"symbols"}:
            keys = f"{', '.join(sorted(required))} and perhaps symbols"
            raise LayoutError(f"a layout in JSON must be an object with keys {keys}; got {data!r:.80}")
        grammar = LayoutGrammar(symbols=data.get("symbols", {}))
        return PipelineParallelLayerLayout(data["layout"], data["pipeline_model_parallel_size"], grammar=grammar)

    def short_text(self) -> str:
        """The canonical text in quotes, cut for an error text."""
        return _short(self.stages, self.grammar)

    def __str__(self) -> str:
        return write(self.stages, self.grammar)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r}, {self.pipeline_model_parallel_size})"


def _listed(layout: object, grammar: LayoutGrammar) -> tuple[tuple[str, ...], ...]:
    if not isinstance(layout, list | tuple) or not layout or not all(isinstance(one, list | tuple) for one in layout):
        raise LayoutError(f"layout must be a string or a list of stages, each a list of kinds, got {layout!r:.80}")
    return tuple(
        tuple(grammar.kind(name, where=f"stage {stage}, layer {index}: ") for index, name in enumerate(layers))
        for stage, layers in enumerate(layout)
    )


def _index(name: str, value: int | None, size: int) -> int:
    return integer(0 if value is None and size == 1 else value, name, least=0, most=size - 1)


def check_rules(stages: Stages, pp: int, grammar: LayoutGrammar, counts: Mapping[str, int]) -> None:
    """Raise for a broken position rule of those that `validate_layer_layout` has, or another count than ``counts``."""
    last = len(stages) - 1
    for kind, home, place in (
        (LayerType.embedding, (0, 0), "first"),
        (LayerType.loss, (last, len(stages[last]) - 1), "last"),
    ):
        at = [(stage, index) for stage, layers in enumerate(stages) for index, one in enumerate(layers) if one == kind]
        if misplaced := [stage for stage, index in at if (stage, index) != home]:
            rule = f"{kind!s} must be the {place} layer of the {place} stage, {home[0]}, and occur once"
            raise _broken(stages, pp, grammar, misplaced[0], rule)
    for name, count in counts.items():
        wanted = integer(count, f"number of {name!s} layers", least=0)
        present = sum(layers.count(name) for layers in stages)
        if present != wanted:
            raise LayoutError(f"layout {_short(stages, grammar)} has {present} {name!s} layers, the model {wanted}")
    homes = [stage for stage, layers in enumerate(stages) if LayerType.mtp in layers]
    if homes:
        first = first_mtp_stage(pp, len(stages))
        rest = [stages[homes[0]][stages[homes[0]].index(LayerType.mtp) :], *stages[homes[0] + 1 :]]
        late = [stage for stage, layers in enumerate(rest, homes[0]) if LayerType.decoder in layers]
        if misplaced := [*(stage for stage in homes if stage < first), *late, *homes[1:]]:
            rule = f"mtp layers must follow all decoders, together on one stage of the last chunk, {first} or later"
            raise _broken(stages, pp, grammar, misplaced[0], rule)


def first_mtp_stage(pp: int, stages: int) -> int:
    """The first stage that may have MTP layers: in the last chunk, not on the first of several pp ranks."""
    return stages - pp + (pp > 1)


def _broken(stages: Stages, pp: int, grammar: LayoutGrammar, stage: int, rule: str) -> LayoutError:
    chunk, rank = divmod(stage, pp)
    text = write_stage(stages[stage], grammar)
    return LayoutError(
        f"stage {stage} (pp rank {rank}, chunk {chunk}) of layout {_short(stages, grammar)} is {text!r}: {rule}",
        stage=stage,
    )


def _short(stages: Stages, grammar: LayoutGrammar) -> str:
    text = write([tuple(stage) for stage in stages], grammar)
    return repr(text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}...")
