"""Plans with routes on stages of one weight matrix each: every actor a thread, and the same units in one process."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from attrs import define, field

from pipegrid.plans.plan.dataflow import replicas_of
from pipegrid.schedules.runtime import Forwarded, PipelineRuntime
from pipegrid.transport import Communicator, Direction, Verbs

from .threads import DEADLINE, SENT, Lane, copied, in_threads

WIDTH = 3


def weight(stage):
    """The weight matrix of ``stage``, the same in every replica."""
    values = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(stage), dtype=torch.float64)
    return (values / 2 + torch.eye(WIDTH, dtype=torch.float64)).requires_grad_()


def data(stage, unit):
    """What ``stage`` adds to its inputs for ``unit``."""
    return torch.sin(torch.arange(2.0 * WIDTH, dtype=torch.float64) * (unit + 1) + stage).view(2, WIDTH)


@define
class Matrix:
    """A stage: a function of what arrives and of the unit, with one weight matrix; where nothing follows, a loss."""

    plan: object
    stage: int
    weight: torch.Tensor = field()
    seen: list = field(factory=list)

    @weight.default
    def _weight(self):
        return weight(self.stage)

    def forward(self, unit, inputs):
        self.seen.append(unit)
        output = torch.tanh((sum(inputs.values()) + data(self.stage, unit)) @ self.weight) * 1.5
        outgoing = [edge for edge in self.plan.graph.stage_edges if edge.source == self.stage]
        if outgoing:
            return Forwarded(dict.fromkeys(outgoing, output))
        return Forwarded({}, output.square().sum())


def in_one_process(plan):
    """The stages of ``plan`` after one step of all units, straight from the raw routes: one graph, one backward."""
    graph, routes = plan.graph, plan.routes
    stages = [Matrix(plan, stage) for stage in range(plan.num_stages)]
    values, losses = {}, []
    for stage, one in enumerate(stages):
        module, _ = graph.module_of(stage)
        for call in routes.calls(module):
            inputs = {}
            for edge in [edge for edge in graph.stage_edges if edge.destination == stage]:
                source, _ = graph.module_of(edge.source)
                units = [unit for unit in routes.served(call, module) if not routes.skips_module(unit, source)]
                if units:
                    value = values[edge.source, routes.call(units[0], source)]
                    inputs[edge] = value.detach() if edge not in plan.gradient_edges else value
            result = one.forward(call, inputs)
            values[stage, call] = next(iter(result.outputs.values()), None)
            losses += [] if result.loss is None or stage in plan.forward_only else [result.loss]
    if losses:
        sum(losses).backward()
    return stages


@define
class Replicas:
    """All actors of a plan with routes in one process: lanes between two actors, each first in, first out.

    ``options`` are those of each `PipelineRuntime`.
    """

    plan: object
    options: dict = field(factory=dict)
    lanes: dict = field(factory=lambda: defaultdict(Lane))
    lock: threading.Lock = field(factory=threading.Lock)
    opened: list = field(factory=list)
    stages: list = field(init=False)
    reduced: dict = field(factory=lambda: defaultdict(int))

    def __attrs_post_init__(self):
        self.stages = [{stage: Matrix(self.plan, stage) for stage in held} for held in self.plan.stages_at]

    def lane(self, *way):
        """That of one actor to another, in one direction of data."""
        with self.lock:
            return self.lanes[way]

    def living(self):
        """The actors that take part, ascending."""
        return [actor for actor, held in enumerate(self.stages) if held]

    def runtime(self, actor):
        plan = self.plan
        tied = {group.name for group in plan.groups if group.tied}
        named = {a.group or a.stage for a in plan.actions(actor) if a.kind == "REDUCE"}
        reducers = {name: (lambda name=name: self.reduce(actor, name)) for name in named - tied}
        return PipelineRuntime(
            plan,
            self.stages[actor],
            InReplica(self, actor),
            replica=actor // plan.positions_each,
            reducers=reducers | dict.fromkeys(named & tied, lambda: None),
            **self.options,
        )

    def reduce(self, actor, stage):
        """The ``REDUCE`` of a stage: no member of it computes the stage afterwards."""
        with self.lock:
            self.reduced[actor, stage] += 1
            self.reduced[actor, stage, "seen"] = len(self.stages[actor][stage].seen)

    def run(self, verb="step", times=1):
        """The runtimes of the living actors, after ``times`` steps of all."""
        made = [self.runtime(actor) for actor in self.living()]
        for _ in range(times):
            in_threads([getattr(runtime, verb) for runtime in made])
        assert all(lane.empty() for lane in self.lanes.values())
        return made

    def gradient(self, stage):
        """Of ``stage``, summed over the replicas that live."""
        found = [held[stage].weight.grad for held in self.stages if stage in held]
        found = [gradient for gradient in found if gradient is not None]
        return sum(found) if found else None


class InReplica(Communicator):
    """The ends of one actor; data also goes to other replicas."""

    deadline = DEADLINE

    def __init__(self, replicas, actor):
        self.replicas, self.actor = replicas, actor

    def port(self, edge, direction):
        return self._port(edge, direction, self.actor // self.replicas.plan.positions_each)

    def port_across(self, edge, direction, replica):
        self.replicas.opened.append((self.actor, edge, direction, replica))
        return self._port(edge, direction, replica)

    def _port(self, edge, direction, replica):
        plan, replicas = self.replicas.plan, self.replicas
        ends = [edge.source, edge.destination][:: 1 if direction is Direction.FORWARD else -1]
        produced, consumed = ends
        (source,), (destination,) = (plan.actors(plan.placement[end], replica) for end in ends)
        here = {stage for stage in (produced, consumed) if stage in replicas.stages[self.actor]}

        def isend(payload):
            assert produced in here
            replicas.lane(self.actor, destination, direction).put(copied(payload))
            return SENT

        def irecv():
            assert consumed in here
            return replicas.lane(source, self.actor, direction).receive()

        return Verbs(isend, irecv)


def assert_gradients_of_one_process(replicas):
    """Summed over replicas, they are those of all units in one process; and each living actor reduced each stage."""
    plan, expected = replicas.plan, in_one_process(replicas.plan)
    for stage, one in enumerate(expected):
        found = replicas.gradient(stage)
        if stage in plan.forward_only or one.weight.grad is None:
            assert found is None
        else:
            torch.testing.assert_close(found, one.weight.grad, rtol=1e-12, atol=1e-14)
        seen = sorted(unit for held in replicas.stages if stage in held for unit in held[stage].seen)
        assert seen == sorted(one.seen)
    for position in range(plan.positions_each):
        members = [actor for actor in plan.living([position]) if plan.num_replicas > 1]
        for actor in members:
            for stage in plan.stages_at[actor]:
                if stage not in plan.forward_only:
                    assert replicas.reduced[actor, stage] == 1, replicas_of(position)
                    assert replicas.reduced[actor, stage, "seen"] == len(replicas.stages[actor][stage].seen)
