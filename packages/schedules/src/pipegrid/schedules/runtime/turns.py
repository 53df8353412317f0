"""A forward and a backward that take turns at named points of their stages, so that each hides the other's exchanges.

A layer of a mixture of experts sends tokens to other ranks and waits for them, twice in a forward and twice in a
backward. Where a plan has the two as a pair, each hands over while its tokens travel::

    backward    combine' -----> |          wait, experts', dispatch' -----> |                 wait, attention', ...
    forward                     | attention, dispatch -------> |            | wait, experts, combine -----> |

There are two threads, of which one runs at a time: what ranks exchange has one order, that of the points, and stages
of one shape on all ranks of an expert-parallel group take turns alike. The backward begins, as it begins with an
exchange; with layers of equal parts only the ends of the pair are not hidden.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from pipegrid.core.errors import StepArgumentError
from pipegrid.plans.plan import Action
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime.warm_up import generator_states
from pipegrid.transport import streams
from pipegrid.transport.collectives.starting import start, wait_inside

Aside: TypeAlias = Callable[[str], AbstractContextManager[object]]
FORWARD, BACKWARD = 0, 1
_here: dict[int, tuple[_Pair, int]] = {}  # by thread: the pair that runs there, and which half of it
_on_devices: list[_Pair] = []  # those whose backwards run in threads of the device


class Work(Protocol):
    """What is under way, such as a collective with ``async_op=True``."""

    def wait(self) -> Any:
        """Hold the caller (on a device: its stream) until it is done."""


class TakeTurns:
    """What runs a pair of computes for `PipelineRuntime.register`: they take turns at each `hand_over`.

    ::

        runtime.register(ActionKind.F_B, TakeTurns(device=device))

    The random numbers of each half are its own: the forward goes on from the generators of the device and of the CPU,
    the backward has a copy of them, for what it recomputes. Autocasting and the current stream are those of the caller.
    On a device a forward must not differentiate inside itself: the device's backward thread waits for its turn.

    Args:
        device: on which the stages compute; None is the CPU.
        aside: called as ``aside(name)`` around what is under way, from the start of its point until it is done:
            `Recorder.aside` shows it in a timeline, as ``dispatch of F``.
    """

    def __init__(self, *, device: torch.device | None = None, aside: Aside | None = None) -> None:
        self._device, self._aside = device, aside
        # One thread for all pairs: a new one would make the threads of its operators anew.
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="pipegrid-pair")

    def __call__(self, pair: Sequence[Action], forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both; the error of the one that fails first ends the other at its next point."""
        both = _Pair(pair, self._device, self._aside)
        on_device = self._device is not None and streams.has_streams(self._device)
        if on_device:
            _on_devices.append(both)
        try:
            as_here = partial(both.as_here, backward)
            helped = self._helper.submit(contextvars.copy_context().run, both.run, BACKWARD, as_here)
            try:
                both.run(FORWARD, forward)
                wait([helped])
            except BaseException as error:  # noqa: BLE001 -- an interrupt of the wait: the backward ends at its next point
                both.error, both.ended[FORWARD] = both.error or error, True
                wait([helped])
        finally:
            if on_device:
                _on_devices.remove(both)
        both.restore(FORWARD)
        if both.error is not None:
            raise both.error


