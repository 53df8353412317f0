"""The proof of a cut: what crosses each boundary of a layout, from one traced forward of the whole model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.stages.assignment import ELSEWHERE, Assignment, as_layout, assign
from pipegrid.stages.building.build import whole_of
from pipegrid.stages.calls import accepted_by, called_with, dropped_by, without_cache
from pipegrid.stages.errors import CutError
from pipegrid.stages.host_state import HostState
from pipegrid.stages.names import Names
from pipegrid.stages.proof.boundaries import Boundary, Crossing, CutProof, Skip, named
from pipegrid.stages.proof.outline import Outline
from pipegrid.stages.proof.segments import difference
from pipegrid.stages.proof.skipping import Crossings, crossing, crossings_of, elsewhere, holders_of, is_there
from pipegrid.stages.proof.trace import ModelCall, Trace, trace, traces
from pipegrid.stages.proof.traced import Operation, Traced, ended_traces
from pipegrid.stages.skeleton import Needs
from pipegrid.stages.skips import Skips
from pipegrid.stages.torch_compat import mapped_by_place, meta_copy, named_leaves, tree_leaves

COMPARED = 100_000_000  # parameters of the largest model that is compared in numbers where its cut is not proved
_NOTHING = Operation("", "", "", 0)


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

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        >>> prove_cut(model, "t|t", (torch.ones(2, 4),), names=Names("0"), loss=torch.sum).faults
        ()
    """
    whole, layout = whole_of(model), as_layout(layout)
    assignment = assign(whole, layout, names)
    args, kwargs = called_with(batch)
    outline = Outline(meta_copy(whole, buffers=False), assignment, layout.short_text())
    return proof_of(outline, ModelCall(args, kwargs, loss=loss), dropped_by(whole))[0]


def proof_of(outline: Outline, call: ModelCall, dropped: Sequence[str]) -> tuple[CutProof, Needs]:
    """The proof of a cut for a call of the model, and what stages need to know of the call.

    ``dropped``: names of arguments that stages behind the first are not called with.
    """
    call = evolve(call, kwargs=without_cache(accepted_by(outline.model), call.kwargs))
    host = HostState(outline.model)
    try:
        with ended_traces():
            return _proof_of(outline, call, host, dropped)
    finally:
        host.restore()  # no trace of the runs is left


def _proof_of(outline: Outline, call: ModelCall, host: HostState, dropped: Sequence[str]) -> tuple[CutProof, Needs]:
    assignment, layers, layout = outline.assignment, outline.assignment.layers, outline.layout
    kwargs = call.kwargs
    given = {name: value for name, value in kwargs.items() if name not in dropped}
    compared = len(given) < len(kwargs) and not outline.encoder
    try:
        forward = first = trace(outline, call, compared=compared)
        runs = traces(outline, call, host, first)
        if any(one.cell.known for one in first.crossing):  # what a module keeps, such as a table, a stage makes itself
            forward = runs[1] if runs[1:] else trace(outline, call)
        if compared:
            host.restore()
        other = trace(outline, evolve(call, kwargs=given), compared=True) if compared else first
    except Exception as error:  # noqa: BLE001 -- the model's code met tensors without values: any kind
        text = next(iter(str(error).splitlines()), "")
        unproved = f"the model does not run on shapes: {type(error).__name__}: {text}"
        return CutProof(layout, (), (), (unproved,), ()), Needs()
    order = _order(forward, layers)
    wrong = _drawn(forward, order) or order
    if wrong:
        return CutProof(layout, (), (wrong,), (), ()), Needs()
    places = {stage: assignment.before(stage) for stage in range(1, assignment.num_stages)}
    crossed = crossings_of(forward, outline, {*places.values()})
    changed = _changed(first, other, places) if compared else {}
    lacking = crossings_of(other, outline, {*places.values()}) if changed else crossed
    # Called without these arguments, such a stage has another number of values than come to it, which is an error.
    full = frozenset(stage for stage in changed if crossed.coming(stage) != lacking.coming(stage))
    every, found = _crossings(forward, outline), _crossings(forward, outline, crossed.left)
    skips = crossed.skips if crossed.skips.uses else None
    boundaries = []
    for stage, at in places.items():
        sent = forward.sent[at]
        texts = tuple(f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in sent)
        after = layers[at - 1] if at else ""
        boundaries.append(Boundary(stage, after, texts, sum(one.nbytes for one in sent), tuple(found[at])))
    missing = " and ".join(sorted(kwargs.keys() - given))
    otherwise = f"stages behind the first have no {missing}, without which other code runs, first"
    faults = (
        *_parameters(forward, assignment, crossed.parameters),
        *_split(forward),
        *_drawn_by_host(forward),
        *(f"{otherwise} {place(differs)}" for stage, differs in changed.items() if stage not in full),
    )
    guesses = {one.line: one for one in forward.guesses}.values()
    proof = CutProof(
        layout,
        tuple(boundaries),
        faults,
        tuple(f"a value that the batch does not determine is read {place(one)}" for one in guesses),
        tuple(layer for number, layer in enumerate(layers[:-1], start=1) if not every[number]),
        outline.asked(kwargs),
        tuple(_handed_on(crossed)),
    )
    needs = Needs(
        tuple(_missing(forward, outline, places[assignment.num_stages - 1], crossed.skips)) if places else (),
        any(one.writes for one in runs),
        frozenset(stage for stage, at in places.items() if at in forward.dicts),
        forward.encoder,
        _longer(forward, kwargs.get("input_ids")),
        skips,
        full,
        _beside(forward, assignment),
    )
    if skips is not None:
        host.restore()
        call = evolve(call, skips=frozenset(skips.uses))
        runs = traces(outline, call, host)
    if places and not proof.faults and not any(one.crossing for one in boundaries):
        other_way = difference(outline, call, runs, host, needs)
        proof = evolve(proof, faults=(other_way,)) if other_way else proof
    return proof, needs


