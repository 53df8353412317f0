"""The world of a pipeline of data-parallel replicas: what its ranks make for an epoch, and again after a death."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from attrs import define, field, frozen

from pipegrid.schedules import Actor, Plan, Proof, Routes, lower, reroute, verify
from pipegrid.schedules.generators.routed import routed
from pipegrid.topology import (
    GroupSpec,
    HyperCommGrid,
    ProcessGroupCollection,
    create_groups,
    destroy_groups,
    discard_groups,
)
from pipegrid.topology.torch_compat import set_timeout
from pipegrid.training.checkpoint import Checkpoints
from pipegrid.training.survive.connections import end_connections
from pipegrid.training.survive.errors import SurviveError
from pipegrid.training.survive.living import Living
from pipegrid.transport import Direction, P2PCommunicator

if TYPE_CHECKING:
    from pipegrid.schedules.monitor.epochs import Epoch

_OF_A_SAVE: Final = timedelta(minutes=10)
# Of a collection's groups: those that a step of one module uses, by the grid's dims.
_GROUPS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
}


@define(eq=False, slots=False)
class PipelineWorld:
    """What this rank communicates through in one epoch. Further attributes are the script's, such as a runtime.

    Attributes:
        epoch: its number; 0 has all ranks.
        living: who takes part.
        actor: the position and the replica of this rank.
        routes: of all units, around the dead actors.
        groups: this rank's, of the ranks that take part.
        job_group: all that take part.
        communicator: between positions, and across replicas where units move.
    """

    epoch: int
    living: Living
    actor: Actor
    routes: Routes
    groups: ProcessGroupCollection
    job_group: dist.ProcessGroup
    communicator: P2PCommunicator
    _checkpoints: Checkpoints | None = field(alias="checkpoints")
    _computes: Callable[[], Plan] = field(alias="computes")
    _made: list[dist.ProcessGroup] = field(alias="made")
    _aborted: bool = field(default=False, init=False)

    @cached_property
    def proof(self) -> Proof:
        """The plan of a step, with its messages, proved: for a `PipelineRuntime`. Step functions make their own."""
        return verify(lower(self._computes()))

    @property
    def plan(self) -> Plan:
        """The plan of a step, with its messages."""
        return self.proof.plan

    @property
    def checkpoints(self) -> Checkpoints:
        """Those of the job's directory, of the ranks that take part.

        Raises:
            SurviveError: the job has no directory.
        """
        if self._checkpoints is None:
            raise SurviveError("the job has no checkpoints; give PipelineJob(checkpoints=directory)")
        return self._checkpoints

    def abort(self, cause: str) -> None:
        """See `World.abort`."""
        self._aborted = True
        self.communicator.abort(cause)
        end_connections([*self._made, *(() if self._checkpoints is None else self._checkpoints.groups())], cause)

    def close(self) -> None:
        """See `World.close`."""
        self.communicator.close()
        if self._checkpoints is not None:
            (self._checkpoints.discard if self._aborted else self._checkpoints.close)()
        if self._aborted:
            discard_groups(self._made)
        else:
            destroy_groups(self._made)


@frozen(eq=False)
class PipelineJob:
    """Makes the `PipelineWorld` of each epoch: a ``build`` of `Survivors`.

    Attributes:
        grid: of the job's one module, with ``pp`` and ``dp`` among its dims, and its ``pp`` groups made.
        plan: what a replica runs while all ranks live, of computes.
        config: of the `P2PCommunicator`.
        routes: while all ranks live; None: each replica computes its own microbatches.
        schedule: the plan along routes.
        timeout: seconds for the ranks to come to each group: how long others wait for one that dies while the world is
            made.
        checkpoints: directory of the run's, for `PipelineWorld.checkpoints`; None: the job has none.
    """

    grid: HyperCommGrid
    plan: Plan
    config: Any = None
    routes: Routes | None = None
    schedule: Callable[[Plan, Routes], Plan] = routed
    timeout: float = 30.0
    checkpoints: str | os.PathLike[str] | None = None

    def __call__(self, epoch: Epoch) -> PipelineWorld:
        """The world of ``epoch``, made together with its other members.

        Raises:
            JobFailedError: a position lives in no replica.
        """
        living, rank = Living(self.grid, epoch.members), dist.get_rank()
        living.require_every_position()
        routes = self.routes or Routes.identity(living.replicas, self.plan.num_microbatches)
        routes = reroute(routes, living.dead, plan=self.plan) if living.dead else routes
        specs = self._specs(living, rank, epoch.number)
        made = create_groups({*specs.values()}, timeout=timedelta(seconds=self.timeout))
        job_group = made[specs.pop("job")]
        try:
            checkpoints = self._open(job_group)
            communicator = self._connect(living, rank)
        except BaseException:
            end_connections(made.values(), "the communicator was not made")
            discard_groups(made.values())
            raise
        groups: dict[str, Any] = {name: made[spec] for name, spec in specs.items()}
        groups["pp"] = self.grid.get_pg("pp")  # also with dead ranks, for their places
        return PipelineWorld(
            epoch=epoch.number,
            living=living,
            actor=living.actor(rank),
            routes=routes,
            groups=ProcessGroupCollection(**groups, grid=self.grid),
            job_group=job_group,
            communicator=communicator,
            checkpoints=checkpoints,
            computes=partial(self.schedule, self.plan, routes),
            made=list(made.values()),
        )

    def retire(self, dead: frozenset[int]) -> tuple[int, ...]:
        """The living ranks that compute only together with one of ``dead``: their tp and cp peers."""
        living = Living(self.grid, [rank for rank in self.grid.ranks if rank not in dead])
        return tuple([rank for rank in living.members if rank not in living.ranks])

    def _open(self, job_group: dist.ProcessGroup) -> Checkpoints | None:
        if self.checkpoints is None:
            return None
        made = Checkpoints(self.checkpoints, group=job_group, timeout=timedelta(seconds=self.timeout))
        for group in made.groups():  # of a save, the end of the slowest; a death ends the wait for it
            set_timeout(group, _OF_A_SAVE)
        return made

    def _specs(self, living: Living, rank: int, epoch: int) -> dict[str, GroupSpec]:
        found = {"job": GroupSpec(living.ranks, f"job of epoch {epoch}")}
        for name, wanted in _GROUPS.items():
            dims = [dim for dim in wanted if dim in self.grid.dim_names]
            if dims:
                found[name] = GroupSpec(living.group(dims, rank), f"{'+'.join(dims)} of epoch {epoch}")
        return found

    def _connect(self, living: Living, rank: int) -> P2PCommunicator:
        """A communicator without lanes to dead ranks, which opens those to other replicas when a plan needs them."""
        at, each = self.grid.coords(rank), self.plan.num_positions
        replicas = [
            [self.grid.rank_at(**{**at, "pp": position, "dp": replica}) for position in range(each)]
            for replica in range(self.grid.dim_size("dp"))
        ]
        places = tuple([positions[0] for positions in self.plan.placement])
        here = {stage for stage, place in enumerate(places) if Actor(place, at["dp"]) not in living.dead}
        edges = [edge for edge in self.plan.graph.stage_edges if {edge.source, edge.destination} <= here]
        cyclic = all(place == stage % each for stage, place in enumerate(places))
        return P2PCommunicator(
            self.grid.get_pg("pp"),
            self.config,
            placement=None if cyclic else places,
            traffic=[(edge, direction) for edge in edges for direction in Direction],
            replicas=replicas,
        )
