"""What a module costs on a grid: seconds of its layers, its balanced layout, bytes per rank.

All of it is linear in the samples that a rank has of a microbatch, so times are kept per sample, and one balanced
layout serves every dp and every microbatch size.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise

from attrs import frozen

from pipegrid.layout import LayerMemory, LayoutInfeasibleError, PipelineParallelLayerLayout, balance
from pipegrid.planner.job import Job, Module, Network
from pipegrid.topology.grid import Grid

Times = tuple[float, float, float]
"""Seconds of F, I and W."""


@frozen
class Part:
    """A module on a grid of ``tp`` x ``cp`` x ``dp`` x ``pp`` ranks, the first dim varying fastest."""

    module: str
    tp: int
    cp: int
    dp: int
    pp: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def grid(self, rank_offset: int = 0) -> Grid:
        """The grid, from rank ``rank_offset`` on."""
        return Grid((self.tp, self.cp, self.dp, self.pp), ("tp", "cp", "dp", "pp"), rank_offset)


@frozen
class Stage:
    """A stage of a module for one sample of a rank's share: seconds, bytes of activations, parameters per rank."""

    times: Times
    activations: float
    parameters: float


def bandwidth(links: Network, ranks: range) -> float:
    """Bytes per second between ranks of a span: those inside a node if it is within one."""
    within = ranks[0] // links.gpus_per_node == ranks[-1] // links.gpus_per_node
    return links.inside if within else links.between


def group_bandwidth(links: Network, *, stride: int, size: int) -> float:
    """Bytes per second of each rank in a collective of ``size`` ranks that are ``stride`` apart.

    Between nodes, the ranks that a group has in one node share the links of all of them.
    """
    if stride * size <= links.gpus_per_node and links.gpus_per_node % (stride * size) == 0:
        return links.inside
    return min(links.inside, links.between * max(1, links.gpus_per_node // stride))


class CostModel:
    """Costs of the modules of a job on grids, each computed once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.layer_times = cache(self._layer_times)
        self.total = cache(self._total)
        self.layout = cache(self._layout)
        self.stages = cache(self._stages)

    def _layer_times(self, name: str, tp: int, cp: int) -> tuple[Times, ...]:
        """Seconds of each layer for one sample: compute, all-reduces of tp, keys and values of cp.

        Source: an all-reduce moves 2 (n - 1) / n of its bytes through each rank (Patarasuk and Yuan 2009); the
        backward has as many as the forward (Shoeybi et al. 2019, section 3).
        """
        module = self.job.module(name)
        return tuple(self._layer(module, at, tp, cp) for at in range(len(module.each)))

    def _layer(self, module: Module, at: int, tp: int, cp: int) -> Times:
        layer, links = module.each[at], self.job.links
        if layer.seconds is not None:
            whole = (layer.seconds.F, layer.seconds.I, layer.seconds.W)
        else:
            flops = layer.flops or 0.0
            parts = (flops, flops + layer.attention_flops, flops - layer.attention_flops)
            whole = (
                parts[0] / self.job.device.flops,
                parts[1] / self.job.device.flops,
                parts[2] / self.job.device.flops,
            )
        forward, inputs, weights = (seconds / (tp * cp) for seconds in whole)
        if tp > 1:
            moved = layer.reductions * 2 * (tp - 1) / tp * module.message / cp
            seconds = moved / group_bandwidth(links, stride=1, size=tp) + layer.reductions * links.latency
            forward, inputs = forward + seconds, inputs + seconds
        if cp > 1:
            seconds = layer.context / tp * (cp - 1) / cp / group_bandwidth(links, stride=tp, size=cp)
            forward, inputs = forward + seconds, inputs + 2 * seconds  # back: keys and values again, their gradients
        return (forward, 0.0, 0.0) if module.frozen else (forward, inputs, weights)

    def _total(self, name: str, tp: int, cp: int) -> float:
        """Seconds of all layers, forward and backward, for one sample."""
        return sum(map(sum, self.layer_times(name, tp, cp)))

    def _layout(
        self,
        name: str,
        tp: int,
        cp: int,
        stages: int,
        fixed: float = 0.0,
        limit: float | None = None,
        peaks: tuple[int, ...] = (),
    ) -> PipelineParallelLayerLayout | None:
        """The balanced layout of ``stages`` stages; under a ``limit`` of bytes, with ``peaks`` samples in flight.

        ``fixed``: bytes of a parameter. None: no layout keeps the limit.
        """
        module = self.job.module(name)
        costs = [sum(times) for times in self.layer_times(name, tp, cp)]
        if limit is None:
            return balance(costs, stages, layers=module.kinds).layout
        memory = [LayerMemory(layer.parameters / tp * fixed, layer.activations / (tp * cp)) for layer in module.each]
        in_flight = tuple(((peak,),) for peak in peaks)
        try:
            return balance(costs, stages, layers=module.kinds, memory=memory, limit=limit, in_flight=in_flight).layout
        except LayoutInfeasibleError:
            return None

    def _stages(self, name: str, tp: int, cp: int, layout: PipelineParallelLayerLayout) -> tuple[Stage, ...]:
        """The stages of a layout."""
        module, times = self.job.module(name), self.layer_times(name, tp, cp)
        ends = accumulate((len(stage) for stage in layout.stages), initial=0)
        stages = []
        for first, last in pairwise(ends):
            own, layers = times[first:last], module.each[first:last]
            stages.append(
                Stage(
                    (sum(t[0] for t in own), sum(t[1] for t in own), sum(t[2] for t in own)),
                    sum(layer.activations for layer in layers) / (tp * cp),
                    sum(layer.parameters for layer in layers) / tp,
                )
            )
        return tuple(stages)

    def parameter_bytes(self, part: Part) -> tuple[float, float, float]:
        """Bytes of a parameter, its gradient and its optimizer states on a rank of ``part``."""
        training, module = self.job.training, self.job.module(part.module)
        if module.frozen:
            return training.parameter_bytes, 0.0, 0.0
        replicas = part.dp * part.cp if training.sharding == "optimizer" else 1
        return training.parameter_bytes, training.gradient_bytes, training.optimizer_bytes / replicas

    def reduction(self, part: Part, parameters: float) -> float:
        """Seconds after the last backward: gradients of ``parameters`` summed, and sharded parameters gathered."""
        replicas = part.dp * part.cp
        if replicas == 1 or self.job.module(part.module).frozen:
            return 0.0
        training, links = self.job.training, self.job.links
        back = training.parameter_bytes if training.sharding == "optimizer" else training.gradient_bytes
        moved = parameters * (training.gradient_bytes + back) * (replicas - 1) / replicas
        return moved / group_bandwidth(links, stride=part.tp, size=replicas) + 2 * links.latency
