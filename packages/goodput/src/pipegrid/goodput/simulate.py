"""Training under failures: a policy, event by event, with the time that each cause takes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias, get_args

from attrs import define, evolve, field, frozen

from pipegrid.core.fields import Count, Index, Rule, checked_arguments, checked_fields, instance
from pipegrid.goodput.durations import DURATION, Duration, seconds_of
from pipegrid.goodput.outages import Failures
from pipegrid.goodput.stretch import Stretch, whole
from pipegrid.goodput.throughput import Throughput, by_nodes
from pipegrid.planner.errors import JobError

Policy: TypeAlias = Literal["restart", "re-plan", "spare"]
"""Reactions to the failure of a node: restart with all, plan anew for fewer, or take a spare one."""
POLICIES: tuple[Policy, ...] = get_args(Policy)
"""All policies."""
Cause: TypeAlias = Literal["redone", "checkpoints", "recovery", "waiting", "fewer_nodes", "idle_spares"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Causes of lost time."""


def _restart(value: Any) -> float | tuple[tuple[int, float], ...]:
    return by_nodes(value, seconds_of) if isinstance(value, Mapping) else seconds_of(value)


Restart: TypeAlias = Annotated[
    float | tuple[tuple[int, float], ...], Rule(_restart, f"{DURATION}, or a table of these by numbers of nodes")
]


@frozen(slots=False, field_transformer=checked_fields(JobError))
class Scenario:
    """A job under failures; durations are seconds, or texts such as ``"10m"``.

    Attributes:
        throughput: samples per second by number of nodes.
        failures: outages of nodes in a run.
        restart: from a failure until training goes on from the last checkpoint; or such durations by the number of
            nodes that are up, ``{8: "10m", 4: "6m"}``, where a row is for its number and those up to the next.
        checkpoint: training stops for so long to make one.
        write: until the checkpoint can be loaded, while training goes on.
        replan: until the nodes that are left go on with the step.
        promote: until a spare has the place of another node.
        spares: number of the job's nodes that are spares under the policy ``"spare"``.
        without_spares: the reaction of that policy where no spare is up: restart with the nodes that are left, or wait
            for one.
        replanned: the throughput under ``"re-plan"``, where it is another than that of a restart with as many nodes;
            with fewer nodes than it has, the job restarts.

    Examples:
        >>> failures = random_failures(32, mtbf="12h", duration="30d", seed=1)
        >>> scenario = Scenario(Throughput({32: 41.0, 31: 39.5}, batch=1024), failures, restart="10m", checkpoint="30s")
        >>> possible(scenario)
        ('restart', 're-plan', 'spare')
    """

    throughput: Annotated[Throughput, instance(Throughput, "a Throughput(table, batch)")]
    failures: Annotated[Failures, instance(Failures, "Failures(outages, duration), such as random_failures(...)")]
    restart: Restart
    checkpoint: Duration
    write: Duration = 0.0
    replan: Duration = 10.0
    promote: Duration = 10.0
    spares: Index = 1
    without_spares: Literal["restart", "wait"] = "restart"
    replanned: Annotated[Throughput, instance(Throughput, "a Throughput(table, batch)")] | None = None

    def __attrs_post_init__(self) -> None:
        nodes, replanned = self.throughput.nodes, self.replanned
        if replanned is not None and replanned.nodes != nodes:
            raise JobError(f"replanned is for {replanned.nodes} nodes, the throughput for {nodes}")
        slow, fast = (0.0 if one is None else one.rate(nodes) for one in (self.throughput, replanned))
        if fast > slow * (1 + 1e-9):
            raise JobError(f"replanned has {fast:g} samples per second, the throughput of all nodes at most {slow:g}")
        if len(self.failures.nodes) > nodes:
            raise JobError(f"{len(self.failures.nodes)} nodes fail; the throughput has {nodes} nodes")

    @property
    def step(self) -> float:
        """Seconds of a step on all nodes."""
        return self.throughput.step(self.throughput.nodes)

    @cached_property
    def _replanned(self) -> Throughput:
        return self.throughput if self.replanned is None else evolve(self.replanned, fewer=self.throughput)

    def throughput_of(self, policy: Policy) -> Throughput:
        """The throughput, by number of nodes, under ``policy``."""
        return self._replanned if policy == "re-plan" else self.throughput

    def restart_seconds(self, up: int) -> float:
        """Seconds of a restart where ``up`` nodes are up."""
        if isinstance(self.restart, float):
            return self.restart
        return next((seconds for nodes, seconds in reversed(self.restart) if nodes <= up), self.restart[0][1])

    def places(self, policy: Policy) -> int:
        """Nodes that may train at once."""
        return max(0, self.throughput.nodes - self.spares * (policy == "spare"))


