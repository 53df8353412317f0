"""What a communicator can be told. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import attrs
from attrs import field, frozen

from pipegrid.transport.errors import P2PConfigError

ShapeMode: TypeAlias = Literal["agreed", "given", "header", "manifest"]
"""How a receiver learns the shapes and dtypes of what comes.

``agreed``
    The first message of a lane carries a header, and what it says holds for every later message, which then
    costs one message and no synchronization. Shapes that the receiver gives are checked against it.
``given``
    The same, and a receive must give its shapes.
``header``
    Every message has a header, on a CPU group.
``manifest``
    The sender announces the next messages of a lane in one table (`Lane.announce`), once per step.
"""

Communicators: TypeAlias = Literal["separate", "shared"]
"""``separate``: each lane has a communicator of its own, and order matters within a lane only.

``shared``: all lanes between the same two ranks use one communicator; each exchange is one batch, and the
batches of the two ranks match pairwise, in order. Takes less of a GPU, and asks more of the plan.
"""

LONGEST_SECONDS = 365 * 24 * 3600
# Each costs a buffer and a transfer that is posted for good: more than this is a mistake for something else.
MOST_AHEAD = 1024


def _require(test: Callable[[Any], bool], rule: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    def validate(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not test(value):
            raise P2PConfigError(f"{attribute.name} is {value!r}; it must be {rule}")

    return validate


def _is_dtype(value: Any) -> bool:
    if value is None:
        return True
    import torch  # a dtype in hand means that torch is there

    return isinstance(value, torch.dtype)


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _is_ahead(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_AHEAD


def is_seconds(value: Any) -> bool:
    """Whether a value can be a deadline: past a year, clocks that count nanoseconds overflow somewhere below."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= LONGEST_SECONDS


_FLAG = _require(lambda value: isinstance(value, bool), "True or False")
_SECONDS = _require(is_seconds, f"a number of seconds above 0 and of at most {LONGEST_SECONDS} (a year)")
_COUNT = _require(_is_count, "None or an integer of at least 1")


@frozen(kw_only=True)
class P2PConfig:
    """Settings of lanes and communicators: the documented default of every ``config`` argument.

    Any other object does as well: attributes of the names below are taken from it, and what it lacks has the
    default below. It is read once, when the communicator is made.

    Args:
        pipeline_dtype: dtype of floating-point tensors that are sent; None allows any.
        variable_seq_lengths: shapes and dtypes may differ from message to message.
        batch_p2p_comm: the blocking verbs issue their sends and receives as one batch; with ``strict`` or ``"shared"``
            communicators always.
        batch_p2p_sync: the blocking verbs hold the host until their transfers are done, too. (Never the
            device: transfers are ordered among the streams that use them.)
        overlap_p2p_comm: for the schedule that reads it; the communicator serves both kinds of calls.
        virtual_pipeline_model_parallel_size: chunks per rank, told back by the communicator.
        timers: ``timers(name, log_level=2).start()`` and ``timers(name).stop()`` around each blocking verb.
        shapes: how the receiver learns what to expect. None is ``"header"`` with ``variable_seq_lengths``, else
            ``"agreed"``. See `ShapeMode`.
        communicators: a communicator per lane, or one for all lanes of two ranks. See `Communicators`.
        strict: wait for each batch before the next action, as a rendezvous would. For tests.
        deadline: seconds after which a transfer that somebody waits for (or a send that was posted) has
            failed. At most a year, as all times here.
        open_deadline: seconds that all members have to open their lanes.
        receives_ahead: receives that a lane keeps posted beyond those that were asked for, so that a message finds
            its buffer ready however late the receiver is. Each costs the memory of one message, also between steps.
            At most 1024. For messages of one tensor whose shape stands, on gloo, where every lane has a communicator
            of its own and ``strict`` is off; elsewhere it is ignored.
        max_ctas: thread blocks that a lane's NCCL kernel may occupy; None leaves it to NCCL.

    Raises:
        P2PConfigError: a value outside the ranges above, or two settings that contradict each other.
    """

    pipeline_dtype: Any = field(default=None, validator=_require(_is_dtype, "a torch.dtype or None"))
    variable_seq_lengths: bool = field(default=False, validator=_FLAG)
    batch_p2p_comm: bool = field(default=True, validator=_FLAG)
    batch_p2p_sync: bool = field(default=False, validator=_FLAG)
    overlap_p2p_comm: bool = field(default=False, validator=_FLAG)
    virtual_pipeline_model_parallel_size: int | None = field(default=None, validator=_COUNT)
    timers: Any = field(default=None, validator=_require(lambda value: value is None or callable(value), "callable"))
    shapes: ShapeMode | None = field(
        default=None,
        validator=_require(lambda value: value is None or value in get_args(ShapeMode), f"in {get_args(ShapeMode)}"),
    )
    communicators: Communicators = field(
        default="separate",
        validator=_require(lambda value: value in get_args(Communicators), f"in {get_args(Communicators)}"),
    )
    strict: bool = field(default=False, validator=_FLAG)
    deadline: float = field(default=300.0, validator=_SECONDS)
    open_deadline: float = field(default=300.0, validator=_SECONDS)
    receives_ahead: int = field(default=0, validator=_require(_is_ahead, f"an integer from 0 to {MOST_AHEAD}"))
    max_ctas: int | None = field(default=4, validator=_COUNT)

    def __attrs_post_init__(self) -> None:
        if self.variable_seq_lengths and self.shapes in ("given", "agreed"):
            raise P2PConfigError(
                f"shapes is {self.shapes!r}, which fixes them, but variable_seq_lengths is True; "
                f"use shapes='header' or 'manifest', or leave it out"
            )

    @property
    def shape_mode(self) -> ShapeMode:
        """How the receiver learns what to expect, with the default resolved."""
        if self.shapes is not None:
            return self.shapes
        return "header" if self.variable_seq_lengths else "agreed"


def as_config(config: Any) -> P2PConfig:
    """``config`` itself where it is a `P2PConfig`, else its attributes of the same names; None is the default.

    Raises:
        P2PConfigError: an attribute has a value that it cannot have here, or it is no object with attributes at all.
    """
    if config is None:
        return P2PConfig()
    if isinstance(config, P2PConfig):
        return config
    if isinstance(config, Mapping):
        raise P2PConfigError(f"the config is a {type(config).__name__}; give P2PConfig(**config)")
    if isinstance(config, (type, str, bytes, int, float, complex, list, tuple, set, frozenset)):
        raise P2PConfigError(
            f"the config is {config!r}; give a P2PConfig, or an object with some of its attributes (or None)"
        )
    if getattr(config, "use_ring_exchange_p2p", False):
        raise P2PConfigError("use_ring_exchange_p2p is True, but torch.distributed has no ring exchange; set it False")
    names = (attribute.name for attribute in attrs.fields(P2PConfig))
    return P2PConfig(**{name: getattr(config, name) for name in names if hasattr(config, name)})
