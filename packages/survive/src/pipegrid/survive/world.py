"""The world of a pipeline of data-parallel replicas: what its ranks make for an epoch, and again after a death."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import torch.distributed as dist
from attrs import define, field, frozen

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.checkpoint import Checkpoints
from pipegrid.checkpoint.gathering import gather_plain
from pipegrid.checkpoint.stored.lock import own_name, take_from
from pipegrid.core.fields import shown
from pipegrid.gradients.loss_scaler import LossScaler
from pipegrid.gradients.main_grad import Modules, named_modules
from pipegrid.gradients.reduction import TiedParameters, ties_among
from pipegrid.monitor.epochs import Epoch
from pipegrid.plans.generators.routed import routed
from pipegrid.plans.plan import module_places
from pipegrid.reshard import positions_of
from pipegrid.reshard.errors import BridgeError
from pipegrid.schedules import Actor, Plan, Proof, Routes, SlowRank, UnitTimes, lower, measured_speeds, reroute, verify
from pipegrid.schedules.megatron.config import config_owner, option, with_options
from pipegrid.survive.connections import end_connections
from pipegrid.survive.errors import SurviveError
from pipegrid.survive.living import Grids, Living, grids_of
from pipegrid.topology import (
    GroupSpec,
    HyperCommGrid,
    ProcessGroupCollection,
    create_groups,
    destroy_groups,
    discard_groups,
)
from pipegrid.topology.torch_compat import set_timeout
from pipegrid.transport import Direction, Edge, P2PCommunicator
from pipegrid.transport.communicator import LaneCommunicator

_SAVE_TIMEOUT: Final = timedelta(minutes=10)
_MEASURED: Final = 10  # steps
# Of a collection's groups those that a step uses; a name is that of the dims of a module's grid.
_GROUPS = ("tp", "cp", "dp", "dp_cp", "tp_cp", "tp_dp_cp")


def _by_speed(routes: Routes, plan: Plan, speeds: Mapping[Actor, float]) -> Routes:
    return reroute(routes, speeds=speeds, plan=plan) if speeds else routes


@define(eq=False, slots=False)
class PipelineWorld:
    """The groups and the communicator of this rank in one epoch. The script may add attributes, such as a runtime.

    Attributes:
        epoch: its number; 0 has all ranks.
        living: the ranks that take part.
        actor: the position and the replica of this rank.
        routes: of all units, around the dead actors, and away from slow ones where the job's ``speeds`` say so.
        groups: this rank's, of the ranks that take part; by module, where modules have grids of their own.
        job_group: all that take part.
        communicator: between positions, and across replicas where units move.
    """

    epoch: int
    living: Living
    actor: Actor
    routes: Routes
    groups: ProcessGroupCollection | Mapping[str, ProcessGroupCollection]
    job_group: dist.ProcessGroup
    communicator: LaneCommunicator
    _job: PipelineJob
    _home: Routes  # of ranks that are equally fast
    _checkpoints: Checkpoints | None
    _times: UnitTimes | None
    _made: list[dist.ProcessGroup]
    _before: list[tuple[Any, str, Any]] = field(factory=list, init=False)  # attributes that `configure` has set
    _aborted: bool = field(default=False, init=False)
    _steps: int = field(default=0, init=False)

    @property
    def peers(self) -> dist.ProcessGroup:
        """The ranks of this one's place in all replicas, which hold the same state."""
        groups: Any = next(iter(self.groups.values())) if isinstance(self.groups, Mapping) else self.groups
        return groups.dp  # type: ignore[no-any-return]

    @cached_property
    def proof(self) -> Proof:
        """The plan of a step, with its messages, proved: for a `PipelineRuntime`. Step functions make their own."""
        return verify(lower(self._job.schedule(self._job.plan, self.routes)))

    @property
    def plan(self) -> Plan:
        """The plan of a step, with its messages."""
        return self.proof.plan

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the job's directory, of the ranks that take part.

        Raises:
            SurviveError: the job has no directory.
        """
        if self._checkpoints is None:
            raise SurviveError("the job has no checkpoints; give PipelineJob(checkpoints=directory)")
        return self._checkpoints

    def end_step(self) -> tuple[SlowRank, ...]:
        """Call in the function, once after each step; returns the ranks that were slow in all of the last ten steps.

        With ``speeds="measured"``, all ranks gather their times every ten steps, so all find the same. The routes of
        the next step move units away from those ranks, or back; `proof` is the proof of the plan along these routes.
        """
        if self._times is None:
            return ()
        self._times.end_step()
        self._steps += 1
        if self._steps % _MEASURED:
            return ()
        slow = self._times.slow(self.job_group)
        routes = _by_speed(self._home, self._job.plan, measured_speeds(slow))
        if routes != self.routes:
            self.routes = routes
            self.__dict__.pop("proof", None)
        return slow

    def configure(self, modules: Modules) -> None:
        """Set ``job_group`` in the configs of ``modules`` and in their loss scalers, and ties of the living ranks.

        And, with ``speeds="measured"``, the hook that measures.
        """
        owners = dict.fromkeys(owner for _, module in named_modules(modules) if (owner := config_owner(module)))
        ties = {tie.name: tie for owner in owners for tie in option(owner.config, "tied_parameters")}
        living: Collection[TiedParameters] = ()
        if ties:
            label, timeout = f"epoch {self.epoch}", timedelta(seconds=self._job.timeout)
            living = ties_among(ties.values(), self.living.ranks, label=label, timeout=timeout)
        self._made += [tie.group for tie in living if tie.group is not None]
        for owner in owners:
            here = {tie.name for tie in option(owner.config, "tied_parameters")}
            scaler = option(owner.config, "grad_scale_func")
            if isinstance(scaler, LossScaler):
                self._set(scaler, "job_group", self.job_group)
            hooks = (*option(owner.config, "hooks"), *(() if self._times is None else (self._times,)))
            tied = tuple([tie for tie in living if tie.name in here])
            changed = with_options(owner.config, job_group=self.job_group, tied_parameters=tied, hooks=hooks)
            self._set(owner, "config", changed)

    def _set(self, holder: Any, name: str, value: Any) -> None:
        self._before.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def abort(self, cause: str) -> None:
        """End all connections; ranks that wait on one get ``cause`` in their error. From any thread, or twice."""
        self._aborted = True
        self.communicator.abort(cause)
        end_connections([*self._made, *(() if self._checkpoints is None else self._checkpoints.groups())], cause)

    def close(self) -> None:
        """Restore the configs that `configure` set and free everything: with the others, or alone after `abort`."""
        while self._before:
            setattr(*self._before.pop())
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
        grid: with ``pp`` and ``dp`` among its dims. One for all positions: their ranks have a `P2PCommunicator`. Or one
            per module, all with as many replicas (``dp``): their ranks have a `MultiModulePipelineCommunicator`.
        plan: of a replica while all ranks live, of computes; for one module, or for a graph (`schedule_for`).
        config: of the communicator.
        routes: while all ranks live; None: each replica computes its own microbatches.
        schedule: the plan along routes.
        timeout: seconds for the ranks to arrive at each group: how long others wait for one that dies while the world
            is made.
        options: of the `MultiModulePipelineCommunicator`, by name: ``edges``, ``placements``, ...
        checkpoints: directory of the run's, for `PipelineWorld.checkpoints`; None: the job has none.
        speeds: of `reroute`, by actor; ``"measured"``: of the ranks that `PipelineWorld.end_step` finds to be slow.

    Raises:
        SurviveError: the grids do not fit the plan, or each other; or another text than ``"measured"``.

    Examples:
        >>> from pipegrid.plans import one_f_one_b
        >>> from pipegrid.topology import HyperCommGrid
        >>> job = PipelineJob(HyperCommGrid([2, 2], ["pp", "dp"], world_size=4), one_f_one_b(2, 4))
        >>> job.plan.num_microbatches
        4
    """

    grid: Grids
    plan: Plan
    config: Any = None
    routes: Routes | None = None
    schedule: Callable[[Plan, Routes], Plan] = routed
    timeout: float = 30.0
    options: Mapping[str, Any] = field(factory=dict)
    checkpoints: str | os.PathLike[str] | None = None
    speeds: Mapping[Actor, float] | Literal["measured"] | None = None
    # Rank and incarnation of the first rank of the last epoch, and the name of its process in the directory's lock.
    _holders: list[tuple[int, int, str]] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._living(())  # raises where the grids do not fit
        if not (self.speeds in (None, "measured") or isinstance(self.speeds, Mapping)):
            raise SurviveError(f"speeds is {shown(self.speeds)}; give speeds by actor, or 'measured'")
        if self.options and not isinstance(self.grid, Mapping):
            raise SurviveError(f"options {list(self.options)} are those of bridges: give PipelineJob a grid per module")

    def _living(self, members: Collection[int]) -> Living:
        positions = module_positions(self.plan, self.grid) if isinstance(self.grid, Mapping) else None
        return Living(self.grid, members, positions)

    def __call__(self, epoch: Epoch) -> PipelineWorld:
        """The world of ``epoch``, made together with its other members.

        Raises:
            JobFailedError: a position lives in no replica.
        """
        living, rank = self._living(epoch.members), dist.get_rank()
        self._living([one for one in epoch.members if one not in epoch.joining]).require_every_position()
        if not isinstance(self.grid, Mapping):
            self.grid.create_places("pp")
        routes = self.routes or Routes.identity(living.replicas, self.plan.num_microbatches)
        routes = reroute(routes, living.dead, plan=self.plan) if living.dead else routes
        speeds = self.speeds if isinstance(self.speeds, Mapping) else {}
        job = GroupSpec(living.ranks, f"job of epoch {epoch.number}")
        specs = self._specs(living, rank, epoch.number)
        every = {job, *[spec for own in specs.values() for spec in own.values()]}
        made = create_groups(every, timeout=timedelta(seconds=self.timeout))
        job_group = made[job]
        try:
            checkpoints = self._open(job_group, epoch)
            communicator = _connect(self, living, rank)
        except BaseException:
            end_connections(made.values(), "the communicator was not made")
            discard_groups(made.values())
            raise
        return PipelineWorld(
            epoch=epoch.number,
            living=living,
            actor=living.actor(rank),
            routes=_by_speed(routes, self.plan, speeds),
            groups=self._groups(specs, made),
            job_group=job_group,
            communicator=communicator,
            checkpoints=checkpoints,
            job=self,
            home=routes,
            times=UnitTimes(living.actor(rank), steps=_MEASURED) if self.speeds == "measured" else None,
            made=list(made.values()),
        )

    def retire(self, dead: frozenset[int]) -> tuple[int, ...]:
        """The living ranks that compute only together with one of ``dead``: their tp and cp peers."""
        every = {rank for grid in grids_of(self.grid) for rank in grid.ranks}
        living = self._living(every - dead)
        return tuple([rank for rank in living.members if rank not in living.ranks])

    def _open(self, job_group: dist.ProcessGroup, epoch: Epoch) -> Checkpoints | None:
        if self.checkpoints is None:
            return None
        directory, first = Path(self.checkpoints), dist.get_rank(job_group) == 0
        known = [one for told in gather_plain(self._holders, job_group) for one in told]  # a new process has none
        for rank, incarnation, name in known if first else ():
            if not epoch.has(rank, incarnation):  # it is dead, or stopped: then its lock would last
                take_from(directory, name)
        made = Checkpoints(self.checkpoints, group=job_group, timeout=timedelta(seconds=self.timeout))
        for group in made.groups():  # of a save, the end of the slowest; a death ends the wait for it
            set_timeout(group, _SAVE_TIMEOUT)
        rank = dist.get_rank()
        own = (rank, epoch.incarnations[rank], own_name(directory)) if first else None
        self._holders[:] = [gather_plain(own, job_group)[0]]
        return made

    def _specs(self, living: Living, rank: int, epoch: int) -> dict[str, dict[str, GroupSpec]]:
        """The groups of this rank by module and name; those of one grid have no module."""
        found: dict[str, dict[str, GroupSpec]] = defaultdict(dict)
        grids = self.grid if isinstance(self.grid, Mapping) else {"": self.grid}
        for module, grid in grids.items():
            for name in _GROUPS if rank in grid.ranks else ():
                dims = [dim for dim in name.split("_") if dim in grid.dim_names]
                if dims:
                    label = f"{module and f'{module} '}{'+'.join(dims)} of epoch {epoch}"
                    found[module][name] = GroupSpec(living.group(dims, rank, module), label)
        return found

    def _groups(
        self, specs: Mapping[str, Mapping[str, GroupSpec]], made: Mapping[GroupSpec, Any]
    ) -> ProcessGroupCollection | Mapping[str, ProcessGroupCollection]:
        by_module = {module: {name: made[spec] for name, spec in own.items()} for module, own in specs.items()}
        if not isinstance(self.grid, Mapping):
            pipeline = self.grid.get_pg("pp")  # also with dead ranks, for their places
            return ProcessGroupCollection(**by_module[""], pp=pipeline, grid=self.grid)
        grids = self.grid
        return {name: ProcessGroupCollection(**groups, grid=grids[name]) for name, groups in by_module.items()}


