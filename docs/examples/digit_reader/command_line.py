"""The options of a training run, read from the command line before any process starts.

An error is one line: option, value, rule, and a value that fits.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from digit_reader.fitting import require_fitting
from digit_reader.modules import DECODERS, DEFAULTS, DIMS, ENCODERS, IMAGES, LANGUAGE, PLACEMENTS, SIGNAL
from digit_reader.options import BACKENDS, SCHEDULE_NAMES, Options, OptionsError, num_stages
from pipegrid.core.fields import nearest
from pipegrid.layout import even

_FIELD = re.compile(r"""\s*([a-z]+)\s*=\s*("[^"]*"|'[^']*'|[^,"']*)\s*(?:,|$)""")


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        OptionsError: something does not fit; nothing has been started.
    """
    given = _parser().parse_args(arguments)
    encoders = _encoders(given.modules, given.placement)
    texts = {name: getattr(given, name) for name in (*encoders, LANGUAGE)}
    for name in ENCODERS:
        if name not in encoders and getattr(given, name) is not None:
            raise OptionsError(f"--{name}: the module is not part of the run; add --modules {','.join(ENCODERS)}")
    defaults = DEFAULTS[given.placement, encoders]
    fields = {
        name: _fields(name, defaults[name] if text is None else text, defaults[name]) for name, text in texts.items()
    }
    grids = {name: _sizes(name, found) for name, found in fields.items()}
    if given.placement == "separate" and "dp" not in fields[LANGUAGE]:
        grids[LANGUAGE]["dp"] = _lanes_to_fill(given.processes, grids)
    vpp = _size(LANGUAGE, "vpp", fields[LANGUAGE].get("vpp", "1"))
    stages = num_stages(given.schedule, grids[LANGUAGE]["pp"], vpp)
    options = Options(
        grids=grids,
        layout=fields[LANGUAGE].get("layout") or str(even(DECODERS, stages)),
        vpp=vpp,
        graph=_graph(given.graph or _usual_graph(encoders)),
        placement=given.placement,
        schedule=given.schedule,
        processes=given.processes,
        microbatches=given.microbatches,
        batch=given.batch,
        steps=given.steps,
        seed=given.seed,
        dtype=given.dtype,
        deadline=given.deadline,
        backend=given.backend,
        check=given.check,
        checkpoint_every=given.checkpoint_every,
        checkpoints=given.checkpoints or given.out / "checkpoints",
        resume=given.resume,
        out=given.out,
        control=given.control,
    )
    require_fitting(options)
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise OptionsError(message)


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    """The type of an option that takes one of ``names``; its error suggests the nearest."""
    known = tuple(names)

    def convert(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(
                f"there is no {text!r}{nearest(text, known)}; choose from {', '.join(known)}"
            )
        return text

    return convert


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="train.py", description=__doc__)
    placements = "; ".join(f"{name}: {text}" for name, text in PLACEMENTS.items())
    add = parser.add_argument
    add("--modules", help="encoders: images, or images,signal (default: images; both where the placement is mixed)")
    add("--images", help="grid of the image encoder: tp, dp (defaults of grids: whatever fills four processes)")
    add("--signal", help="grid of the signal's encoder: tp, dp, pp")
    add(
        "--language",
        help='grid and layout of the language model: tp, dp, pp=2, vpp=1, layout="Ett|ttL"; dp fills the processes',
    )
    add("--graph", help="which module feeds which (default: every encoder the language model)")
    add("--placement", default="separate", type=_one_of(PLACEMENTS), help=placements)
    add(
        "--schedule",
        default="1f1b",
        type=_one_of(SCHEDULE_NAMES),
        help=f"order of forwards and backwards: {', '.join(SCHEDULE_NAMES)} (default: %(default)s)",
    )
    add("--processes", type=int, default=4, help="processes to start; torchrun: its own number (default: %(default)s)")
    add("--microbatches", type=int, default=4, help="microbatches per step (default: %(default)s)")
    add("--batch", type=int, default=64, help="samples per step (default: %(default)s)")
    add("--steps", type=int, default=1800, help="steps of the optimizer (default: %(default)s)")
    add("--seed", type=int, default=0, help="of parameters and of the order of samples (default: %(default)s)")
    add("--dtype", default="float32", choices=("float32", "float64"), help="of parameters (default: %(default)s)")
    add("--deadline", type=float, default=60.0, help="seconds that a rank may stand still (default: %(default)s)")
    add("--backend", type=_one_of(BACKENDS), help="of the processes (default: NCCL with a GPU for each, else gloo)")
    add("--check", action="store_true", help="compare the first step's gradients with one process, then stop")
    add("--checkpoint-every", type=int, default=0, metavar="N", help="save every N steps (default: nothing is saved)")
    add("--checkpoints", type=Path, metavar="DIR", help="directory of the checkpoints (default: checkpoints in --out)")
    add("--resume", default="never", metavar="auto|never|PATH", help="auto: from the newest of --checkpoints, if any")
    add("--out", type=Path, default=Path("runs/digit_reader"), help="where files are written (default: %(default)s)")
    add("--control", help=argparse.SUPPRESS)
    return parser


def _encoders(text: str | None, placement: str) -> tuple[str, ...]:
    """The encoders that are asked for, in the order of `ENCODERS`."""
    if text is None:
        return ENCODERS if placement == "mixed" else (IMAGES,)
    named = [name.strip() for name in text.split(",")]
    if IMAGES not in named or len(set(named)) != len(named) or not set(named) <= set(ENCODERS):
        raise OptionsError(f"--modules {text!r}: the encoders are {IMAGES}, or {IMAGES},{SIGNAL}")
    encoders = tuple(name for name in ENCODERS if name in named)
    if (placement, encoders) not in DEFAULTS:
        raise OptionsError(
            f"--placement {placement}: {PLACEMENTS[placement]}, and --modules {text} has no {SIGNAL}; add it, or use "
            "separate or colocated"
        )
    return encoders


def _fields(module: str, text: str, example: str) -> dict[str, str]:
    """``tp=1,layout="Ett|ttL"`` as a dict; a quoted value may hold commas."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _FIELD.match(text, at)
        if match is None:
            raise OptionsError(
                f"--{module} {text!r}: cannot read {text[at:]!r}; write name=value, separated by commas: {example}"
            )
        name, value = match[1], match[2].strip().strip("\"'")
        if name in found:
            raise OptionsError(f"--{module} {text!r}: {name} is given twice; give it once")
        if name not in DIMS[module]:
            raise OptionsError(f"--{module} {name}={value}: the {module} module knows {', '.join(DIMS[module])} only")
        found[name] = value
        at = match.end()
    return found


