"""An executor that knows nothing of `verify`: it plays a plan by blocking rules, in every order.

The rules, as a person would state them. Every position does its steps in order. A compute needs what its
stage's neighbours made: on the same position earlier, or received before. A batch of messages is *posted*,
and holds its position up until every message in it has met its other end in a batch that its partner has
posted; messages between two positions meet in the order in which they were posted, either per direction of
data ("separate" lanes: an activation and a gradient never meet), or batch by batch ("shared"). A collective
holds its positions up until all of the group are there, in the order in which each names the group.

A state is how far each position has come, and whether its step is posted. `explore` walks through the states
and returns what can go wrong. Position-by-position bookkeeping only; nothing is shared with the package but
the data.
"""

from __future__ import annotations

from collections import Counter

STUCK = "stuck"  # some order of events ends before every position has done all its steps
WRONG = "wrong"  # all runs to the end, and something was done twice, never, with wrong data or for nothing


class _Program:
    """What one plan asks of each position, in the explorer's own words."""

    def __init__(self, plan, lanes):
        self.plan = plan
        self.lanes = lanes
        self.problems = set()
        self.steps = [[step if isinstance(step, tuple) else (step,) for step in steps] for steps in plan.positions]
        self.places = [set(places) for places in plan.placement]
        self.edges = {(edge.source, edge.destination) for edge in plan.graph.stage_edges}
        self.dead = set(plan.forward_only)
        self.carriers = {  # (source, destination, forward) -> the group by which it goes
            (edge.source, edge.destination, forward): group.name
            for group in plan.groups
            for edge in group.edges
            for forward in (True, False)
            if forward or not {edge.source, edge.destination} & self.dead
        }
        self.tied = {group.name: set(group.tied) for group in plan.groups}
        self.members = {group.name: set(group.positions) for group in plan.groups}
        self.ends = []  # per position and step: the message ends in it, (queue, place in it, content)
        self.needs = []  # per position and step: what it uses
        self.makes = []  # per position and step: what is there after it
        self.queues = {}  # (queue, side) -> contents in order of posting
        for position, steps in enumerate(self.steps):
            self._read(position, steps)

    def _read(self, position, steps):
        ends, needs, makes = [], [], []
        for number, step in enumerate(steps):
            step_ends, step_needs, step_makes = [], [], []
            for action in step:
                kind, stage = str(action.kind), action.stage
                if kind in ("F", "B", "I", "W"):
                    used, made = self._compute(kind, stage, action.microbatch, position)
                elif kind in ("REDUCE", "COLLECTIVE"):
                    used, made = self._collective(action, position, number, step_ends)
                else:
                    used, made = self._message(action, position, number, step_ends)
                step_needs += used
                step_makes += made
            ends.append(step_ends)
            needs.append(step_needs)
            makes.append(step_makes)
        self.ends.append(ends)
        self.needs.append(needs)
        self.makes.append(makes)

    def _compute(self, kind, stage, microbatch, position):
        if stage >= len(self.places) or position not in self.places[stage]:
            self.problems.add(WRONG)
            return [], []
        if microbatch >= self.plan.num_microbatches:
            self.problems.add(WRONG)
        if kind == "F":
            used = [
                thing
                for source, destination in self.edges
                if destination == stage
                for thing in self._along(source, destination, True, microbatch, position)
            ]
            return used, [("F", stage, microbatch)]
        if stage in self.dead:
            self.problems.add(WRONG)
        if kind == "W":
            return [("I", stage, microbatch)], [("W", stage, microbatch)]
        used = [("F", stage, microbatch)]
        for source, destination in self.edges:
            if source == stage and destination not in self.dead and stage not in self.dead:
                used += self._along(source, destination, False, microbatch, position)
        made = [("grad", stage, microbatch)]
        made += [("B", stage, microbatch)] if kind == "B" else [("I", stage, microbatch)]
        return used, made

    def _along(self, source, destination, forward, microbatch, position):
        """What ``position`` must hold to use the edge's tensor of ``microbatch``."""
        maker = source if forward else destination
        made = "F" if forward else "grad"
        if (source, destination, forward) in self.carriers:
            return [("collected", source, destination, forward, microbatch)]
        if self.places[source] == self.places[destination]:
            return [(made, maker, microbatch)]
        return [
            (made, maker, microbatch)
            if other == position
            else ("received", source, destination, forward, microbatch, other)
            for other in self.places[maker]
        ]

    def _message(self, action, position, number, step_ends):
        kind = str(action.kind)
        source, destination = action.edge.source, action.edge.destination
        if (source, destination) not in self.edges or action.microbatch >= self.plan.num_microbatches:
            self.problems.add(WRONG)
            return [], []
        forward, sending = kind.endswith("_F"), kind.startswith("SEND")
        if not forward and {source, destination} & self.dead:
            self.problems.add(WRONG)
        if (source, destination, forward) in self.carriers:
            self.problems.add(WRONG)
        maker, user = (source, destination) if forward else (destination, source)
        content = (source, destination, forward, action.microbatch)
        if position not in self.places[maker if sending else user]:
            self.problems.add(WRONG)
            return [], []
        if self.places[source] == self.places[destination]:
            self.problems.add(WRONG)
            return [], []
        partners = sorted(self.places[user if sending else maker] - {position})
        if not partners:
            self.problems.add(WRONG)
        for partner in partners:
            way = (position, partner) if sending else (partner, position)
            if self.lanes == "separate":
                queue, side, met = (*way, forward), sending, content
            else:
                queue, side, met = tuple(sorted(way)), position, (*content, way)
            posted = self.queues.setdefault((queue, side), [])
            if self.lanes == "separate":
                step_ends.append((queue, side, len(posted), met))
                posted.append(met)
            elif step_ends and (same := [end for end in step_ends if end[0] == queue]):
                same[0][3].append(met)  # one exchange per pair of positions and batch
            else:
                exchange = [met]
                step_ends.append((queue, side, len(posted), exchange))
                posted.append(exchange)
        if sending:
            return [("F" if forward else "grad", maker, action.microbatch)], []
        return [], [("received", *content, partner) for partner in partners]

    def _collective(self, action, position, number, step_ends):
        if action.group is not None:
            if position not in self.members.get(action.group, ()):
                self.problems.add(WRONG)
                return [], []
            queue = ("group", action.group)
            posted = self.queues.setdefault((queue, position), [])
            whose = action.stage if action.edge is not None else None  # tied stages each reduce their own
            met = (str(action.kind), whose, action.edge, action.microbatch)
            step_ends.append((queue, position, len(posted), met))
            posted.append(met)
        if action.kind == "REDUCE":
            held = {stage for stage, places in enumerate(self.places) if position in places}
            if action.stage not in held or action.stage in self.dead:
                self.problems.add(WRONG)
            finished = {action.stage} | (self.tied.get(action.group, set()) & held)
            return [("all", stage) for stage in finished], [("reduced", action.group or action.stage)]
        if action.edge is None:
            if action.microbatch is not None and action.microbatch >= self.plan.num_microbatches:
                self.problems.add(WRONG)
            return [], []
        source, destination = action.edge.source, action.edge.destination
        way = (source, destination, action.stage == source)
        if self.carriers.get(way) != action.group or action.microbatch >= self.plan.num_microbatches:
            self.problems.add(WRONG)
        used = []
        if action.stage < len(self.places) and position in self.places[action.stage]:
            used = [("F" if way[2] else "grad", action.stage, action.microbatch)]
        return used, [("collected", *way, action.microbatch)]

    def others(self, end):
        """The other ends of ``end``: (queue, side, place, content there or None)."""
        queue, side, place, _ = end
        if queue[0] == "group":
            sides = sorted(self.members[queue[1]] - {side})
        elif self.lanes == "separate":
            sides = [not side]
        else:
            sides = [other for other in queue if other != side]
        for other in sides:
            posted = self.queues.get((queue, other), [])
            yield queue, other, place, posted[place] if place < len(posted) else None


