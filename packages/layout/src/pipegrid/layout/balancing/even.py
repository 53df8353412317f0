"""The rule-based split: the same number of layers on every stage, with exceptions at the ends."""

from __future__ import annotations

from pipegrid.core.fields import checked_arguments
from pipegrid.layout.errors import LayoutError
from pipegrid.layout.fields import MAX_LAYERS, integer, sizes_of_pipeline
from pipegrid.layout.grammar import LayerType, LayoutGrammar, grammar_of
from pipegrid.layout.layout import PipelineParallelLayerLayout


@checked_arguments(LayoutError, kinds=True)
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
    """``num_layers`` layers evenly over ``pp * vpp`` stages; the first stages have one more where it does not divide.

    Args:
        num_layers: layers of the model, embedding and loss not counted.
        pp: number of pp ranks.
        vpp: number of chunks per rank.
        account_for_embedding: count the embedding as a layer of the first stage.
        account_for_loss: count the loss as a layer of the last stage.
        first: layers on the first pp rank, all its chunks together; the other ranks share the rest.
        last: layers on the last pp rank likewise.
        layer_type: kind of the layers.
        ends: an embedding before and a loss after the layers; False for a module in the middle of a model.
        grammar: the kinds of layer; None is the standard ones.

    Examples:
        >>> str(even(10, 4))
        'Et*3|t*3|tt|ttL'
        >>> str(even(10, 4, account_for_loss=True))
        'Et*3|t*3|t*3|tL'
    """
    pp, vpp = sizes_of_pipeline(pp, vpp)
    stages = pp * vpp
    num_layers = integer(num_layers, "num_layers", least=0, most=MAX_LAYERS)
    grammar = grammar_of(grammar)
    kind = grammar.kind(layer_type)
    for name, counted, end, given in (
        ("embedding", account_for_embedding, "first", first),
        ("loss", account_for_loss, "last", last),
    ):
        if counted and (given is not None or not ends):
            raise LayoutError(f"account_for_{name} needs ends=True and {end}=None, got ends={ends}, {end}={given}")
    given_counts = (("first", 0, first), ("last", pp - 1, last))
    fixed = {rank: integer(count, name, least=0) for name, rank, count in given_counts if count is not None}
    total = sum(fixed.values())
    if fixed and (pp == 1 or total > num_layers or (total < num_layers and len(fixed) == pp)):
        raise LayoutError(f"first={first} and last={last} do not fit {num_layers} layers on {pp} pp ranks")
    counts = [0] * stages
    for rank, count in fixed.items():
        counts[rank::pp] = _shares(count, vpp)
    others = [stage for stage in range(stages) if stage % pp not in fixed]
    embedding = int(account_for_embedding)
    rest = num_layers - total + embedding
    # With fewer layers than stages the last stage has the loss alone, which then replaces no layer.
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


def _shares(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` equal shares, the first ones larger by one where it does not divide."""
    return [total // parts + (part < total % parts) for part in range(parts)] if parts else []
