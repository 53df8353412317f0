"""One communicator for a pipeline of many modules: the blocking verbs, which exchange dicts by module."""

from __future__ import annotations

from typing import Any

from pipegrid.bridges.checks import as_flag
from pipegrid.bridges.errors import StageError
from pipegrid.bridges.multimodule.dict_api import Tensors, results, wait_for
from pipegrid.bridges.multimodule.edges import ModuleEdges


class MultiModulePipelineCommunicator(ModuleEdges):
    """Traffic between the stages of many modules that together are one pipeline.

    Satisfies `pipegrid.transport.PipelineCommunicator` in two ways. `isend` and `irecv` take an edge of global
    stage numbers (``graph.stage(module, index)``): with them a runtime executes any plan over the graph. The
    six blocking verbs exchange dicts keyed by module: a first stage of a module gets one entry per incoming
    edge, named after the source module; any other stage gets one entry under its own name. What a module sends
    stands under its own name; with several destinations it goes to each, and the gradients that come back are
    summed. The verbs need one stage of each module per rank, and no rank on both ends of an edge.

    Modules may share ranks. `positions` says which ranks then act alike; along `collective_edges` a plan has a
    ``COLLECTIVE`` in place of messages, which `collective` executes.

    Every rank constructs this with equal arguments. Lanes inside modules and bridges between them are opened
    in one order that is the same on all ranks, and one `batch` spans all of them.

    Args:
        module_to_grid_map: grid of each module.
        topology: the modules that each module feeds.
        config: a `P2PConfig`, or any object with some of its attributes. With ``variable_seq_lengths`` sizes may
            change from microbatch to microbatch, on every edge.
        dim_mapping: axes of the modules' outputs, as for `BridgeCommunicator`, with the same default.
        module_output_ndim: axes of each module's output; default 3.
        edges: options of single edges, by (source, destination).
        placements: per module, what the dims of its grid do with tensors at its boundaries, see `boundary_side`.
        stage_placement: per module, the place in its pipeline of each of its stages, where that is not one each:
            ``(0, 1, 0, 1)`` for two chunks on two places.
        backend: as for `BridgeCommunicator`.
        device: as for `BridgeCommunicator`.

    Raises:
        ModuleGraphError: a cycle, an unknown module, a module without a grid.
        StageError: options for an edge that does not exist; a gradient that would have to pass a module without
            backward.
        BridgeError: as `BridgeCommunicator`.
    """

    def recv_forward(self, tensor_shape: Any = None, is_first_stage: bool = False) -> Tensors:
        """The next activations of this rank's modules, by name; no entry for a module that nothing feeds here.

        Args:
            tensor_shape: the shape that is expected inside of modules, or a dict by name for any entry.
            is_first_stage: True on a rank that holds no first stage of the pipeline is an error.
        """
        self._require_verbs(first=is_first_stage)
        with self.batch():
            receiving = self._dicts.receive_forward(tensor_shape)
        return results(receiving)

    def send_forward(self, output_dict: Tensors, is_last_stage: bool = False) -> None:
        """Send the outputs of this rank's modules, by name, to wherever each module's next stage is.

        Args:
            output_dict: module name to tensor. Entries of sinks may stand there; nothing is sent for them.
            is_last_stage: True on a rank that holds no last stage of the pipeline is an error.

        Raises:
            MissingTensorError: no entry for a module that sends here, or one for a module that is not here.
        """
        self._require_verbs(last=is_last_stage)
        with self.batch():
            sending = self._dicts.send_forward(output_dict)
        wait_for(sending)

    def recv_backward(self, tensor_shape: Any = None, is_last_stage: bool = False) -> Tensors:
        """The next gradients of this rank's outputs, by module; the sum where a module feeds several."""
        self._require_verbs(last=is_last_stage)
        with self.batch():
            receiving = self._dicts.receive_backward(tensor_shape)
        return results(receiving)

    def send_backward(self, grad_dict: Tensors, is_first_stage: bool = False) -> None:
        """Send back the gradients of what `recv_forward` gave, under the same names."""
        self._require_verbs(first=is_first_stage)
        with self.batch():
            sending = self._dicts.send_backward(grad_dict)
        wait_for(sending)

    def send_forward_recv_backward(
        self, output_dict: Tensors, tensor_shape: Any = None, is_last_stage: bool = False
    ) -> Tensors:
        """`send_forward` and `recv_backward`, all posted before any is waited for."""
        self._require_verbs(last=is_last_stage)
        with self.batch():
            sending = self._dicts.send_forward(output_dict)
            receiving = self._dicts.receive_backward(tensor_shape)
        received = results(receiving)
        wait_for(sending)
        return received

    def send_backward_recv_forward(
        self, grad_dict: Tensors, tensor_shape: Any = None, is_first_stage: bool = False
    ) -> Tensors:
        """`send_backward` and `recv_forward`, all posted before any is waited for."""
        self._require_verbs(first=is_first_stage)
        with self.batch():
            sending = self._dicts.send_backward(grad_dict)
            receiving = self._dicts.receive_forward(tensor_shape)
        received = results(receiving)
        wait_for(sending)
        return received

    def _require_verbs(self, *, first: bool = False, last: bool = False) -> None:
        self._require_alive()
        as_flag(first, "is_first_stage", error=StageError)
        as_flag(last, "is_last_stage", error=StageError)
        if first and not self.is_pp_first_stage:
            raise StageError(f"is_first_stage=True on rank {self.rank}, which holds no first stage of the pipeline")
        if last and not self.is_pp_last_stage:
            raise StageError(f"is_last_stage=True on rank {self.rank}, which holds no last stage of the pipeline")
        self._dicts.require(self.stage_placement)
