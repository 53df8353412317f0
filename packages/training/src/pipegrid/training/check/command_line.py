"""``python -m pipegrid.training check MODEL LAYOUT``: prove a cut, and compare its stages with the whole model."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipegrid.layout import LayoutError
from pipegrid.training.check.made_batch import batch_for
from pipegrid.training.errors import CutError
from pipegrid.training.stages import Names, check_stages, prove_cut
from pipegrid.training.stages.building.build import whole_of

USAGE, DIFFERENT = 2, 1


def main(arguments: Sequence[str]) -> int:
    """The command ``check`` with its arguments; 1 where stages and model differ, 2 where nothing can be compared."""
    parser = argparse.ArgumentParser(prog="python -m pipegrid.training check", description=__doc__)
    parser.add_argument(
        "model", help="a config.json of Hugging Face or its folder; or module:function, which makes the model"
    )
    parser.add_argument("layout", help="such as 'Et*2|t*2L'")
    parser.add_argument("--class", dest="kind", metavar="NAME", help="of transformers; else the config's architecture")
    parser.add_argument("--batch", metavar="MODULE:FUNCTION", help="makes the batch; else two samples for the config")
    parser.add_argument("--layers", help="the dotted name of the list of layers, as in Names(...)")
    parser.add_argument("--carry", nargs="*", default=(), metavar="NAME", help="as in pipeline_stage")
    parser.add_argument("--dtype", default=None, choices=("float64", "float32", "bfloat16"), help="of the comparison")
    parser.add_argument("--seed", type=int, default=0, help="of the initial values")
    parser.add_argument("--proof-only", action="store_true", help="compare no numbers: for a config of any size")
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except CutError as error:
        print(error)  # noqa: T201
        return DIFFERENT
    except (argparse.ArgumentTypeError, LayoutError, OSError) as error:
        parser.exit(USAGE, f"{error}\n")


def _run(given: argparse.Namespace) -> int:
    make = _seeded(_maker(given.model, given.kind), given.seed)
    whole = whole_of(make)
    batch = _named(given.batch)() if given.batch else batch_for(whole)
    names = Names(given.layers) if given.layers else None
    proof = prove_cut(whole, given.layout, batch, names=names)
    if given.proof_only or not proof.holds:
        print(proof)  # noqa: T201
    proof.require()
    if given.proof_only:
        return 0
    dtype = getattr(torch, given.dtype) if given.dtype else None
    print(check_stages(make, given.layout, batch, names=names, carry=given.carry, dtype=dtype))  # noqa: T201
    return 0


def _maker(model: str, kind: str | None) -> Callable[[], nn.Module]:
    if ":" in model and not Path(model).exists():
        return _named(model)
    import transformers

    found = transformers.AutoConfig.from_pretrained(_folder(model))
    name = kind or next(iter(found.architectures or ()), None)
    if name is None:
        return lambda: transformers.AutoModelForCausalLM.from_config(found)  # type: ignore[no-untyped-call]
    if not hasattr(transformers, name):
        raise argparse.ArgumentTypeError(f"transformers has no class {name}; give --class")
    return lambda: getattr(transformers, name)(found)


def _folder(path: str) -> str:
    """What `AutoConfig` reads; never a name on the hub."""
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(
            f"{path} is no file and no folder; give a config.json, its folder, or module:function"
        )
    return path


def _named(text: str) -> Callable[[], Any]:
    module, _, name = text.partition(":")
    sys.path.insert(0, "")  # modules beside the caller
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no function: {error}; give module:function") from error
    finally:
        sys.path.remove("")
    return found  # type: ignore[no-any-return]


def _seeded(make: Callable[[], nn.Module], seed: int) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return made
