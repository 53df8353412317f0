"""A lane over a backend that orders streams: NCCL."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipegrid.transport.errors import P2PError
from pipegrid.transport.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.payload import ReceiveBuffers
from pipegrid.transport.remote_lane import RemoteLane
from pipegrid.transport.streams import current_stream, used_here, working_on

_POLL_SECONDS = 0.0001


class StreamedLane(RemoteLane):
    """See `RemoteLane`. A wait orders the current stream and returns; the progress thread polls for ends.

    Only headers are waited for, by one thread at a time (see `WaitLock`).
    """

    def _admit_receive(self, transfer: ReceiveTransfer) -> None:
        transfer.stream = current_stream(self.device)
        super()._admit_receive(transfer)

    def _sends_stand(self) -> None:
        """Nothing to prepare: each send is a batch of its own."""

    def _receives_stand(self, buffers: ReceiveBuffers) -> None:
        """Nothing to prepare: each receive is a batch of its own."""

    def _post_late(self, ready: Sequence[Transfer]) -> None:
        with working_on(ready[0].stream):
            super()._post_late(ready)

    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Lane.wait_for`."""
        self._until(transfer, timeout, posted=True)
        self._refuse(transfer)
        for work in transfer.works or ():
            work.wait()
        used_here(transfer.tensors, transfer.stream)

    def _step(self, waited: Transfer | None) -> None:
        first = next(iter(self._deferred), None)
        if first is None:
            return
        try:
            self._take_header(self._timeout_of(waited))
        except P2PError:
            raise
        except RuntimeError as error:
            self.explain(error, waited or first)

    def _has_wanted(self, wanted: int) -> bool:
        return bool(self._deferred) and self._deferred[0].sequence <= wanted

    def synchronize(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Lane.synchronize`."""
        self.wait_for(transfer, timeout)
        self.tally.host_syncs += 1
        while not self.poll(transfer):
            time.sleep(_POLL_SECONDS)
        self._refuse(transfer)

    def poll(self, transfer: Transfer) -> bool:
        """See `Lane.poll`."""
        if transfer.state is State.PENDING and self.error is not None:
            self._ended(transfer, State.FAILED, self.error)
        if transfer.state is not State.PENDING:
            return transfer.state is not State.HELD
        return bool(transfer.works) and all(work.is_completed() for work in transfer.works or ())

    def sweep(self, now: float) -> None:
        """See `Lane.sweep`; take what has ended off the queue, and look for the other side's last words."""
        queue = self.queue.copy()
        while queue and self.poll(queue[0]):
            self._ended(queue.popleft(), State.DONE)
        if queue and self.wire.has_note():
            self.explain(RuntimeError("the other side ended the lane"), queue[0])
        else:
            super().sweep(now)