def place(operation: Operation) -> str:
    """The place of an operation, in words."""
    name = operation.name.removeprefix("aten.").partition(".")[0]
    return f"by {name} in {operation.part or 'the model'} ({operation.line})"


def _crossings(
    forward: Trace, outline: Outline, among: AbstractSet[tuple[int, int]] | None = None
) -> Mapping[int, Sequence[Crossing]]:
    """Per boundary, the values that cross it and are not sent there; those of ``among`` alone, if that is given.

    The first layer alone takes what arrives before it; the model's own code has a stand-in there. What is sent at the
    end of an encoder, later boundaries send as well.
    """
    found: dict[int, dict[tuple[int, str], Crossing]] = {boundary: {} for boundary in range(forward.passed)}
    for tensor, made, used, boundary in crossing(forward, outline):
        if among is None or (id(made), id(used)) in among:
            # Of what a part has made the part is named, of the model's own code the line.
            value = Crossing(tuple(tensor.shape), str(tensor.dtype), tensor.nbytes, f"made {place(made)}", place(used))
            found[boundary].setdefault((id(made), used.line), value)
    return {boundary: tuple(values.values()) for boundary, values in found.items()}


def _split(forward: Trace) -> Iterator[str]:
    """The first write in place to memory that a stage receives in two places."""
    for operation in forward.split:
        if id(operation) in forward.live:
            yield f"what a stage sends twice as one tensor is two on the next one, and is written {place(operation)}"
            return


def _drawn_by_host(forward: Trace) -> Iterator[str]:
    if forward.host_drew:
        yield (
            f"the model draws from Python's or numpy's random generator between its layers ({forward.host_drew}), and "
            "each stage draws other numbers"
        )


def _handed_on(crossed: Crossings) -> Iterator[Skip]:
    for value, uses in crossed.skips.uses.items():
        one = crossed.tensors[value]
        yield Skip(
            source=uses.source,
            users=uses.users,
            held=uses.held,
            value=str(value),
            shape=tuple(one.shape),
            dtype=str(one.dtype),
            nbytes=one.nbytes,
        )


def _longer(forward: Trace, ids: Any) -> bool:
    """Whether the first layer takes other tokens than those of the ids."""
    hidden = forward.sent[0][:1]
    return isinstance(ids, Tensor) and any(math.prod(one.shape[:-1]) != ids.numel() for one in hidden)


