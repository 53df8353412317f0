"""Routes as text and as JSON.

The text has one line per part, of which only ``units`` is always there; lines of the same words stand in the header of
a routed plan::

    units 4 4
    dead 1@1
    move 1 0@1>0 1@1>0 2@1>0 3@1>0
    skip images 2@0
    every images 2

That is: two replicas of 4 microbatches; position 1 of replica 1 is dead; stage 1 of the units of replica 1 is computed
by replica 0; microbatch 2 of replica 0 has no image; a call of the module ``images`` serves 2 units.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from attrs import define, field

from pipegrid.core.fields import checked, shown
from pipegrid.core.strict_json import read_json
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan.parts import QUOTED, Text, Token, read_name
from pipegrid.plans.plan.routes import Actor, Move, Routes

_AT = r"(\d{1,9})@(\d{1,9})"
_NUMBER = re.compile(r"(\d{1,9})", re.ASCII)
_PAIR = re.compile(_AT, re.ASCII)
_MOVE = re.compile(rf"{_AT}>(\d{{1,9}})", re.ASCII)
_MODULE = re.compile(rf'({QUOTED}|[^"]+)', re.ASCII)
LINES = {  # per keyword: the form of its first word and of the others, and how an error describes each
    "units": 2 * (_NUMBER, "a number of units"),
    "dead": 2 * (_PAIR, "an actor as position@replica, such as 1@0"),
    "move": (_NUMBER, "a stage", _MOVE, "a unit and the replica it goes to, such as 3@1>0"),
    "skip": (_MODULE, "a module", _PAIR, "a unit as microbatch@replica, such as 3@1"),
    "every": (_MODULE, "a module", _NUMBER, "the units of a call"),
}
_FIELDS = {"units": "units", "dead": "dead", "move": "moves", "skip": "skips", "every": "every"}


@define
class RoutesReader:
    """The lines of written routes, gathered one by one, each as the matches of its words; ``lines``: their numbers."""

    words: dict[str, list[tuple[re.Match[str], list[re.Match[str]]]]] = field(factory=dict)
    lines: dict[str, int] = field(factory=dict)

    def add(self, key: Token, words: list[Token]) -> None:
        """Take a line of which the first word is one of `LINES`."""
        kind = key.text
        if kind in ("units", "dead") and kind in self.words:
            raise key.error(f"one line of {kind}")
        first, what, other, others = LINES[kind]
        matches = []
        for index, word in enumerate(words):
            match = (other if index else first).fullmatch(word.text)
            if match is None:
                raise word.error(f"{others if index else what}, after {kind!r}")
            matches.append(match)
        least, most = {"units": (1, None), "dead": (1, None), "every": (2, 2)}.get(kind, (2, None))
        if len(words) < least:
            raise key.end().error(f"{others if words else what}, after {kind!r}")
        if most is not None and len(words) > most:
            raise words[most].error("the end of the line")
        self.lines.setdefault(f"routes.{_FIELDS[kind]}", key.line)
        self.words.setdefault(kind, []).append((matches[0], matches[1:]))

    def routes(self) -> Routes | None:
        """The routes; None without any line."""
        if not self.words:
            return None
        if "units" not in self.words:
            raise PlanError("there are routes and no line of units, such as: units 4 4", path="routes.units")
        ((first, rest),) = self.words["units"]
        plain = Routes([int(match[1]) for match in (first, *rest)])

        def unit(match: re.Match[str]) -> int:
            return plain.unit(int(match[2]), int(match[1]))

        moved = [(stage, word) for stage, words in self.words.get("move", ()) for word in words]
        moves = [Move(int(stage[1]), unit(word), int(word[3])) for stage, word in moved]
        skips: dict[str, list[int]] = defaultdict(list)
        for name, words in self.words.get("skip", ()):
            skips[read_name(name[1])] += map(unit, words)
        every: dict[str, int] = {}
        for name, (word,) in self.words.get("every", ()):
            module, count = read_name(name[1]), int(word[1])
            if every.setdefault(module, count) != count:
                raise PlanError(f"every {module!r} is {every[module]} and {count}; give one", path="routes.every")
        dead = [match for first, rest in self.words.get("dead", ()) for match in (first, *rest)]
        actors = [Actor(int(match[1]), int(match[2])) for match in dead]
        return Routes(plain.units, moves=moves, skips=skips, every=every, dead=actors)


def routes_from_text(text: str) -> Routes:
    """Read routes from ``str(routes)``, or written by hand.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: a number is out of range.
    """
    reader = RoutesReader()
    lines = checked(text, Text, "text", PlanError).splitlines()
    for number, line in enumerate(lines, start=1):
        words = list(Token(line, number, 1).words())
        if words and words[0].text not in LINES:
            raise words[0].error(f"a line of {', '.join(LINES)}")
        if words:
            reader.add(words[0], words[1:])
    routes = reader.routes()
    if routes is None:
        raise Token("", len(lines) + 1, 1, "the end").error("a line of units, such as: units 4 4")
    return routes


def routes_document(routes: Routes) -> dict[str, Any]:
    """Routes as an object of JSON: ``{"units": [4, 4], "moves": {"1": {"0@1": 0}}, ...}``."""
    moves: dict[str, dict[str, int]] = {}
    for move in routes.moves:
        moves.setdefault(str(move.stage), {})[routes.name(move.unit)] = move.replica
    parts: dict[str, Any] = {
        "dead": [*map(str, routes.dead)],
        "moves": moves,
        "skips": {name: [*map(routes.name, units)] for name, units in routes.skips},
        "every": dict(routes.every),
    }
    return {"units": list(routes.units), **{key: value for key, value in parts.items() if value}}


def routes_from_document(document: Any) -> Routes:
    """Read routes from the object of `routes_document`.

    Raises:
        PlanError: with the path to a value that is not what it must be, such as ``routes.moves.1``.
    """
    known = {"units": list, "dead": list, "moves": dict, "skips": dict, "every": dict}
    for key, value in _typed(document, dict, "routes").items():
        if key not in known:
            raise PlanError(f"{shown(key)} is not a part of routes; they are {', '.join(known)}", path="routes")
        _typed(value, known[key], f"routes.{key}")
    if "units" not in document:
        raise PlanError("there is no 'units', the number of units of each replica", path="routes")
    plain = Routes([_typed(count, int, "routes.units") for count in document["units"]])

    def pair(word: Any, path: str) -> tuple[int, int]:
        match = _PAIR.fullmatch(_typed(word, str, path))
        if match is None:
            raise PlanError(f"{shown(word)} is not a pair such as '3@1'", path=path)
        return int(match[1]), int(match[2])

    def unit(word: Any, path: str) -> int:
        microbatch, replica = pair(word, path)
        return plain.unit(replica, microbatch)

    def entries(key: str, kind: type, read: Callable[[str], Any]) -> list[tuple[Any, Any, str]]:
        return [
            (read(name), _typed(value, kind, f"routes.{key}.{name}"), f"routes.{key}.{name}")
            for name, value in document.get(key, {}).items()
        ]

    return Routes(
        plain.units,
        moves=[
            Move(stage, unit(word, path), _typed(replica, int, path))
            for stage, words, path in entries("moves", dict, _stage)
            for word, replica in words.items()
        ],
        skips={name: [unit(word, path) for word in words] for name, words, path in entries("skips", list, str)},
        every={name: count for name, count, _ in entries("every", int, str)},
        dead=[Actor(*pair(word, "routes.dead")) for word in document.get("dead", ())],
    )


def _stage(name: str) -> int:
    if _NUMBER.fullmatch(name) is None:
        raise PlanError(f"{name!r} is not a stage", path="routes.moves")
    return int(name)


def _typed(value: Any, kind: type, path: str) -> Any:
    if type(value) is not kind:
        words = {dict: "an object", list: "a list", int: "an integer", str: "a string"}
        raise PlanError(f"{shown(value)} is not {words[kind]}", path=path)
    return value


def routes_to_json(routes: Routes) -> str:
    """Routes as JSON; `routes_from_json` reads them back to equal ones."""
    return json.dumps(routes_document(routes)) + "\n"


def routes_from_json(text: str) -> Routes:
    """Read routes from the JSON of `routes_to_json`.

    Raises:
        PlanError: text that is not JSON, or a value that is not what it must be.
    """
    try:
        return routes_from_document(read_json(checked(text, Text, "text", PlanError)))
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(str(error)) from None
