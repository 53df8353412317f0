"""The weights of all ranks as a folder that `from_pretrained` reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from torch import nn

from hf_vlm.model import make_model
from pipegrid.training import Checkpoints, Stage, TrainingState, export_safetensors


def save(model: nn.Module, folder: Path, *, step: int) -> None:
    """Save a checkpoint of the job, and from it one file per module with its index. Every rank calls it.

    Both modules have their names in the whole model, so the files together are that model's.
    """
    language = isinstance(model, Stage)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    held = {model.number: model} if isinstance(model, Stage) else {0: model}
    checkpoints.save(TrainingState(stages={"language" if language else "vision": held}), step=step)
    checkpoints.close()
    if dist.get_rank() == 0:
        (saved,) = (folder / "checkpoints").iterdir()
        files = {name: folder / f"{name}.safetensors" for name in ("vision", "language")}
        found = {
            name: file.name for part, file in files.items() for name in export_safetensors(saved, file, module=part)
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))
        whole = make_model()
        whole.config.save_pretrained(folder)
        whole.generation_config.save_pretrained(folder)
    dist.barrier()