def module_positions(plan: Plan, grids: Mapping[str, HyperCommGrid]) -> dict[int, int]:
    """The position of each rank, where each module of ``plan`` has a grid of its own.

    Raises:
        SurviveError: the grids are not those of the plan's modules, put stages on other positions than the plan, have
            other numbers of replicas, or a rank in two replicas.
    """
    graph = plan.graph
    if set(grids) != set(graph.order):
        raise SurviveError(f"the grids are those of modules {sorted(grids)}; the plan has {sorted(graph.order)}")
    sizes = {name: dict(zip(grid.dim_names, grid.shape, strict=True)).get("dp", 1) for name, grid in grids.items()}
    if len({*sizes.values()}) > 1:
        raise SurviveError(
            f"the modules have dp {sizes}; units of a dead rank go to its position in another replica, so each module "
            "has as many replicas"
        )
    places = {name: module_places(graph, plan.placement, name) for name in grids}
    try:
        found = positions_of(graph, grids, places)
    except BridgeError as error:
        raise SurviveError(f"the grids do not fit the plan: {error}") from error
    if found.placement != plan.placement:
        raise SurviveError(
            f"the plan has the stages on positions {plan.placement}, and the grids put them on {found.placement}: give "
            "schedule_for(graph, ..., placement=...) that of the grids"
        )
    replica: dict[int, tuple[int, str]] = {}
    for name, grid in grids.items():
        for rank in grid.ranks:
            here = grid.coords(rank).get("dp", 0)
            known, other = replica.setdefault(rank, (here, name))
            if known != here:
                raise SurviveError(f"rank {rank} is in replica {known} of {other!r} and in replica {here} of {name!r}")
    return {rank: position for position, ranks in enumerate(found.ranks) for rank in ranks}


