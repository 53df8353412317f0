"""A device that runs late: operations that are queued when they are called, and computed when the host waits.

Inside `FakeDevice.late` an operation returns at once, with a tensor of the right shape whose values are not there:
on the host it holds 0xff in each byte (NaN, -1) and never anything else. The values are in device memory, a second
memory behind each storage, which tasks on virtual streams compute. Tensors that existed before are copied to the
device at their first use, and all values are copied back at the end.

The tensors are plain ones: whatever looks at a tensor's type, storage or strides takes the same way as on a GPU, and
memory is given back when the host drops it, not when the device has used it. Freed memory is overwritten in the order
of the stream that it was allocated on, so that a later use on another stream finds NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from pipegrid.fake_nccl.torch_compat import tree_leaves, tree_map
from pipegrid.fake_nccl.virtual_streams.host_syncs import HostSync
from pipegrid.fake_nccl.virtual_streams.player import Player, Signal

_UNREAD_BYTE = 0xFF


@define(eq=False)
class LateRun:
    """The observations of a late device.

    - An operation is queued on the current virtual stream and returns a tensor of the right shape; the host's own bytes
      are NaN (0xff) and stay so.
    - Streams are played while the host waits or polls, or has queued nothing for 20 ms (another rank may need this
      one).
    - A read by the host returns the right values, after a wait that is listed: the calls of `Streams.watch`, and
      ``nonzero``, ``masked_select``, ``unique``, a mask as an index (whatever has a shape that depends on values), and
      polling in a loop.
    - Entries of the fake NCCL start when the launching stream gets to their launch, and ``Work.wait()`` never holds the
      host.
    - ``FakeDevice.timeline`` has launches and marks on the host, starts and ends of entries, and where the streams get
      to a wait for an entry and to a mark.
    - The vector clocks of the virtual streams run beside it. Not seen: host threads other than the one that entered,
      ``.to("cpu")`` (every tensor is on the CPU here; ``.cpu()`` is seen), and copies to the GPU from memory that is
      not pinned.

    Attributes:
        player: plays the launches of the streams, later than the host makes them.
        live_bytes: of tensors made on the device that the host holds, or that it freed while another stream may use
            them (`Tensor.record_stream`).
        peak_bytes: the most of them.
        shapes: of the results of calls, as far as they are known.

    Examples:
        >>> import torch
        >>> device = FakeDevice()
        >>> with device.late() as late:
        ...     loss = torch.ones(4).sum().item()
        >>> loss, [sync.what for sync in late.syncs]
        (4.0, ['_local_scalar_dense'])
    """

    player: Player
    _syncs: list[HostSync]
    _before: int
    live_bytes: int = 0
    peak_bytes: int = 0
    shapes: dict[Any, Any] = field(factory=dict)

    @property
    def syncs(self) -> list[HostSync]:
        """Every point so far at which the host waited for the device, in order."""
        return self._syncs[self._before :]

    def grow(self, nbytes: int) -> None:
        """Add to the live bytes."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def shrink(self, nbytes: int, after: Sequence[Signal]) -> None:
        """Subtract from the live bytes, once all of ``after`` is done."""
        pending = [signal for signal in after if not signal.done]
        if pending:
            pending[0].when_done(lambda: self.shrink(nbytes, pending[1:]))
        else:
            self.live_bytes -= nbytes


def new_block(nbytes: int) -> Tensor:
    """Device memory that holds no values."""
    return torch.full((nbytes,), _UNREAD_BYTE, dtype=torch.uint8)


def copy_of(storage: torch.UntypedStorage) -> Tensor:
    """Device memory with the values of a storage on the host."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone()


def seen_through(tensor: Tensor, block: Tensor) -> Tensor:
    """The part of device memory that is behind a tensor."""
    plain: Any = torch.empty(0, dtype=tensor.dtype)
    shape, strides = tensor.size(), tensor.stride()
    behind: Tensor = plain.set_(block.untyped_storage(), tensor.storage_offset(), shape, strides)
    return behind


def make_unreadable(block: Tensor) -> None:
    """Overwrite device memory."""
    block.fill_(_UNREAD_BYTE)


def without_values(like: _TensorShape) -> Tensor:
    """A tensor of that shape and those strides whose values are not on the host."""
    tensor = torch.empty_strided(like.size, like.strides, dtype=like.dtype)
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(_UNREAD_BYTE)
    return tensor


def results_of(operation: Any, args: Any, kwargs: dict[str, Any], known: dict[Any, Any]) -> Any:
    """The results of a call, without values: an argument that it returns, or new tensors.

    The shapes are those that the operation gives of zeros. (Of meta tensors it would give the same, but the first use
    of those takes seconds in every process.)

    Args:
        operation: the operation that torch dispatches.
        args: its arguments.
        kwargs: its arguments by name.
        known: shapes of the results of earlier calls.
    """
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    key = (operation, repr(tree_map(_shape_of, (args, kwargs))))
    if key not in known:
        zeros: dict[int, Tensor] = {id(tensor): torch.zeros_like(tensor) for tensor in given}
        places = {id(zeros[id(tensor)]): _Argument(place) for place, tensor in enumerate(given)}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            zero_args, zero_kwargs = tree_map(lambda each: zeros.get(id(each), each), (args, kwargs))
            made = operation(*zero_args, **zero_kwargs)
        known[key] = tree_map(lambda each: places.get(id(each)) or _shape_of(each), made)

    def result_of(found: Any) -> Any:
        if isinstance(found, _Argument):
            return given[found.place]
        return without_values(found) if isinstance(found, _TensorShape) else found

    return tree_map(result_of, known[key])


@frozen
class _TensorShape:
    size: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@frozen
class _Argument:
    place: int


def _shape_of(value: Any) -> Any:
    return _TensorShape(value.size(), value.stride(), value.dtype) if isinstance(value, Tensor) else value


def computation(operation: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor]) -> Callable[[], None]:
    """A task that computes an operation on device memory; ``made`` is that of its new tensors, in order."""
    inputs = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}

    def run() -> None:
        with torch.no_grad():
            found = operation(*args, **kwargs)
            new = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and id(leaf) not in inputs]
            for memory, values in zip(made, new, strict=True):
                memory.copy_(values)

    return run
