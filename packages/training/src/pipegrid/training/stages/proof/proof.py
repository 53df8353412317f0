"""The proof of a cut: what crosses each boundary of a layout, from one traced forward of the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.training.errors import CutError, few
from pipegrid.training.stages.assignment import ELSEWHERE, Assignment, as_layout, assign, joined
from pipegrid.training.stages.building.build import whole_of
from pipegrid.training.stages.calls import accepted_by, called_with, without_cache
from pipegrid.training.stages.names import Names
from pipegrid.training.stages.proof.crossing import Crossing, crossings, place, returned
from pipegrid.training.stages.proof.trace import Forward, trace
from pipegrid.training.stages.proof.traced import Operation
from pipegrid.training.stages.tree import meta_copy

_NOTHING = Operation("", "", "", 0)


@frozen
class Boundary:
    """Where one stage ends and the next begins.

    Attributes:
        stage: the number of the stage behind it.
        after: the layer before it; "" before the first layer.
        sent: shape and dtype of each tensor that the stage before sends.
        nbytes: of these.
        crossing: the values that cross it besides.
    """

    stage: int
    after: str
    sent: tuple[str, ...]
    nbytes: int
    crossing: tuple[Crossing, ...]

    def __str__(self) -> str:
        """One line, and one more for each value that crosses besides."""
        where = f"after {self.after}" if self.after else "before the first layer"
        besides = "".join(f"\n    and {one}" for one in self.crossing)
        return f"stage {self.stage}, {where}: {', '.join(self.sent) or 'nothing'}, {_size(self.nbytes)}{besides}"


@frozen
class CutProof:
    """What crosses the boundaries of a cut.

    Attributes:
        layout: in its short form.
        boundaries: one per stage but the first.
        faults: what else makes stages differ from the whole model, in words: layers out of order, parameters used on a
            stage that does not hold them.
        unproved: what the trace could not decide, in words; `check_stages` compares numbers.
        alone: the layers after which the layout may end a stage: the hidden states alone cross there.
        asked: what the model is asked for besides, by its config or the call, such as ``output_router_logits``.
    """

    layout: str
    boundaries: tuple[Boundary, ...]
    faults: tuple[str, ...]
    unproved: tuple[str, ...]
    alone: tuple[str, ...]
    asked: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the stages compute what the whole model computes."""
        return not self.faults and not self.unproved and not any(one.crossing for one in self.boundaries)

    def require(self) -> None:
        """Raise where the stages compute something else than the whole model.

        Raises:
            CutError: names the value, where it is made, and where it is used.
        """
        values = dict.fromkeys(str(value) for one in self.boundaries for value in one.crossing)
        faults = [*self.faults, *values]
        if faults:
            ends = f"A stage may end after {_named(self.alone)}; " if self.alone else ""
            ends += f"without {' and '.join(self.asked)} there may be less to send; " if self.asked else ""
            raise CutError(
                f"the stages of layout {self.layout} would not compute what the model computes; a stage has what the "
                "layer before it returned, and what it makes from the batch:\n  "
                + "\n  ".join(few(faults))
                + f"\n{ends}print(prove_cut(model, layout, batch)) shows all"
            )

    def __str__(self) -> str:
        """A line per boundary, then what is wrong."""
        verdict = "proved" if self.holds else "not proved"
        return "\n  ".join([f"{self.layout}: {verdict}", *map(str, self.boundaries), *self.faults, *self.unproved])


