"""A simulator by brute force: time passes tick by tick, and at each tick everybody looks at what they can do.

Slow, obvious, and written without a look at the package's engine: whole numbers only, no queues of events. It
plays plans of computes (results travel by themselves) and plans with messages (`SEND` and `RECV` post).
"""

from __future__ import annotations

COMPUTES = ("F", "B", "I", "W")


class _Data:
    """Which results there are, where, and since when."""

    def __init__(self, plan):
        self.plan = plan
        self.made = {}  # (kind of result, stage, microbatch, position) -> tick
        self.arrived = {}  # (edge, forward, microbatch, from, to) -> tick

    def edges(self, stage, *, forward, into):
        """The edges along which results (forward) or gradients come into ``stage``, or leave it."""
        for edge in self.plan.graph.stage_edges:
            end = edge.destination if into == forward else edge.source
            if end == stage and (forward or edge in self.plan.gradient_edges):
                yield edge

    def inputs(self, kind, stage, microbatch, position):
        """When each thing that a compute needs was there; None for what is not."""
        if kind == "W":
            yield self.made.get(("I", stage, microbatch, position))
            return
        forward = kind == "F"
        if not forward:
            yield self.made.get(("F", stage, microbatch, position))
        for edge in self.edges(stage, forward=forward, into=True):
            maker = edge.source if forward else edge.destination
            same = self.plan.placement[edge.source] == self.plan.placement[edge.destination]
            for other in (position,) if same else self.plan.placement[maker]:
                received = self.arrived.get((edge, forward, microbatch, other, position))
                if other == position and received is None:
                    received = self.made.get(("F" if forward else "I", maker, microbatch, position))
                yield received

    def outgoing(self, kind, stage, position):
        """Where a result goes: edge, forward, position."""
        forward = kind == "F"
        for edge in self.edges(stage, forward=forward, into=False):
            if self.plan.placement[edge.source] != self.plan.placement[edge.destination]:
                for other in self.plan.placement[edge.destination if forward else edge.source]:
                    if other != position:
                        yield edge, forward, other


def play(plan, duration, *, travel=0, occupied=0, overhead=0, reduce=0):
    """Start and end of each action, per position; durations by (kind, stage), all whole numbers of ticks.

    A message occupies its lane for ``occupied`` ticks and arrives ``travel`` after that.
    """
    actions = [list(plan.actions(position)) for position in range(plan.num_positions)]
    explicit = any(action.kind not in COMPUTES for own in actions for action in own)
    start = [[None] * len(own) for own in actions]
    end = [[None] * len(own) for own in actions]
    at, free = [0] * len(actions), [0] * len(actions)
    paid = [False] * len(actions)  # whether the overhead of the next action is paid already
    data = _Data(plan)
    lanes = {}  # (from, to, forward) -> [sends, receives, number started, busy until]
    gathered = {}  # (group, how many before), or (stage, kind, microbatch) -> {position: tick}

    def lane(*way):
        return lanes.setdefault(way, [[], [], 0, 0])

    def act(p, tick):
        """Whether position ``p`` gets on with its next action at ``tick``."""
        index = at[p]
        action = actions[p][index]
        kind = str(action.kind)
        if kind in COMPUTES:
            there = list(data.inputs(kind, action.stage, action.microbatch, p))
            if any(time is None or time > tick for time in there):
                return False
            # All positions of a stage do a compute of it together; who comes earlier is there already.
            here = gathered.setdefault((action.stage, kind, action.microbatch), {})
            here.setdefault(p, tick)
            if len(here) < len(plan.placement[action.stage]):
                return False
            done = tick + overhead + duration[kind, action.stage]
            start[p][index], end[p][index] = tick + overhead, done
            data.made["I" if kind == "B" else kind, action.stage, action.microbatch, p] = done
            if not explicit and kind != "W":
                for edge, forward, other in data.outgoing(kind, action.stage, p):
                    message = (done, None, (edge, action.microbatch))
                    lane(p, other, forward)[0].append(message)
                    lane(p, other, forward)[1].append(message)
            free[p] = done
        elif not paid[p]:
            paid[p] = True
            free[p] = tick + overhead
            return True
        elif kind in ("REDUCE", "COLLECTIVE"):
            group = next(group for group in plan.groups if group.name == action.group)
            before = sum(other.group == group.name for other in actions[p][:index])
            here = gathered.setdefault((group.name, before), {})
            here.setdefault(p, tick)
            begin = max(here.values())
            if len(here) < len(group.positions) or begin + reduce > tick:
                return False
            start[p][index], end[p][index] = begin, begin + reduce
            if action.edge is not None:
                forward = action.stage == action.edge.source
                for other in plan.placement[action.stage]:
                    data.arrived[action.edge, forward, action.microbatch, other, p] = tick
        else:
            forward, sending = kind.endswith("F"), kind.startswith("SEND")
            edge = action.edge
            for other in plan.placement[edge.destination if forward == sending else edge.source]:
                if other != p:
                    way = (p, other, forward) if sending else (other, p, forward)
                    lane(*way)[0 if sending else 1].append((tick, (p, index), (edge, action.microbatch)))
        at[p] += 1
        paid[p] = False
        return True

    def transfer(way, tick):
        """Whether the next message of the lane leaves at ``tick``."""
        sends, receives, number, busy = lanes[way]
        if number == min(len(sends), len(receives)) or busy > tick:
            return False
        (sent, sender, what), (ready, receiver, expected) = sends[number], receives[number]
        if max(sent, ready) > tick:
            return False
        assert what == expected
        lanes[way][2:] = number + 1, tick + occupied
        arrival = tick + occupied + travel
        source, destination, forward = way
        data.arrived[what[0], forward, what[1], source, destination] = arrival
        for place in (sender, receiver) if explicit else ():
            p, index = place
            start[p][index] = tick if start[p][index] is None else min(start[p][index], tick)
            end[p][index] = arrival if end[p][index] is None else max(end[p][index], arrival)
        return True

    tick = 0
    while any(at[p] < len(own) for p, own in enumerate(actions)):
        changed = True
        while changed:
            changed = False
            for p, own in enumerate(actions):
                while at[p] < len(own) and free[p] <= tick and act(p, tick):
                    changed = True
            for way in list(lanes):
                while transfer(way, tick):
                    changed = True
        tick += 1
        assert tick < 100_000, "nobody has anything to do"
    return start, end


def makespan(end):
    return max((time for times in end for time in times), default=0)


def peak(plan, start, end, position, *, until="W"):
    """The most chunks of microbatches live at once on ``position``."""
    changes = []
    for begin, done, action in zip(start[position], end[position], plan.actions(position), strict=True):
        if str(action.kind) == "F":
            changes.append((begin, 1, +1))
        elif str(action.kind) in ("B", until):
            changes.append((done, 0, -1))
    live = most = 0
    for *_, change in sorted(changes):
        live += change
        most = max(most, live)
    return most