def _connect(job: PipelineJob, living: Living, rank: int) -> LaneCommunicator:
    """The communicator of one replica, without lanes to the dead; what leads to other replicas opens for a plan."""
    grid, plan, graph = job.grid, job.plan, job.plan.graph
    traffic = living_traffic(plan, living, rank)
    if isinstance(grid, Mapping):
        return MultiModulePipelineCommunicator(
            grid,
            {name: [other for source, other in graph.edges if source == name] for name in grid},
            job.config,
            stage_placement={name: module_places(graph, plan.placement, name) for name in grid},
            traffic=traffic,
            replicas=True,
            **job.options,
        )
    at, positions = grid.coords(rank), range(plan.num_positions)
    places = tuple([held[0] for held in plan.placement])
    return P2PCommunicator(
        grid.get_pg("pp"),
        job.config,
        placement=None if all(place == stage % len(positions) for stage, place in enumerate(places)) else places,
        traffic=traffic,
        replicas=[
            [grid.rank_at(**{**at, "pp": position, "dp": replica}) for position in positions]
            for replica in range(grid.dim_size("dp"))
        ],
        graph=graph if len(graph.order) > 1 else None,
    )


def living_traffic(plan: Plan, living: Living, rank: int) -> list[tuple[Edge, Direction]]:
    """The edges of ``plan`` between living actors of the replica of ``rank``, in both directions."""
    replica, dead = living.actor(rank).replica, set(living.dead)
    here = {
        stage
        for stage, positions in enumerate(plan.placement)
        if all(Actor(position, replica) not in dead for position in positions)
    }
    edges = [edge for edge in plan.graph.stage_edges if {edge.source, edge.destination} <= here]
    return [(edge, direction) for edge in edges for direction in Direction]