def prove_cut(
    model: nn.Module | Callable[[], nn.Module],
    layout: str | PipelineParallelLayerLayout,
    batch: Any,
    *,
    names: Names | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> CutProof:
    """Show what crosses the boundaries of a cut: run the whole model once, on shapes.

    Values that depend on a parameter have a shape and no memory; values that the batch alone determines are computed.

    Args:
        model: the whole model, or a function that makes it.
        layout: as in `pipeline_stage`.
        batch: what the model is called with: a dict of arguments by name, or a tuple of positional ones.
        names: as in `pipeline_stage`.
        loss: of what the model returns; None where the model returns its loss, or the loss reads the last layers alone.

    Raises:
        CutError: layers not found, a layout that does not fit, or a model whose code cannot run on shapes.
    """
    whole, layout = whole_of(model), as_layout(layout)
    assignment = assign(whole, layout, names)
    args, kwargs = called_with(batch)
    proof, _ = proof_of(meta_copy(whole, buffers=False), assignment, layout.short_text(), args, kwargs, loss=loss)
    return proof


def proof_of(
    whole: nn.Module,
    assignment: Assignment,
    layout: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    hidden: Mapping[str, Tensor] = MappingProxyType({}),
    dropped: Sequence[str] = (),
    loss: Callable[[Any], Any] | None = None,
) -> tuple[CutProof, tuple[str, ...]]:
    """The proof of an assignment for a call of a model, and what of its result the last stage cannot make, by place.

    Args:
        whole: made by `meta_copy`.
        assignment: of the model.
        layout: in its short form.
        args: of the call.
        kwargs: of the call.
        hidden: more of these, which stand for the result of the embedding.
        dropped: names of arguments that stages behind the first are not called with.
        loss: of what the model returns.
    """
    encoder, layers = _encoder(whole, assignment), assignment.layers
    kwargs = without_cache(accepted_by(whole), kwargs)
    given = {name: value for name, value in kwargs.items() if name not in dropped}
    compared = len(given) < len(kwargs) and not encoder

    def traced(kwargs: Mapping[str, Any]) -> Forward:
        return trace(
            whole,
            layers=layers,
            parts=tuple(_parts(whole, "", assignment)),
            encoder=encoder,
            args=args,
            kwargs=kwargs,
            hidden=hidden,
            loss=loss,
            compared=compared,
        )

    try:
        forward = traced(kwargs)
        other = traced(given) if compared else forward
    except Exception as error:  # noqa: BLE001 -- the model's code met tensors without values: any kind
        text = next(iter(str(error).splitlines()), "")
        return CutProof(layout, (), (), (f"the model does not run on shapes: {type(error).__name__}: {text}",), ()), ()
    wrong = _order(forward, layers)
    if wrong:
        return CutProof(layout, (), (wrong,), (), ()), ()
    found = crossings(forward, layers[0], None if encoder is None else encoder[1])
    places = {stage: assignment.before(stage) for stage in range(1, assignment.num_stages)}
    proof = CutProof(
        layout,
        tuple(_boundary(stage, at, layers, forward, found[at]) for stage, at in places.items()),
        (
            *_parameters(forward, assignment),
            *_changed(forward, other, sorted(kwargs.keys() - given), places.get(1, len(layers) + 1)),
        ),
        tuple(f"a value that the batch does not determine is read {place(one)}" for one in _by_line(forward.guesses)),
        tuple(layer for number, layer in enumerate(layers[:-1], start=1) if not found[number]),
        _asked(whole, kwargs),
    )
    missing = returned(forward, places[assignment.num_stages - 1]) if places else {}
    return proof, tuple(missing)


def _changed(forward: Forward, other: Forward, dropped: Sequence[str], first: int) -> Iterator[str]:
    """What is computed in another way behind boundary ``first`` where arguments are dropped."""
    pairs = zip_longest(_behind(forward, first), _behind(other, first), fillvalue=(_NOTHING, ()))
    for (one, values), (there, others) in pairs:
        if (one.name, one.passed, values) != (there.name, there.passed, others):
            changed = place(there if one is _NOTHING else one)
            missing = " and ".join(dropped)
            yield f"stages behind the first have no {missing}, without which other code runs, first {changed}"
            return


def _behind(forward: Forward, first: int) -> list[tuple[Operation, tuple[int, ...]]]:
    return [(one, values) for one, values in forward.behind or () if one.passed > first]


def _boundary(stage: int, at: int, layers: Sequence[str], forward: Forward, crossing: Sequence[Crossing]) -> Boundary:
    sent = forward.sent[at]
    texts = tuple(f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in sent)
    return Boundary(stage, layers[at - 1] if at else "", texts, sum(one.nbytes for one in sent), tuple(crossing))


def _order(forward: Forward, layers: Sequence[str]) -> str:
    """What is wrong with the order of the layers; "" if nothing is."""
    if forward.order == list(range(len(layers))):
        return ""
    ran = [layers[number] for number in forward.order]
    missing = [layer for layer in layers if layer not in ran]
    twice = [layer for layer in layers if ran.count(layer) > 1]
    if missing or twice:
        return f"each layer runs once; twice ran {_named(twice)}, not at all {_named(missing)}"
    return f"layers run in the order {', '.join(ran[:8])}, and the list has them in another"


def _parameters(forward: Forward, assignment: Assignment) -> Iterator[str]:
    """Parameters used on stages that do not hold them."""
    tied = {name: set(tie.stages) for tie in assignment.ties for name in (tie.name, *tie.names)}
    for name, uses in forward.parameters.items():
        holders = tied.get(name, {assignment.stage_of_parameter[name]})
        found = [(use, *_running(use.passed, assignment)) for use in uses if id(use) in forward.live]
        wrong = [(use, first) for use, first, last in found if not any(first <= one <= last for one in holders)]
        if not wrong or ELSEWHERE in holders:
            continue
        use, stage = wrong[0]
        moved = "" if len(wrong) < len(found) else f"; name its module in Names({'head' if stage else 'embedding'}=...)"
        yield f"{name} is on stage {min(holders)}, and stage {stage} uses it {place(use)}{moved}"


def _running(passed: int, assignment: Assignment) -> tuple[int, int]:
    """The first and the last stage that may run what runs when so many boundaries are passed."""
    layers, stages = assignment.layers, assignment.stage_of_layer
    if passed == 0:
        return 0, stages[layers[0]]
    if passed > len(layers):  # a stage that is not the last ends with its last layer
        return min(stages[layers[-1]] + 1, assignment.num_stages - 1), assignment.num_stages - 1
    return stages[layers[passed - 1]], stages[layers[passed - 1]]


def _parts(part: nn.Module, path: str, assignment: Assignment) -> Iterator[str]:
    """The outermost submodules beside the layers that belong to one stage."""
    if path in assignment.stage_of_layer:
        return
    owners = assignment.owners(path)
    if not assignment.has_layers(path) and len(owners) <= 1:
        if owners:
            yield path
        return
    for key, child in part.named_children():
        yield from _parts(child, joined(path, key), assignment)


def _encoder(whole: nn.Module, assignment: Assignment) -> tuple[str, int] | None:
    """The dotted name of the encoder and its number of layers, of a model with a decoder as well."""
    if len(assignment.lists) < 2:
        return None
    encoder = whole.get_encoder()  # type: ignore[operator]
    name = next(name for name, module in whole.named_modules() if module is encoder)
    return name, len(assignment.lists[0])


def _asked(whole: nn.Module, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The outputs that a Hugging Face model is asked for."""
    config = vars(whole.config) if hasattr(getattr(whole, "config", None), "to_dict") else {}
    return tuple(f"{name}=True" for name, value in {**config, **kwargs}.items() if name.startswith("output_") and value)


def _by_line(guesses: Sequence[Any]) -> list[Any]:
    return list({one.line: one for one in guesses}.values())


def _named(names: Sequence[str]) -> str:
    if len(names) > 6:
        return f"{', '.join(names[:3])} ... {', '.join(names[-2:])}"
    return ", ".join(names) or "none"


def _size(nbytes: float) -> str:
    unit = min(int(math.log(max(nbytes, 1), 1024)), 3)
    return f"{nbytes / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
