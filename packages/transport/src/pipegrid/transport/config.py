"""Settings of lanes and communicators. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import attrs
from attrs import frozen

from pipegrid.core.fields import Count, Rule, checked_fields, instance, integer
from pipegrid.core.lanes import Communicators
from pipegrid.transport.errors import P2PUsageError

ShapeMode: TypeAlias = Literal["agreed", "given", "header", "learned"]
"""How a receiver learns the shapes and dtypes of the next message.

``agreed``
    The first message of a lane carries a header, which holds for all later messages: they cost one message and no
    synchronization. Shapes given to a receive are checked against it.
``given``
    The same, and each receive must give its shapes.
``header``
    Every message has a header, on a CPU group.
``learned``
    As ``header`` in the first step of each batch signature (the shapes of all microbatches, as a `Pipeline` knows them)
    that both ends of a lane have. In a later step of that signature, messages are as they were then, without headers: a
    sender whose message is another one raises, and sends nothing.
"""

LONGEST_SECONDS = 365 * 24 * 3600  # beyond a year, clocks that count nanoseconds overflow
STEPS_KEPT = 64  # batch signatures whose shapes a lane knows
MOST_AHEAD = 1024  # each costs a buffer and a posted transfer


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LONGEST_SECONDS:
        raise ValueError
    return value


def _dtype(value: Any) -> Any:
    import torch  # a dtype exists, so torch does

    if not isinstance(value, torch.dtype):
        raise ValueError  # noqa: TRY004 -- the rule of a field
    return value


# A config is often another library's object, and "no" would be true.
Flag: TypeAlias = Annotated[bool, instance(bool, "True or False")]
Deadline: TypeAlias = Annotated[float, Rule(_seconds, f"seconds above 0 and of at most {LONGEST_SECONDS} (a year)")]


@frozen(kw_only=True, field_transformer=checked_fields(P2PUsageError))
class P2PConfig:
    """Settings of lanes and communicators: the documented default of every ``config`` argument.

    Any other object may take its place: attributes of the names below are read from it once, when the communicator is
    made; missing ones have the defaults below.

    Args:
        pipeline_dtype: dtype of floating-point tensors that are sent; None allows any.
        variable_seq_lengths: shapes and dtypes may differ from message to message.
        batch_p2p_comm: the blocking verbs start their sends and receives as one batch; with ``strict`` or shared
            communicators always.
        batch_p2p_sync: the blocking verbs also hold the host until their transfers are done. (Never the device:
            transfers are ordered among the streams that use them.)
        overlap_p2p_comm: read by schedules; the communicator serves both kinds of calls.
        virtual_pipeline_model_parallel_size: chunks per rank, as the communicator reports them.
        timers: ``timers(name, log_level=2).start()`` and ``timers(name).stop()`` around each blocking verb.
        shapes: how a receiver learns shapes; see `ShapeMode`. None is ``"header"`` with ``variable_seq_lengths``, else
            ``"agreed"``.
        communicators: a communicator per lane, one for all lanes of two ranks, or those that
            ``fewest_communicators(plan)`` has found, and no others; see `Communicators`.
        strict: wait for each batch before the next action, as a rendezvous would. For tests.
        deadline: seconds until a send that was posted, or a receive that is waited for, has failed. At most a year, as
            all times here.
        open_deadline: seconds that all members have to open their lanes.
        receives_ahead: receives of its plan that a step keeps posted on each lane before their turn, so that a message
            finds its buffer however late the receiver is; at most 1024. Each costs the memory of one message while the
            step runs; the first message of a step that a lane has learned, of at most 64 KB, finds it from the step
            before on. Over gloo, on lanes with a communicator of their own and without ``strict``: inside modules,
            and between them in a step whose messages a lane has learned; ignored elsewhere.
        max_ctas: thread blocks that a lane's NCCL kernel may occupy; None leaves it to NCCL.
        staged: payloads travel through host memory over gloo, whatever the group's backend: several ranks per GPU, or
            GPUs without NCCL. On a group whose backend for CUDA is gloo this is always so.

    Examples:
        >>> import torch
        >>> P2PConfig(pipeline_dtype=torch.bfloat16, deadline=60.0).deadline
        60.0
    """

    pipeline_dtype: Annotated[Any, Rule(_dtype, "a torch.dtype or None")] | None = None
    variable_seq_lengths: Flag = False
    batch_p2p_comm: Flag = True
    batch_p2p_sync: Flag = False
    overlap_p2p_comm: Flag = False
    virtual_pipeline_model_parallel_size: Count | None = None
    timers: Annotated[Any, instance(Callable, "callable or None")] | None = None
    shapes: ShapeMode | None = None
    communicators: Communicators = "separate"
    strict: Flag = False
    deadline: Deadline = 300.0
    open_deadline: Deadline = 300.0
    receives_ahead: Annotated[int, integer(0, MOST_AHEAD)] = 1
    max_ctas: Count | None = 4
    staged: Flag = False

    def __attrs_post_init__(self) -> None:
        if self.variable_seq_lengths and self.shapes in ("given", "agreed"):
            raise P2PUsageError(f"shapes is {self.shapes!r}, which fixes them, but variable_seq_lengths is True")

    @property
    def fixed_shapes(self) -> bool:
        """Whether all messages of a lane have one shape."""
        return self.shape_mode not in ("header", "learned")

    @property
    def shape_mode(self) -> ShapeMode:
        """``shapes`` with its default resolved."""
        return self.shapes or ("header" if self.variable_seq_lengths else "agreed")


def as_config(config: Any) -> P2PConfig:
    """``config`` itself where it is a `P2PConfig`, else its attributes of the same names; None is the default."""
    if isinstance(config, P2PConfig):
        return config
    if getattr(config, "use_ring_exchange_p2p", False):
        raise P2PUsageError("use_ring_exchange_p2p is True, but torch.distributed has no ring exchange")
    given = {one.name: getattr(config, one.name) for one in attrs.fields(P2PConfig) if hasattr(config, one.name)}
    if config is not None and not given:
        raise P2PUsageError(f"the config is {config!r:.80}; it must be None or have some of P2PConfig's attributes")
    return P2PConfig(**given)
