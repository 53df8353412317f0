"""Orders of steps, played: each step starts as soon as its position is free and what it needs is there.

Slow, obvious, and written without a look at the package's engine. `play` plays any steps; `play_plan` makes such steps
of a plan of computes, whose results travel by themselves, or of one with messages, which `SEND` and `RECV` post.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import accumulate

from attrs import frozen

COMPUTES, COLLECTIVES = ("F", "B", "I", "W"), ("REDUCE", "COLLECTIVE")


def play(orders, *, needs, length, gives=lambda step: [step]):
    """Start and end of each step, by position; None where positions wait for each other.

    ``needs(step)``: what must be there, with the time that it takes to come; ``gives(step)``: what is there at its end.
    """
    there = {}
    times = [[] for _ in orders]
    free = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for position, order in enumerate(orders):
            while len(times[position]) < len(order):
                step = order[len(times[position])]
                needed = list(needs(step))
                if any(key not in there for key, _ in needed):
                    break
                start = max([free[position], *(there[key] + travel for key, travel in needed)])
                free[position] = start + length(step)
                times[position].append((start, free[position]))
                there.update(dict.fromkeys(gives(step), free[position]))
                moved = True
    return times if list(map(len, times)) == list(map(len, orders)) else None


def makespan(times):
    """The end of the last step."""
    return max((end for each in times for _, end in each), default=0)


@frozen
class Step:
    """What it needs, each with the time that it takes to come; how long it is; and what is there at its end."""

    needs: list
    length: float
    gives: list


def play_plan(plan, duration, *, travel=0, occupied=0, overhead=0, reduce=0):
    """Start and end of each action, by position; ``duration`` of a compute.

    A message occupies its lane for ``occupied`` and arrives ``travel`` after that. An action is two steps: its position
    has come to it, with the inputs of a compute, or after the overhead of anything else; and it is done, by all
    positions of its stage or its group together. A message is a step of its lane.
    """
    actions = {(p, n): action for p in range(plan.num_positions) for n, action in enumerate(plan.actions(p))}
    together, lanes = _together(actions), _lanes(plan, actions)
    orders = [[] for _ in range(plan.num_positions)]
    for here, action in actions.items():
        kind, position = str(action.kind), here[0]
        come, done = Step([], overhead, [("come", here)]), Step([], 0, [("done", here)])
        if kind in COMPUTES:
            result = "I" if kind == "B" else kind, action.stage, _piece(action)
            come = Step(list(_inputs(plan, *result, position, travel)), 0, [("come", here)])
            done = Step([], overhead + duration(action), [("done", here), (result, position)])
        elif kind in COLLECTIVES:
            result = "F" if action.edge and action.stage == action.edge.source else "I", action.stage, _piece(action)
            brought = [(result, action.edge, other, position) for other in plan.placement[action.stage]]
            done = Step([], reduce, [("done", here), *brought])
        done.needs.extend((("come", other), 0) for other in together[here])
        orders[position] += [come, done]
    for (source, destination, _), messages in lanes.items():
        orders.append(
            [
                Step([(("done", end), 0) for end in ends], occupied, [(result, edge, source, destination)])
                for result, edge, ends in messages
            ]
        )
    times = play(orders, needs=lambda step: step.needs, length=lambda step: step.length, gives=lambda step: step.gives)
    moves = defaultdict(list)
    for messages, moved in zip(lanes.values(), times[plan.num_positions :], strict=True):
        for (_, _, ends), (start, end) in zip(messages, moved, strict=True):
            for here in ends:
                moves[here].append((start, end + travel))
    spans = [own[1::2] for own in times[: plan.num_positions]]
    for (position, number), action in actions.items():
        start, end = spans[position][number]
        if str(action.kind) in COMPUTES:
            spans[position][number] = start + overhead, end
        elif (position, number) in moves:
            starts, ends = zip(*moves[position, number], strict=True)
            spans[position][number] = min(starts), max(ends)
    return spans


def _together(actions):
    """Per action those that are done at once: a compute on all positions of its stage, a collective of its group."""
    meetings, before = defaultdict(list), Counter()
    for here, action in actions.items():
        meeting = here
        if str(action.kind) in COMPUTES:
            meeting = str(action.kind), action.stage, _piece(action)
        elif str(action.kind) in COLLECTIVES:
            meeting = action.group, before[here[0], action.group]
            before[here[0], action.group] += 1
        meetings[meeting].append(here)
    return {here: met for met in meetings.values() for here in met}


def _piece(action):
    """Its microbatch, or the part of it."""
    return action.microbatch, action.slice


def _inputs(plan, kind, stage, piece, position, travel):
    """What a compute on ``position`` needs, with the time that it takes to come."""
    if kind != "F":
        yield (("F" if kind == "I" else "I", stage, piece), position), 0
    for edge in {"F": plan.graph.stage_edges, "I": plan.gradient_edges, "W": ()}[kind]:
        user, maker = (edge.destination, edge.source) if kind == "F" else (edge.source, edge.destination)
        alike = plan.placement[user] == plan.placement[maker]
        for other in ((position,) if alike else plan.placement[maker]) if user == stage else ():
            if edge in plan.collective_edges:
                yield ((kind, maker, piece), edge, other, position), 0
            elif other == position:
                yield ((kind, maker, piece), position), 0
            else:
                yield ((kind, maker, piece), edge, other, position), travel


def _lanes(plan, actions):
    """Per lane (from, to, whether forward) its messages: the result, the edge, and the actions at both ends.

    Of a plan of computes alone, the maker of a result is at both ends.
    """
    sent, received = defaultdict(list), defaultdict(list)
    alone = all(str(action.kind) in COMPUTES for action in actions.values())
    for here, action in actions.items():
        kind = str(action.kind)
        if kind.startswith(("SEND", "RECV")):
            sends, forward, edges = kind.startswith("SEND"), kind.endswith("_F"), [action.edge]
        elif alone and kind != "W":
            sends, forward = True, kind == "F"
            edges = [edge for edge in plan.graph.stage_edges if forward or edge in plan.gradient_edges]
        else:
            continue
        for edge in edges:
            maker, user = (edge.source, edge.destination) if forward else (edge.destination, edge.source)
            if (sends and maker != action.stage) or plan.placement[maker] == plan.placement[user]:
                continue
            for other in plan.placement[user if sends else maker]:
                lane = (here[0], other, forward) if sends else (other, here[0], forward)
                if other != here[0]:
                    result = "F" if forward else "I", maker, _piece(action)
                    (sent if sends else received)[lane].append((result, edge, here))
    lanes = {}
    for lane, messages in sent.items():
        others = messages if alone else received[lane]
        assert [message[:2] for message in messages] == [other[:2] for other in others]
        lanes[lane] = [(*message[:2], (message[2], other[2])) for message, other in zip(messages, others, strict=True)]
    return lanes


def peak(plan, times, position, *, until="W"):
    """The most chunks of microbatches live at once on ``position``."""
    changes = []
    for (start, end), action in zip(times[position], plan.actions(position), strict=True):
        if str(action.kind) == "F":
            changes.append((start, 1, +1))
        elif str(action.kind) in ("B", until):
            changes.append((end, 0, -1))
    return max(accumulate(change for *_, change in sorted(changes)), default=0)
