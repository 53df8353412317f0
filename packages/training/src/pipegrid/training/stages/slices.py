"""A Hugging Face model over slices of a sequence: its cache is what the slices of a microbatch keep for each other.

The model's own forward runs on a slice as it does on further tokens of a text: positions begin after the earlier
slices, and attention gets their keys and values out of the cache. Unlike in generation they belong to the graph of
their own slice, to which `pipegrid.schedules.Slice` returns the gradients of all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipegrid.schedules.autograd import compiled_modules
from pipegrid.topology.fields import Count, checked
from pipegrid.training.errors import CutError
from pipegrid.training.stages.assignment import Assignment

if TYPE_CHECKING:
    from pipegrid.schedules import Slice

_IGNORED = -100
_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
_LABELS = ("shift_labels", "num_items_in_batch")


def sequence_slices(
    batch: Mapping[str, Any], lengths: Sequence[int], *, num_items_in_batch: int | Tensor | None = None
) -> list[dict[str, Any]]:
    """Cut a batch of texts along the sequence, for a schedule with slices such as ``seq1f1b``.

    Labels are shifted before they are cut, since the last token of a slice predicts the first of the next:
    ``shift_labels[:, i]`` is what token ``i`` predicts. On the last stage of `cut` the ``loss`` of a slice is the sum
    over its labels by ``num_items_in_batch``, so the losses of the slices add up to the mean of the batch.

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
        CutError: no tokens, an argument without an axis of tokens, or lengths that do not fit it.
    """
    parts = checked(tuple(lengths), tuple[Count, ...], "lengths", CutError)
    given = {name: value for name, value in batch.items() if value is not None}
    if not given.keys() & {"input_ids", "inputs_embeds"}:
        raise CutError(f"the batch has {', '.join(given) or 'nothing'}; slices are cut from input_ids or inputs_embeds")
    if "labels" in given:
        labels = given.pop("labels")
        given["shift_labels"] = nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        if num_items_in_batch is None:
            num_items_in_batch = (given["shift_labels"] != _IGNORED).sum()
    for name, value in given.items():
        _require_known(name)
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != sum(parts):
            shape = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"the value {value!r}"
            raise CutError(
                f"{name} has {shape}, and lengths {list(parts)} add up to {sum(parts)} tokens; its second axis is cut"
            )
    cut = {name: value.split(list(parts), dim=1) for name, value in given.items()}
    slices: list[dict[str, Any]] = [{name: pieces[i] for name, pieces in cut.items()} for i in range(len(parts))]
    if "shift_labels" in given:
        for each in slices:
            each["num_items_in_batch"] = num_items_in_batch
    return slices


def _require_known(name: str) -> None:
    if name == "labels":
        raise CutError(
            "labels was given for a slice: the model would shift them inside of it, and lose the label of its last "
            "token. Cut the batch by sequence_slices, which shifts before it cuts"
        )
    if name not in (*_INPUTS, *_LABELS):
        raise CutError(
            f"{name} was given for a slice; slices take {', '.join((*_INPUTS, *_LABELS))}, whose values for a token do "
            "not depend on later tokens"
        )


def forward_of_slice(
    whole: nn.Module,
    assignment: Assignment,
    number: int,
    part: Slice,
    tokens: Tensor,
    given: Mapping[str, Any],
    forward: Callable[[dict[str, Any]], Any],
) -> Any:
    """Run ``forward`` on the slice ``part``, with the cache of the microbatch among its arguments.

    Args:
        whole: the model, of which this is a stage.
        assignment: of the model's layers to stages.
        number: the stage's.
        part: the slice.
        tokens: the ids or hidden states of the slice.
        given: arguments of the model.
        forward: the model's forward over the stage.

    Raises:
        CutError: an argument or a model that would see other tokens in slices than in the whole sequence.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        _require_known(name)
    if "position_ids" in given and "attention_mask" not in given:
        raise CutError(
            "position_ids without attention_mask was given for a slice: Hugging Face reads the bounds of packed "
            "samples out of it for a whole sequence only. Leave it out, or give the mask of padded texts"
        )
    if "attention_mask" in given and given["attention_mask"].ndim != 2:
        raise CutError(
            f"attention_mask has {given['attention_mask'].ndim} axes; that of a slice has samples and its tokens, and "
            "is joined with those of the earlier slices"
        )
    loss = {name: given.pop(name) for name in _LABELS if name in given}
    own = [n for n, layer in enumerate(assignment.layers) if assignment.stage_of_layer[layer] == number]
    past = sum(len(each) for each in part.past("tokens"))
    part.keep("tokens", torch.empty(tokens.shape[1], device="meta"))
    if "attention_mask" in given:
        given["attention_mask"] = part.extend("attention_mask", given["attention_mask"], dim=1)
    from pipegrid.training.stages.slice_cache import SliceCache  # only here is Hugging Face needed

    cache = SliceCache(part, len(assignment.layers), past)
    result = forward({**given, "past_key_values": cache, "use_cache": True})
    unread = [assignment.layers[n] for n in own if n not in cache.read]
    if unread:
        raise CutError(
            f"{unread[0]} has not read the keys and values of earlier slices: it shares those of another layer, "
            "attends in both directions, keeps another kind of state, or is checkpointed, for which this model or this "
            "version of transformers drops the cache. Checkpoint its layers by torch.utils.checkpoint, if that is it; "
            "else the model does not run in slices"
        )
    if loss and number == assignment.num_stages - 1:
        result.loss = _loss(whole, result, **loss)
    return result


