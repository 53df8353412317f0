"""The base class of communicators: the part that a runtime and the step functions use. No torch.

A communicator of one's own derives from `Communicator` and has `Communicator.port`; everything else has a default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from attrs import frozen

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import shown
from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.job import JobTopology

if TYPE_CHECKING:
    import torch

    from pipegrid.core.edge import Crossing, Direction, Edge
    from pipegrid.transport.control.handshake import Handshake
    from pipegrid.transport.protocol import Handle, Payload, ReceiveHandle


class Port(Protocol):
    """This rank's end of an edge in one direction. Messages arrive in the order in which they were sent."""

    @property
    def isend(self) -> Callable[[Payload], Handle]:
        """Start sending a payload."""

    @property
    def irecv(self) -> Callable[[], ReceiveHandle]:
        """Start receiving the next payload."""


@frozen(eq=False)
class Verbs:
    """A `Port` of two functions.

    Attributes:
        ahead: receives that may be posted before their turn in a plan.
        takes_slots: whether ``irecv`` takes the ``slot`` in which a message is to arrive, as that of a lane does.
    """

    isend: Callable[[Payload], Handle]
    irecv: Callable[..., ReceiveHandle]
    ahead: int = 0
    takes_slots: bool = False


class Communicator:
    """Traffic between the positions of a plan, as one rank has it: what a runtime and the step functions use.

    A subclass has `port`, or `isend` and `irecv` along edges. Everything else is optional.

    Attributes:
        rank: this rank, for errors; None takes that of the default process group, if there is one.
        device: where payloads live; None is the CPU.
        deadline: seconds that any one transfer may take.
        exchanges: whether there is `collective`, which modules that share ranks need.
        fixed_shapes: whether all messages of an edge have one shape.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with P2PCommunicator(dist.group.WORLD) as communicator:
        ...     isinstance(communicator, Communicator), communicator.deadline
        (True, 300.0)
    """

    rank: int | None = None
    device: torch.device | None = None
    deadline: float = 300.0
    exchanges: bool = False
    fixed_shapes: bool = False

    def __init_subclass__(cls, **named: Any) -> None:
        """Verbs that a subclass overrides are called: its ports are made of them unless it has `port` as well."""
        super().__init_subclass__(**named)
        own = vars(cls)
        if "port" not in own and ("isend" in own or "irecv" in own):
            cls.port = _port_of_verbs  # type: ignore[method-assign]

    @property
    def job(self) -> JobTopology:
        """The job's stages and this rank's. A `PipelineRuntime` needs none of them, a step function does."""
        return JobTopology()

    @property
    def attempt(self) -> int:
        """Grows where the ranks of a job rebuild their communicators: the failure of an earlier one is then over."""
        return 0

    def port(self, edge: Edge, direction: Direction) -> Port:
        """This rank's end of ``edge`` (forward), or of the way against it (backward). A runtime asks once for each.

        Raises:
            P2PUsageError: this rank has no such end.
        """
        raise P2PUsageError(f"{type(self).__name__} has no port for edge {edge} {direction.name.lower()}")

    def open_across(self, *, sends: Iterable[Crossing], receives: Iterable[Crossing]) -> None:
        """Called before the ports to other replicas are asked for, with all of them; may communicate with these ranks.

        The ranks of all replicas are called for one plan after the other, in one order.

        Args:
            sends: the edges, in a direction, along which this rank sends to a replica.
            receives: those along which it receives from one.
        """

    def port_across(self, edge: Edge, direction: Direction, replica: int) -> Port:
        """`port` of an edge whose other end is in another replica, where routes move a unit there or back.

        Raises:
            P2PUsageError: no data goes from one replica to another.
        """
        raise P2PUsageError(
            f"{type(self).__name__} has no port to replica {replica} for edge {edge} {direction.name.lower()}; it "
            "moves data within one replica"
        )

    def isend(self, payload: Payload, *, edge: Edge, direction: Direction) -> Handle:
        """Start sending along ``edge`` (forward) or against it (backward)."""
        return self.port(edge, direction).isend(payload)

    def irecv(self, *, edge: Edge, direction: Direction, shapes: Any = None) -> ReceiveHandle:
        """Start receiving the next message of ``edge`` in that direction. ``shapes``: as of the port, if it has any."""
        receive: Callable[..., ReceiveHandle] = self.port(edge, direction).irecv
        return receive() if shapes is None else receive(shapes)

    def collective(
        self, payload: Payload, *, edge: Edge, direction: Direction
    ) -> tuple[Handle | None, ReceiveHandle | None]:
        """Start the exchange along ``edge`` among all ranks of its two stages, some of which hold both.

        Returns:
            The send of a rank that holds the stage that makes the payload, and the receive of one that holds the other.
        """
        del payload
        raise P2PUsageError(f"{type(self).__name__} has no exchange for edge {edge} {direction.name.lower()}")

    def batch(self) -> AbstractContextManager[None]:
        """Start the sends and receives of the block, by this thread, as one simultaneous batch."""
        return nullcontext()

    @property
    def batches(self) -> bool:
        """Whether a batch is more than its messages one by one: where a subclass has `batch`. Not entered otherwise."""
        return type(self).batch is not Communicator.batch

    def in_order(self) -> AbstractContextManager[None]:
        """Entered around a step, where `batches`: transfers start in the order of calls inside."""
        return nullcontext()

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Entered around a step that may take longer: transfers for which no wait says how many have ``seconds``."""
        del seconds
        return nullcontext()

    def neighbours(self, edges: Iterable[Edge]) -> Sequence[Handshake] | None:
        """The handshakes before a step with the ranks at the other ends of ``edges``; None compares nothing."""
        del edges
        return None

    def neighbours_across(
        self, edges: Iterable[Edge], across: Iterable[tuple[Edge, int]]
    ) -> Sequence[Handshake] | None:
        """`neighbours`, and those at the other ends of the edges of ``across`` in other replicas, each with that.

        By default those of this replica alone.
        """
        del across
        return self.neighbours(edges)

    def check(self) -> None:
        """Raise if a transfer has failed since it was waited for."""

    def describe(self) -> Mapping[str, Any]:
        """The state of each lane, by its name, for the record of a failure."""
        return {}

    def abort(self, reason: str) -> None:
        """End all transfers at once, here and at the other ends, with an error that says ``reason``."""

    def close(self) -> None:
        """Free what the communicator holds. A second call does nothing."""

    def destroy(self) -> None:
        """`close`, by the name that bridges and communicators of modules have always had."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close; after an exception, abort first, so that no other rank waits for this one."""
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


def as_communicator(given: Any) -> Communicator:
    """``given``; for None a `Communicator` that moves nothing.

    Raises:
        StepArgumentError: it does not derive from `Communicator`.
    """
    if given is None:
        return Communicator()
    if not isinstance(given, Communicator):
        raise StepArgumentError(
            f"communicator is {shown(given)}; it must derive from pipegrid.transport.Communicator: pass "
            "P2PCommunicator(pp_group, config) or MultiModulePipelineCommunicator(grids, topology, config)"
        )
    return given


def _port_of_verbs(self: Communicator, edge: Edge, direction: Direction) -> Port:
    return Verbs(
        partial(self.isend, edge=edge, direction=direction), partial(self.irecv, edge=edge, direction=direction)
    )