@frozen
class Outcome:
    """The share of the failure-free work that a policy does.

    Attributes:
        policy: the reaction to a failure.
        every: steps between checkpoints; None: there are none.
        goodput: the share, from 0 to 1; with ``duration`` times it, ``lost`` adds up to ``duration``.
        duration: seconds of the run.
        lost: seconds per cause. ``redone``: work that was lost; ``checkpoints``: stops for them; ``recovery``:
            restarts, new plans and promotions; ``waiting``: for nodes; ``fewer_nodes``: what steps take longer with
            them; ``idle_spares``: what they take longer without the spares.

    Examples:
        >>> failures = random_failures(8, mtbf="12h", duration="30d")
        >>> scenario = Scenario(Throughput({8: 10.0, 7: 8.0}, batch=64), failures, restart="10m", checkpoint="30s")
        >>> sorted(simulate(scenario, "restart", every=100).lost)
        ['checkpoints', 'fewer_nodes', 'idle_spares', 'recovery', 'redone', 'waiting']
    """

    policy: Policy
    every: int | None
    goodput: float
    duration: float
    lost: Mapping[Cause, float]


@checked_arguments(JobError, kinds=True)
def simulate(scenario: Scenario, policy: Policy, every: Count | None) -> Outcome:
    """The run of ``scenario`` under ``policy`` with a checkpoint after ``every`` steps; None: without checkpoints.

    A failure loses the steps since the last checkpoint under ``"restart"``, and the step in progress under
    ``"re-plan"`` and ``"spare"``; ``"re-plan"`` restarts where too few nodes are left to train. A node that is back
    joins at the end of a step, if what it adds in the mean time between failures is more than the stop takes; else at
    the next failure.

    Examples:
        >>> failures = random_failures(8, mtbf="12h", duration="30d")
        >>> scenario = Scenario(Throughput({8: 10.0, 7: 8.0}, batch=64), failures, restart="10m", checkpoint="30s")
        >>> round(simulate(scenario, "restart", every=100).goodput, 2)
        0.91
    """
    run = _SimulatedRun(scenario, policy, every)
    for time, back, node in scenario.failures.events:
        run.until(time)
        if back:
            run.returns(time, node)
        else:
            run.fails(time, node)
    end = scenario.failures.duration
    run.until(end)
    run.account(end)
    return Outcome(policy, every, run.done * scenario.step / end, end, run.lost)


