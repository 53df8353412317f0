"""Costs of a layer of each kind, out of a recorded run: those that the stages' times add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.planner.errors import JobError
from pipegrid.planner.job import Layers, Measured
from pipegrid.timeline import Recording, recorded_costs

_PIVOT = 1e-9
"""Below this part of the largest entry, a pivot is zero: two kinds are in the same proportion on all stages."""


@checked_arguments(JobError)
def layer_costs(
    recording: Recording,
    layout: str,
    *,
    module: str | None = None,
    samples: Count = 1,
    free: Iterable[str] = (),
    input_share: float = 0.5,
) -> tuple[Layers, ...]:
    """The layers of a job's module: per kind, seconds of F, I and W and bytes of activations of a layer and a sample.

    A stage's time is taken as the sum over its layers, all layers of a kind alike; least squares over the stages
    (Gauss 1809), negative times as 0. Runs of equal layers become one entry each, in the layout's order.

    Args:
        recording: of one step, without tensor or context parallelism inside the stages.
        layout: of the module's layers in that run, such as ``"Et*3|t*4|t*3L"``.
        module: its name; None: the only one.
        samples: of a microbatch, on each rank.
        free: kinds that take no time, such as ``["embedding"]``, where the stages cannot tell them from others.
        input_share: see `recorded_costs`.

    Raises:
        JobError: a layout of another number of stages, kinds that these stages cannot tell apart, or a stage without
            a backward, unless its whole module is frozen in a training step.
        CostsError: a stage without a track.
    """
    graph = recording.plan.graph
    name = graph.order[-1] if module is None else module
    if (module is None and len(graph.order) > 1) or name not in graph.order:
        raise JobError(f"module is {module!r}; the recorded modules are {', '.join(graph.order)}: name one")
    first, depth = graph.stage(name, 0), graph.depth(name)
    stages = [list(map(str, stage)) for stage in PipelineParallelLayerLayout.parse_str_to_list(layout)]
    if len(stages) != depth:
        raise JobError(f"layout {layout!r} has {len(stages)} stages; {name!r} was recorded with {depth}")
    without = [stage - first for stage in recording.plan.forward_only if first <= stage < first + depth]
    if without and (len(without) < depth or len(recording.plan.forward_only) == graph.num_stages):
        raise JobError(f"stages {without} of {name!r} were recorded without a backward; record a step that trains them")
    counts = [Counter(stage) for stage in stages]
    timed = [kind for kind in dict.fromkeys(kind for stage in stages for kind in stage) if kind not in set(free)]
    costs = recorded_costs(recording, input_share=input_share)

    def solved(values: Sequence[float]) -> Mapping[str, float]:
        rows = [[float(count[kind]) for kind in timed] for count in counts]
        found = _least_squares(rows, [value / samples for value in values], timed)
        return dict(zip(timed, (max(0.0, value) for value in found), strict=True))

    total = graph.num_stages
    seconds = {kind: solved(costs.per_stage(kind, total)[first : first + depth]) for kind in ("F", "I", "W")}
    kept = {} if costs.activation is None else solved(costs.per_stage("activation", total)[first : first + depth])
    layers: list[Layers] = []
    for kind, run in groupby(kind for stage in stages for kind in stage):
        times = Measured(*(of.get(kind, 0.0) for of in seconds.values()))
        layers.append(Layers(kind, len(list(run)), seconds=times, activations=kept.get(kind, 0.0)))  # type: ignore[arg-type]
    return tuple(layers)


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float], names: Sequence[str]) -> list[float]:
    """The x with the least squares of ``rows x - values``, by the normal equations: a few kinds of small counts."""
    size = range(len(names))
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in size]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in size
    ]
    largest = max((matrix[i][i] for i in size), default=1.0)
    for column in size:
        pivot = max(range(column, len(names)), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) <= _PIVOT * largest:
            raise JobError(
                f"the stages of this layout cannot tell {names[column]!r} from {', '.join(map(repr, names[:column]))}; "
                f"record another layout, or name kinds that take no time: free=[{names[0]!r}]"
            )
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in size:
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[i][-1] / matrix[i][i] for i in size]


def layers_toml(layers: Iterable[Layers]) -> str:
    """The layers as tables of a job's module, to paste into a job file."""
    tables = []
    for layer in layers:
        assert layer.seconds is not None
        times = ", ".join(f"{kind} = {getattr(layer.seconds, kind):.6g}" for kind in ("F", "I", "W"))
        tables.append(
            f'[[modules.layers]]\nkind = "{layer.kind}"\ncount = {layer.count}\n'
            f"seconds = {{ {times} }}\nactivations = {layer.activations:.6g}\n"
        )
    return "\n".join(tables)
