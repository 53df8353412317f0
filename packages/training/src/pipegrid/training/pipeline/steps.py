"""Steps of a job: its forward step, the call of the step function, the mean loss, the recording of one step."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from pipegrid.checkpoint.gathering import gather_plain, wait_for_all
from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.gradients import tied_stages
from pipegrid.gradients.all_reduce import reduce_few
from pipegrid.monitor import JobFailedError
from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules import (
    PipelineConfig,
    Plan,
    Recorder,
    Recording,
    Routes,
    WithLoss,
    get_forward_backward_func,
    position_of,
    recording_to_json,
    step_plan,
)
from pipegrid.schedules.megatron import attached_losses
from pipegrid.schedules.megatron.call import LastStep, LossSums
from pipegrid.stages import Stage
from pipegrid.stages.generators import generators_as_before, seed_by
from pipegrid.timeline import Track
from pipegrid.topology import replica_of
from pipegrid.training.pipeline import losses
from pipegrid.training.pipeline.counts import MICROBATCHES, CallMeeting, StepCounts, sums_of
from pipegrid.training.pipeline.exchange import RankExchange
from pipegrid.training.pipeline.first_step import FirstStep
from pipegrid.training.pipeline.first_update import FirstUpdate, refuse_what_decides_alone
from pipegrid.training.pipeline.losses import TOLD, GivenLoss, MicrobatchLoss, OwnLoss, Told, Weighed
from pipegrid.training.pipeline.microbatches import Microbatch, forms_of, shared_microbatches, signature
from pipegrid.training.pipeline.modules import JobSetup, hosts_of
from pipegrid.transport.base import Communicator
from pipegrid.transport.collectives.small_all_gather import SmallAllGather
from pipegrid.transport.collectives.waiting import host_collectives
from pipegrid.transport.streams import has_streams


@define(eq=False)
class Steps:
    """The steps of a job on this rank."""

    job: JobSetup
    communicator: Communicator
    places: Mapping[str, Sequence[int]]  # the pp rank of each stage, by module
    host: str  # what this rank shares with those near it
    # Makes the communicator anew, with edges past stages by module; None behind the first call:
    connect: Callable[[Mapping[str, Sequence[Edge]]], Communicator] | None
    first: FirstStep | None = field(init=False)  # compares the first step that trains; None afterwards
    is_one_batch: bool = field(init=False)  # whether the losses of a step are all of one batch; alike on all ranks
    loss: MicrobatchLoss = field(init=False)
    _comparing: FirstStep | None = field(default=None, init=False)
    _update: FirstUpdate | None = field(default=None, init=False)
    _unchecked: list[tuple[Tensor, StepCounts, CallMeeting]] = field(factory=list, init=False)
    _compared: bool = field(default=False, init=False)
    _gather: SmallAllGather | None = field(default=None, init=False)
    _refusing: tuple[Any, set[int]] | None = field(default=None, init=False)  # of `refuse_what_decides_alone`
    _last: LastStep = field(factory=LastStep, init=False)
    _step: Callable[..., list[Any]] = field(init=False)
    _streamed: bool = field(init=False)
    _counts_now: StepCounts | None = field(default=None, init=False)  # of the running step; generation has none

    def __attrs_post_init__(self) -> None:
        job = self.job
        self.loss = OwnLoss() if job.loss is None else GivenLoss(job.loss)
        grids = [job.modules[name].grid for name in job.graph.sinks]
        self.is_one_batch = all(replica_of(grid, grid.ranks[0])[1] == 1 for grid in grids)
        self._step = get_forward_backward_func(schedule=job.schedule)
        self._streamed = has_streams(job.device)
        self.first = FirstStep.of(job)
        places = {(name, place) for name, held in self.places.items() for place in held}
        if len(places) > 1 or job.is_tensor_parallel:
            self._refusing = refuse_what_decides_alone(stage for held in job.stages.values() for stage in held)
        self._set_config(job.config)

    def arguments(self, parts: Sequence[Mapping[str, Any]], routes: Routes | None = None) -> dict[str, Any]:
        """The arguments of a step function; routes that move microbatches or share calls are a `StepArgumentError`."""
        if routes is not None and (routes.moves or routes.every or routes.dead):
            raise StepArgumentError(
                "the routes of a Pipeline's step move microbatches to other replicas, whose rows these do not have, or "
                "share calls; give such routes to a step function, with UnitBatches"
            )
        job, forms = self.job, forms_of(parts)
        read: dict[str, list[Iterator[Microbatch]]] = {}
        for name, stages in job.stages.items():
            counts = name in self._losing
            own = shared_microbatches(parts, forms, job.shares[name], job.device, job.rows, counts=counts)
            if routes is not None:  # those that pass through the module; how many, the step function compares
                units = zip(routes.units_of(self.job.replica), own, strict=False)
                own = [part for unit, part in units if not routes.skips_module(unit, name)]
            read[name] = [iter(own) for _ in stages]
        return {
            "forward_step_func": self._forward_step,
            "data_iterator": read,
            "model": self.job.stages,
            "num_microbatches": len(parts),
            "p2p_communicator": self.communicator,
            "pg_collection": self.job.groups,
            "batch": signature(forms),
            **({} if routes is None else {"routes": routes}),
        }

    def run(
        self,
        parts: Sequence[Mapping[str, Any]],
        routes: Routes | None = None,
        *,
        forward_only: bool = False,
        batch: Any = None,
    ) -> Tensor:
        """A step of ``parts`` of the script's ``batch``; the mean loss over what the job counts, on every rank."""
        given = self.arguments(parts, routes)
        number = len(parts) if self.is_one_batch and routes is None else None
        call, update = "evaluate" if forward_only else "step", None if forward_only else self._update
        first = None if forward_only or routes is not None else self.first
        read = given["data_iterator"]
        losing: list[Microbatch] = []
        for name in self._losing:
            losing += copy.copy(read[name][0])
        own = sums_of(losing)
        updated = update is not None and bool(update.updated)
        soon = update is not None and update.is_soon
        together = number is not None and (self.connect, first) == (None, None) and not soon  # the same on all ranks
        what, config = f"the {'mean loss' if together else 'counts'} of {call}()", self.job.config
        waiting = Waiting(config.deadline, config.monitor, what, of_step=together)
        meeting = CallMeeting(call, self.job.device, config.job_group, waiting, self._gather)
        if together and self._losing:  # a last stage, which has to wait now; the others are ready before it is
            meeting.expect()
        if not together:
            skips = self.connect is not None and self._find_skips(read)
            meeting.start(own if self._is_counted else (), ready=skips or updated)
            if self.connect is not None:
                self._connect(meeting, given)
        if soon:
            self._compare_update(meeting)
        if first is not None:
            meeting.wait()  # a rank that is in another call does not come to the comparison
            self._comparing = first if first.begin(parts, batch) else None
        counts = StepCounts(meeting) if number is None else StepCounts.known(own, number, self.job.device)
        sums = LossSums(partial(self._add_up, meeting, together, updated), not self._streamed)
        self._counts_now = counts
        try:
            self._step(**given, forward_only=forward_only, sums=sums, last=self._last)
            found = sums.wait()
        except Exception:
            meeting.look()
            # The second sum begins on a failed rank too: other replicas may wait in nothing else. All ranks know of a
            # failed first step.
            if number is None and first is None and not (sums.begun or self._streamed):
                reduce_few(torch.full((TOLD,), -math.inf, dtype=torch.float64), self.job.config.job_group)
            host_collectives.cut([self.job.config.job_group])  # after the record of the cause
            raise
        finally:
            self._counts_now = None
        self._gather = meeting.gather
        mean = self._mean(found[:TOLD], counts, meeting)
        if first is not None:
            comparing, self._comparing, self.first = self._comparing, None, None  # also where the comparison raises
            limit = None
            if comparing is not None:
                limit = comparing.end(len(parts), mean, attaches=bool(attached_losses(self.job.stages)))
            if limit is not None:
                ranks = RankExchange("the first update", self.job.config, self.job.device)
                self._update = FirstUpdate(self.job.named, ranks, limit)
        elif update is not None:
            self._compare_update(meeting)  # the step has left the parameters as optimizers had made them
        if self._update is not None and first is None and not forward_only:
            self._update.keep()
        return mean

    def _compare_update(self, meeting: CallMeeting) -> None:
        """Compare the first update, once some rank has one."""
        if self._update is not None and meeting.ready:
            update, self._update = self._update, None
            if self._refusing is not None and not self._refusing[1]:  # all have been seen: a later step calls no hook
                self._refusing[0].remove()
            update.compare()

    def _find_skips(self, read: Mapping[str, Sequence[Any]]) -> bool:
        """Have the stages of this rank look at all microbatches; whether any hands on values past others."""
        found = False
        for name, stages in self.job.stages.items():
            for stage, microbatches in zip(stages, read[name], strict=True):
                if not isinstance(stage, Stage) or stage.assignment.num_stages < 2:
                    continue
                forward = self._roles[stage][1]
                for part in copy.copy(microbatches):
                    # What else the script's code raises, the step itself raises at its place.
                    with contextlib.suppress(Exception), generators_as_before():
                        stage.look(partial(_called, stage, forward, part))
                found = found or bool(stage.skips)
        return found

    def _connect(self, meeting: CallMeeting, given: dict[str, Any]) -> None:
        """In the first call of a job: make the communicator anew where stages of any rank hand on values."""
        connect, self.connect = self.connect, None
        skips: dict[str, list[tuple[int, int]]] = {}
        if connect is None or not meeting.ready:
            return
        everyone: Any = self.job.config.job_group or dist.group.WORLD
        hosts = dict(gather_plain([dist.get_rank(), self.host], everyone, self.job.device))
        for name, stages in self.job.stages.items():
            near = hosts_of(self.job.modules[name].grid, self.places[name], hosts)
            for stage in stages:
                if isinstance(stage, Stage):
                    stage.place(self.places[name], near)
                    skips.setdefault(name, []).extend((edge.source, edge.destination) for edge in stage.skips)
        edges: dict[str, set[Edge]] = {}
        for told in gather_plain(skips, everyone, self.job.device):
            for name, own in told.items():
                edges.setdefault(name, set()).update(Edge(*ends) for ends in own)
        self.communicator = given["p2p_communicator"] = connect({name: sorted(own) for name, own in edges.items()})

    def close(self) -> None:
        """Leave the script's optimizers alone."""
        if self._refusing is not None:
            self._refusing[0].remove()
        if self._update is not None:
            self._update.close()

    def _add_up(
        self, meeting: CallMeeting, together: bool, updated: bool, infos: Sequence[Told]
    ) -> Callable[[], Tensor]:
        """Start to add up what the losses tell; what it returns waits for the sums over the job.

        ``together``: the ranks meet in this one all-reduce; ``updated``: then with this as `CallMeeting.ready`.
        """
        told: Tensor | Sequence[float] = ()
        if infos and self._is_counted:
            told = losses.sum_of(infos) if self._streamed else losses.sum_on_host(infos)
        if together:
            meeting.start(told, ready=updated)
            return meeting.met
        config, what = self.job.config, f"the mean loss of {meeting.call}()"
        waiting = Waiting(config.deadline, config.monitor, what, of_step=True)
        if not isinstance(told, Tensor):
            told = torch.tensor(told or [0.0] * TOLD, dtype=torch.float64, device=self.job.device)
        sums, wait = told, reduce_few(told, config.job_group)

        def both() -> Tensor:
            meeting.wait()
            wait(waiting)
            if not self._streamed and sums[1] == -math.inf:  # the sum of weights, of which one is a failed rank's
                raise JobFailedError(f"another rank of the job has failed in {meeting.call}(); its error says why")
            return sums

        return both

    def _mean(self, sums: Tensor, counts: StepCounts, meeting: CallMeeting) -> Tensor:
        """The mean loss of the job; the weights of its microbatches are compared with what was counted.

        On a device with streams the host reads them a step later, when they are there, and of the first step at once.
        """
        self._unchecked.append((sums, counts, meeting))
        found: list[float] = []
        while len(self._unchecked) > (self._compared and self._streamed):
            earlier, counted, met = self._unchecked.pop(0)
            if self._streamed:
                met.require_one_call()
            found, number = earlier.tolist(), counted.numbers()[MICROBATCHES]
            attached = met.call == "step" and losses.are_apart(found, number) and self._attaches()
            losses.require_mean(found, number, attached=attached)
        self._compared = True
        if not self._streamed:  # these sums are those that were read
            return sums.new_tensor(found[0] / (found[1] or 1.0))
        return sums[0] / sums[1].where(sums[1] != 0, 1.0)

    def _attaches(self) -> bool:
        """Whether a layer of the job has attached a loss; every rank asks."""
        own = float(bool(attached_losses(self.job.stages)))
        found = torch.tensor([own], dtype=torch.float64, device=self.job.device)
        reduce_few(found, self.job.config.job_group)(Waiting(self.job.config.deadline, self.job.config.monitor))
        return bool(found > 0)

    @cached_property
    def _is_counted(self) -> bool:
        """Whether the losses of this rank count: tensor-parallel ranks have the same ones."""
        tp = [groups.tp for name, groups in self.job.groups.items() if name in self.job.graph.sinks]
        return not any(group is not None and group.rank() for group in tp)

    def recorded(self, parts: Sequence[Mapping[str, Any]], path: Path, *, batch: Any = None) -> Tensor:
        """`run` with a recorder, on CUDA of the memory of activations as well; the first rank writes all tracks."""
        cuda = self.job.device.type == "cuda"
        recorder = Recorder(memory=(lambda: int(torch.cuda.memory_allocated(self.job.device))) if cuda else None)
        self._set_config(attrs.evolve(self.job.config, hooks=(*self.job.config.hooks, recorder)))
        waiting = Waiting(self.job.config.deadline, self.job.config.monitor, "the recording of a step")
        everyone: Any = self.job.config.job_group or dist.group.WORLD
        try:
            wait_for_all(everyone, self.job.device, waiting=waiting)
            recorder.start()
            loss = self.run(parts, batch=batch)
        finally:
            self._set_config(self.job.config)
        plan, rank = self.plan(len(parts)), dist.get_rank()
        own = recorder.track(plan, rank=rank, position=position_of(plan, self.communicator.job.stages))
        tracks = cattrs.structure(gather_plain(own, everyone, self.job.device, waiting=waiting), list[Track])
        if dist.get_rank(everyone) == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(recording_to_json(Recording(plan, tracks)), encoding="utf-8")
        wait_for_all(everyone, self.job.device, waiting=waiting)
        return loss

    def plan(self, num_microbatches: int) -> Plan:
        """The proved plan of a step."""
        job = self.communicator.job
        assert job.graph is not None  # a communicator of modules, with the edges past stages once they are known
        return step_plan(
            job.graph,
            num_microbatches,
            tied_stages(self.job.config.tied_parameters),
            placement=job.placement,
            collectives=job.collective_edges,
            frozen=job.frozen_modules,
            schedule=self.job.schedule,
            shard=self.job.config.shard,
            prefetch=self.job.config.prefetch,
            overlap=self.job.config.overlap_moe_expert_parallel_comm,
        )

    def _forward_step(self, parts: Iterator[Microbatch], stage: Any) -> tuple[Any, Any]:
        part, counts = next(parts), self._counts_now
        name, forward, has_loss = self._roles[stage]
        restore = seed_by(self.job.generators[name], self.job.device)
        try:
            if self._comparing is not None:
                output = self._comparing.forward(name, stage, forward, part)
            else:
                output = _called(stage, forward, part)
        finally:
            restore()
        if not has_loss:
            if isinstance(stage, Stage):
                return output, None
            if isinstance(output, WithLoss):
                return attrs.evolve(output, output={name: output.output}), None
            return {name: output}, None
        if counts is None:
            return output, None
        if not isinstance(output, WithLoss):
            return output, lambda output: self.loss(output, part, counts)
        beside = output.loss

        def with_own_loss(output: Any) -> Weighed:
            loss, weight, told = self.loss(output, part, counts)
            return loss + beside, weight, told

        return output.output, with_own_loss

    @cached_property
    def _roles(self) -> Mapping[Any, tuple[str, Callable[[Any, Any], Any] | None, bool]]:
        """The role of each stage: its module, the forward of that, and whether it has the loss."""
        sinks = self.job.graph.sinks
        return {
            stage: (name, self.job.modules[name].forward, name in sinks and bool(getattr(stage, "is_last", True)))
            for name, stages in self.job.stages.items()
            for stage in stages
        }

    @cached_property
    def _losing(self) -> tuple[str, ...]:
        """The modules whose loss this rank has."""
        return tuple(dict.fromkeys(name for name, _, has_loss in self._roles.values() if has_loss))

    def _set_config(self, config: PipelineConfig) -> None:
        for stage in (stage for held in self.job.stages.values() for stage in held):
            stage.config = config


def _called(stage: Any, forward: Callable[[Any, Any], Any] | None, part: Microbatch) -> Any:
    """The call of a stage in a forward step."""
    return stage(**part.inputs) if forward is None else forward(stage, part.inputs)