class _Pair:
    """A pair that runs: whose turn it is, by a lock for each half, which is held while the half waits."""

    def __init__(self, actions: Sequence[Action], device: torch.device | None, aside: Aside | None) -> None:
        self.actions, self.aside = actions, aside
        self._devices = [] if device is None or device.type == "cpu" else [device]
        self.error: BaseException | None = None
        self.ended = [False, False]
        self.kept = [generator_states(self._devices)] * 2
        self._turns = [threading.Lock(), threading.Lock()]
        self._turns[FORWARD].acquire()
        self._grad = torch.is_grad_enabled()
        self._stream = None if device is None else streams.current_stream(device)
        kinds = dict.fromkeys(("cpu", "cpu" if device is None else device.type))
        self._casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]

    def run(self, half: int, compute: Callable[[], None]) -> None:
        """Run one half in this thread, from its first turn to its end."""
        thread = threading.get_ident()
        self._turns[half].acquire()
        _here[thread] = self, half
        try:
            self.restore(half)
            if self.error is None:
                compute()
        except BaseException as error:  # noqa: BLE001 -- raised by the caller's thread
            self.error = self.error or error
        finally:
            del _here[thread]
            self.kept[half], self.ended[half] = generator_states(self._devices), True
            if not self.ended[1 - half]:
                self._turns[1 - half].release()

    def as_here(self, compute: Callable[[], None]) -> None:
        """Compute in another thread as in the one that made the pair."""
        with contextlib.ExitStack() as state:
            state.enter_context(torch.set_grad_enabled(self._grad))
            state.enter_context(streams.working_on(self._stream))
            for kind, dtype in self._casts:
                state.enter_context(torch.autocast(kind, dtype=dtype))
            compute()

    def hand_over(self, half: int) -> None:
        """Let the other half run to its next point, or to its end."""
        if not self.ended[1 - half]:
            self.kept[half] = generator_states(self._devices)
            self._turns[1 - half].release()
            self._turns[half].acquire()
            self.restore(half)
        if self.error is not None:
            raise StageOutputError(f"{self.actions[half]} ends, as {self.actions[1 - half]} has failed beside it")

    def restore(self, half: int) -> None:
        """Let the random numbers of a half go on."""
        for restore in self.kept[half]:
            restore()


def _half() -> tuple[_Pair, int] | None:
    """The pair that runs in this thread, and which half; a device runs backwards in threads of its own."""
    found = _here.get(threading.get_ident())
    if found is None and _on_devices and threading.current_thread() is not threading.main_thread():
        if len(_on_devices) > 1:
            raise StepArgumentError(
                f"{len(_on_devices)} pairs run at once in this process, and a backward in a thread of the device could "
                "be of each of them; run one pipeline per process"
            )
        return _on_devices[0], BACKWARD
    return found


def hand_over(point: str, work: Work | None = None) -> None:
    """Let the other compute of a pair run while ``work`` is under way, then wait for it.

    A stage calls it where it would wait: in its forward, and in the backward of an autograd function. Outside of a
    pair, or where the other compute has ended, it only waits. Ranks that exchange come to their points in one order.

    Args:
        point: a name for errors and timelines.
        work: with ``wait()``, such as that of a collective with ``async_op=True``.
    """
    found = _half()
    if found is None:
        _wait(work)
        return
    pair, half = found
    with contextlib.nullcontext() if pair.aside is None else pair.aside(f"{point} of {pair.actions[half].kind}"):
        pair.hand_over(half)
        _wait(work)


def _wait(work: Work | None) -> None:
    if isinstance(work, dist.Work):
        wait_inside(work)
    elif work is not None:
        work.wait()


def exchange_tokens(
    tokens: torch.Tensor, group: dist.ProcessGroup | None, *, sends: Sequence[int], receives: Sequence[int], point: str
) -> torch.Tensor:
    """Send rows of ``tokens`` to the ranks of ``group``, and hand over while they travel: dispatch, and combine.

    Its gradient goes the other way, and hands over as well.

    Args:
        tokens: rows, in the order of the ranks that they go to: ``(sum(sends), ...)``.
        group: of the ranks that hold the experts; all of them call it, in one order.
        sends: rows to each rank.
        receives: rows from each rank, in whose order they come: ``(sum(receives), ...)``.
        point: a name for errors and timelines, as of `hand_over`.
    """
    received: torch.Tensor = _Exchange.apply(tokens, group, tuple(sends), tuple(receives), point)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        return _exchanged(tokens, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, sends, receives, point = ctx.how
        return _exchanged(gradients[0], group, receives, sends, point), None, None, None, None


def _exchanged(
    tokens: torch.Tensor, group: dist.ProcessGroup | None, sends: Sequence[int], receives: Sequence[int], point: str
) -> torch.Tensor:
    tokens = tokens.contiguous()  # in use until the wait
    received = tokens.new_empty((sum(receives), *tokens.shape[1:]))
    work = start(dist.all_to_all_single, received, tokens, list(receives), list(sends), group=group)
    hand_over(point, work)
    return received
