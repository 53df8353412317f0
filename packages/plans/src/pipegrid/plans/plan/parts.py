"""The parts of a plan: steps, groups, the graph of a chain; and the tokens of a written plan.

A *step* is one action, a batch (a tuple) of messages and collectives that are issued together, or a pair (a tuple too)
of a forward and a backward that run together. A *token* is a piece of text that knows its line and column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

from attrs import field, frozen

from pipegrid.core.edge import Edge
from pipegrid.core.fields import Index, Rule, checked, checked_fields, index_of, instance, shown
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError, PlanSyntaxError
from pipegrid.plans.plan.actions import ALONE, COMPUTES, Action, ActionKind, GroupName, parse_action

Step: TypeAlias = Action | tuple[Action, ...]
"""One action, a batch of at least two communications that are issued together, or a pair ``(F, B)`` or ``(F, I)``."""

Text: TypeAlias = Annotated[str, instance(str, "the text itself, such as Path(...).read_text()")]
"""The text of a plan; a path is a common mistake."""


def _places(value: Any) -> tuple[int, ...]:
    try:
        found = [index_of(place) for place in ((value,) if index_of(value) is not None else value)]
    except TypeError:  # no sequence
        found = []
    places = {place for place in found if place is not None and place >= 0}
    if not places or len(places) < len(found):
        raise ValueError
    return tuple(sorted(places))


Places: TypeAlias = Annotated[tuple[int, ...], Rule(_places, "one position from 0, or several, each once")]
"""Positions, ascending."""


def ascending(value: Any) -> Any:
    """The items of ``value`` in ascending order; a value without such an order is left to the check of its field."""
    try:
        return tuple(sorted(value))
    except TypeError:
        return value


@frozen(order=True, field_transformer=checked_fields(PlanError))
class Group:
    """Positions whose ranks communicate collectively.

    Attributes:
        name: unique in the plan.
        positions: of its ranks.
        edges: between stages whose data travels by a ``COLLECTIVE`` of this group, both ways, in place of messages.
        tied: the stages that share a parameter, whose gradients this group reduces.
    """

    name: GroupName
    positions: Places = field(converter=ascending)
    edges: tuple[Edge, ...] = field(converter=ascending, default=())
    tied: tuple[Index, ...] = field(converter=ascending, default=())


def actions_of(step: Step) -> tuple[Action, ...]:
    """The actions of a step: one, or those of the batch or the pair.

    Examples:
        >>> [str(action) for step in lower(one_f_one_b(2, 2)).positions[1] for action in actions_of(step)]
        ['1RECV_F0<0', '1F0', '1B0', '1RECV_F1<0', '1SEND_B0>0', '1F1', '1B1', '1SEND_B1>0']
    """
    return (step,) if isinstance(step, Action) else step


PAIR = r"\(\s*([^\s();]+)\s*;\s*([^\s();]+)\s*\)"  # as text, with its two words


def is_pair(step: Step) -> bool:
    """Whether a step is a pair of computes."""
    return not isinstance(step, Action) and step[0].kind in COMPUTES


def parse_step(token: str) -> Step:
    """Read one action, or a pair as ``(3F7;1B4)``."""
    match = re.fullmatch(PAIR, token)
    return parse_action(token) if match is None else as_step([parse_action(word) for word in match.groups()])


def as_positions(value: Iterable[Iterable[Action | Iterable[Action]]]) -> tuple[tuple[Step, ...], ...]:
    """Per position its steps."""
    try:
        return tuple(tuple([step if type(step) is Action else as_step(step) for step in steps]) for steps in value)
    except TypeError:
        what = f"positions is {shown(value)}; it must be a list with the steps of each position"
        raise PlanError(what, path="positions") from None


_PAIRS = ((ActionKind.F, ActionKind.B), (ActionKind.F, ActionKind.I))


def as_step(step: Action | Iterable[Action], *, paired: bool | None = None) -> Step:
    """An action, a batch or a pair as a step; a batch of one is that action. ``paired``: whether it is to be a pair."""
    batch = step if type(step) is tuple else tuple(step) if isinstance(step, Iterable) else (step,)
    batched = bool(batch)
    for action in batch:  # plans have hundreds of thousands
        if type(action) is not Action:
            raise PlanError(f"step {shown(step)} is neither an Action nor a batch of Actions")
        batched = batched and action.kind not in ALONE
    if len(batch) == 1:
        return batch[0]
    if not (batched and not paired) and (paired is False or tuple([action.kind for action in batch]) not in _PAIRS):
        rule = (
            "messages and collectives are batched, and nothing else; a pair is a forward and a B or I, as in (3F7;1B4)"
        )
        raise PlanError(f"[{' '.join(map(str, batch))}] is no batch; {rule}")
    return batch


def as_placement(value: Iterable[int | Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Per stage its positions, ascending; a single position may be given as an integer."""
    error = partial(PlanError, path="placement")
    placement: tuple[tuple[int, ...], ...] = checked(value, tuple[Places, ...], "placement", error)
    return placement


