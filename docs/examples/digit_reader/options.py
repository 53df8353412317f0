"""What can be asked of the training run, checked before any process starts.

Every refusal is one line: what was given, why it cannot be, and what would fit.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from pipegrid.bridges.graph import ModuleGraph, ModuleGraphError
from pipegrid.layout import LayoutError, PipelineParallelLayerLayout
from pipegrid.topology import HyperCommGrid, PlacementError, place

SCHEDULES = ("1f1b",)
DIMS = {"images": ("tp", "dp"), "language": ("tp", "dp", "pp")}


class OptionsError(ValueError):
    """An option that cannot be; the text is one line for the person who typed it."""


@frozen(kw_only=True)
class Options:
    """A training run, whole: the same on every rank.

    ``grids`` has a size per dimension and module; ``layout`` is the language model's. ``batch`` samples make a step,
    shared by ``microbatches``.
    """

    grids: Mapping[str, Mapping[str, int]]
    layout: str
    graph: tuple[tuple[str, str], ...]
    placement: str
    schedule: str
    processes: int
    microbatches: int
    batch: int
    steps: int
    seed: int
    dtype: str
    check: bool
    out: Path

    def place(self) -> dict[str, HyperCommGrid]:
        """Every module's grid. All have the dimensions tp, dp, pp, the fastest first."""
        return place(self.grids, world_size=self.processes)

    def stages(self) -> PipelineParallelLayerLayout:
        """The language model's layout over its pipeline."""
        return PipelineParallelLayerLayout(self.layout, self.grids["language"]["pp"])

    def modules(self) -> ModuleGraph:
        """The graph of modules with their depths."""
        return ModuleGraph({name: dims["pp"] for name, dims in self.grids.items()}, self.graph)


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        OptionsError: something does not fit; nothing has been started.
    """
    parser = _Parser(prog="train.py", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--images", default="tp=1,dp=2", help="grid of the image encoder")
    parser.add_argument("--language", default='pp=2,layout="Ett|ttL"', help="grid and layout of the language model")
    parser.add_argument("--graph", default="images>language", help="which module feeds which")
    parser.add_argument("--placement", default="separate", choices=("separate", "colocated"), help="modules on ranks")
    parser.add_argument("--schedule", default="1f1b", choices=SCHEDULES, help="order of forwards and backwards")
    parser.add_argument("--processes", type=int, default=4, help="processes to start (torchrun: its own number)")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches per step")
    parser.add_argument("--batch", type=int, default=64, help="samples per step")
    parser.add_argument("--steps", type=int, default=1800, help="steps of the optimizer")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and of the order of samples")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"), help="of parameters")
    parser.add_argument("--check", action="store_true", help="compare the first step's gradients with one process")
    parser.add_argument("--out", type=Path, default=Path("runs/digit_reader"), help="where files are written")
    given = parser.parse_args(arguments)
    images, language = _fields("--images", given.images), _fields("--language", given.language)
    layout = language.pop("layout", "Ett|ttL")
    options = Options(
        grids={"images": _dims("images", images), "language": _dims("language", language)},
        layout=layout,
        graph=_graph(given.graph),
        placement=given.placement,
        schedule=given.schedule,
        processes=given.processes,
        microbatches=given.microbatches,
        batch=given.batch,
        steps=given.steps,
        seed=given.seed,
        dtype=given.dtype,
        check=given.check,
        out=given.out,
    )
    _check(options)
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise OptionsError(message)


def _fields(option: str, text: str) -> dict[str, str]:
    """``tp=1,layout="Ett|ttL"`` as a dict; a quoted value may hold commas."""
    item = re.compile(r"""\s*([a-z]+)\s*=\s*("[^"]*"|'[^']*'|[^,"']*)\s*(?:,|$)""")
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = item.match(text, at)
        if match is None:
            raise OptionsError(f"{option} {text!r}: cannot read {text[at:]!r}; write name=value, separated by commas")
        name, value = match[1], match[2].strip().strip("\"'")
        if name in found:
            raise OptionsError(f"{option} {text!r}: {name} is given twice; give it once")
        found[name] = value
        at = match.end()
    return found


def _dims(module: str, fields: Mapping[str, str]) -> dict[str, int]:
    known = DIMS[module]
    for name, value in fields.items():
        if name not in known:
            raise OptionsError(f"--{module} {name}={value}: the {module} module knows {', '.join(known)} only")
        if not re.fullmatch(r"[1-9]\d*", value):
            raise OptionsError(f"--{module} {name}={value}: a size is a whole number of at least 1")
    if fields.get("tp", "1") != "1":
        raise OptionsError(f"--{module} tp={fields['tp']}: this model has no tensor-parallel layers; use tp=1")
    return {name: int(fields.get(name, "1")) for name in ("tp", "dp", "pp")}


def _graph(text: str) -> tuple[tuple[str, str], ...]:
    edges = [tuple(part.strip() for part in edge.split(">")) for edge in text.split(",")]
    for edge in edges:
        if len(edge) != 2 or not all(edge):
            raise OptionsError(f"--graph {text!r}: write source>destination, separated by commas: images>language")
    return tuple((source, destination) for source, destination in edges)


def _check(options: Options) -> None:
    if options.placement == "colocated":
        raise OptionsError(
            "--placement colocated: modules that share ranks are not trained by this example yet; use separate"
        )
    named = {name for edge in options.graph for name in edge}
    for name in options.grids:
        if name not in named:
            raise OptionsError(f"--graph: module {name!r} is missing from the graph; use images>language")
    try:
        options.modules()
    except ModuleGraphError as error:
        raise OptionsError(f"--graph: {error}") from None
    if options.graph != (("images", "language"),):
        raise OptionsError("--graph: the language model reads what the encoder sees; use images>language")
    try:
        options.stages().validate_layer_layout(options.stages().flatten_layout.count("decoder"))
        if options.stages().virtual_pipeline_model_parallel_size != 1:
            stages = len(options.stages().stages)
            raise OptionsError(
                f"--language layout {options.layout!r} has {stages} stages for pp={options.grids['language']['pp']}; "
                f"schedule {options.schedule} runs one stage per rank: use pp={stages}, or a layout with "
                f"{options.grids['language']['pp']} stages"
            )
    except LayoutError as error:
        raise OptionsError(f"--language layout {options.layout!r}: {_one_line(error)}") from None
    try:
        options.place()
    except PlacementError as error:
        sizes = {name: dims["tp"] * dims["dp"] * dims["pp"] for name, dims in options.grids.items()}
        raise OptionsError(
            f"{_one_line(error)} Processes given: {options.processes}; "
            f"{' + '.join(f'{name} {size}' for name, size in sizes.items())} need {sum(sizes.values())}"
        ) from None
    for name in ("microbatches", "steps", "batch"):
        if getattr(options, name) < 1:
            raise OptionsError(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.seed < 0:
        raise OptionsError(f"--seed {options.seed}: must be at least 0")
    lanes = max(dims["dp"] for dims in options.grids.values())
    share = options.microbatches * lanes
    if options.batch % share:
        raise OptionsError(
            f"--batch {options.batch}: {options.microbatches} microbatches over {lanes} data lanes need a multiple of "
            f"{share}; {options.batch // share * share or share} or {-(-options.batch // share) * share} would do"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).splitlines()[0].split())
