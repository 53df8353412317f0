"""The model, the batches and the loss of both; and the lines of a file that are code."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

Batch: TypeAlias = dict[str, Tensor]
Make: TypeAlias = Callable[[], Any]
WORDS, ROWS = 128, 2


def maker(layers: int, width: int, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Make:
    """A function that makes a Llama from its config, with the same values in every process."""

    def make() -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=tied,
        )
        model: Any = LlamaForCausalLM(config)
        return model.to(dtype)

    return make


def batches_of(count: int, length: int, *, padded: bool = False, ragged: bool = False) -> list[Batch]:
    """Microbatches of texts; ``padded``: of unequal length within one, ``ragged``: between them as well."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        longest = length - number % 3 if ragged else length
        ids = torch.randint(1, WORDS, (ROWS, longest), generator=generator)
        ends = torch.randint(2, longest + 1, (ROWS, 1), generator=generator) if padded or ragged else longest
        made.append({"input_ids": ids, "attention_mask": (torch.arange(longest).expand(ROWS, -1) < ends).long()})
    return made


def loss_of(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum over predicted words, and how many they are."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)[:, 1:]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


def lines_of_code(text: str) -> int:
    """Lines that are neither blank, nor comments, nor docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    held = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    documents = [node.body[0] for node in held if ast.get_docstring(node) is not None]
    without = {line for node in documents for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        number not in without and bool(line.strip()) and not line.strip().startswith("#") for number, line in lines
    )
