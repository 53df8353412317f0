"""The next token of each row from its logits: the greatest, or one drawn as Hugging Face draws it."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from pipegrid.core.fields import Amount, Count, Index, checked_fields
from pipegrid.training.errors import GenerationError


@frozen(field_transformer=checked_fields(GenerationError))
class Sampling:
    """The draw of a token, in the order of Hugging Face: temperature, ``top_k``, ``top_p``, then one draw per row.

    Microbatch ``m`` of ``M`` of replica ``d`` (the rank in the ``dp`` group) is number ``n = d * M + m`` of the job.
    It has a generator of its own with the seed ``seed + n``, so its tokens are those that ``generate`` of Hugging Face
    draws for its rows after ``torch.manual_seed(seed + n)``. The tp, cp and pp ranks of a replica draw alike.

    Attributes:
        temperature: divides the logits.
        top_k: of each row, tokens below its ``top_k`` greatest are left out.
        top_p: of each row, the least likely tokens that hold less than ``1 - top_p`` together are left out.
        seed: of the first microbatch of the job.

    Examples:
        >>> Sampling(temperature=0.7, top_p=0.9, seed=1).top_k is None
        True
    """

    temperature: Amount = 1.0
    top_k: Count | None = None
    top_p: Amount = 1.0
    seed: Index = 0

    def __attrs_post_init__(self) -> None:
        if not self.temperature:
            raise GenerationError("temperature is 0.0; leave Sampling out for the greatest logit")
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p is {self.top_p}; it is a probability above 0, at most 1")

    def generators(self, count: int, device: torch.device, *, lane: int = 0) -> list[torch.Generator]:
        """One generator for each of the ``count`` microbatches of a replica."""
        first = self.seed + lane * count
        return [torch.Generator(device).manual_seed(first + number) for number in range(count)]

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """The tokens of ``logits`` ``[batch, words]``."""
        scores = logits / self.temperature if self.temperature != 1 else logits
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ascending, places = scores.sort(descending=False)
            unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.top_p
            unlikely[:, -1] = False
            scores = scores.masked_fill(unlikely.scatter(1, places, unlikely), -torch.inf)
        return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).squeeze(1)
