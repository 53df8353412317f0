"""A receive of the variable-TP communicator under way: it lands by itself, and completes while others are received."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from pipegrid.bridges.bridge.receive import remaining
from pipegrid.bridges.errors import CompletionError, ShapeError
from pipegrid.bridges.reshard import Completion
from pipegrid.bridges.steps import Completing, unpack
from pipegrid.bridges.vtp.boundary import Crossing, Shape
from pipegrid.transport.handle import ReceiveTransfer
from pipegrid.transport.streams import follow, mark, used_here, working_on

# How long a wait for a completion sleeps before it looks whether the communicator was ended meanwhile.
_LOOK_SECONDS = 0.1


@define(eq=False)
class LandingQueue:
    """What the receives along one edge in one direction share.

    Completions are collectives, so every copy starts them in one order: that of the receives, whatever thread sees them
    arrive and whoever is waited for first.

    Attributes:
        where: for messages.
        rank: this rank.
        device: where tensors live.
        crossing_of: this rank's part, given the shape of the whole tensor.
        complete: starts a completion in this rank's tensor, seen as the boxes see it.
        completes: whether there are copies to complete each other; each receive lands when it is waited for otherwise.
        stream: where landing happens, beside the stream that computes; None on a CPU.
        waiting: receives that have not landed, in order.
        ended: why the communicator was ended, if it was.
    """

    where: str
    rank: int
    device: torch.device
    crossing_of: Callable[[Shape], Crossing]
    complete: Callable[[Completion, torch.Tensor], Completing]
    completes: bool
    stream: torch.cuda.Stream | None = None
    waiting: deque[VTPReceive] = field(factory=deque)
    lock: threading.Lock = field(factory=threading.Lock)
    ended: str | None = None


class VTPReceive:
    """A tensor on its way to this rank: slices from several peers, then the completion among copies.

    One thread makes the receives of an edge and direction; any may wait for them.

    Args:
        queue: of its edge and direction.
        post: posts the receives on the lanes, by peer.
        whole: the whole tensor's shape, where the caller knows it.
        out: what to receive into, where its shape and dtype are known; ``whole`` is then given.
    """

    def __init__(
        self,
        queue: LandingQueue,
        post: Callable[[], Mapping[int, ReceiveTransfer]],
        *,
        whole: Shape | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        self._queue, self._whole, self._out = queue, whole, out
        self._completing: Completing | None = None
        self._error: BaseException | None = None
        self._landed = threading.Event()
        self._finishing = threading.Lock()
        self._done = False
        # On CUDA the buffer may be memory that the caller's stream still uses, and landing has a stream of its own.
        self._allocated = mark(queue.device)
        self._marks: Sequence[Any] = ()
        # Without the lock: in strict mode this blocks, and the thread of a lane may be waiting to land another receive.
        self._handles = post()
        self._missing = len(self._handles)
        with queue.lock:
            queue.waiting.append(self)
        if queue.completes:
            for handle in self._handles.values():
                handle.on_done(self._one_arrived)

    # -- what callers see -----------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensor is whole (on CUDA: when the current stream is ordered after it).

        May be called any number of times, from any thread. ``timeout`` is in seconds, for lanes and completion
        together; None is the deadline of each.
        """
        if self._done:
            return
        left = remaining(timeout)
        for handle in self._handles.values():
            handle.wait(left())
        if not self._queue.completes:
            self._land_alone()
        self._landed.wait()
        with self._finishing:
            if not self._done:
                self._finish(left)

    def result(self) -> torch.Tensor:
        """Wait, then the tensor; it requires grad where its dtype can. The same object each time."""
        self.wait()
        assert self._out is not None
        return self._out

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if self._done or self._error is not None:
            return True
        if not self._queue.completes:
            return all(handle.is_completed() for handle in self._handles.values())
        return self._landed.is_set() and (self._completing is None or self._completing.is_completed())

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is received into, before there is data in it; None where its shape is not known yet."""
        return self._out

    # -- landing --------------------------------------------------------------------------------------------

    def _one_arrived(self, _: object) -> None:
        """One lane has delivered, or failed: land whatever is complete, in order."""
        queue = self._queue
        with queue.lock:
            self._missing -= 1
            while queue.waiting and not queue.waiting[0]._missing:  # noqa: SLF001 -- same class
                queue.waiting.popleft()._land()  # noqa: SLF001

    def _land_alone(self) -> None:
        with self._queue.lock:
            if not self._landed.is_set():
                self._queue.waiting.remove(self)
                self._land()

    def _land(self) -> None:
        """Put every slice in its place and start the completion. An error is kept for who waits."""
        try:
            with torch.no_grad(), working_on(self._queue.stream):
                if self._queue.stream is not None:
                    follow(self._allocated, self._queue.device)
                self._fill()
                self._marks = mark(self._queue.device) if self._queue.stream is not None else ()
        except Exception as error:  # noqa: BLE001 -- it may be the thread of a lane: whoever waits raises it
            self._error = error
        finally:
            self._landed.set()

    def _fill(self) -> None:
        queue = self._queue
        arrived = {peer: next(iter(handle.result().items())) for peer, handle in self._handles.items()}
        wholes = {decode_shape(text) for text, _ in arrived.values()}
        dtypes = {flat.dtype for _, flat in arrived.values()}
        if len(wholes) > 1 or len(dtypes) > 1:
            raise ShapeError(
                f"{queue.where}: the peers of rank {queue.rank} send parts of different tensors: shapes "
                f"{sorted(wholes)}, dtypes {sorted(map(str, dtypes))}; the ranks of a stage send one"
            )
        (whole,), (dtype,) = wholes, dtypes
        crossing = queue.crossing_of(whole)
        if self._whole not in {None, whole}:
            expected = queue.crossing_of(self._whole or ()).shape
            raise ShapeError(
                f"{queue.where}: rank {queue.rank} expects shape {expected}, but {crossing.shape} comes; give the "
                f"shape that the other stage sends"
            )
        if self._out is None:
            flat = _all_of_it(arrived, crossing)
            if flat is not None:
                self._out = _with_grad(flat.view(crossing.shape))
                return
            self._out = _with_grad(torch.empty(crossing.shape, dtype=dtype, device=queue.device))
        elif self._out.dtype is not dtype:
            raise ShapeError(f"{queue.where}: rank {queue.rank} expects {self._out.dtype}, but {dtype} comes")
        view = self._out.detach().view(crossing.view)
        for peer, boxes in crossing.peers.items():
            unpack(arrived[peer][1].detach(), boxes, view)
        used_here([view], queue.stream)
        if crossing.completion is not None:
            self._completing = queue.complete(crossing.completion, view)

    # -- finishing ------------------------------------------------------------------------------------------

    def _finish(self, left: Callable[[], float | None]) -> None:
        if self._error is not None:
            raise self._error
        queue = self._queue
        follow(self._marks, queue.device)
        if self._completing is not None:
            self._complete(self._completing, left())
        assert self._out is not None
        used_here([self._out], queue.stream)
        self._handles = {}
        self._done = True

    def _complete(self, completing: Completing, seconds: float | None) -> None:
        queue = self._queue
        try:
            # Streams order themselves; on a CPU, wait in short sleeps, so that the end of the communicator is seen.
            if queue.device.type == "cpu":
                self._hold(completing, seconds)
            with torch.no_grad():
                completing.finish()
        except RuntimeError as error:
            if isinstance(error, CompletionError):
                raise
            raise CompletionError(
                f"{queue.where}: the completion among the ranks of this stage failed on rank {queue.rank}: one of them "
                f"died, or did not come before the deadline ({error})"
            ) from error
        used_here([completing.buffer], queue.stream)

    def _hold(self, completing: Completing, seconds: float | None) -> None:
        queue = self._queue
        end = math.inf if seconds is None else time.monotonic() + seconds
        while not completing.wait(min(_LOOK_SECONDS, end - time.monotonic())):
            if queue.ended is not None:
                raise CompletionError(
                    f"{queue.where}: the communicator was ended on rank {queue.rank} while the ranks of its stage "
                    f"completed each other: {queue.ended}"
                )
            if time.monotonic() >= end:
                raise CompletionError(
                    f"{queue.where}: rank {queue.rank} waited {seconds:.3g} s for the completion among the ranks of "
                    f"its stage; look at where the others stand"
                )


def _all_of_it(arrived: Mapping[int, tuple[str, torch.Tensor]], crossing: Crossing) -> torch.Tensor | None:
    """The one message that is the whole tensor as it lies in memory, where that is so."""
    if crossing.completion is not None or len(arrived) != 1:
        return None
    ((peer, (_, flat)),) = arrived.items()
    boxes = crossing.peers.get(peer, ())
    return flat.detach() if len(boxes) == 1 and boxes[0].shape == crossing.view else None


def _with_grad(tensor: torch.Tensor) -> torch.Tensor:
    dtype = tensor.dtype
    return tensor.requires_grad_() if dtype.is_floating_point or dtype.is_complex else tensor


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream to land on; None on a CPU."""
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def encode_shape(whole: Shape) -> str:
    """A shape as the key under which a slice travels: all that a receiver must be told."""
    return ",".join(map(str, whole))


def decode_shape(text: str) -> Shape:
    """From text."""
    return tuple(int(extent) for extent in text.split(",") if extent)
