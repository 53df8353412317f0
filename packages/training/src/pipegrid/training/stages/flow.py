"""How a forward begins and ends on a stage, and what is sent between stages."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.schedules.autograd import compiled_modules
from pipegrid.training.errors import CutError
from pipegrid.training.stages.assignment import Assignment
from pipegrid.training.stages.stubs import Leave, Run, blank, first_tensor
from pipegrid.training.stages.torch_compat import tensors_in

_PIXELS = ("pixel_values", "input_features")
"""Inputs of a Hugging Face model that parts before the layers read; later stages have hidden states in their place."""
_STATES = ("hidden_states", "attentions")
"""Outputs with an entry for each layer, of which a stage has those of its own layers."""
_TOGETHER = "cut the model such that all that it uses together is on one stage"
_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


class Flow:
    """What is sent between stages, and how a forward begins and ends on a stage.

    With one list of layers, a stage sends what its last layer returned. With an encoder and a decoder, stages send that
    inside the encoder; the encoder's output at its end; and both, ``(returned, encoded)``, inside the decoder.
    """

    def __init__(self, whole: nn.Module, assignment: Assignment, number: int) -> None:
        held = assignment.held(number)
        self.whole, self.last = whole, number == assignment.num_stages - 1
        self.before = assignment.before(number)
        self.after = self.before + len(held)
        self.encoders = len(assignment.lists[0]) if len(assignment.lists) > 1 else 0
        self.accepted = tuple(inspect.signature(whole.forward).parameters)
        self.empty = not held and not self.last and next(whole.parameters(), None) is None
        self.layers = assignment.layers
        self.several = assignment.num_stages > 1
        # Parameters beside the layers on other stages, of modules that have own parts too:
        self.bare = [name for name in assignment.stage_of_parameter if name in dict(whole.named_buffers())]
        self.proved: set[frozenset[str]] = set()
        # The last layer, until its first forward:
        self.leaves = whole.get_submodule(held[-1]) if held and not self.last else None
        if self.encoders and "encoder_outputs" not in self.accepted:
            raise CutError(f"{type(whole).__name__} has an encoder, and its forward takes no encoder_outputs")

    def run(self, run: Run, received: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward over the parts of the stage."""
        if self.empty:
            return received
        if self.leaves is not None:  # registered this late, the hook sees what those of parallel layers have made
            self.leaves.register_forward_hook(_leaving(run))
            self.leaves = None
        self._require_own_layers_suffice(kwargs)
        encoded = None if received is None else self._begin(run, received, kwargs)
        if "use_cache" in self.accepted:
            kwargs = {"use_cache": False, **kwargs}
        names = frozenset(kwargs)
        if not self.several or names in self.proved:
            return self._forward(run, received, encoded, args, kwargs)
        with self._in_order():
            sent = self._forward(run, received, encoded, args, kwargs)
        self.proved.add(names)
        if _has_nan(sent) and not _has_nan(received) and kwargs.get("past_key_values") is None:
            self._require_no_stand_in(lambda: self._forward(run, received, encoded, args, kwargs), run)
        return sent

    def _forward(self, run: Run, received: Any, encoded: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run.received, run.entered, run.left = self._hidden_of(received), False, None
        catching = (
            _Encoded(self.whole) if encoded is None and 0 < self.encoders <= self.after and not self.last else None
        )
        result: Any = None
        try:
            with contextlib.suppress(Leave):
                result = self.whole(*args, **kwargs)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise CutError(
                f"the forward of {type(self.whole).__name__} reads a parameter of another stage: {error}; {_TOGETHER}"
            ) from error
        finally:
            left, run.received, run.left = run.left, None, None
            if catching is not None:
                catching.remove()
        if self.last:
            return result if received is None else self._in_place(run, result)
        if not self.encoders or self.after < self.encoders:
            return left
        encoded = catching.hidden if catching is not None else encoded
        return encoded if self.after == self.encoders else (left, encoded)

    def _in_place(self, run: Run, result: Any) -> Any:
        """The model's output; stand-ins for earlier layers, where it has an entry for each layer that has run."""
        for name, entries in list(result.items()) if isinstance(result, Mapping) and not self.encoders else ():
            if name in _STATES and 0 < len(entries) <= self.after - self.before + 1:
                first = first_tensor(entries)
                result[name] = (blank(first, first.device, run.stand_in),) * self.before + tuple(entries)
        return result

    def _require_own_layers_suffice(self, kwargs: Mapping[str, Any]) -> None:
        """Raise where the model's own code needs all layers of one forward at one place."""
        config = getattr(self.whole, "config", None)
        if config is None or not self.several:
            return
        configs = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
        for name in _DROPS:
            if self.whole.training and any(getattr(each, name, 0) for each in configs):
                raise CutError(
                    f"{name} of {type(config).__name__} is above 0, and stages do not agree on the layers that "
                    "they leave out; set it to 0"
                )
        if kwargs.get("output_router_logits", any(getattr(each, "output_router_logits", False) for each in configs)):
            raise CutError(
                "output_router_logits is set: the model's loss adds one over the routers of all layers, and the last "
                "stage has those of its own layers; call the stage with output_router_logits=False"
            )
        taps = [each for each in configs if getattr(each, "deepstack_visual_indexes", None)]
        if taps and kwargs.get("pixel_values") is not None:
            raise CutError(
                f"{type(taps[0]).__name__} has deepstack_visual_indexes: the model adds image features between layers, "
                "and later stages do not have them; cut it with all layers on one stage"
            )

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Require that layers run in the order of their lists; compiled ones are not watched."""
        order: list[str] = []
        handles = [
            self.whole.get_submodule(name).register_forward_pre_hook(_noting(order, name))
            for name in (() if compiled_modules(self.whole) else self.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for earlier, later in pairwise(order):
            if self.layers.index(later) < self.layers.index(earlier):
                raise CutError(
                    f"{type(self.whole).__name__} runs {later} after {earlier}; a cut needs layers that run in "
                    "the order of their list"
                )

    def _require_no_stand_in(self, forward: Callable[[], Any], run: Run) -> None:
        """Raise where NaN in the result of a forward are those of a stand-in: with zeros in its place they are gone."""
        try:
            self._stand_in(run, 0.0)
            with torch.no_grad(), torch.random.fork_rng():
                found = _has_nan(forward())
        finally:
            self._stand_in(run, math.nan)
        if not found:
            raise CutError(
                f"the forward of {type(self.whole).__name__} uses more of earlier stages than what the layer before "
                f"has returned: an embedding again, an earlier layer's result, or a parameter; {_TOGETHER}"
            )

    def _stand_in(self, run: Run, value: float) -> None:
        run.stand_in = value
        for name in self.bare:
            parent, _, key = name.rpartition(".")
            before = self.whole.get_buffer(name)
            setattr(self.whole.get_submodule(parent), key, blank(before, before.device, value))

    def _hidden_of(self, received: Any) -> Any:
        """What the layer before has returned; inside the decoder, the encoder's output travels with it."""
        return received[0] if self.encoders and self.before > self.encoders else received

    def _begin(self, run: Run, received: Any, kwargs: dict[str, Any]) -> Any:
        """Replace inputs that parts of earlier stages read; the encoder's output, past the encoder.

        The ids stay, for what the model's own code reads in them; the embedding on another stage returns a stand-in.
        """
        prefix, encoded = "", None
        if self.encoders and self.before >= self.encoders:
            prefix = "decoder_"
            encoded = received if self.before == self.encoders else received[1]
            kwargs["encoder_outputs"] = (encoded,)
            if self.before == self.encoders:
                return encoded
        if f"{prefix}inputs_embeds" in self.accepted:
            hidden = first_tensor(self._hidden_of(received))
            for name in _PIXELS:
                kwargs.pop(f"{prefix}{name}", None)
            ids = kwargs.pop(f"{prefix}input_ids", None)
            if ids is not None and ids.numel() == math.prod(hidden.shape[:-1]):
                kwargs[f"{prefix}input_ids"] = ids
                kwargs.pop(f"{prefix}inputs_embeds", None)
            else:
                like = hidden.new_empty(()).expand(*hidden.shape[:-1], _width(self.whole) or hidden.shape[-1])
                kwargs[f"{prefix}inputs_embeds"] = blank(like, hidden.device, run.stand_in)
        return encoded


def _width(whole: nn.Module) -> int | None:
    """The width of the word embedding, which may be another than that of the layers (OPT-350m)."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        width: int = whole.get_input_embeddings().embedding_dim  # type: ignore[operator]
        return width
    return None


def _has_nan(value: Any) -> bool:
    """Whether a payload, or the output of a model, has NaN; not in outputs with an entry for each layer."""
    if isinstance(value, Mapping):
        value = [entry for key, entry in value.items() if not str(key).endswith(_STATES)]
    return any(bool(leaf.isnan().any()) for leaf in tensors_in(value) if leaf.is_floating_point())


def _noting(order: list[str], name: str) -> Callable[[nn.Module, Any], None]:
    def hook(layer: nn.Module, args: Any) -> None:
        del layer, args
        order.append(name)

    return hook


def _leaving(run: Run) -> Callable[[nn.Module, Any, Any], None]:
    def hook(layer: nn.Module, args: Any, result: Any) -> None:
        del layer, args
        run.left = result

    return hook


class _Encoded:
    """The output of the encoder in the running forward."""

    def __init__(self, whole: nn.Module) -> None:
        self.hidden: Tensor | None = None
        self._handle = whole.get_encoder().register_forward_hook(self._hook)  # type: ignore[operator]

    def _hook(self, encoder: nn.Module, args: Any, result: Any) -> None:
        del encoder, args
        self.hidden = result[0]

    def remove(self) -> None:
        """End watching."""
        self._handle.remove()