def stages_on(placement: Iterable[Iterable[int]]) -> dict[int, list[int]]:
    """The stages of each position that holds any, ascending."""
    held: dict[int, list[int]] = {}
    for stage, positions in enumerate(placement):
        for position in positions:
            held.setdefault(position, []).append(stage)
    return held


def module_places(graph: ModuleGraph, placement: Sequence[tuple[int, ...]], module: str) -> tuple[int, ...]:
    """The place of each stage of ``module`` in its pipeline, in their order; ``placement`` is of all of ``graph``."""
    first = graph.stage(module, 0)
    held = placement[first : first + graph.depth(module)]
    order = list(dict.fromkeys(held))
    return tuple([order.index(positions) for positions in held])


def step_text(step: Step) -> str:
    """A step as text: an action's token, the tokens of a batch in brackets, ``(3F7;1B4)`` for a pair."""
    if isinstance(step, Action):
        return str(step)
    return f"({';'.join(map(str, step))})" if is_pair(step) else f"[{' '.join(map(str, step))}]"


_WORD = re.compile(r'(?:"(?:[^"\\]|\\.)*"?|[^\s#"])+|#.*')
_STEP = re.compile(rf"{PAIR}(?:\s*OVERLAP_F_B)?(?!\S)|\[[^\[\]]*\]|[^\s\[\]]+|[\[\]]")
_EDGE = re.compile(r"(\d{1,9})>(\d{1,9})", re.ASCII)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
QUOTED = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
"""A string of JSON."""


@frozen
class Token:
    """A piece of the text and its place; ``called`` names it in errors where its text does not."""

    text: str
    line: int
    column: int
    called: str = ""

    def error(self, expected: str) -> PlanSyntaxError:
        """The error for this token where ``expected`` should be."""
        found = self.called or shown(self.text)
        return PlanSyntaxError(line=self.line, column=self.column, found=found, expected=expected)

    def within(self, text: str, offset: int) -> Token:
        """A part of this token."""
        return Token(text, self.line, self.column + offset)

    def end(self) -> Token:
        """The end of a line whose last token is this one."""
        return Token("", self.line, self.column + len(self.text), "the end of the line")

    def words(self) -> Iterator[Token]:
        """The words of this token, up to a comment; a name in double quotes may hold spaces."""
        for match in _WORD.finditer(self.text):
            if match[0].startswith("#"):
                return
            yield self.within(match[0], match.start())

    def steps(self) -> Iterator[tuple[Token, list[Token]]]:
        """The steps of this token, each with its words: an action, those of a batch in brackets, or of a pair."""
        for match in _STEP.finditer(self.text):
            step = self.within(match[0], match.start())
            if match[1] is not None:
                yield step, [self.within(match[part], match.start(part)) for part in (1, 2)]
            else:
                yield step, [step.within(word[0], word.start()) for word in re.finditer(r"[^\s\[\]]+", match[0])]

    def action(self) -> Action:
        """This token as an action."""
        try:
            return parse_action(self.text)
        except PlanError as error:
            raise self.error(f"an action ({error})") from None


def parse_edge(text: str) -> Edge:
    """An edge between stages such as ``1>2``."""
    match = _EDGE.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise PlanError(f"an edge between stages, such as 1>2, not {text!r}")
    return Edge(int(match[1]), int(match[2]))


def name_text(name: str) -> str:
    """The name of a module as a word of a plan's text: in quotes where it is not a plain word."""
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)


def read_name(text: str) -> str:
    """The name that `name_text` has written."""
    return str(json.loads(text)) if text.startswith('"') else text