def _missing(forward: Trace, outline: Outline, boundary: int, skips: Skips) -> Iterator[str]:
    """The places in the forward's result of what a stage behind ``boundary`` cannot make."""
    sent, last = forward.sent[boundary], outline.assignment.num_stages - 1
    if outline.encoder is not None and boundary > outline.encoder[1]:
        sent = sent + forward.sent[outline.encoder[1]]
    for path, leaf in named_leaves(forward.result):
        early = isinstance(leaf, Traced) and leaf.cell.placed and leaf.made.passed <= boundary
        if not early or any(leaf is one for one in sent):
            continue
        if not (skips.uses and is_there(forward, outline, skips, leaf, last)):
            yield path


def _changed(forward: Trace, other: Trace, places: Mapping[int, int]) -> dict[int, Operation]:
    """The stages behind the first that compute in another way without some arguments, each with what differs first."""
    found: dict[int, Operation] = {}
    for stage, before in places.items():
        after = places.get(stage + 1, math.inf)
        behind = ([each for each in run.behind or () if before < each[0].passed <= after] for run in (forward, other))
        for (one, values), (there, others) in zip_longest(*behind, fillvalue=(_NOTHING, ())):
            if (one.name, one.passed, values) != (there.name, there.passed, others):
                found[stage] = there if one is _NOTHING else one
                break
    return found


def _drawn(forward: Trace, order: str) -> str:
    """A decision of the model behind its first layer by random numbers, or in place of layers; "" if there is none."""
    for read in forward.draws:
        if order or read.passed:
            return (
                f"a random number is read {place(read)}: stages draw others, and do not agree on what it decides; set "
                "layerdrop to 0"
            )
    return ""


def _order(forward: Trace, layers: Sequence[str]) -> str:
    """The fault in the order of the layers; "" if there is none."""
    if forward.order == list(range(len(layers))):
        return ""
    ran = [layers[number] for number in forward.order]
    missing = [layer for layer in layers if layer not in ran]
    twice = [layer for layer in layers if ran.count(layer) > 1]
    if missing or twice:
        return f"each layer runs once; twice ran {named(twice)}, not at all {named(missing)}"
    return f"layers run in the order {', '.join(ran[:8])}, and the list has them in another"


def _parameters(forward: Trace, assignment: Assignment, handed_on: AbstractSet[tuple[str, int]]) -> Iterator[str]:
    """Parameters used on stages that do not hold them, and to which they are not handed on.

    Where a part of a later stage runs between layers, and no stage before that sends what depends on it, it is used on
    its own stage, which does all of the model's own code: a head of several predictions.
    """
    for name, uses in elsewhere(forward, assignment).items():
        holders = holders_of(name, assignment)
        reached = [stage for one, stage in handed_on if one == name]
        wrong = [
            (use, first)
            for use, first in uses
            if not any(first <= stage for stage in reached)
            and not (first < min(holders) and not _is_sent(forward, assignment, use, first, min(holders)))
        ]
        if not wrong or ELSEWHERE in holders:
            continue
        use, stage = wrong[0]
        every = sum(id(one) in forward.live for one in forward.parameters[name])
        moved = "" if len(wrong) < every else f"; name its module in Names({'head' if stage else 'embedding'}=...)"
        yield f"{name} is on stage {min(holders)}, and stage {stage} uses it {place(use)}{moved}"


def _beside(forward: Trace, assignment: Assignment) -> frozenset[str]:
    """The parts that run between layers, such as norms in a list, or after them on a stage that does not hold them."""
    last = len(assignment.layers)
    behind = {use.part for uses in forward.parameters.values() for use in uses if 0 < use.passed <= last}
    return frozenset(behind | {use.part for uses in elsewhere(forward, assignment).values() for use, _ in uses})


def _is_sent(forward: Trace, assignment: Assignment, use: Operation, first: int, holder: int) -> bool:
    """Whether what a stage from ``first`` to ``holder`` receives depends on ``use``."""
    sent = [one for stage in range(first + 1, holder + 1) for one in forward.sent[assignment.before(stage)]]
    return any(one is use for one in forward.behind_of(sent, use.passed))


