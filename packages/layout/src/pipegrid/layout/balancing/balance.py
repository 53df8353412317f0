"""The balanced layout: least cost of the most expensive stage, then least spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import attrs

from pipegrid.layout.balancing.branch_and_bound import RankLimit, SearchResult, overdrafts, own_caps, search
from pipegrid.layout.balancing.in_flight import Peaks, peaks_of
from pipegrid.layout.balancing.partition import Chain, best_partition, rightmost
from pipegrid.layout.balancing.profile import Costs, ExactMemory, Memories, model_layers, read_profile
from pipegrid.layout.balancing.report import LayoutReport, measure
from pipegrid.layout.errors import LayoutInfeasibleError
from pipegrid.layout.fields import integer, sizes_of_pipeline
from pipegrid.layout.grammar import LayerType, LayoutGrammar, grammar_of
from pipegrid.layout.layout import PipelineParallelLayerLayout, check_rules, first_mtp_stage
from pipegrid.layout.text import write_stage

_WORK = 100_000  # default bound of stages times nodes of a search: seconds


@attrs.frozen
class Balance:
    """A balanced layout with a proven bound.

    Attributes:
        layout: the layout.
        report: cost and memory of its stages.
        lower_bound: no layout that keeps the rules and the limits has a smaller bottleneck.
        optimal: the layout is proven to have the least bottleneck and, among those, the least spread.
    """

    layout: PipelineParallelLayerLayout
    report: LayoutReport
    lower_bound: float
    optimal: bool

    @property
    def gap(self) -> float:
        """Upper bound of bottleneck / least possible bottleneck - 1; 0 where it is proven to be the least."""
        return self.report.bottleneck / self.lower_bound - 1 if self.lower_bound else 0.0


def balance(
    costs: Costs,
    pp: int,
    vpp: int = 1,
    *,
    layers: str | Sequence[str] | None = None,
    memory: Memories | None = None,
    limit: float | Sequence[float] | None = None,
    microbatches: int | None = None,
    in_flight: Peaks | None = None,
    nodes: int | None = None,
    grammar: LayoutGrammar | None = None,
) -> Balance:
    """The partition of a model into ``pp * vpp`` stages with the least bottleneck and, among those, the least spread.

    The bottleneck is the cost of the most expensive stage, the spread that minus the cost of the cheapest. The result
    keeps the position rules: an embedding is on the first stage, a loss on the last, MTP layers are together on the
    last chunk of a rank other than the first. Of several best layouts it is the one with the earliest cuts.

    The result is exact (`pipegrid.layout.balancing.partition` has the method and its proof), except with ``vpp > 1``
    and a limit, where the chunks of a rank share its memory: then a branch and bound runs, which is exact if it ends
    within ``nodes`` and otherwise bounds its distance from the optimum (`Balance.gap`).

    Args:
        costs: forward plus backward time of each layer, in any unit. A mapping from kind to a number (each layer of
            that kind) or to a list (one number for each), or a list with one number for each layer of the model.
        pp: number of pp ranks.
        vpp: number of chunks per rank.
        layers: the model: a layout string without ``|`` (``"Et*61mL"``) or a list of kinds. By default the layers are
            those of ``costs``: a mapping has them in its own order, a plain number is one layer; a list has decoders.
        memory: memory of each layer, in the form of ``costs``, with a `LayerMemory` or a number (memory per
            microbatch in flight) for each.
        limit: memory of a rank for its layers, in the unit of ``memory``; one number, or one per rank.
        microbatches: per step, for the number in flight under 1F1B; None for enough to reach the steady state.
        in_flight: microbatches in flight under another schedule, in the form of `in_flight_1f1b`.
        nodes: most relaxations that the branch and bound opens, for each of the two criteria; the default takes
            seconds (half a minute for hundreds of stages).
        grammar: the kinds of ``layers`` and ``costs``; None is the standard ones.

    Raises:
        LayoutInfeasibleError: no layout keeps the limit; names the tightest stage.
        LayoutError: the input is malformed, or the order of the layers breaks a position rule.

    Examples:
        >>> best = balance({"embedding": 0.3, "decoder": [1.0] * 6 + [1.5] * 2, "loss": 1.1}, 4)
        >>> str(best.layout), best.optimal
        ('Ett|t*3|tt|tL', True)
    """
    grammar = grammar_of(grammar)
    pp, vpp = sizes_of_pipeline(pp, vpp)
    stages = pp * vpp
    nodes = max(4 * stages, _WORK // stages) if nodes is None else integer(nodes, "nodes", least=0)
    kinds = model_layers(costs, layers, grammar)
    check_rules([kinds], 1, grammar, {})
    profile = read_profile(kinds, costs, memory, limit, pp=pp, grammar=grammar)
    peaks = peaks_of(in_flight, pp, vpp, microbatches)
    places, low, high = _bounds(kinds, pp, stages)
    nothing = [0] * len(kinds)
    sizes = profile.memory or ExactMemory(nothing, nothing, None, 1)
    sums = ([0, *accumulate(values)] for values in (profile.cost, sizes.fixed, sizes.moving))
    costs_before, fixed, moving = ([before[place] for place in places] for before in sums)
    chain = Chain(costs_before, fixed, moving, low, high)
    ranks: list[RankLimit] = []
    if sizes.limits is None:
        partition = best_partition(chain, [{}] * stages)
        found = SearchResult(partition, partition.bottleneck if partition else None, optimal=True)
    else:
        ranks = [RankLimit(most, rank) for most, rank in zip(sizes.limits, peaks, strict=True)]
        found = search(chain, ranks, nodes=nodes)
    if found.partition is None or found.bottleneck_bound is None:
        raise _infeasible(
            chain, ranks, found, lambda start, end: write_stage(kinds[places[start] : places[end]], grammar), sizes.unit
        )
    cuts = [places[cut] for cut in found.partition.cuts]
    layout = PipelineParallelLayerLayout([kinds[start:end] for start, end in pairwise(cuts)], pp, grammar=grammar)
    return Balance(layout, measure(layout, profile, peaks), found.bottleneck_bound / profile.unit, found.optimal)


def _bounds(kinds: Sequence[str], pp: int, stages: int) -> tuple[list[int], list[int], list[int]]:
    """The legal places of cuts (not between MTP layers), and the position rules: the first and last index of each."""
    mtp = [index for index, kind in enumerate(kinds) if kind == LayerType.mtp]
    inside = range(mtp[0] + 1, mtp[-1] + 1) if mtp else range(0)
    places = [place for place in range(len(kinds) + 1) if place not in inside]
    end = len(places) - 1
    low = [0] * stages + [end]
    high = [0] + [end] * stages
    if kinds[0] == LayerType.embedding:
        low[1:stages] = [1] * (stages - 1)
    if kinds[-1] == LayerType.loss and stages > 1:
        high[stages - 1] = end - 1
    if mtp and (first := first_mtp_stage(pp, stages)) > 0:
        high[first] = min(high[first], places.index(mtp[0]))
    for cut in range(stages - 1, 0, -1):
        high[cut] = min(high[cut], high[cut + 1])
    return places, low, high


def _infeasible(
    chain: Chain, ranks: Sequence[RankLimit], found: SearchResult, text: Callable[[int, int], str], unit: int
) -> LayoutInfeasibleError:
    """The error: the tightest stage, the memory it lacks, and its microbatches in flight."""
    if found.closest is None:
        cuts, missing = _least_relief(chain, ranks)
        caps = own_caps(ranks)
        stage, flying = max(
            ((stage, flying) for stage, limits in enumerate(caps) for flying in limits),
            key=lambda one: chain.memory(cuts[one[0]], cuts[one[0] + 1], one[1]) - caps[one[0]][one[1]],
        )
        alone = " by itself"
    else:
        cuts = list(found.closest)
        overdrawn = overdrafts(chain, ranks, cuts)
        rank = max(range(len(ranks)), key=lambda rank: overdrawn[rank][0])
        missing, peak = overdrawn[rank]
        stages = zip(range(rank, chain.stages, len(ranks)), peak, strict=True)
        stage, flying = max(stages, key=lambda one: chain.memory(cuts[one[0]], cuts[one[0] + 1], one[1]))
        alone = " together with the other chunks of its rank"
    verdict = (
        "no layout keeps every rank under its limit"
        if found.optimal or found.closest is None
        else "no layout was found that keeps every rank under its limit, though there may be one; raise nodes"
    )
    held, allowed = text(cuts[stage], cuts[stage + 1]), ranks[stage % len(ranks)].limit
    return LayoutInfeasibleError(
        f"{verdict}: the tightest is stage {stage} (pp rank {stage % len(ranks)}, chunk {stage // len(ranks)}), which "
        f"with {held!r} and {flying} microbatches in flight takes{alone} {(allowed + missing) / unit:.6g} of "
        f"{allowed / unit:.6g}; raise the limit by {missing / unit:.6g}, or use more pp ranks or fewer microbatches "
        "in flight",
        stage=stage,
        proven=found.optimal,
    )


def _least_relief(chain: Chain, ranks: Sequence[RankLimit]) -> tuple[list[int], int]:
    """The least rise of all limits for which each stage fits by itself, and cuts with which it does."""
    caps = own_caps(ranks)
    short, enough = 0, max(chain.memory(0, len(chain.cost) - 1, flying) for limits in caps for flying in limits)
    cuts = list(chain.high)  # with that much more, any cuts fit
    while enough - short > 1:
        middle = (short + enough) // 2
        raised = [{flying: limit + middle for flying, limit in limits.items()} for limits in caps]
        tried = rightmost(chain, raised, chain.cost[-1])
        if tried is None:
            short = middle
        else:
            cuts, enough = tried, middle
    return cuts, enough
