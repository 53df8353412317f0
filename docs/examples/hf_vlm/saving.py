"""The weights of all ranks as a folder that `from_pretrained` reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from hf_vlm.model import make_model
from pipegrid.training import Pipeline, export_safetensors


def save(pipeline: Pipeline, folder: Path, *, step: int) -> None:
    """Save a checkpoint of the job, and from it one file per module with its index. Every rank calls it.

    Both modules have their names in the whole model, so the files together are that model's.
    """
    pipeline.save(folder / "checkpoints", step=step)
    if dist.get_rank() == 0:
        *_, saved = sorted((folder / "checkpoints").glob("save-*"))
        files = {name: folder / f"{name}.safetensors" for name in ("vision", "language")}
        found = {
            name: file.name for part, file in files.items() for name in export_safetensors(saved, file, module=part)
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))
        whole = make_model()
        whole.config.save_pretrained(folder)
        whole.generation_config.save_pretrained(folder)
    dist.barrier()
