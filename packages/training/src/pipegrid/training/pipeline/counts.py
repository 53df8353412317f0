"""Counts of a step's microbatches, and the weights of losses by them: known before the first backward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from pipegrid.gradients.all_reduce import all_reduce, post_gather, reduce_gathered
from pipegrid.monitor import DisagreementError, JobFailedError
from pipegrid.monitor.collectives import Waiting
from pipegrid.training.pipeline.microbatches import Microbatch
from pipegrid.transport.collectives.small_all_gather import SmallAllGather
from pipegrid.transport.streams import has_streams

ROWS, LABELS, FOLLOWING, ELEMENTS, FOLLOWING_ELEMENTS, MICROBATCHES = range(6)
NAMES = ("rows", "labels", "following labels", "labels with padding", "following labels with padding", "microbatches")
"""What a loss may be a mean over: the numbers of `Microbatch.counts`."""
CALLS = ("step", "evaluate", "clip")
"""Methods of a `Pipeline`. Each has an all-reduce over the job, of one layout, in which it has a mark."""

_LOOK_SECONDS, _POLL_SECONDS = 0.2, 0.005
_MARKS = {call: [float(call == each) for each in CALLS] for call in CALLS}
_NOTHING = [0.0] * len(NAMES)


def beginning(call: str, counts: Sequence[float] = (), *, ready: bool = False, failed: bool = False) -> list[float]:
    """The row of a call to be added up over the job: ``counts`` by rule, a mark for the call, ``ready``, ``failed``.

    11 float64 numbers: ``counts`` are filled up with zeros to six, as many as `NAMES`.
    """
    return [*counts, *_NOTHING[len(counts) :], *_MARKS[call], float(ready), float(failed)]


def require_one_call(call: str, sums: Sequence[float]) -> None:
    """Raise a `DisagreementError` where ``sums``, of `beginning` or its end, have marks of others than ``call``."""
    marks = dict(zip(CALLS, sums[-len(CALLS) - 2 : -2], strict=True))
    if sum(marks.values()) > marks[call]:
        others = [f"{each}()" for each, mark in marks.items() if mark and each != call]
        raise DisagreementError(
            f"this rank is in {call}(), and others of the job are in {' and '.join(others)}: they have called other "
            "methods, or one of them more often. Every rank calls them in one order, and as often as the others"
        )


def sums_of(microbatches: Sequence[Microbatch]) -> list[float]:
    """What ``microbatches`` count together, by rule."""
    if not microbatches:
        return _NOTHING
    return [float(sum(each)) for each in zip(*[each.counts for each in microbatches], strict=True)]


@define(eq=False)
class CallMeeting:
    """The meeting of a job's ranks in a call: one sum over them, which is waited for when it matters."""

    call: str  # of `CALLS`
    device: torch.device
    group: dist.ProcessGroup | None  # all ranks of the job; None is the default group
    waiting: Waiting
    again: SmallAllGather | None = None  # the `gather` of an earlier meeting of the group, whose memory is used again
    gather: SmallAllGather | None = field(default=None, init=False)  # over gloo; elsewhere an all-reduce adds up
    sums: Tensor = field(init=False)  # of all rows (`beginning`), with what `start` was given; once waited for
    _wait: Callable[[], list[float] | None] | None = field(default=None, init=False)
    _started: bool = field(default=False, init=False)

    def expect(self) -> None:
        """Post the receives of what the others tell, before this rank does."""
        self.gather = post_gather(self.group, self.device, self.again)

    def start(self, told: Sequence[float] | Tensor = (), *, ready: bool = False, failed: bool = False) -> None:
        """Start to add up what this rank tells, such as the counts of microbatches whose loss it has (`sums_of`).

        ``told``: at most as many numbers as `NAMES`, on the host or as a float64 tensor; ``ready``: makes `ready` true
        on all ranks; ``failed``: this rank has failed before it had anything to tell.
        """
        if self.gather is None:
            self.expect()
        self._started = True
        if self.gather is not None:
            numbers = told.tolist() if isinstance(told, Tensor) else told
            self.gather.send(beginning(self.call, numbers, ready=ready, failed=failed))
            self._wait = partial(reduce_gathered, self.gather, self.waiting)
            return
        row = beginning(self.call, () if isinstance(told, Tensor) else told, ready=ready, failed=failed)
        self.sums = torch.tensor(row, dtype=torch.float64, device=self.device)
        if isinstance(told, Tensor):
            self.sums[: len(told)] = told
        self._wait = partial(all_reduce(self.sums, self.group), self.waiting)

    def wait(self) -> None:
        """Wait for the others; on the host raises as `require_one_call`, or `JobFailedError` where one had failed."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            numbers = wait()
            if numbers is not None:
                self.sums = torch.tensor(numbers, dtype=torch.float64)
            if not has_streams(self.device):
                numbers = self.sums.tolist() if numbers is None else numbers
                require_one_call(self.call, numbers)
                if numbers[-1] > 0:
                    raise JobFailedError(f"another rank of the job has failed in {self.call}(); its error says why")

    def met(self) -> Tensor:
        """`sums`, waited for."""
        self.wait()
        return self.sums

    def look(self) -> None:
        """Raise as `wait`, in a call that has failed: the neighbours of a rank in another call see it end."""
        if has_streams(self.device):
            return
        if not self._started:
            with contextlib.suppress(RuntimeError):  # which has its own place in the failure
                self.start(failed=True)
        if self.gather is None:
            return
        end = time.monotonic() + _LOOK_SECONDS
        while not self.gather.end() and time.monotonic() < end:  # if all come, the group is whole for another call
            time.sleep(_POLL_SECONDS)
        for row in self.gather.here():
            require_one_call(self.call, row)

    def require_one_call(self) -> None:
        """Raise as `wait`, of which it is the part that reads."""
        require_one_call(self.call, self.sums.tolist())

    @property
    def ready(self) -> bool:
        """Whether any rank has said so in `start`; the host waits for it."""
        self.wait()
        return bool(self.sums[-2] > 0)


Weight = tuple[float | None, Tensor]
"""The weight of a mean on the host, or None if only the device has it; and ``[weight, 0, 0, 0]``, float64, on the
device: what follows the weighted loss in the sums of a step."""
OfMean = tuple[Tensor, Tensor | None, Weight]
"""What a mean is multiplied by: a float64 scalar; the same in the dtype of the loss, or None if the host knows that it
is 1; and the `Weight`."""


@define(eq=False)
class StepCounts:
    """The counts of all microbatches of a step, on all replicas: known, or added up in a meeting."""

    _meeting: CallMeeting | None = None
    _totals: Tensor | None = None  # by rule, float64; None where they are those of the meeting, or not asked for
    _numbers: list[float] | None = None
    _device: torch.device | None = None
    of_means: dict[tuple[int, float, torch.dtype], OfMean] = field(factory=dict, init=False)
    """What `of_mean` has returned: most microbatches of a step count the same."""

    @classmethod
    def known(cls, counts: Sequence[float], number: int, device: torch.device) -> StepCounts:
        """The counts of a job whose ``number`` microbatches count ``counts`` on the ranks with the loss (`sums_of`)."""
        return cls(numbers=[*counts[:-1], float(number)], device=device)

    @property
    def totals(self) -> Tensor:
        """The counts by rule, float64; raises as `CallMeeting.wait`."""
        if self._totals is None and self._meeting is not None:
            self._meeting.wait()
            self._totals = self._meeting.sums[: len(NAMES)]
        elif self._totals is None:
            self._totals = torch.tensor(self._numbers, dtype=torch.float64, device=self._device)
        return self._totals

    def weight(self, rule: int, count: Tensor | float) -> Tensor:
        """The weight of a microbatch of ``count``; the weights of a step add up to its microbatches."""
        total = self.totals[rule]
        return torch.where(total > 0, self.totals[MICROBATCHES] / total.clamp(min=1) * count, 1.0)

    def of_mean(self, rule: int, count: float, dtype: torch.dtype) -> OfMean:
        """What a mean over ``count`` is multiplied by, of losses in ``dtype``."""
        device = self._device if self._meeting is None else self._meeting.device
        if self._meeting is None or not has_streams(self._meeting.device):  # the host has the numbers
            numbers = self.numbers()
            value = numbers[MICROBATCHES] / max(numbers[rule], 1.0) * count if numbers[rule] > 0 else 1.0
            rest = torch.tensor([value, 0.0, 0.0, 0.0], dtype=torch.float64, device=device)
        else:
            value, weight = None, self.weight(rule, count)
            rest = torch.cat([weight.reshape(1), weight.new_zeros(3)])
        factor = None if value == 1.0 else rest[0].to(dtype)  # as where all microbatches count the same
        self.of_means[rule, count, dtype] = found = rest[0], factor, (value, rest)
        return found

    def numbers(self) -> list[float]:
        """`totals` on the host, which waits for them."""
        if self._numbers is None:
            self._numbers = self.totals.tolist()
        return self._numbers

    def alike(self, counts: Sequence[int], rules: Sequence[int]) -> bool:
        """Whether a microbatch with these ``counts`` weighs the same by all ``rules``; the host waits for totals."""
        if len(set(rules)) < 2:
            return True
        totals = self.numbers()
        first = rules[0]
        return all(counts[rule] * totals[first] == counts[first] * totals[rule] for rule in rules)