def _meets(end, other, lanes):
    """Whether the two ends are of one message."""
    if other is None:
        return False
    if end[0][0] == "group" or lanes == "separate":
        return end[3] == other
    return Counter(map(tuple, end[3])) == Counter(map(tuple, other))


def explore(plan, *, lanes="separate", every_order=True, limit=2_000_000):
    """What can go wrong with ``plan``: a set with any of `STUCK` and `WRONG`, empty if nothing can.

    ``every_order`` walks through all states that any timing can reach; otherwise one order of events, which
    is enough as long as no event can disable another (the tests hold both against each other).
    """
    program = _Program(plan, lanes)
    problems = set(program.problems)
    count = len(program.steps)
    where = {}  # (queue, side, place) -> (position, step)
    for position, ends in enumerate(program.ends):
        for number, step_ends in enumerate(ends):
            for queue, side, place, _ in step_ends:
                where[queue, side, place] = (position, number)

    def starved(position, number):
        """Whether a step uses something that the position's earlier steps have not brought."""
        held = set()
        for made in program.makes[position][:number]:
            held.update(made)
        for thing in program.needs[position][number]:
            if thing[0] == "all":
                stage = thing[1]
                if any(
                    ("B", stage, m) not in held and ("W", stage, m) not in held for m in range(plan.num_microbatches)
                ):
                    return True
            elif thing not in held:
                return True
        return False

    # Whether a step finds its data depends on its own position's earlier steps alone.
    hungry = [[starved(p, n) for n in range(len(program.steps[p]))] for p in range(count)]

    def moves(state):
        for position in range(count):
            number, posted = state[position]
            if number == len(program.steps[position]) or hungry[position][number]:
                continue
            if not posted:
                yield _with(state, position, (number, True))
                continue
            meets = True
            for end in program.ends[position][number]:
                for queue, side, place, content in program.others(end):
                    at = where.get((queue, side, place))
                    if at is None or not (state[at[0]][0] > at[1] or (state[at[0]][0] == at[1] and state[at[0]][1])):
                        meets = False
                    elif not _meets(end, content, lanes):
                        problems.add(WRONG)
            if meets:
                yield _with(state, position, (number + 1, False))

    first = tuple((0, False) for _ in range(count))
    seen, todo = {first}, [first]
    finished = False
    while todo:
        state = todo.pop()
        followers = list(moves(state))
        if not followers:
            if all(number == len(steps) for (number, _), steps in zip(state, program.steps, strict=True)):
                finished = True
            else:
                problems.add(STUCK)
        for follower in followers if every_order else followers[:1]:
            if follower not in seen:
                if len(seen) >= limit:
                    raise RuntimeError(f"more than {limit} states; give a smaller plan")
                seen.add(follower)
                todo.append(follower)
    if finished:
        problems |= _account(program)
    return problems


