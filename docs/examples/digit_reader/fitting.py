"""Whether options fit together: modules, graph, layout, schedule, grids and batch. No torch."""

from __future__ import annotations

import math
from pathlib import Path

from digit_reader.modules import LANGUAGE, PLACEMENTS, SIGNAL, SIGNAL_LAYERS, together
from digit_reader.options import Options, OptionsError, num_stages
from pipegrid.core.graph import ModuleGraphError
from pipegrid.layout import LayoutError, PipelineParallelLayerLayout
from pipegrid.schedules import fitting_schedules
from pipegrid.topology import PlacementError


def require_fitting(options: Options) -> None:
    """Raise for options that contradict each other.

    Raises:
        OptionsError: the first one, in one line.
    """
    _require_graph(options)
    _require_layout(options)
    _require_schedule(options)
    _require_grids(options)
    _require_numbers(options)
    _require_checkpoints(options)


def _require_graph(options: Options) -> None:
    usual = ",".join(f"{name}>{LANGUAGE}" for name in options.encoders)
    named = {name for edge in options.graph for name in edge}
    for name in options.grids:
        if name not in named:
            raise OptionsError(f"--graph: module {name!r} is missing from the graph; use {usual}")
    try:
        options.modules()
    except ModuleGraphError as error:
        raise OptionsError(f"--graph: {error}") from None
    if set(options.graph) != {(name, LANGUAGE) for name in options.encoders}:
        raise OptionsError(f"--graph: the language model reads what the encoders see; use {usual}")


def _require_layout(options: Options) -> None:
    """The layout is of this model, and has as many stages as the schedule makes of the language model."""
    name, pp, vpp = options.schedule, options.grids[LANGUAGE]["pp"], options.vpp
    try:
        stages = PipelineParallelLayerLayout.get_num_stages_from_str(options.layout)
        if stages != options.num_stages():
            counts = range(1, stages + 1)
            would = [f"pp={n}" for n in counts if num_stages(name, n, vpp) == stages]
            would += [f"a layout with {options.num_stages()} stages"]
            would += [f"vpp={n}" for n in counts if num_stages(name, pp, n) == stages and name in fitting_schedules(n)]
            raise OptionsError(
                f"--language layout {options.layout!r} has {stages} stages; {name} with pp={pp},vpp={vpp} makes "
                f"{options.num_stages()}: use {', or '.join(would)}"
            )
        layout = options.stages()
        layout.validate_layer_layout(layout.flatten_layout.count("decoder"))
    except LayoutError as error:
        raise OptionsError(f"--language layout {options.layout!r}: {_one_line(error)}") from None


def _require_schedule(options: Options) -> None:
    if options.schedule not in fitting_schedules(options.vpp):
        counts = [str(vpp) for vpp in (1, 2, 3) if options.schedule in fitting_schedules(vpp)]
        would = f"vpp={counts[0]}" + (" or more" if len(counts) > 1 else "")
        raise OptionsError(
            f"--schedule {options.schedule}: it does not run vpp={options.vpp} stages on a place; use {would}, "
            f"or one of {', '.join(fitting_schedules(options.vpp))}"
        )


def _require_grids(options: Options) -> None:
    sizes = {name: math.prod(dims.values()) for name, dims in options.grids.items()}
    for name, dims in options.grids.items():
        if name == SIGNAL and dims["pp"] > SIGNAL_LAYERS:
            raise OptionsError(f"--{name} pp={dims['pp']}: the encoder has {SIGNAL_LAYERS} layers; use pp=1 or pp=2")
    shared = together(options.placement, tuple(options.grids))
    for names in shared:
        for name in names:
            if sizes[name] != sizes[LANGUAGE]:
                raise OptionsError(
                    f"--placement {options.placement}: {PLACEMENTS[options.placement]}, and {name} has {sizes[name]} "
                    f"ranks, language {sizes[LANGUAGE]}; {_another_size(options, name, sizes[LANGUAGE])}"
                )
    try:
        options.place()
    except PlacementError as error:
        alone = [name for name in sizes if not any(name in names and name != names[-1] for names in shared)]
        needed = sum(sizes[name] for name in alone)
        raise OptionsError(
            f"{_one_line(error)} Processes given: {options.processes}; "
            f"{' + '.join(f'{name} {sizes[name]}' for name in alone)} need {needed}"
        ) from None


def _another_size(options: Options, name: str, wanted: int) -> str:
    """What would give the encoder as many ranks as the language model has."""
    pp = options.grids[name]["pp"]
    if wanted % pp:
        return "give both as many ranks"
    return f"use --{name} dp={wanted // pp}" + (f",pp={pp}" if pp > 1 else "")


def _require_numbers(options: Options) -> None:
    for name in ("microbatches", "steps", "batch"):
        if getattr(options, name) < 1:
            raise OptionsError(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.checkpoint_every < 0:
        raise OptionsError(f"--checkpoint-every {options.checkpoint_every}: must be at least 0")
    if options.seed < 0:
        raise OptionsError(f"--seed {options.seed}: must be at least 0")
    if not options.deadline > 0:
        raise OptionsError(f"--deadline {options.deadline}: give a positive number of seconds")
    lanes = math.lcm(*(dims["dp"] for dims in options.grids.values()))
    share = options.microbatches * lanes
    if options.batch % share:
        raise OptionsError(
            f"--batch {options.batch}: {options.microbatches} microbatches over {lanes} replicas need a multiple of "
            f"{share}; {options.batch // share * share or share} or {-(-options.batch // share) * share} would do"
        )


def _require_checkpoints(options: Options) -> None:
    if options.resume not in ("auto", "never") and not Path(options.resume).is_dir():
        raise OptionsError(f"--resume {options.resume}: no such directory; use auto, never, or one with checkpoints")
    if options.resume == "never" and options.checkpoint_every and any(options.checkpoints.glob("save-*")):
        raise OptionsError(
            f"--resume never: {options.checkpoints} has checkpoints of a run, which would be mixed with this one's; "
            "use --resume auto, or another directory (--checkpoints)"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).splitlines()[0].split())
