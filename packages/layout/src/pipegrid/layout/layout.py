"""A pipeline layout: which layers each stage builds, and where each stage lies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import attrs

from pipegrid.layout import rules
from pipegrid.layout.checks import number_below, of_type, whole_number
from pipegrid.layout.errors import LayoutError
from pipegrid.layout.grammar import LayerType, LayoutGrammar, grammar_or_standard
from pipegrid.layout.parser import parse
from pipegrid.layout.table import align, merge_equal, name_layers
from pipegrid.layout.text import write

_SHORT = 80  # characters of a layout that an error text repeats


@attrs.frozen(init=False, repr=False)
class PipelineParallelLayerLayout:
    """The layers of each pipeline stage, for one number of pp ranks.

    ``PipelineParallelLayerLayout("Et*3|(tt|)*29,m|L", 16)`` has 32 stages on 16 ranks, so two chunks per rank. Stage
    ``s`` lies on pp rank ``s % pp``, chunk ``s // pp`` (chunk-major). A stage may be empty: it passes its input on.

    Layouts are immutable, and equal where the stages and the number of ranks are; ``str(layout)`` is the canonical
    text, the same for equal layouts, and parses back to an equal layout.

    Args:
        layout: a layout string, or a list of stages in model order, each a list of `LayerType` or names.
        pipeline_model_parallel_size: number of pp ranks; it must divide the number of stages.
        grammar: the letters and kinds that may stand in the layout; by default the standard ones.

    Attributes:
        stages: for each stage, in model order, its kinds of layer.
        pipeline_model_parallel_size: number of pp ranks.
        grammar: as given.

    Raises:
        LayoutSyntaxError: the string cannot be read.
        LayoutError: a kind of layer is unknown, or the stages cannot be shared out evenly over the ranks.
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
        grammar = grammar_or_standard(grammar)
        stages = parse(layout, grammar) if isinstance(layout, str) else _listed(layout, grammar)
        pp = whole_number("pipeline_model_parallel_size", pipeline_model_parallel_size, least=1)
        if len(stages) % pp:
            raise LayoutError(
                f"{len(stages)} stages cannot be shared out evenly over pipeline_model_parallel_size {pp}; "
                f"add {-len(stages) % pp} stages (empty ones work) or remove {len(stages) % pp}"
            )
        given = layout if isinstance(layout, str) else tuple(map(tuple, layout))
        self.__attrs_init__(stages, pp, grammar, given)

    @staticmethod
    def from_str(
        layout: str, pipeline_model_parallel_size: int, *, grammar: LayoutGrammar | None = None
    ) -> PipelineParallelLayerLayout:
        """Read a layout string. Errors as those of the class."""
        if not isinstance(layout, str):
            raise LayoutError(f"from_str takes a layout string, got {type(layout).__name__}: {layout!r:.80}")
        return PipelineParallelLayerLayout(layout, pipeline_model_parallel_size, grammar=grammar)

    @staticmethod
    def parse_str_to_list(layout_str: str, *, grammar: LayoutGrammar | None = None) -> list[list[str]]:
        """The stages of a layout string as lists of kinds of layer.

        Raises:
            LayoutSyntaxError: the string cannot be read.
        """
        return [list(stage) for stage in parse(layout_str, grammar_or_standard(grammar))]

    @staticmethod
    def get_num_stages_from_str(layout_str: str, *, grammar: LayoutGrammar | None = None) -> int:
        """How many stages a layout string has.

        Raises:
            LayoutSyntaxError: the string cannot be read.
        """
        return len(parse(layout_str, grammar_or_standard(grammar)))

    @property
    def input_data(self) -> str | list[list[str]]:
        """The layout as it was given."""
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
        """The pp rank and the chunk of a stage.

        Raises:
            LayoutError: there is no such stage.
        """
        chunk, rank = divmod(number_below("stage", stage, len(self.stages)), self.pipeline_model_parallel_size)
        return rank, chunk

    def stage(self, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        """The stage at chunk ``vp_stage`` of ``pp_rank``; either may be left out where there is only one.

        Raises:
            LayoutError: one is missing and there are several, or is out of range.
        """
        pp, vpp = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        return _index("vp_stage", vp_stage, vpp) * pp + _index("pp_rank", pp_rank, pp)

    def get_num_layers_to_build(
        self, layer_type: str = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """How many layers of a kind the stage at (``pp_rank``, ``vp_stage``) builds.

        Raises:
            LayoutError: no such kind of layer, or no such stage.
        """
        return self.stages[self.stage(vp_stage, pp_rank)].count(self.grammar.kind(layer_type))

    def get_layer_offset(
        self, layer_type: str = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """How many layers of a kind stand before the stage at (``pp_rank``, ``vp_stage``), in model order.

        Raises:
            LayoutError: no such kind of layer, or no such stage.
        """
        kind = self.grammar.kind(layer_type)
        return sum(stage.count(kind) for stage in self.stages[: self.stage(vp_stage, pp_rank)])

    def get_layer_id_list(
        self, layer_type: str = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> list[int]:
        """The global ids, from 0 in model order, of the layers of a kind that a stage builds.

        Raises:
            LayoutError: no such kind of layer, or no such stage.
        """
        offset = self.get_layer_offset(layer_type, vp_stage, pp_rank)
        return list(range(offset, offset + self.get_num_layers_to_build(layer_type, vp_stage, pp_rank)))

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None = 0) -> bool:
        """Check the layout against a language model with so many decoder and MTP layers.

        The embedding is the first layer of the first stage, the loss the last layer of the last stage, each once;
        MTP layers follow all decoders, on one stage, which is the last chunk of a pp rank other than the first (with
        one pp rank, of that one). Encoders and registered kinds may stand anywhere between.

        Args:
            num_layers: decoder layers of the model.
            mtp_num_layers: MTP layers of the model; None means 0.

        Returns:
            Whether MTP stands on a stage of its own, not on the last rank with the loss. The model then builds a
            copy of the embedding and the output layer there.

        Raises:
            LayoutError: a rule is broken; names the rule and, where it is one stage's, the stage.
        """
        mtp = 0 if mtp_num_layers is None else mtp_num_layers
        rules.check_ends(self)
        rules.check_counts(
            self,
            {LayerType.embedding: 1, LayerType.loss: 1, LayerType.decoder: num_layers, LayerType.mtp: mtp},
        )
        home = rules.check_mtp(self)
        return home is not None and self.position(home)[0] != self.pipeline_model_parallel_size - 1

    def validate_counts(self, counts: Mapping[str, int]) -> None:
        """Check the layout of one module of several against its number of layers per kind.

        Unlike `validate_layer_layout` it asks for no embedding and no loss; those that are there, and MTP layers, must
        stand where they may. Kinds that ``counts`` does not name must not occur.

        Raises:
            LayoutError: a rule is broken; names the rule and, where it is one stage's, the stage.
        """
        of_type("counts", counts, Mapping, "give the number of layers per kind, like {'decoder': 4}")  # type: ignore[type-abstract]
        absent = dict.fromkeys(sorted(set(self.flatten_layout)), 0)
        rules.check_ends(self)
        rules.check_counts(self, {**absent, **{self.grammar.kind(kind): count for kind, count in counts.items()}})
        rules.check_mtp(self)

    def pretty_repr(self) -> str:
        """The table of pp ranks by chunks in words, runs of equal ranks in one row."""
        table = self.layout
        header = ["", *(f"VPP rank {chunk}" for chunk in range(self.virtual_pipeline_model_parallel_size))]
        rows = [
            [f"PP rank {label}", *map(name_layers, table[rank])]
            for label, rank in merge_equal(len(table), table.__getitem__)
        ]
        return align([header, *rows])

    def to_json(self) -> str:
        """The layout as JSON; `from_json` reads it back to an equal layout with an equal grammar."""
        data = {"layout": str(self), "pipeline_model_parallel_size": self.pipeline_model_parallel_size}
        if self.grammar.registered:
            data["symbols"] = self.grammar.registered
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> PipelineParallelLayerLayout:
        """Read what `to_json` wrote.

        Raises:
            LayoutError: not JSON, or not of that form, or not a layout.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise LayoutError(f"a layout in JSON was expected, but: {error}") from error
        required, allowed = {"layout", "pipeline_model_parallel_size"}, {"symbols"}
        if not isinstance(data, dict) or not required <= set(data) <= required | allowed:
            keys = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise LayoutError(
                "a layout in JSON must be an object with keys layout, pipeline_model_parallel_size and optionally "
                f"symbols; got {keys}"
            )
        return PipelineParallelLayerLayout(
            data["layout"],
            data["pipeline_model_parallel_size"],
            grammar=LayoutGrammar(symbols=data.get("symbols", {})),
        )

    def short_text(self) -> str:
        """The canonical text in quotes, cut to fit an error text."""
        text = str(self)
        return repr(text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}...")

    def __str__(self) -> str:
        return write(self.stages, self.grammar)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r}, {self.pipeline_model_parallel_size})"


def _listed(layout: object, grammar: LayoutGrammar) -> tuple[tuple[str, ...], ...]:
    """The stages of a layout given as a list of lists."""
    if not isinstance(layout, list | tuple) or not layout:
        raise LayoutError(f"layout must be a string or a list of stages, at least one, got {layout!r:.80}")
    stages = []
    for index, stage in enumerate(layout):
        if not isinstance(stage, list | tuple):
            raise LayoutError(
                f"stage {index} must be a list of kinds of layer, got {stage!r:.80}; an empty stage is []", stage=index
            )
        stages.append(
            tuple(grammar.kind(name, where=f"stage {index}, layer {position}: ") for position, name in enumerate(stage))
        )
    return tuple(stages)


def _index(name: str, value: int | None, size: int) -> int:
    if value is None:
        if size == 1:
            return 0
        raise LayoutError(f"{name} is needed, there are {size}: pass 0 to {size - 1}")
    return number_below(name, value, size)
