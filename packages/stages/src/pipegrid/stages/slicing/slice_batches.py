"""A batch of texts cut along the sequence, for a schedule with slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipegrid.core.fields import Count, checked, checked_arguments
from pipegrid.stages.errors import CutError

IGNORED = -100  # the label of a token that counts in no loss, as in Hugging Face's models


@checked_arguments(CutError, kinds=True)
def sequence_slices(
    batch: Mapping[str, Any], lengths: Sequence[int], *, num_items_in_batch: int | Tensor | None = None
) -> list[dict[str, Any]]:
    """Cut a batch of texts along the sequence, for a schedule with slices such as ``seq1f1b``.

    Labels are shifted before they are cut, since the last token of a slice predicts the first of the next:
    ``shift_labels[:, i]`` is what token ``i`` predicts. On the last stage of `pipeline_stage` the ``loss`` of a slice
    is the sum over its labels by ``num_items_in_batch``, so the losses of the slices add up to the mean of the batch.

    Args:
        batch: ``input_ids`` or ``inputs_embeds``, ``attention_mask``, ``position_ids``, and ``labels`` (ids, or -100);
            of each the first two axes are samples and tokens.
        lengths: tokens of each slice, which add up to those of the batch; `pipegrid.schedules.balanced_slices` has
            lengths of equal time.
        num_items_in_batch: divisor of the sums; None: the labels of this batch. With ``calculate_per_token_loss`` it
            is 1, and ``output.loss`` the sum that the setting asks for.

    Returns:
        Of each slice the arguments of ``stage(...)``.

    Raises:
        CutError: a length below 1. That lengths add up to the tokens of each argument is checked by torch.

    Examples:
        >>> import torch
        >>> ids = torch.arange(8).reshape(1, 8)
        >>> slices = sequence_slices({"input_ids": ids, "labels": ids}, lengths=[5, 3])
        >>> [list(part["input_ids"].shape) for part in slices]
        [[1, 5], [1, 3]]
    """
    parts = checked(tuple(lengths), tuple[Count, ...], "lengths", CutError)
    given = {name: value for name, value in batch.items() if value is not None}
    if "labels" in given:
        labels = given.pop("labels")
        given["shift_labels"] = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if num_items_in_batch is None:
            num_items_in_batch = (given["shift_labels"] != IGNORED).sum()
    cut = {name: value.split(parts, dim=1) for name, value in given.items()}
    count = {"num_items_in_batch": num_items_in_batch} if "shift_labels" in given else {}
    return [{name: pieces[i] for name, pieces in cut.items()} | count for i in range(len(parts))]