def _sizes(module: str, fields: Mapping[str, str]) -> dict[str, int]:
    if fields.get("tp", "1") != "1":
        raise OptionsError(f"--{module} tp={fields['tp']}: this model has no tensor-parallel layers; use tp=1")
    return {name: _size(module, name, fields.get(name, "1")) for name in ("tp", "dp", "pp")}


def _lanes_to_fill(processes: int, grids: Mapping[str, Mapping[str, int]]) -> int:
    """Replicas of the language model that fill the processes; 1 where none do."""
    left = processes - sum(math.prod(sizes.values()) for name, sizes in grids.items() if name != LANGUAGE)
    lanes, over = divmod(left, grids[LANGUAGE]["pp"])
    return lanes if lanes > 0 and over == 0 else 1


def _size(module: str, name: str, value: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", value):
        raise OptionsError(f"--{module} {name}={value}: a size is a whole number of at least 1")
    return int(value)


def _usual_graph(encoders: Sequence[str]) -> str:
    return ",".join(f"{name}>{LANGUAGE}" for name in encoders)


def _graph(text: str) -> tuple[tuple[str, str], ...]:
    edges = [tuple(part.strip() for part in edge.split(">")) for edge in text.split(",")]
    for edge in edges:
        if len(edge) != 2 or not all(edge):
            raise OptionsError(f"--graph {text!r}: write source>destination, separated by commas: images>language")
    return tuple((source, destination) for source, destination in edges)
