"""Plans with routes over real bridges whose lanes are queues: every actor of two modules a thread of one process."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.bridges.bridge import communicator as bridge
from pipegrid.bridges.multimodule import communicator as multimodule
from pipegrid.schedules import Actor
from pipegrid.schedules.runtime import PipelineRuntime
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import Direction, P2PConfig

from .routed_runs import Replicas
from .threads import DEADLINE, SENT, Receiving, copied


@define
class Noted(Receiving):
    """A message with the note of its sender."""

    @property
    def note(self):
        return self.message.result(DEADLINE)[1]

    def result(self):
        return self.message.result(DEADLINE)[0]


@define
class QueueLane:
    """One lane, at either end."""

    replicas: object
    spec: object
    error: object = None
    note: str = ""

    def isend(self, payload, note=None):
        self.note = self.note if note is None else note  # as a lane repeats that of the agreed shapes
        self.replicas.lane(self.spec).put((copied(payload), self.note))
        return SENT

    def irecv(self, shapes=None):
        del shapes
        return Noted(self.replicas.lane(self.spec).receive().message)


class QueueLanes(dict):
    """The lanes of a rank."""

    closed = failed = batches = False

    def batch(self, *, by_lane=False):
        del by_lane
        return contextlib.nullcontext()

    def in_order(self):
        return contextlib.nullcontext()

    def patient(self, seconds):
        del seconds
        return contextlib.nullcontext()

    def neighbours(self, ranks):
        del ranks

    def abort(self, reason):
        del reason


@define
class BridgedReplicas(Replicas):
    """As `Replicas`; each actor has a `MultiModulePipelineCommunicator`, and modules have grids of their own."""

    config: P2PConfig = field(factory=P2PConfig)
    across: dict = field(factory=dict)
    opened_lanes: set = field(factory=set)

    def runtime(self, actor):
        graph, count = self.plan.graph, self.plan.num_replicas
        each = self.plan.positions_each
        replica, position = actor // each, actor % each
        rank = position * count + replica

        def open_lanes(specs, *, beside=None, **_):
            lanes = QueueLanes() if beside is None else beside
            lanes.update({spec: QueueLane(self, spec) for spec in specs if rank in spec.pair})
            return lanes

        grids = {
            name: HyperCommGrid(
                [count, graph.depth(name)],
                ["dp", "pp"],
                rank_offset=count * graph.stage(name, 0),
                world_size=count * graph.num_stages,
            )
            for name in graph.order
        }
        flow = {name: [other for source, other in graph.edges if source == name] for name in graph.order}
        with (
            mock.patch.object(multimodule, "open_lanes", open_lanes),
            mock.patch.object(multimodule, "resolve_device", return_value=("gloo", torch.device("cpu"))),
            mock.patch.object(bridge, "resolve_device", return_value=("gloo", torch.device("cpu"))),
            mock.patch.object(bridge, "own_groups", return_value={}),  # one rank each: nothing to complete
            mock.patch.object(dist, "get_rank", return_value=rank),
        ):
            made = MultiModulePipelineCommunicator(
                grids,
                flow,
                self.config,
                module_output_ndim=dict.fromkeys(graph.order, 2),
                replicas=True,
                traffic=self.living_traffic(replica),
            )
            own = set(made.lanes)
            runtime = PipelineRuntime(
                self.plan,
                self.stages[actor],
                made,
                replica=replica,
                reducers={stage: (lambda stage=stage: self.reduce(actor, stage)) for stage in self.reduced_by(actor)},
                **self.options,
            )
        self.across[actor] = set(made.lanes) - own
        self.opened_lanes |= set(made.lanes)
        return runtime

    def living_traffic(self, replica):
        """What has both ends alive in a replica: lanes to the dead cannot be opened."""
        dead, graph = set(self.plan.routes.dead), self.plan.graph
        here = [Actor(stage, replica) not in dead for stage in range(graph.num_stages)]  # one stage on each position
        edges = [edge for edge in graph.stage_edges if here[edge.source] and here[edge.destination]]
        return [(edge, direction) for edge in edges for direction in Direction]

    def touched(self):
        """The actors at the ends of all lanes, as position and replica."""
        ranks = {rank for spec in self.opened_lanes for rank in spec.pair}
        return {divmod(rank, self.plan.num_replicas) for rank in ranks}

    def reduced_by(self, actor):
        """The stages that an actor reduces."""
        return {action.stage for action in self.plan.actions(actor) if action.kind == "REDUCE"}
