"""Look at checkpoints: ``python -m pipegrid.checkpoint show | verify | export PATH``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from pipegrid.checkpoint.stored import folder, manifest, reading
from pipegrid.checkpoint.stored.manifest import Manifest
from pipegrid.checkpoint.stored.plain import from_plain
from pipegrid.checkpoint.weights import SHARD_SIZE, export_safetensors
from pipegrid.core.parser import Parser
from pipegrid.stages.errors import CheckpointError, CorruptCheckpointError

USAGE, FAULTY = 2, 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m pipegrid.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("show", "what a checkpoint holds"),
        ("verify", "compare every byte with its checksum: detects damage, not forgery"),
        ("export", "write the whole model as .safetensors: a folder for from_pretrained, or one file"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=Path, help="a checkpoint, or the directory of a run: its newest one")
        if name == "export":
            command.add_argument("target", type=Path, help="a new folder, or one file that ends with .safetensors")
            command.add_argument("--module", help="only this module, with its own names")
            command.add_argument("--source", type=Path, help="a folder whose config and tokenizer files are copied")
            command.add_argument("--max-shard-size", default=SHARD_SIZE, help="of a file in the folder; %(default)s")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    path = found_at(arguments.path)
    if arguments.command == "show":
        print(shown(path, reading.read(path)))  # noqa: T201
    elif arguments.command == "verify":
        faults = manifest.faults(path, manifest.parts(found := reading.read(path)))
        for fault in faults:
            print(f"{path.name}: {fault}")  # noqa: T201
        if faults:
            return FAULTY
        print(f"{path.name}: {len(found.tensors)} tensors, all bytes as saved")  # noqa: T201
    else:
        module, source, size = arguments.module, arguments.source, arguments.max_shard_size
        names = export_safetensors(path, arguments.target, module=module, source=source, max_shard_size=size)
        print(f"{arguments.target}: {len(names)} tensors of {path.name}")  # noqa: T201
    return 0


def found_at(path: Path) -> Path:
    """The checkpoint at ``path``, or the newest in it."""
    if (path / folder.MANIFEST).is_file():
        return path
    saved = folder.saved_in(path)
    if not saved:
        raise CheckpointError(f"{path} is no checkpoint, and has none in it")
    return saved[0].path


def shown(path: Path, found: Manifest) -> str:
    """Describe the contents of a checkpoint in lines of text."""
    kinds = {"model": "tensors of the model", "optimizer": "entries of optimizer states", "random": "random states"}
    lines = [f"{path.name}: step {found.step}, saved by {len(found.ranks)} ranks"]
    for kind, text in kinds.items():
        held = [entry for key, entry in found.tensors.items() if key.startswith(f"{kind}/")]
        stored = sum(chunk.length for entry in held for chunk in entry.chunks)
        lines.append(f"  {len(held):>6,} {text}, {stored:,} bytes")
    for module in found.modules:
        keys = [key for key in found.tensors if key.startswith(f"model/{module}/")]
        count = sum(math.prod(found.tensors[key].shape) for key in keys)
        grid = (found.grids or {}).get(module)
        lines.append(f"  module {module}: {len(keys):,} tensors, {count:,} values" + (f", grid {grid}" if grid else ""))
    for group in found.groups:
        known = {name: from_plain(value) for name, value in sorted(group.options.items()) if value is not None}
        options = ", ".join(f"{name}={value}" for name, value in known.items())
        which = f"{group.optimizer} ({group.kind})" if group.kind else group.optimizer
        lines.append(f"  optimizer {which}, {len(group.parameters)} parameters: {options}")
    for name, value in (("loss scale", found.scaler), ("data", found.data), ("layout", found.layout)):
        if value is not None:
            lines.append(f"  {name}: {json.dumps(value):.200}")
    lines.extend(f"  {name}: {entry.length:,} bytes" for name, entry in found.files.items())
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The command ``checkpoint`` with its arguments; 2 for a path without a checkpoint."""
    parser = _parser()
    try:
        return _run(parser.parse_args(arguments))
    except CorruptCheckpointError as error:
        print(error)  # noqa: T201
        return FAULTY
    except (CheckpointError, OSError) as error:
        parser.exit(USAGE, f"{error}\n")