def _loss(whole: nn.Module, result: Any, shift_labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The model's own loss: the sum over the slice, by ``num_items_in_batch``."""
    if num_items_in_batch is None:
        raise CutError(
            "shift_labels was given for a slice without num_items_in_batch, the number that the sum of its losses is "
            "divided by; cut the batch by sequence_slices, which counts the labels"
        )
    logits = result.logits
    loss: Tensor = whole.loss_function(  # type: ignore[operator]
        logits=logits,
        labels=None,
        vocab_size=logits.shape[-1],
        num_items_in_batch=num_items_in_batch,
        shift_labels=shift_labels.contiguous(),
    )
    return loss


def require_slices(stage: nn.Module, accepted: Sequence[str], config: Any) -> None:
    """Raise unless the attention of a stage can be that of a Hugging Face decoder in slices.

    Raises:
        CutError: what hinders it.
    """
    name = type(stage).__name__ if config is None else type(config).__name__.removesuffix("Config")
    if "past_key_values" not in accepted or config is None or getattr(config, "is_encoder_decoder", False):
        raise CutError(
            f"{name} runs in slices, and its forward takes no past_key_values of one list of layers, as Hugging Face's "
            "decoders do. Set current_slice = None on each attention module of another model, and keep keys and values "
            "with what the step functions set there"
        )
    bidirectional = [path for path, module in stage.named_modules() if getattr(module, "is_causal", True) is False]
    if bidirectional or getattr(config, "use_bidirectional_attention", None):
        raise CutError(
            f"{bidirectional[0] if bidirectional else name} attends in both directions: a slice would not see the "
            "later ones. Slices are for causal attention"
        )
    if getattr(config, "output_router_logits", False):
        raise CutError(
            f"{name} has output_router_logits, whose loss is that of a whole microbatch and not the sum over its "
            "slices; set it to False"
        )
    compiled = compiled_modules(stage)
    if compiled:
        raise CutError(
            f"{compiled[0]} is compiled: what a slice keeps would be lost inside a compiled region. Leave layers that "
            "run in slices in eager mode"
        )
    for module in stage.modules():
        if hasattr(module, "_can_checkpoint_with_cache"):
            # Checkpointed layers drop a cache, which a second run would extend again; it does not extend a slice's.
            module._can_checkpoint_with_cache = True  # type: ignore[assignment]  # noqa: SLF001
