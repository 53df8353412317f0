"""The common rule of thumb: as many layers on every stage, with a few exceptions at the ends."""

from __future__ import annotations

from pipegrid.layout.checks import flag, sizes_of_pipeline, whole_number
from pipegrid.layout.errors import LayoutError
from pipegrid.layout.grammar import LayerType, LayoutGrammar, grammar_or_standard
from pipegrid.layout.layout import PipelineParallelLayerLayout
from pipegrid.layout.parser import MAX_LAYERS


def even(
    num_layers: int,
    pp: int,
    vpp: int = 1,
    *,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    first: int | None = None,
    last: int | None = None,
    layer_type: str = LayerType.decoder,
    ends: bool = True,
    grammar: LayoutGrammar | None = None,
) -> PipelineParallelLayerLayout:
    """Share out ``num_layers`` layers evenly over ``pp * vpp`` stages.

    Where the number is not divisible, the earlier stages have one layer more.

    Args:
        num_layers: layers of the model, embedding and loss not counted.
        pp: number of pp ranks.
        vpp: number of chunks per rank.
        account_for_embedding: count the embedding as a layer of the first stage.
        account_for_loss: count the loss as a layer of the last stage.
        first: layers on the first pp rank, all its chunks together; the other ranks share the rest.
        last: layers on the last pp rank likewise.
        layer_type: the kind of the layers.
        ends: put an embedding before and a loss behind the layers. Without, the layout is one of a module in the
            middle of a model.
        grammar: the kinds of layer; by default the standard ones.

    Raises:
        LayoutError: a size is not a whole number in range, or two rules contradict each other.
    """
    pp, vpp = sizes_of_pipeline(pp, vpp)
    stages = pp * vpp
    num_layers = whole_number("num_layers", num_layers, least=0)
    if num_layers > MAX_LAYERS:
        raise LayoutError(f"num_layers must be at most {MAX_LAYERS:,}, got {num_layers}")
    flag("account_for_embedding", account_for_embedding)
    flag("account_for_loss", account_for_loss)
    flag("ends", ends)
    grammar = grammar_or_standard(grammar)
    kind = grammar.kind(layer_type)
    for name, given, counted in (("first", first, account_for_embedding), ("last", last, account_for_loss)):
        if given is not None and counted:
            raise LayoutError(
                f"{name}={given} sets the layers of that rank; do not count its embedding or loss as well"
            )
    if (account_for_embedding or account_for_loss) and not ends:
        raise LayoutError("without ends there is no embedding and no loss to account for")
    fixed = _fixed(num_layers, pp, first, last)
    counts = [0] * stages
    for rank, count in fixed.items():
        counts[rank::pp] = _shares(count, vpp)
    others = [stage for stage in range(stages) if stage % pp not in fixed]
    embedding = int(account_for_embedding)
    rest = num_layers - sum(fixed.values()) + embedding
    # With fewer layers than stages the last stage holds nothing but the loss, which then takes no layer's place.
    loss = int(account_for_loss and rest + 1 >= len(others))
    for stage, share in zip(others, _shares(rest + loss, len(others)), strict=True):
        counts[stage] = share
    counts[0] -= embedding
    counts[-1] -= loss
    layers = [[kind] * count for count in counts]
    if ends:
        layers[0].insert(0, LayerType.embedding)
        layers[stages - 1].append(LayerType.loss)
    return PipelineParallelLayerLayout(layers, pp, grammar=grammar)


def _fixed(num_layers: int, pp: int, first: int | None, last: int | None) -> dict[int, int]:
    """The pp ranks that are set apart, with their layers."""
    if pp == 1 and (first is not None or last is not None):
        raise LayoutError("first and last set apart the first and the last of several pp ranks, but pp is 1")
    given = (("first", 0, first), ("last", pp - 1, last))
    fixed = {rank: whole_number(name, count, least=0) for name, rank, count in given if count is not None}
    rest = num_layers - sum(fixed.values())
    if rest < 0 or (rest > 0 and len(fixed) == pp):
        raise LayoutError(
            f"first and last put {num_layers - rest} layers on {len(fixed)} of {pp} pp ranks, the model has "
            f"{num_layers}; {'lower' if rest < 0 else 'raise'} them by {abs(rest)}"
        )
    return fixed


def _shares(total: int, parts: int) -> list[int]:
    """``total`` in so many equal shares, the first ones larger by one where it does not divide."""
    return [total // parts + (part < total % parts) for part in range(parts)] if parts else []
