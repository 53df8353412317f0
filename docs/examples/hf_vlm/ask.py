"""Plain transformers, one process: load the saved weights and compare their answers with those of the pipeline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_vlm.data import IMAGE_TOKENS, batch_of, captions_of, prompts_of


def ask(folder: Path) -> bool:
    """Whether the model in ``folder`` gives the answers that are written there."""
    answers = json.loads((folder / "answers.json").read_text())
    model: Any = LlavaForConditionalGeneration.from_pretrained(folder)
    prompts = prompts_of(batch_of(range(len(answers)), unseen=True))
    tokens = model.generate(**prompts, max_new_tokens=8, do_sample=False)[:, IMAGE_TOKENS + 1 :]
    same = sum(one == other for one, other in zip(captions_of(tokens), answers, strict=True))
    print(f"plain transformers, one process, the saved weights: the same answer for {same} of {len(answers)} images")
    return bool(same == len(answers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(0 if ask(Path(sys.argv[1])) else 1)