class Proofs:
    """Proofs of a cut, which its stages share, by what calls are made of: names, dtypes, None or not, flags."""

    def __init__(self, model: nn.Module, assignment: Assignment, layout: str) -> None:
        self.outline = Outline(meta_copy(model, buffers=False), assignment, layout)
        self._dropped = dropped_by(model)
        self._found: dict[object, tuple[CutProof, Needs]] = {}
        self._held: dict[object, Needs] = {}  # of calls whose proof holds

    @property
    def skips(self) -> tuple[Skips, ...]:
        """The values that stages hand on past others, of the calls that have been proved."""
        return tuple([needs.skips for _, needs in self._found.values() if needs.skips is not None])

    @property
    def handing_on(self) -> tuple[CutProof, ...]:
        """The proofs of calls in which stages hand on values past others, each once."""
        return tuple({proof.skips: proof for proof, _ in self._found.values() if proof.skips}.values())

    def require(
        self,
        stage: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        hidden: Tensor | None,
        comparison: Callable[[], Callable[[], None] | None] | None = None,
    ) -> Needs:
        """Prove a call of ``stage``, by the arguments of the whole model, unless one like it has been.

        What cannot be proved, a warning says; numbers decide it where a model is small (`COMPARED`): ``comparison`` is
        asked for what compares loss and gradients with those of the whole model, None: not on this stage. ``hidden``
        stands for the result of the embedding, of a stage that is called without the ids.

        Raises CutError where more than what stages send crosses a boundary, a stage computes in another way than the
        model, or the numbers differ.
        """
        key = _key(stage, args, kwargs, hidden)
        if key in self._held:
            return self._held[key]
        known = len(self._found)
        proof, needs = self.found(stage, args, kwargs, hidden)
        if proof.holds:
            self._held[key] = needs
        else:
            proof.require()
            if len(self._found) > known:
                compare = None if comparison is None else comparison()
                size = sum(one.numel() for one in self.outline.model.parameters())
                compared = compare is not None and size <= COMPARED
                by_itself = f"{size:,} parameters; without being asked at most {COMPARED:,}"
                what = (
                    "Stage 0 compares loss and gradients of this microbatch with those of the whole model "
                    f"({by_itself}); PipelineConfig(check=False) leaves that out"
                    if compared
                    else "check_stages, or PipelineConfig(check=True), compares loss and gradients with those of the "
                    f"whole model ({by_itself})"
                )
                warnings.warn(
                    f"layout {self.outline.layout} is not proved: {'; '.join(proof.unproved)}. {what}", stacklevel=4
                )
                if compared and compare is not None:
                    compare()
        return needs

    def found(
        self, stage: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], hidden: Tensor | None = None
    ) -> tuple[CutProof, Needs]:
        """The proof of a call, which may not hold, and what `require` returns. Arguments as there."""
        key = _key(stage, args, kwargs, hidden)
        if key not in self._found:
            self.outline.take_modes(stage)
            self.outline.require_no_layerdrop()
            embedded = {} if hidden is None else {"inputs_embeds": hidden}
            self._found[key] = proof_of(self.outline, ModelCall(args, kwargs, embedded), self._dropped)
        return self._found[key]


def _key(stage: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], hidden: Tensor | None) -> object:
    """The parts of a call that may change the operations of a forward."""
    given = []
    for name, one in kwargs.items():  # most are tensors
        given.append((name, (one.dtype, one.dim()) if isinstance(one, Tensor) else _kind(one)))
    return stage.training, hidden is None, *map(_kind, args), *sorted(given, key=itemgetter(0))


def _kind(value: Any) -> object:
    """The part of an argument that may change the operations of a forward."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


_HAS_GRADIENT: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Absent(Tensor):
    """Stands for what the model returns and another stage makes."""

    place: str

    @staticmethod
    def at(place: str) -> Absent:
        """The stand-in for one place of the output."""
        made = torch.empty(()).as_subclass(Absent)
        made.place = place
        return made

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise: the value is not here. It has no gradient, which FSDP2 asks of all that a stage returns."""
        if func == _HAS_GRADIENT:
            return False
        place = next(one.place for one in tree_leaves((args, kwargs)) if isinstance(one, Absent))
        raise CutError(f"output{place} of the model is made on an earlier stage, and is used on the last one")


def without(result: Any, places: Sequence[str]) -> Any:
    """The model's output on the last stage, with stand-ins at ``places``."""
    return mapped_by_place(lambda place, leaf: Absent.at(place) if place in places else leaf, result)
