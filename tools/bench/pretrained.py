"""What each rank holds while it loads its stage of a pretrained model.

    python tools/bench/pretrained.py [--hidden 2048] [--layers 22] [--vocab 32000] [--ranks 4]

Makes a sharded folder of bfloat16 weights (2 GiB as given above), loads each rank's stage with ``from_pretrained``
inside the function given to `pipeline_stage`, at bfloat16 and at float32, and removes the folder. Each rank is a
process of its own, one after the other. Printed for each:

share      bytes of the stage's parameters
peak       the most resident memory of the process (VmHWM: anonymous pages, and pages of files that it has mapped), over
           that of the process before the load, with all imports done and a tiny model loaded. What `read` leaves in
           the page cache is not in it: it belongs to no process, and the system drops it when memory is short
allocated  the most bytes of tensors alive together; of the buffer that foreign parameters share, most has no pages
read       bytes that the process has read

A peak of more than 1.2 shares, or a parameter with other values than the file's, is a failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pipegrid.training import pipeline_stage

BOUND = 1.2
MIB = 2**20
SHARD = 256 * MIB


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors that are alive together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[Any, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            storage = result.untyped_storage()
            self._alive[torch.multiprocessing.reductions.StorageWeakRef(storage)] = storage.nbytes()  # type: ignore[no-untyped-call]
            self._alive = {key: size for key, size in self._alive.items() if not key.expired()}
            self.most = max(self.most, sum(self._alive.values()))
        return result


def value_of(name: str) -> float:
    """What all values of a parameter are; exact in bfloat16, and zero for none."""
    return float(1 + sum(name.encode()) % 127)


def make(folder: Path, config: LlamaConfig, limit: int) -> int:
    """Write a sharded checkpoint, a shard at a time; its bytes."""
    from safetensors.torch import save_file

    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, shape in shapes.items():
        nbytes = 2 * shape.numel()
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + nbytes, total + nbytes
    files: dict[str, str] = {}
    for at, held in enumerate(shards, 1):
        file = f"model-{at:05}-of-{len(shards):05}.safetensors"
        tensors = {name: torch.full(shapes[name], value_of(name), dtype=torch.bfloat16) for name in held}
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    return total


def status(field: str) -> int:
    """Bytes of a field of ``/proc/self/status``."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def has_read() -> int:
    """Bytes that the process has read."""
    return int(Path("/proc/self/io").read_text().split("\n", 1)[0].split()[1])


def load(folder: Path, tiny: Path, layout: str, rank: int, dtype: torch.dtype) -> dict[str, int]:
    """One rank's stage, and what the load took."""
    pipeline_stage(lambda: AutoModelForCausalLM.from_pretrained(tiny, dtype=dtype), "Et|tL", 0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before, read = status("VmRSS"), has_read()
    with Allocated() as allocated:
        stage = pipeline_stage(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), layout, rank)
    peak = status("VmHWM") - before
    wrong = [name for name, value in stage.named_parameters() if not bool((value == value_of(name)).all())]
    share = sum(parameter.nbytes for parameter in stage.parameters())
    taken = {"share": share, "peak": peak, "allocated": allocated.most, "read": has_read() - read}
    return taken | {"wrong": len(wrong)}


def layout_of(layers: int, ranks: int) -> str:
    """About the same number of layers on each rank, the embedding on the first and the head on the last."""
    ends = [round(layers * at / ranks) for at in range(ranks + 1)]
    return "E" + "|".join(f"t*{end - begin}" for begin, end in pairwise(ends)) + "L"


def config_of(hidden: int, layers: int, vocab: int) -> LlamaConfig:
    """A Llama with the proportions of TinyLlama."""
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers}
    return LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, vocab_size=vocab, dtype="bfloat16")


def main() -> int:
    """The table; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 2048), ("layers", 22), ("vocab", 32000), ("ranks", 4), ("shard", SHARD)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--load", nargs=5, help=argparse.SUPPRESS)  # one rank: folder, tiny, layout, rank, dtype
    options = parser.parse_args()
    if options.load:
        folder, tiny, layout, rank, dtype = options.load
        print(json.dumps(load(Path(folder), Path(tiny), layout, int(rank), getattr(torch, dtype))))
        return 0
    layout, missed = layout_of(options.layers, options.ranks), False
    with tempfile.TemporaryDirectory() as place:
        folder, tiny = Path(place) / "model", Path(place) / "tiny"
        folder.mkdir()
        tiny.mkdir()
        total = make(folder, config_of(options.hidden, options.layers, options.vocab), options.shard)
        make(tiny, config_of(32, 2, 32), options.shard)
        shards = len(list(folder.glob("*.safetensors")))
        print(f"{total / MIB:,.0f} MiB of bfloat16 in {shards} shards, layout {layout}; MiB")
        print("  loaded as  rank     share      peak  allocated      read  peak / share")
        for dtype in ("bfloat16", "float32"):
            for rank in range(options.ranks):
                command = [sys.executable, __file__, "--load", str(folder), str(tiny), layout, str(rank), dtype]
                printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                found = json.loads(printed.splitlines()[-1])
                ratio = found["peak"] / found["share"]
                missed = missed or ratio > BOUND or found["wrong"] > 0
                numbers = "".join(f"{found[key] / MIB:>10,.1f}" for key in ("share", "peak", "allocated", "read"))
                sign = "<=" if ratio <= BOUND else "> "
                values = f", {found['wrong']} parameters WRONG" if found["wrong"] else ""
                print(f"  {dtype:<9} {rank:>5}{numbers}   {ratio:.3f} {sign} {BOUND}{values}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
