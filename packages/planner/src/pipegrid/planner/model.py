"""Costs of a module on a grid: seconds of its layers, its balanced layout, bytes per rank.

All of it is linear in the samples of a microbatch, so figures are for one sample, and one balanced layout serves every
dp and every microbatch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from attrs import frozen

from pipegrid.layout import LayerMemory, LayoutInfeasibleError, PipelineParallelLayerLayout, balance
from pipegrid.planner.grids import Arrangement, GridPart
from pipegrid.planner.job import Job, Layers, ModuleCosts, Network

Times = tuple[float, float, float]  # seconds of F, I and W


@frozen
class StageCosts:
    """A stage of a module on its grid; figures of a rank, those of a microbatch for each of its samples."""

    part: GridPart
    times: Times
    activations: float  # bytes
    parameters: float  # their number


def bandwidth(links: Network, ranks: Sequence[int]) -> float:
    """Bytes per second between ascending ranks: those inside a node if all are within one."""
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
        self.layout_within = cache(self._layout_within)
        self.stages = cache(self._stages)

    def _layer_times(self, name: str, tp: int, cp: int) -> tuple[Times, ...]:
        """Seconds of each layer for one sample: compute, all-reduces of tp, keys and values of cp.

        Source: an all-reduce moves 2 (n - 1) / n of its bytes through each rank (Patarasuk and Yuan 2009); the
        backward has as many as the forward (Shoeybi et al. 2019, section 3).
        """
        module = self.job.module(name)
        return tuple(self._layer(module, layer, tp, cp) for layer in module.each)

    def _layer(self, module: ModuleCosts, layer: Layers, tp: int, cp: int) -> Times:
        links = self.job.links
        if layer.seconds is not None:
            whole = (layer.seconds.F, layer.seconds.I, layer.seconds.W)
        else:
            flops, attention, rate = layer.flops or 0.0, layer.attention_flops, self.job.device.flops
            whole = (flops / rate, (flops + attention) / rate, (flops - attention) / rate)
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

    def _layout(self, name: str, tp: int, cp: int, stages: int) -> PipelineParallelLayerLayout:
        costs = [sum(times) for times in self.layer_times(name, tp, cp)]
        return balance(costs, stages, layers=self.job.module(name).kinds).layout

    def _layout_within(
        self, part: GridPart, limit: float, peaks: tuple[int, ...]
    ) -> PipelineParallelLayerLayout | None:
        """The best layout, of at most ``limit`` bytes with ``peaks`` samples on a pp rank; None: there is none."""
        module, tp, cp = self.job.module(part.module), part.tp, part.cp
        fixed = sum(self.parameter_bytes(part))
        # The fullest stage has at least the mean of all, weighted by 1 / peak.
        moving = module.activations / (tp * cp)
        if moving + module.parameters / tp * fixed / max(peaks) > limit * sum(1 / peak for peak in peaks):
            return None
        costs = [sum(times) for times in self.layer_times(part.module, tp, cp)]
        memory = [LayerMemory(layer.parameters / tp * fixed, layer.activations / (tp * cp)) for layer in module.each]
        live = tuple(((peak,),) for peak in peaks)
        try:
            return balance(costs, part.pp, layers=module.kinds, memory=memory, limit=limit, in_flight=live).layout
        except LayoutInfeasibleError:
            return None

    def _stages(self, part: GridPart, layout: PipelineParallelLayerLayout) -> tuple[StageCosts, ...]:
        module, times = self.job.module(part.module), self.layer_times(part.module, part.tp, part.cp)
        ends = accumulate((len(stage) for stage in layout.stages), initial=0)
        stages = []
        for first, last in pairwise(ends):
            own, layers = times[first:last], module.each[first:last]
            forward, inputs, weights = (sum(layer[kind] for layer in own) / part.dp for kind in range(3))
            activations = sum(layer.activations for layer in layers) / (part.tp * part.cp) / part.dp
            parameters = sum(layer.parameters for layer in layers) / part.tp
            stages.append(StageCosts(part, (forward, inputs, weights), activations, parameters))
        return tuple(stages)

    def parameter_bytes(self, part: GridPart) -> tuple[float, float, float]:
        """Bytes of a parameter, its gradient and its optimizer states on a rank of ``part``."""
        training, module = self.job.training, self.job.module(part.module)
        if module.frozen:
            return training.parameter_bytes, 0.0, 0.0
        replicas = part.dp * part.cp if training.sharding == "optimizer" else 1
        return training.parameter_bytes, training.gradient_bytes, training.optimizer_bytes / replicas

    def reduction(self, stage: StageCosts) -> float:
        """Seconds after the last backward: gradients of the parameters summed, and sharded parameters gathered."""
        part = stage.part
        replicas = part.dp * part.cp
        if replicas == 1 or self.job.module(part.module).frozen:
            return 0.0
        training, links = self.job.training, self.job.links
        back = training.parameter_bytes if training.sharding == "optimizer" else training.gradient_bytes
        moved = stage.parameters * (training.gradient_bytes + back) * (replicas - 1) / replicas
        return moved / group_bandwidth(links, stride=part.tp, size=replicas) + 2 * links.latency

    def least_seconds(self, arrangement: Arrangement) -> float:
        """Lower bound of the seconds of a step: the busiest position computes the mean of its module, or more."""
        each = [
            self.total(part.module, part.tp, part.cp) * self.job.global_batch / (part.dp * part.pp)
            for part in arrangement.parts
        ]
        return sum(each) if arrangement.colocated else max(each)

    def least_memory(self, arrangement: Arrangement) -> float:
        """Lower bound of the bytes of the fullest rank: the mean of its module, with one microbatch, the smallest."""
        samples = math.lcm(*(part.dp for part in arrangement.parts))
        fixed, trained, running = [], [], []
        for part in arrangement.parts:
            module = self.job.module(part.module)
            fixed.append(module.parameters / (part.tp * part.pp) * sum(self.parameter_bytes(part)))
            held = module.activations * samples / part.ranks
            trained.append(0.0 if module.frozen else held)
            running.append(held)  # a frozen module frees them at the end of its forward, before others run
        if arrangement.colocated:
            return self.job.device.reserved + sum(fixed) + max(sum(trained), *running)
        return self.job.device.reserved + max(size + held for size, held in zip(fixed, running, strict=True))