def _with(state, position, value):
    return (*state[:position], value, *state[position + 1 :])


def _account(program):
    """After a run to the end: was everything done, once, and was every message of use?"""
    plan = program.plan
    for position in range(len(program.steps)):
        made = Counter(thing for things in program.makes[position] for thing in things)
        used = {thing for things in program.needs[position] for thing in things}
        if any(times > 1 for times in made.values()):
            return {WRONG}
        wanted = set()
        for stage, places in enumerate(program.places):
            if position not in places:
                continue
            for microbatch in range(plan.num_microbatches):
                wanted.add(("F", stage, microbatch))
                if stage not in program.dead:
                    halves = [made["I", stage, microbatch], made["W", stage, microbatch]]
                    whole = made["B", stage, microbatch]
                    if (whole, *halves) not in ((1, 0, 0), (0, 1, 1)):
                        return {WRONG}
        for way, group in program.carriers.items():
            if position in program.members[group]:
                wanted |= {("collected", *way, microbatch) for microbatch in range(plan.num_microbatches)}
        for group, stages in program.tied.items():
            if any(position in program.places[stage] for stage in stages):
                wanted.add(("reduced", group))
        if any(made[thing] != 1 for thing in wanted):
            return {WRONG}
        for thing in made:
            if thing[0] == "received" and thing not in used:
                return {WRONG}
    for (queue, side), posted in program.queues.items():
        for place, content in enumerate(posted):
            for *_, other in program.others((queue, side, place, content)):
                if not _meets((queue, side, place, content), other, program.lanes):
                    return {WRONG}
    return set()


def explore_creation(plan, *, lanes="separate"):
    """What can go wrong while groups and lanes are made, each by all its members at once, in every order.

    With shared lanes a pair of positions makes one communicator, with the first lane it comes to.
    """
    members = {group.name: set(group.positions) for group in plan.groups}
    wanted = [set() for _ in plan.positions]
    for group in plan.groups:
        for position in group.positions:
            wanted[position].add(group.name)
    for lane in plan.lanes:
        members[lane] = {lane.source, lane.destination}
        for position in members[lane]:
            wanted[position].add(lane)
    for names, own in zip(plan.creation, wanted, strict=True):
        if len(names) != len(own) or set(names) != own:
            return {WRONG}

    def communicator(name):
        return frozenset(members[name]) if lanes == "shared" and not isinstance(name, str) else name

    orders = [list(dict.fromkeys(communicator(name) for name in names)) for names in plan.creation]
    who = {communicator(name): positions for name, positions in members.items()}
    seen, todo = set(), [tuple(0 for _ in orders)]
    problems = set()
    while todo:
        state = todo.pop()
        heads = [order[at] if at < len(order) else None for order, at in zip(orders, state, strict=True)]
        followers = [
            tuple(at + (position in who[thing]) for position, at in enumerate(state))
            for thing in {head for head in heads if head is not None}
            if all(heads[position] == thing for position in who[thing])
        ]
        if not followers and any(head is not None for head in heads):
            problems.add(STUCK)
        for follower in followers:
            if follower not in seen:
                seen.add(follower)
                todo.append(follower)
    return problems
