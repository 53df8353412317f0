"""Functions that all ranks of a job run together, and run again where one of them has died meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

import torch.distributed as dist
from attrs import frozen

from pipegrid.core.fields import Name, checked
from pipegrid.gradients.main_grad import Modules
from pipegrid.monitor import JobFailedError
from pipegrid.monitor.epochs import Epoch, Epochs, EpochStore, VoteResult
from pipegrid.survive.connections import require_no_watchdog
from pipegrid.survive.device import DeviceEnd
from pipegrid.survive.errors import RankRetiredError, SurviveError
from pipegrid.survive.handover import JobState, Stateful
from pipegrid.survive.kept import KeptState
from pipegrid.survive.neighbours import Neighbours
from pipegrid.survive.redoable import require_redoable
from pipegrid.topology.bounded_calls import giving_up
from pipegrid.topology.world import require_default_group


class World(Protocol):
    """The means of communication in one epoch: groups, a communicator, a plan.

    Examples:
        >>> from types import SimpleNamespace
        >>> world: World = SimpleNamespace(abort=print, close=lambda: None)
        >>> world.abort("rank 1 died")
        rank 1 died
    """

    def abort(self, cause: str) -> None:
        """End all connections, so that no rank waits for this one, nor this one for others. From any thread, or twice.

        ``cause`` is for the errors of those that wait.
        """

    def close(self) -> None:
        """Free everything: together with the other ranks, or alone after `abort`."""


@runtime_checkable
class ConfiguringWorld(World, Protocol):
    """A world with groups that modules find in their ``config``, such as those of tied parameters."""

    def configure(self, modules: Modules) -> None:
        """Set the configs of ``modules``, until `close`. Called once, before the first function of the epoch."""


@runtime_checkable
class OpenWorld(World, Protocol):
    """A world that new processes may join."""

    @property
    def peers(self) -> dist.ProcessGroup:
        """The ranks with the same state, this one among them: from one of them a new process gets it."""


@frozen
class Survived:
    """A death that the job has survived, or new processes that have joined.

    Attributes:
        key: of the function that was running here.
        result: the vote result: who is dead and why, who has joined, the epoch since then, and whether the function
            was done by all that live.
        seconds: from the first sign of it on this rank until the ranks have agreed.

    Examples:
        >>> from pipegrid.monitor import Epoch, VoteResult
        >>> Survived("step 7", VoteResult(Epoch(1, (0, 2)), {1: "no heartbeat"}, (), 7), seconds=0.4).result.dead
        {1: 'no heartbeat'}
    """

    key: str
    result: VoteResult
    seconds: float

    def __str__(self) -> str:
        """One line, for a log."""
        epoch, dead = self.result.epoch, self.result.dead
        lost = [f"rank {rank} is dead ({why})" for rank, why in sorted(dead.items())]
        came = [f"a new process of rank {rank} has come" for rank in self.result.joined]
        done = "was done by all others" if self.result.committed else "is done again"
        return (
            f"epoch {epoch.number}: {'; '.join(lost + came)}; {self.key} {done}, {len(epoch.members)} ranks go on, "
            f"{self.seconds:.2f} s after this rank noticed"
        )


def print_once(event: Survived) -> None:
    """Print a line to stderr, on the lowest living rank."""
    if require_default_group()[0] == event.result.epoch.members[0]:
        print(event, file=sys.stderr, flush=True)  # noqa: T201 -- the line that a person looks for


W = TypeVar("W", bound=World)
T = TypeVar("T")


def _of_state(epoch: Epoch) -> str:
    """The key of a hand-over."""
    return f"the state in epoch {epoch.number}"


class Survivors(Generic[W]):
    """Runs functions of a world on all ranks that live, until all of these have done them in one epoch.

    ::

        with Survivors(store, build, modules=stage, state={"optimizer": optimizer}) as survivors:
            for step in survivors.steps(range(first, last)):
                survivors.run(f"step {step}", lambda world: train(world, step))
                norm = survivors.run(f"norm {step}", norm_of, keep_gradients=False)
                scale(norm)
                optimizer.step()

    All ranks run the same keys in the same order. What a function communicates goes through its world; between two
    functions a rank computes alone. So a rank is never a step ahead: the optimizer steps when all have the gradients.

    When a rank dies, the functions of the others fail (or `Epochs.done` says that not all have done it). The world is
    ended, and the ranks that live agree who is dead and whether each of them had done the function. If so, its result
    holds. Else gradients, buffers and random generators of ``modules`` become what they were, ``build`` makes a world
    of the ranks that live, and the function runs again.

    The same script, started again for a dead rank, takes its place: the others take it in at the beginning of one of
    their `steps`, and it gets their state from a peer as the block is entered.

    Args:
        store: for this attempt of the job alone, in a process that outlives the ranks; see `Epochs`.
        build: makes the world of an epoch, together with its other members; called when the block is entered, and after
            each death. Raises `JobFailedError` where the ranks that live cannot go on.
        modules: this rank's stages, whose state is kept.
        allow: as of `require_redoable`: hooks that may run twice, such as ``["layers.3"]``.
        state: further state for a new process, by name: the optimizer, a scheduler of learning rates, anything with
            ``state_dict`` and ``load_state_dict``. None: new processes cannot join.
        heartbeat: as of `Epochs`.
        deadline: likewise; and for the device to end what a function has issued, but in the first one of an epoch.
        retire: likewise.
        on_event: called with each `Survived`; by default the lowest living rank prints a line to stderr.

    Raises:
        SurviveError: a step of ``modules`` cannot be done again (`require_redoable`), or ``state`` cannot be sent to a
            new process; or torch's watchdog of NCCL would end the ranks that live. Before anything is sent.

    Attributes:
        epochs: the agreement on living ranks and finished keys.
        events: the deaths so far, and the new processes.

    Examples:
        >>> import torch, torch.distributed as dist, types
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> build = lambda epoch: types.SimpleNamespace(abort=print, close=lambda: None)
        >>> with Survivors(dist.HashStore(), build, modules=torch.nn.Linear(4, 4)) as survivors:
        ...     survivors.run("step 0", lambda world: 0.5)
        0.5
    """

    def __init__(
        self,
        store: EpochStore,
        build: Callable[[Epoch], W],
        *,
        modules: Modules,
        allow: Collection[str] = (),
        state: Mapping[str, Stateful] | None = None,
        heartbeat: float = 5.0,
        deadline: float = 60.0,
        retire: Callable[[frozenset[int]], Iterable[int]] = lambda _: (),
        on_event: Callable[[Survived], object] = print_once,
    ) -> None:
        rank, size = require_default_group()
        require_no_watchdog()
        require_redoable(modules, {*range(size)}.difference(retire(frozenset({rank}))), allow=allow)
        self.events: list[Survived] = []
        self._build, self._on_event = build, on_event
        self._modules, self._kept = modules, KeptState(modules)
        self._state = None if state is None else JobState(modules, state)
        self._step: int | None = None
        self._edge = self._handed = False  # before the first function of a step; all ranks of this epoch have the state
        self._world: W | None = None
        self._ring: Neighbours | None = None
        self._watching = False
        self._timeout, self._device = timedelta(seconds=deadline / 2), DeviceEnd(deadline)
        self._key = ""
        self.epochs = Epochs(
            store,
            rank=rank,
            ranks=range(size),
            heartbeat=heartbeat,
            deadline=deadline,
            retire=retire,
            on_alarm=self._alarmed,
        )

    def __enter__(self) -> Self:
        if self.epochs.incarnation == 1:
            self._living_world()
            return self
        try:
            self._take_place()
        except BaseException as error:
            self._end(f"{type(error).__name__}: {error}")
            self._close()
            raise
        return self

    def _take_place(self) -> None:
        """Join the job in place of a dead rank, and get the state of the job."""
        if self._state is None:
            raise SurviveError(f"rank {self.epochs.rank} has died, and Survivors has no state= for a new process of it")
        self.epochs.join()
        while True:
            try:
                with giving_up(self._why_not_wait):
                    self._living_world()
            except RuntimeError as error:
                if isinstance(error, JobFailedError) and self._world is None:
                    raise
                self._agree("the state of the job", error, edge=True, asking={})
            else:
                return

    def steps(self, steps: Iterable[int]) -> Iterator[int]:
        """The numbers ``steps``; in a new process of a dead rank, those from the step on at which the others are.

        New processes join before the first `run` of a step.

        Raises:
            SurviveError: the step of the others is none of ``steps``.
        """
        first, came = self._step, self._step is None
        for step in steps:
            came = came or step == first
            if came:
                self._step, self._edge = step, True
                yield step
        self._edge = False
        if not came:
            raise SurviveError(f"the other ranks are at step {first}, which is none of the steps of this one")

    def run(self, key: str, function: Callable[[W], T], *, keep_gradients: bool = True) -> T:
        """The result of ``function(world)``, when every rank that lives has done it.

        It may be called several times, with the state of ``modules`` as at the first one; what else it changes or reads
        (an iterator of data) is its own matter. Its error is raised as it is where no rank has died.

        Args:
            key: of the function, the same on all ranks and another one than the last, such as ``"step 3"``.
            function: communicates through the world that it gets, and only that.
            keep_gradients: False for a function that leaves gradients as they are, such as a norm: saves the copy.

        Raises:
            SurviveError: the key is that of the last function; or a function changes gradients that are not kept.
            JobFailedError: the ranks that live cannot go on, or a rank has failed by an error of its own.
            RankRetiredError: a rank that computes together with this one has died.
        """
        key = checked(key, Name, "key", SurviveError)
        if key == self._key:  # of the last alone: a set of all would grow with the run
            raise SurviveError(f"key {key!r} was used before; count the steps in it")
        self._key, edge, self._edge = key, self._edge, False
        self._kept.keep(gradients=keep_gradients)
        while True:
            done, error, results, asking = False, None, list[T](), dict[int, int]()
            try:
                with giving_up(self._why_not_wait):
                    world = self._living_world()
                    asking = self.epochs.asking if edge else {}
                    if not asking:
                        results.append(function(world))
                if results:
                    self._kept.require_unwritten(key)
                    done = self._done(key)
                    self._watching = self._watching or done
            except RuntimeError as caught:  # of a transfer, a collective, a store; also a failure passed on by others
                if isinstance(caught, JobFailedError) and self._world is None:  # of `build`
                    raise
                error = caught
            if done or self._agree(key, error, edge=edge, asking=asking):
                self._kept.drop()
                return results[0]
            self._kept.restore()

    def _living_world(self) -> W:
        if self._world is None:
            epoch = self.epochs.current
            world = self._build(epoch)
            try:
                lost, name = partial(self._lost, epoch), f"epoch {epoch.number}"
                self._ring = Neighbours(lost, members=epoch.members, name=name, timeout=self._timeout)
                if isinstance(world, ConfiguringWorld):
                    world.configure(self._modules)
            except BaseException:
                world.abort("the ranks do not watch each other")
                world.close()
                raise
            self._world = world
        if self.epochs.current.joining and not self._handed:
            self._hand_over(self._world)
        return self._world

    def _hand_over(self, world: W) -> None:
        epoch = self.epochs.current
        if self._state is not None:
            if not isinstance(world, OpenWorld):
                raise RuntimeError(f"{type(world).__name__} has no peers, so new processes do not come in")
            self._step = self._state.hand_over(world.peers, epoch.joining, self._step)
            self.epochs.ready = True
        if not self._done(_of_state(epoch)):
            raise RuntimeError("new processes have not got the state of the job")
        self._handed = self._watching = True

    def _done(self, key: str) -> bool:
        """Say that this rank has done ``key``, its device too; whether all others have.

        A kernel that waits for a dead rank ends by the abort of its group, as if it had what it waited for; so where
        this rank knows of a death by now, it has not done it: a RuntimeError.
        """
        self._device.wait(key, self._why_not_wait, first=not self._watching)
        self.epochs.check(key)
        return self.epochs.done(key)

    def _why_not_wait(self) -> str:
        """The reason why other ranks do not arrive, where this one knows that the epoch ends; else empty."""
        try:
            self.epochs.check("it ends")
        except RuntimeError as error:
            return str(error)
        return ""

    def _lost(self, epoch: Epoch, rank: int, why: str) -> None:
        """Note, in a thread, that the connection to the next rank has ended.

        Once all have done a function in this epoch, its process has ended as well. Before, it may be that it could not
        connect with a third rank, which is dead; then its heartbeat decides.
        """
        if self._watching:
            self.epochs.lost(rank, why, epoch)

    def _agree(self, key: str, error: RuntimeError | None, *, edge: bool, asking: Mapping[int, int]) -> bool:
        """Agree with the others who has died and who has joined; whether all that live had done ``key``."""
        began = time.monotonic()
        why = f"{key} is not done" if error is None else f"{key}: {type(error).__name__}: {error}".splitlines()[0]
        self._end(why)
        epoch = self.epochs.current
        handing = bool(epoch.joining) and not self._handed  # a key of its own, before this one
        result = self.epochs.vote(_of_state(epoch) if handing else key, why, edge=edge, asking=asking)
        self._handed = False
        self._leave_ring()  # not before: who watches a dead rank is to say so
        if not result.dead and not result.joined:
            self.epochs.give_up(f"no rank has died, but {why}")
            raise error or JobFailedError(f"{why} on another rank, and no rank has died")
        if self.epochs.rank in result.retired:
            peers = f"one of the dead ranks {sorted(result.dead)}"
            raise RankRetiredError(f"rank {self.epochs.rank} retires: it computes only together with {peers}")
        event = Survived(key, result, time.monotonic() - began)
        self.events.append(event)
        self._on_event(event)
        return result.committed and not handing

    def _alarmed(self, cause: str) -> None:
        """Abort the world, in a thread: this rank may wait for others that never arrive."""
        world = self._world
        try:
            self.epochs.check("")
        except RuntimeError:  # else the world is already that of the next epoch
            if world is not None:
                world.abort(cause)

    def _end(self, cause: str | None = None) -> None:
        world, self._world = self._world, None
        if world is not None:
            if cause is not None:
                world.abort(cause)
            world.close()

    def _close(self) -> None:
        self._leave_ring()
        self.epochs.close()
        self._device.close()

    def _leave_ring(self) -> None:
        ring, self._ring, self._watching = self._ring, None, False
        if ring is not None:
            ring.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end()
        else:
            said = f"{type(error).__name__}: {error}"
            if not isinstance(error, RankRetiredError):
                self.epochs.give_up(said)
            self._end(said)
        self._close()
