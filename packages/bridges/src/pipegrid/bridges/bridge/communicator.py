"""The bridge between two modules: a tensor leaves one grid's last stage and arrives at another grid's first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipegrid.bridges.bridge.transfers import BridgeTransfers


class BridgeCommunicator(BridgeTransfers):
    """Moves activations from ``src_grid``'s last stage to ``dest_grid``'s first, and gradients back.

    Construct it on every rank of both grids, in the same order relative to other communicators. Ranks of a
    grid that are not on its boundary stage may call everything; it does nothing there and returns None.

    What each rank holds follows from its grid: ``dp`` splits the batch, ``cp`` the sequence, ``tp`` holds
    copies; ``src_placements`` and ``dest_placements`` override that and declare further dims. Source lanes are
    consecutive blocks of the batch; destination lanes take consecutive blocks of the same batch, in any ratio.

    Sizes: with ``shapes="fixed"`` the first message of the edge carries the source's shape, and later messages
    are payload only; a tensor of another shape is refused. With ``shapes="variable"`` each message has a
    header on a CPU group, so lanes, sequences and packed samples may change from microbatch to microbatch, and
    a lane may have no rows. Gradients then belong to activations in the order in which those were sent, counting
    those sent with gradients enabled: run forward-only steps under `torch.no_grad`.

    Args:
        src_grid: grid of the module that makes the tensor.
        dest_grid: grid of the module that consumes it.
        dim_mapping: axis of ``"b"``, ``"s"`` and ``"h"``; default ``{"s": 1, "b": 0, "h": 2}``, and for
            ``tensor_ndim=2`` ``[b*s, h]``.
        comm_dtype: dtype on the wire; what arrives has the dtype of what was sent. None is the tensor's own.
        src_module_name: for labels and messages.
        dest_module_name: for labels and messages.
        tensor_ndim: axes of the tensor.
        src_placements: what each dim of the source grid does with the tensor, see `boundary_side`.
        dest_placements: the same for the destination.
        src_lanes: samples per source lane where lanes are uneven, in proportion.
        dest_lanes: samples per destination lane where lanes are uneven, in proportion.
        strategy: see `plan_reshard`.
        leader_below: bytes below which ``"auto"`` uses a leader, where no links are given.
        links: what ``"auto"`` decides by: bandwidth, latency, and which ranks share a link.
        backward: False declares an edge without gradients (a frozen source).
        shapes: ``"fixed"`` or ``"variable"``, see above; None is ``"variable"`` where
            ``config.variable_seq_lengths``.
        config: of the lanes; see `pipegrid.transport.P2PConfig`.
        backend: of lanes and groups; None is the grids' backend, else the default group's for ``device``.
        device: where tensors live; None is the current GPU where the backend is NCCL, else the CPU.
        label: tells apart bridges between the same modules.
        stage_dim: the grids' pipeline dim.
        src_stage: place of the source's last stage along ``stage_dim``; None is the last.
        dest_stage: place of the destination's first stage along ``stage_dim``; None is the first.
        open: False leaves the lanes to the caller, who opens ``lane_specs`` with ``lane_config`` together with
            others, so that one batch can span them, and gives them to `attach`.

    Raises:
        UndeclaredDimError: a dim of a grid that nobody declared, or a sharded axis that the tensor does not name.
        LaneTotalsError: lanes of the two sides that hold different numbers of samples.
    """

    def send_forward(self, tensor: torch.Tensor, *, samples: Sequence[int] | None = None) -> None:
        """Send an activation from the source side, and wait until it is on its way."""
        handle = self.isend_forward(tensor, samples=samples)
        if handle is not None:
            handle.wait()

    def recv_forward(self) -> torch.Tensor | None:
        """The next activation, on the destination side; it requires grad unless the edge has no backward."""
        handle = self.irecv_forward()
        return None if handle is None else handle.result()

    def send_backward(self, grad: torch.Tensor | None) -> None:
        """Send the gradient of the oldest activation that has none yet, from the destination side."""
        handle = self.isend_backward(grad)
        if handle is not None:
            handle.wait()

    def recv_backward(self) -> torch.Tensor | None:
        """The gradient of the oldest activation that has none yet, on the source side, in that one's shape."""
        handle = self.irecv_backward()
        return None if handle is None else handle.result()

    def send_forward_recv_backward(
        self, tensor: torch.Tensor, *, samples: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """Both, posted before either is waited for. The gradient may be that of an earlier activation.

        Raises:
            NoBackwardError: the edge has no backward; nothing is sent then.
        """
        if self.is_source:
            self._require_backward("send_forward_recv_backward")
        with self.batch():
            sending = self.isend_forward(tensor, samples=samples)
            receiving = self.irecv_backward()
        if sending is None or receiving is None:
            return None
        grad = receiving.result()
        sending.wait()
        return grad

    def send_backward_recv_forward(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Both, posted before either is waited for."""
        with self.batch():
            sending = self.isend_backward(grad)
            receiving = self.irecv_forward()
        if sending is None or receiving is None:
            return None
        tensor = receiving.result()
        sending.wait()
        return tensor
