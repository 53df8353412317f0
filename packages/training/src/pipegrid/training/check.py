"""``python -m pipegrid.training check MODEL LAYOUT``: prove a cut, and compare its stages with the whole model."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.core.parser import Parser
from pipegrid.layout import LayoutError
from pipegrid.stages import Names, check_stages, prove_cut
from pipegrid.stages.building.build import whole_of
from pipegrid.stages.errors import CutError

USAGE, DIFFERENT = 2, 1
SIZE, LENGTH = 2, 16  # of a batch that is made: samples, tokens
_SPECIAL = ("_token_id", "_token_index")


def main(arguments: Sequence[str]) -> int:
    """The command ``check`` with its arguments; 1 where stages and model differ, 2 where nothing can be compared."""
    parser = Parser(prog="python -m pipegrid.training check", description=__doc__)
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
        maker = _maker(given.model, given.kind)

        def make() -> nn.Module:
            torch.manual_seed(given.seed)
            return maker()

        whole = whole_of(make)
        batch = _named(given.batch)() if given.batch else batch_for(whole)
        names = Names(given.layers) if given.layers else None
        proof = prove_cut(whole, given.layout, batch, names=names)
        if given.proof_only or not proof.holds:
            print(proof)  # noqa: T201
        proof.require()
        if not given.proof_only:
            dtype = getattr(torch, given.dtype) if given.dtype else None
            print(check_stages(make, given.layout, batch, names=names, carry=given.carry, dtype=dtype))  # noqa: T201
    except CutError as error:
        print(error)  # noqa: T201
        return DIFFERENT
    except (argparse.ArgumentTypeError, LayoutError, OSError) as error:
        parser.exit(USAGE, f"{error}\n")
    return 0


def _maker(model: str, kind: str | None) -> Callable[[], nn.Module]:
    if ":" in model and not Path(model).exists():
        return _named(model)
    if not Path(model).exists():  # never a name on the hub
        raise argparse.ArgumentTypeError(
            f"{model} is no file and no folder; give a config.json, its folder, or module:function"
        )
    import transformers

    found = transformers.AutoConfig.from_pretrained(model)
    name = kind or next(iter(found.architectures or ()), None)
    if name is None:
        return lambda: transformers.AutoModelForCausalLM.from_config(found)  # type: ignore[no-untyped-call]
    if not hasattr(transformers, name):
        raise argparse.ArgumentTypeError(f"transformers has no class {name}; give --class")
    return lambda: getattr(transformers, name)(found)


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


def batch_for(model: nn.Module) -> dict[str, Any]:
    """Two samples: texts with padding on the right, images, or sounds, and labels where the model takes them.

    Of a model of images and texts, two texts. The model may be on the meta device; one that is not of Hugging Face, or
    has inputs of another kind, is a `CutError`.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    accepted = set(inspect.signature(model.forward).parameters)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if main == "input_ids":
            return _texts(model, config, accepted)
        if main == "pixel_values" and isinstance(size := _of(config, "image_size"), int):
            images = torch.randn(SIZE, _of(config, "num_channels") or 3, size, size)
            return {"pixel_values": images} | _labels(model, config, accepted, None)
        if main == "input_features" and _of(config, "max_source_positions"):
            sounds = torch.randn(SIZE, config.num_mel_bins, 2 * config.max_source_positions)  # type: ignore[union-attr]
            ids = torch.randint(3, _of(config, "vocab_size"), (SIZE, LENGTH))
            return {"input_features": sounds} | _labels(model, config, accepted, ids)
    raise CutError(f"no batch can be made for {type(model).__name__}, whose main input is {main}; give one")


def _texts(model: nn.Module, config: Any, accepted: set[str]) -> dict[str, Any]:
    words = int(_of(config, "vocab_size"))
    special = {value for each in _configs(config) for name, value in vars(each).items() if name.endswith(_SPECIAL)}
    plain = torch.tensor([word for word in range(min(words, 1000)) if word not in special] or [0])
    ids = plain[torch.randint(0, len(plain), (SIZE, LENGTH))]
    mask = torch.ones_like(ids)
    padding = _of(config, "pad_token_id")
    if "attention_mask" in accepted and padding is not None:
        mask[-1, -LENGTH // 4 :] = 0
        ids[mask == 0] = padding
    made = {"input_ids": ids} | ({"attention_mask": mask} if "attention_mask" in accepted else {})
    return made | _labels(model, config, accepted, ids.masked_fill(mask == 0, -100))


def _labels(model: nn.Module, config: Any, accepted: set[str], words: Tensor | None) -> dict[str, Tensor]:
    """Labels of the kind that a class of Hugging Face takes, by its name."""
    if "labels" not in accepted:
        return {}
    name = type(model).__name__
    if "TokenClassification" in name and words is not None:
        return {"labels": (words % config.num_labels).masked_fill(words < 0, -100)}
    if "Classification" in name:
        return {"labels": torch.arange(SIZE) % config.num_labels}
    return {} if words is None else {"labels": words}


def _of(config: Any, name: str) -> Any:
    """A setting of the config, or of the first config inside of it that has it."""
    return next((value for each in _configs(config) if (value := getattr(each, name, None)) is not None), None)


def _configs(config: Any) -> list[Any]:
    return [] if config is None else [config, *(one for one in vars(config).values() if hasattr(one, "to_dict"))]