@define
class _SimulatedRun:
    """The state of a run: it trains (``stretch``; until ``due`` if nodes join then), stops until ``due``, or waits."""

    scenario: Scenario
    policy: Policy
    every: int | None
    places: int = field(init=False)
    throughput: Throughput = field(init=False)
    idle: set[int] = field(init=False)  # up, and not in training
    training: set[int] = field(factory=set)
    done: float = 0.0
    saved: int = 0
    since: float = 0.0
    stretch: Stretch | None = None
    due: float | None = None
    intact: bool = True  # nodes that are up have the state, which else is in the checkpoint of ``saved`` steps alone
    drain: float | None = None  # seconds of a stop until a checkpoint of all steps can be loaded
    lost: dict[Cause, float] = field(factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def __attrs_post_init__(self) -> None:
        self.throughput = self.scenario.throughput_of(self.policy)
        self.places = self.throughput.training(self.scenario.places(self.policy))
        self.idle = set(range(self.throughput.nodes))
        self.train(0.0)

    @property
    def up(self) -> int:
        return len(self.training) + len(self.idle)

    def until(self, time: float) -> None:
        """Pass what is due until ``time``: the end of a stop, or of the last step before one in which nodes join."""
        while self.due is not None and self.due <= time:
            now, joins = self.due, self.stretch is not None
            self.account(now)
            if joins:
                self.stop(now, joins=True)
            else:
                self.train(now)

    def fails(self, time: float, node: int) -> None:
        """A node fails; nothing happens unless it trains, or is about to."""
        if node in self.idle:
            self.idle.remove(node)
            return
        self.training.remove(node)
        self.account(time)
        self.intact = self.intact and self.survives()
        kept = whole(self.done) if self.intact else self.saved
        self.lost["redone"] += (self.done - kept) * self.scenario.step
        self.done = kept
        self.resume(time)

    def returns(self, time: float, node: int) -> None:
        """A node is back: it joins, takes part in what the run waits for or stops for, or is idle."""
        self.idle.add(node)
        if self.stretch is None:
            if self.due is None:
                self.account(time)
                self.resume(time)
        elif self.joining_pays():
            self.due = self.since + self.stretch.next_edge(time - self.since)

    def survives(self) -> bool:
        if self.policy == "re-plan":
            return bool(self.training) and self.up >= (self.scenario.replanned or self.throughput).least
        if self.policy == "spare":
            return bool(self.training) and (self.up >= self.places or self.scenario.without_spares == "wait")
        return False

    def resume(self, time: float) -> None:
        short = self.intact and self.policy == "spare" and self.up < self.places
        if self.throughput.training(min(self.up, self.places)) and not short:
            self.stop(time)

    def pause(self, *, joins: bool) -> tuple[float, float | None]:
        """Seconds of a stop, and of the checkpoint before it: for a restart that no failure causes."""
        scenario = self.scenario
        other_grids = joins and scenario.replanned is not None and len(self.training) < scenario.replanned.least
        if self.policy == "restart" or not self.intact or (self.policy == "re-plan" and other_grids):
            return scenario.restart_seconds(self.up), scenario.checkpoint + scenario.write if joins else None
        return scenario.replan if self.policy == "re-plan" else scenario.promote, None

    def joining_pays(self) -> bool:
        """Whether a stop to take in the nodes that are up is worth more than it takes, by the next expected failure."""
        stop, saving = self.pause(joins=True)
        now, then = self.throughput.rate(len(self.training)), self.throughput.rate(min(self.up, self.places))
        return (then - now) * self.scenario.failures.mtbf > then * (stop + (saving or 0.0))

    def stop(self, time: float, *, joins: bool = False) -> None:
        seconds, self.drain = self.pause(joins=joins)
        self.due = time + seconds + (self.drain or 0.0)
        self.fill()

    def fill(self) -> None:
        """Choose the nodes that train: those that do, and the first of the others that are up."""
        up = [*sorted(self.training), *sorted(self.idle)]
        wanted = self.throughput.training(min(len(up), self.places))
        self.training, self.idle = set(up[:wanted]), set(up[wanted:])

    def train(self, time: float) -> None:
        """Train, from the end of a step."""
        scenario = self.scenario
        self.fill()
        self.since, self.intact, self.done = time, True, whole(self.done)
        step = self.throughput.step(len(self.training))
        self.stretch = Stretch(step, self.every, scenario.checkpoint, scenario.write, self.done, self.saved)

    def account(self, time: float) -> None:
        """Count the seconds until ``time`` to their causes; what the run has done in them ends here."""
        scenario, elapsed = self.scenario, time - self.since
        self.since = time
        if self.stretch is not None:
            done, saved, checkpoints = self.stretch.at(elapsed)
            steps = done - self.stretch.done
            room = self.throughput.step(self.places) if self.policy == "spare" else scenario.step
            self.lost["checkpoints"] += checkpoints
            self.lost["fewer_nodes"] += steps * (self.stretch.step - room)
            self.lost["idle_spares"] += steps * (room - scenario.step)
            self.done, self.saved, self.stretch = done, saved, None
        elif self.due is not None:
            saving = min(elapsed, self.drain or 0.0)
            self.lost["checkpoints"] += saving
            self.lost["recovery"] += elapsed - saving
            if self.drain is not None and elapsed >= self.drain:
                self.saved = whole(self.done)
        else:
            self.lost["waiting"] += elapsed
        self.due = None
