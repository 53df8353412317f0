"""An executor that knows nothing of `verify`: it plays a plan by blocking rules, in every order.

The rules, as a person would state them. Every position does its steps in order. A compute needs what its
stage's neighbours made: on the same position earlier, or received before. A batch of messages is *posted*,
and holds its position up until every message in it has met its other end in a batch that its partner has
posted; messages between two positions meet in the order in which they were posted, either per direction of
data ("separate" lanes: an activation and a gradient never meet), or batch by batch ("shared"). Where batches are
played "in_order", a batch on separate lanes is one batch after the other for each tensor in it. A collective
holds its positions up until all of the group are there, in the order in which each names the group; so does a
compute of a stage that lies on several positions, in the order in which each does the computes of the stage.

What a position has in hand depends on its own earlier steps alone, so each position is read by itself
(`Part`): where it runs out of data, and what it would do twice or never. What is left is the meeting of
messages. A state is how far each position has come, and whether its step is posted; `explore` walks through
the states and returns what can go wrong. Nothing is shared with the package but the data.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import NamedTuple

STUCK = "stuck"  # some order of events ends before every position has done all its steps
WRONG = "wrong"  # all runs to the end, and something was done twice, never, with wrong data or for nothing

# What a position's own steps can have wrong.
STRANGE = "strange"  # an action that has no business there
UNKNOWN = "unknown microbatch"
TWICE = "twice"
NEVER = "never"
TOO_SOON = "too soon"  # before what it uses is there, if that ever comes


class Reading(NamedTuple):
    """One action in the explorer's own words."""

    does: tuple | None = None  # what is there after it, to be done once
    needs: frozenset = frozenset()  # what it uses
    also: tuple = ()  # what is there after it as well
    ends: tuple = ()  # its ends of messages, and its part in a collective: (queue, side, content)
    wrong: str | None = None  # why it should not be there, whatever the other steps are


class Part:
    """What the steps of one position say by themselves; each step comes as the readings of its actions.

    ``mistakes``: what is wrong with them. Any of these is a problem whatever the other positions do: out of
    data, the position never comes to its end, and if it does the rest shows in its account.
    ``stop``: the step at which it runs out of data, or the number of steps.
    """

    def __init__(self, explorer, position, steps):
        self.explorer, self.steps = explorer, steps
        self.mistakes = set()
        self.stop = None
        held = set()
        for number, step in enumerate(steps):
            there = set(held) if len(step) > 1 else held  # of what is done at once, nothing waits for another
            for does, needs, also, _, wrong in step:
                if wrong is not None:
                    self.mistakes.add(wrong)
                elif does in held:
                    self.mistakes.add(TWICE)
                else:
                    if not needs <= there:
                        self.mistakes.add(TOO_SOON)
                        if self.stop is None:
                            self.stop = number
                    if does is not None:
                        held.add(does)
                        held.update(also)
        if self.stop is None:
            self.stop = len(steps)
        if not held.issuperset(explorer.wanted[position]) or any(
            thing[0] == "half" and ("weight", *thing[1:]) not in held for thing in held
        ):
            self.mistakes.add(NEVER)

    @cached_property
    def posts(self):
        """Per step, its ends as (queue, side, place in the queue, content)."""
        counts, posts = {}, []
        for step in self.steps:
            ends = [end for reading in step for end in reading.ends]
            if self.explorer.lanes == "shared":
                ends = _exchanges(ends)
            placed = []
            for queue, side, content in ends:
                place = counts.get((queue, side), 0)
                counts[queue, side] = place + 1
                placed.append((queue, side, place, content))
            posts.append(tuple(placed))
        return posts

    @cached_property
    def queues(self):
        """(queue, side) -> the contents, in the order in which they are posted."""
        queues = {}
        for ends in self.posts:
            for queue, side, _, content in ends:
                queues.setdefault((queue, side), []).append(content)
        return queues

    @cached_property
    def trace(self):
        """All that the others ever see of it: the batches it posts, as numbers, and whether it comes to its end."""
        numbers = self.explorer.batches
        batches = [numbers.setdefault(ends, len(numbers)) for ends in self.posts[: self.stop] if ends]
        return (*batches, self.stop == len(self.steps))


