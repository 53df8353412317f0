"""Throughput of a job by the number of nodes that train: from a file, or as the planner predicts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, TypeAlias

from attrs import frozen

from pipegrid.core.fields import Amount, Count, Rule, Seconds, checked, checked_arguments, checked_fields
from pipegrid.goodput.outages import Nodes
from pipegrid.planner.errors import JobError, NoFitError
from pipegrid.planner.job import GivenBytes
from pipegrid.planner.reading import Form, parse_document
from pipegrid.planner.search import GivenJob, plan


def by_nodes(value: Any, number: Callable[[Any], float]) -> tuple[tuple[int, float], ...]:
    """Rows in the order of nodes, of a mapping or of pairs; numbers of nodes may be texts, as they are in files.

    `ValueError`: no rows, a number of nodes twice or below 1, or a value that is no ``number``.
    """
    if isinstance(value, (str, bytes)):
        raise ValueError  # noqa: TRY004 -- a rule's one signal
    try:
        pairs = [*(value.items() if isinstance(value, Mapping) else value)]
        rows = {
            checked(int(nodes) if isinstance(nodes, str) else nodes, Nodes, "nodes", ValueError): number(one)
            for nodes, one in pairs
        }
    except TypeError:
        raise ValueError from None
    if not rows or len(rows) < len(pairs):
        raise ValueError
    return tuple(sorted(rows.items()))


def _rates(value: Any) -> tuple[tuple[int, float], ...]:
    rows = by_nodes(value, lambda rate: float(checked(rate, Amount, "rate", ValueError)))
    if not any(rate for _, rate in rows):
        raise ValueError
    return rows


Table: TypeAlias = Annotated[
    tuple[tuple[int, float], ...],
    Rule(_rates, "numbers of nodes, each once, with samples per second, not all 0: {30: 368.2, 29: 362.2}"),
]


@frozen(slots=False, field_transformer=checked_fields(JobError))
class Throughput:
    """Samples per second by number of nodes.

    The job has as many nodes as the largest number of the table. Of the nodes that are up, as many train as give the
    most samples per second.

    Attributes:
        table: samples per second by number of nodes; a number between two rows has those of the row below.
        batch: samples in a step.
        fewer: has the samples of numbers before the first row, which otherwise have none.

    Examples:
        >>> throughput = Throughput({32: 41.0, 31: 39.5}, batch=1024)  # samples per second by number of nodes
        >>> throughput.rate(31)
        39.5
    """

    table: Table
    batch: Seconds
    fewer: Throughput | None = None

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return self.table[-1][0]

    @property
    def least(self) -> int:
        """Nodes with which the job trains, at least."""
        return next(nodes for nodes, rate in self.table if rate)

    @cached_property
    def best(self) -> tuple[tuple[int, float], ...]:
        """The nodes that train, and samples per second, by the number of nodes that are up, from 0."""
        rates, best = dict(self.table), [(0, 0.0)] * self.least
        for nodes in range(self.least, self.nodes + 1):
            best.append(max(best[-1], (nodes, rates.get(nodes, 0.0)), key=lambda row: row[1]))
        return (*(self.fewer.best if self.fewer else best)[: self.least], *best[self.least :])

    def training(self, up: int) -> int:
        """Nodes that train where ``up`` are up."""
        return self.best[up][0]

    def rate(self, up: int) -> float:
        """Samples per second where ``up`` nodes are up."""
        return self.best[up][1]

    def step(self, up: int) -> float:
        """Seconds of a step where ``up`` nodes are up, of which some train."""
        return self.batch / self.rate(up)


@checked_arguments(JobError)
def planned_throughput(
    job: GivenJob, *, nodes: Nodes, memory: GivenBytes | None = None, limit: Count = 200
) -> Throughput:
    """The throughput that `plan` predicts on ``nodes`` nodes of the job, and on 1, 2, 4, 8, ... fewer.

    Each has the best grids, layout and schedule for its own GPUs.

    Args:
        job: to plan; ``links.gpus_per_node`` GPUs are a node.
        nodes: that the job has.
        memory: as in `plan`.
        limit: as in `plan`, for each number of nodes.

    Raises:
        NoFitError: nothing fits on all nodes.
        JobError: as from `plan`.

    Examples:
        >>> from pipegrid.planner import Device, Job, Layers, ModuleCosts, Network
        >>> module = ModuleCosts("language", [Layers("decoder", count=8, flops=1e12)], message="8MB")
        >>> links = Network("450GB", "50GB", gpus_per_node=2)
        >>> job = Job([module], global_batch=16, device=Device(4e14, memory="80GB"), links=links)
        >>> round(planned_throughput(job, nodes=2, limit=20).rate(1), 1)
        33.3
    """
    table: dict[int, float] = {}
    for fewer in (0, *(1 << power for power in range(nodes.bit_length()))):
        up = nodes - fewer
        gpus = up * job.links.gpus_per_node
        try:
            step = plan(job, gpus=gpus, memory=memory, limit=limit).winner.step if gpus else 0.0
        except NoFitError:
            if not table:
                raise
            break
        if not step:
            break
        table[up] = job.global_batch / step
    return Throughput(tuple(table.items()), job.global_batch)


def parse_throughput(text: str, form: Form = "toml") -> Throughput:
    r"""The throughput in a text with ``batch``, samples of a step, and the table ``throughput``: ``30 = 368.2``.

    Raises:
        JobError: what is missing, or wrong.

    Examples:
        >>> parse_throughput("batch = 64\n[throughput]\n8 = 10.0\n7 = 8.0").rate(7)
        8.0
    """
    document = parse_document(text, form)
    if set(document) != {"batch", "throughput"}:
        raise JobError(f"the keys are {', '.join(map(repr, document))}; they must be 'batch' and 'throughput'")
    return Throughput(document["throughput"], document["batch"])
