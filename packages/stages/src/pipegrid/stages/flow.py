"""The begin and the end of a forward on a stage, and the payload between stages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.stages.assignment import Assignment
from pipegrid.stages.calls import PIXELS, accepted_by, without_cache
from pipegrid.stages.errors import CutError
from pipegrid.stages.skeleton import Leave, StageRun, first_tensor
from pipegrid.stages.torch_compat import first_parameter, nan_like, tensors_in, tree_map_only

_STATES = ("hidden_states", "attentions")  # outputs with an entry for each layer, of which a stage has its own


class StageFlow:
    """The payload between stages, and the begin and the end of a forward on a stage.

    With one list of layers, a stage sends what its last layer returned; also with several, where the forward takes no
    ``encoder_outputs``. With an encoder and a decoder, stages send that inside the encoder; the encoder's output at its
    end; and both, ``(returned, encoded)``, inside the decoder.
    """

    def __init__(self, whole: nn.Module, assignment: Assignment, number: int) -> None:
        held = assignment.held(number)
        self.whole, self.number, self.last = whole, number, number == assignment.num_stages - 1
        self.before = assignment.before(number)
        self.after = self.before + len(held)
        self.accepted = accepted_by(whole)
        apart = len(assignment.lists) > 1 and "encoder_outputs" in self.accepted  # else all layers are one chain
        self.encoders = len(assignment.lists[0]) if apart else 0
        self.embeds = "inputs_embeds" in self.accepted
        self._parameter: tuple[dict[str, Any], str] | None = None
        self.empty = not held and not self.last and next(whole.parameters(), None) is None
        # The last layer, until its first forward:
        self.leaves = whole.get_submodule(held[-1]) if held and not self.last else None

    def run(self, run: StageRun, received: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward over the parts of the stage."""
        if self.empty:
            return received
        if self.leaves is not None:  # registered this late, the hook sees what those of parallel layers have made
            self.leaves.register_forward_hook(run.pass_on if self.after == self.encoders else run.leave)
            self.leaves = None
        encoded, arrived = self._encoded_of(received) if self.encoders else None, received
        # In place: to what arrived, of which the stage sends some on, or to the batch of other stages.
        if run.needs.writes:
            arrived, args, kwargs = tree_map_only(Tensor, _once(Tensor.clone), (received, args, kwargs))
        run.received, run.entered, run.left = self._hidden_of(arrived) if self.encoders else arrived, False, None
        place = self._parameter
        parameter = None if place is None else place[0].get(place[1])
        run.encoded = encoded
        run.device = self._device((arrived, args, kwargs)) if parameter is None else parameter.device
        if arrived is not None and (self.encoders or self.embeds):
            self._begin(run, arrived, kwargs)
        given = without_cache(self.accepted, kwargs) if "use_cache" in self.accepted else kwargs
        result: Any = None
        hook: Any = None
        try:
            if run.encoded is None and 0 < self.encoders <= self.after and not self.last:
                encoder: Any = self.whole.get_encoder()  # type: ignore[operator]
                hook = encoder.register_forward_hook(run.encode)
            result = self.whole(*args, **given)
        except Leave:
            pass  # the parts that follow are on later stages
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise CutError(
                f"the forward of {type(self.whole).__name__} reads a parameter of another stage: {error}; cut "
                "the model such that all that it uses together is on one stage"
            ) from error
        finally:
            if hook is not None:
                hook.remove()
            left, encoded = run.left, run.encoded
            run.received = run.left = run.encoded = run.device = None
        if self.last:
            return result if received is None or isinstance(result, Tensor) else self._in_place(result)
        if not self.encoders or self.after < self.encoders:
            return left
        return encoded if self.after == self.encoders else (left, encoded)

    def _in_place(self, result: Any) -> Any:
        """The model's output; stand-ins for earlier layers, where it has an entry for each layer that has run."""
        for name, entries in list(result.items()) if isinstance(result, Mapping) and not self.encoders else ():
            if name in _STATES and 0 < len(entries) <= self.after - self.before + 1:
                first = first_tensor(entries)
                result[name] = (nan_like(first, first.device),) * self.before + tuple(entries)
        return result

    def _device(self, given: Any) -> torch.device:
        """The device of the stage: of its first parameter, which may be another now, else of what it is given."""
        self._parameter = first_parameter(self.whole)
        if self._parameter is None:
            return next((tensor.device for tensor in tensors_in(given)), torch.device("cpu"))
        table, key = self._parameter
        device: torch.device = table[key].device
        return device

    def _hidden_of(self, received: Any) -> Any:
        """The result of the layer before; inside the decoder, the encoder's output travels with it."""
        return received[0] if self.encoders and self.before > self.encoders else received

    def _encoded_of(self, received: Any) -> Any:
        """The encoder's output, past the encoder."""
        if received is None or not self.encoders or self.before < self.encoders:
            return None
        return received if self.before == self.encoders else received[1]

    def _begin(self, run: StageRun, received: Any, kwargs: dict[str, Any]) -> None:
        """Replace inputs that parts of earlier stages read; past the encoder, give the encoder's output.

        The ids stay, for what the model's own code reads in them; the embedding on another stage returns a stand-in.
        """
        prefix, encoded = "", self._encoded_of(received)
        if encoded is not None:
            prefix = "decoder_"
            kwargs["encoder_outputs"] = (encoded,)
            if run.needs.encoder is not None:  # it returns a dict
                kind, key = run.needs.encoder
                kwargs["encoder_outputs"] = kind(**{key: encoded})
            if self.before == self.encoders:
                return
        if f"{prefix}inputs_embeds" in self.accepted:
            hidden = first_tensor(self._hidden_of(received))
            for name in () if self.number in run.needs.full else PIXELS:
                kwargs.pop(f"{prefix}{name}", None)
            ids = kwargs.pop(f"{prefix}input_ids", None)
            if ids is not None and (run.needs.longer or ids.numel() == math.prod(hidden.shape[:-1])):
                kwargs[f"{prefix}input_ids"] = ids
                kwargs.pop(f"{prefix}inputs_embeds", None)
            else:
                kwargs[f"{prefix}inputs_embeds"] = run.stand_in(self.embedded(received))

    def embedded(self, received: Any) -> Tensor:
        """A stand-in for the result of the embedding, of a stage that has no ids."""
        hidden = first_tensor(self._hidden_of(received))
        like = hidden.new_empty(()).expand(*hidden.shape[:-1], _width(self.whole) or hidden.shape[-1])
        return nan_like(like, hidden.device)


def _once(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function`` of each tensor; the same tensor in two places stays one."""
    made: dict[int, Tensor] = {}
    return lambda tensor: made[id(tensor)] if id(tensor) in made else made.setdefault(id(tensor), function(tensor))


def _width(whole: nn.Module) -> int | None:
    """The width of the word embedding, which may be another than that of the layers (OPT-350m)."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        width: int = whole.get_input_embeddings().embedding_dim  # type: ignore[operator]
        return width
    return None