def _exchanges(ends):
    """One exchange per pair of positions and batch, whatever the order in the batch; collectives as they are."""
    exchanges = {}
    for number, (queue, side, content) in enumerate(ends):
        exchanges.setdefault((queue, side, number if queue[0] in ("group", "stage") else None), []).append(content)
    return [(queue, side, tuple(sorted(contents, key=str))) for (queue, side, _), contents in exchanges.items()]


class Explorer:
    """Knows the shape of a plan, whatever its steps: reads each position's, and lets the parts meet."""

    def __init__(self, plan, lanes="separate", batches="in_order"):
        self.lanes = lanes
        self.one_by_one = lanes == "separate" and batches == "in_order"
        self.num_slices = plan.num_slices
        self.pieces = set(range(plan.num_microbatches))
        if plan.num_slices > 1:
            self.pieces = {(m, part) for m in range(plan.num_microbatches) for part in range(plan.num_slices)}
        self.places = [set(places) for places in plan.placement]
        self.edges = {(edge.source, edge.destination) for edge in plan.graph.stage_edges}
        self.dead = set(plan.forward_only)
        self.ways = {  # (source, destination, forward) -> the stage that makes what goes there, and its user
            (*edge, forward): edge if forward else edge[::-1]
            for edge in self.edges
            for forward in (True, False)
            if forward or not self.dead.intersection(edge)
        }
        self.carriers = {  # (source, destination, forward) -> the group by which it goes
            way: group.name
            for group in plan.groups
            for edge in group.edges
            for way in self.ways
            if way[:2] == (edge.source, edge.destination)
        }
        self.tied = {group.name: set(group.tied) for group in plan.groups}
        self.members = {group.name: set(group.positions) for group in plan.groups}
        self.wanted = [self._wanted(position) for position in range(len(plan.positions))]
        self.batches = {}  # all ends of a step -> their number
        self._meetings = {}  # (every_order, *traces) -> what comes of their meeting

    def part(self, position, steps):
        """One position's steps, read."""
        return Part(self, position, [piece for step in steps for piece in self.read(position, step)])

    def read(self, position, step):
        """The readings of a step's actions, in pieces of which each blocks before the next is posted."""
        actions = step if isinstance(step, tuple) else (step,)
        if str(actions[0].kind) in ("F", "B", "I", "W"):  # a compute, or a pair
            return [tuple(self._read(position, action) for action in actions)]
        pieces = []
        tensor = None
        for action in actions:
            before, tensor = tensor, _tensor(action)
            if pieces and (not self.one_by_one or (tensor is not None and tensor == before)):
                pieces[-1].append(self._read(position, action))
            else:
                pieces.append([self._read(position, action)])
        return [tuple(piece) for piece in pieces]

    def _wanted(self, position):
        """What must have been done at a position in the end."""
        wanted = set()
        for microbatch in self.pieces:
            for stage, places in enumerate(self.places):
                if position in places:
                    wanted.add(("F", stage, microbatch))
                    if stage not in self.dead:
                        wanted.add(("grad", stage, microbatch))
            for way, (maker, user) in self.ways.items():
                if way in self.carriers:
                    if position in self.members[self.carriers[way]]:
                        wanted.add(("collected", *way, microbatch))
                elif self.places[maker] != self.places[user]:
                    for verb, stage, other in (("sent", maker, user), ("received", user, maker)):
                        if position in self.places[stage] and self.places[other] - {position}:
                            wanted.add((verb, *way, microbatch))
        for group, stages in self.tied.items():
            if any(position in self.places[stage] for stage in stages):
                wanted.add(("reduced", group))
        return wanted

    def _read(self, position, action):
        kind = str(action.kind)
        if kind in ("F", "B", "I", "W"):
            return self._compute(kind, action.stage, _piece(action), position)
        if kind in ("REDUCE", "COLLECTIVE"):
            return self._collective(action, position)
        return self._message(action, position)

    def _compute(self, kind, stage, microbatch, position):
        if stage >= len(self.places) or position not in self.places[stage]:
            return Reading(wrong=STRANGE)
        if kind != "F" and stage in self.dead:
            return Reading(wrong=STRANGE)
        if microbatch not in self.pieces:
            return Reading(wrong=UNKNOWN)
        # Of slices: forward after the one before it in the sequence, backward after the one behind it.
        beside = []
        if self.num_slices > 1:
            step = -1 if kind == "F" else 1
            beside = [(microbatch[0], microbatch[1] + step)] if 0 <= microbatch[1] + step < self.num_slices else []
        ends = ()
        if len(self.places[stage]) > 1:
            ends = ((("stage", stage), position, (kind, microbatch)),)
        if kind == "F":
            used = [
                thing
                for source, destination in self.edges
                if destination == stage
                for thing in self._along(source, destination, True, microbatch, position)
            ]
            used += [("F", stage, other) for other in beside]
            return Reading(("F", stage, microbatch), frozenset(used), ends=ends)
        half, weight = ("half", stage, microbatch), ("weight", stage, microbatch)
        if kind == "W":
            return Reading(weight, frozenset([half]), ends=ends)
        used = [("F", stage, microbatch), *[("grad", stage, other) for other in beside]]
        for source, destination in self.edges:
            if source == stage and destination not in self.dead:
                used += self._along(source, destination, False, microbatch, position)
        return Reading(("grad", stage, microbatch), frozenset(used), (weight,) if kind == "B" else (half,), ends)

    def _along(self, source, destination, forward, microbatch, position):
        """What ``position`` must hold to use the edge's tensor of ``microbatch``."""
        maker = source if forward else destination
        made = ("F" if forward else "grad", maker, microbatch)
        if (source, destination, forward) in self.carriers:
            return [("collected", source, destination, forward, microbatch)]
        if self.places[source] == self.places[destination]:
            return [made]
        return [
            made if other == position else ("received", source, destination, forward, microbatch)
            for other in self.places[maker]
        ]

    def _message(self, action, position):
        kind = str(action.kind)
        source, destination = action.edge.source, action.edge.destination
        forward, sending = kind.endswith("_F"), kind.startswith("SEND")
        way = (source, destination, forward)
        if way not in self.ways or way in self.carriers or self.places[source] == self.places[destination]:
            return Reading(wrong=STRANGE)
        maker, user = self.ways[way]
        partners = sorted(self.places[user if sending else maker] - {position})
        if position not in self.places[maker if sending else user] or not partners:
            return Reading(wrong=STRANGE)
        content = (*way, _piece(action))
        ends = []
        for partner in partners:
            pair = (position, partner) if sending else (partner, position)
            if self.lanes == "separate":
                ends.append(((*pair, forward), sending, content))
            else:
                ends.append((tuple(sorted(pair)), position, (*content, pair)))
        wrong = None if _piece(action) in self.pieces else UNKNOWN
        if not sending:
            return Reading(("received", *content), ends=tuple(ends), wrong=wrong)
        made = ("F" if forward else "grad", maker, _piece(action))
        return Reading(("sent", *content), frozenset([made]), ends=tuple(ends), wrong=wrong)

    def _collective(self, action, position):
        ends = ()
        if action.group is not None:
            if position not in self.members.get(action.group, ()):
                return Reading(wrong=STRANGE)
            whose = action.stage if action.edge is not None else None  # tied stages each reduce their own
            met = (str(action.kind), whose, action.edge, action.microbatch)
            ends = ((("group", action.group), position, met),)
        if action.kind == "REDUCE":
            held = {stage for stage, places in enumerate(self.places) if position in places}
            if action.stage not in held or action.stage in self.dead:
                return Reading(wrong=STRANGE, ends=ends)
            finished = {action.stage} | (self.tied.get(action.group, set()) & held)
            weights = [("weight", stage, m) for stage in finished for m in self.pieces]
            return Reading(("reduced", action.group or action.stage), frozenset(weights), ends=ends)
        unknown = action.microbatch is not None and action.microbatch not in self.pieces
        if action.edge is None:
            return Reading(ends=ends, wrong=UNKNOWN if unknown else None)
        source, destination = action.edge.source, action.edge.destination
        way = (source, destination, action.stage == source)
        if self.carriers.get(way) != action.group:
            return Reading(wrong=STRANGE, ends=ends)
        if unknown:
            return Reading(wrong=UNKNOWN, ends=ends)
        used = []
        if action.stage < len(self.places) and position in self.places[action.stage]:
            used = [("F" if way[2] else "grad", action.stage, action.microbatch)]
        return Reading(("collected", *way, action.microbatch), frozenset(used), ends=ends)

    def _others(self, queue, side):
        """The other sides of a queue."""
        if queue[0] == "group":
            return sorted(self.members[queue[1]] - {side})
        if queue[0] == "stage":
            return sorted(self._together(queue) - {side})
        if self.lanes == "separate":
            return [not side]
        return [other for other in queue if other != side]

    def _together(self, queue):
        """The positions that do the computes of a stage together."""
        return self.places[queue[1]]

    def judge(self, parts, *, every_order=False):
        """What can come of the parts: in one order of events, which is as good as all, or in every order.

        That one is as good as all is not taken for granted: the tests hold both against each other.
        """
        key = every_order, *[part.trace for part in parts]
        if key not in self._meetings:
            self._meetings[key] = self._meet(parts, every_order)
        finished, stuck, fitting = self._meetings[key]
        problems = {STUCK} if stuck else set()
        if not fitting or any(part.mistakes & {STRANGE, UNKNOWN} for part in parts):
            problems.add(WRONG)
        if finished and any(part.mistakes for part in parts):
            problems.add(WRONG)
        return problems

    def crossed(self, parts):
        """Whether in some queue what one side posts is not what another does, message by message."""
        posted = {end: contents for part in parts for end, contents in part.queues.items()}
        return any(
            posted.get((queue, other)) != contents
            for (queue, side), contents in posted.items()
            for other in self._others(queue, side)
        )

    def _meet(self, parts, every_order, limit=2_000_000):
        """Go through all states that any timing can reach, or through those of one order of events.

        Returns whether some order comes to its end, whether some gets stuck, and whether all that met was of one
        message.
        """
        where = {  # (queue, side, place) -> (position, step)
            (queue, side, place): (position, number)
            for position, part in enumerate(parts)
            for number, ends in enumerate(part.posts)
            for queue, side, place, _ in ends
        }
        fitting, finished, stuck = True, False, False

        def meets(state, end):
            nonlocal fitting
            queue, side, place, content = end
            there = True
            for other in self._others(queue, side):
                at = where.get((queue, other, place))
                if at is None or state[at[0]] < (at[1], True):
                    there = False
                else:
                    fitting = fitting and parts[at[0]].queues[queue, other][place] == content
            return there

        def moves(state):
            for position, part in enumerate(parts):
                number, posted = state[position]
                if number == part.stop:
                    continue
                if not posted:
                    yield _with(state, position, (number, True))
                    continue
                met = [meets(state, end) for end in part.posts[number]]
                if all(met):
                    yield _with(state, position, (number + 1, False))

        first = tuple((0, False) for _ in parts)
        seen, todo = {first}, [first]
        while todo:
            state = todo.pop()
            followers = list(itertools.islice(moves(state), None if every_order else 1))
            if not followers:
                done = all(number == len(part.steps) for (number, _), part in zip(state, parts, strict=True))
                finished, stuck = finished or done, stuck or not done
            for follower in followers:
                if follower not in seen:
                    if len(seen) >= limit:
                        raise RuntimeError(f"more than {limit} states; give a smaller plan")
                    seen.add(follower)
                    todo.append(follower)
        return finished, stuck, fitting


def _tensor(action):
    """What a message moves, at either end of it: (source, destination, whether forward, microbatch); None of others."""
    kind = str(action.kind)
    if not kind.startswith(("SEND", "RECV")):
        return None
    return action.edge.source, action.edge.destination, kind.endswith("_F"), _piece(action)


def _piece(action):
    """The microbatch of an action, with its slice where it has one."""
    return action.microbatch if action.slice is None else (action.microbatch, action.slice)


def _with(state, position, value):
    return (*state[:position], value, *state[position + 1 :])


def explore(plan, lanes="separate", batches="in_order", *, every_order=True):
    """What can go wrong with ``plan``: a set with any of `STUCK` and `WRONG`, empty if nothing can.

    ``every_order`` walks through all states that any timing can reach; otherwise one order of events, which
    is enough as long as no event can disable another (the tests hold both against each other).
    """
    from plan_kit.routes_explorer import RoutedExplorer

    explorer = (Explorer if plan.routes is None else RoutedExplorer)(plan, lanes, batches)
    parts = [explorer.part(position, steps) for position, steps in enumerate(plan.positions)]
    return explorer.judge(parts, every_order=every_order)
