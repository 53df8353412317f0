"""The explorer for plans with routes: what each actor has to do, read off the raw fields of the routes.

A unit's data goes from actor to actor: from each that makes it to each that needs it, one message for a call and a pair
of actors. Where both stages lie on the same positions, an actor has to do with the one of its own position only.
"""

from __future__ import annotations

from functools import cache, cached_property

from plan_kit.explorer import NEVER, STRANGE, UNKNOWN, Explorer, Reading  # noqa: F401 -- NEVER names what is wanted


class RoutedExplorer(Explorer):
    """Knows the shape of a plan with routes."""

    def __init__(self, plan, lanes="separate", batches="in_order"):
        self.plan, self.raw = plan, plan.routes
        self.each = len(plan.positions) // len(self.raw.units)
        self.home = [replica for replica, count in enumerate(self.raw.units) for _ in range(count)]
        self.first = [self.home.index(replica) for replica in self.home]
        self.away = {(move.unit, move.stage): move.replica for move in self.raw.moves}
        self.gone = {(actor.position, actor.replica) for actor in self.raw.dead}
        self.skipped = {(name, unit) for name, units in self.raw.skips for unit in units}
        self.every = dict(self.raw.every)
        self.module = [name for name in plan.graph.order for _ in range(dict(plan.graph.modules)[name])]
        super().__init__(plan, lanes, batches)
        self.members = {group.name: self._living(group.positions) for group in plan.groups}
        for position in range(self.each):
            self.members["all of", position] = self._living([position])

    def _living(self, positions):
        return {
            position + self.each * replica
            for position in positions
            for replica in range(len(self.raw.units))
            if (position, replica) not in self.gone
        }

    @cached_property
    def calls(self):
        """Per stage, from each call to the units that it serves."""
        calls = []
        for name in self.module:
            k = self.every.get(name, 1)
            served = {}
            for unit, first in enumerate(self.first):
                if (name, unit) not in self.skipped:
                    served.setdefault(unit - (unit - first) % k, set()).add(unit)
            calls.append(served)
        return calls

    @cache  # noqa: B019 -- lives as long as its test
    def where(self, stage, call):
        """The actors that compute it."""
        replica = self.away.get((call, stage), self.home[call])
        return {place + self.each * replica for place in self.places[stage]}

    def feeds(self, source, destination):
        """Pairs of calls of two stages of which the second needs the result of the first."""
        if self.module[source] == self.module[destination]:
            return {(call, call) for call in self.calls[source]}
        return {
            (a, b)
            for a, units in self.calls[source].items()
            for b, others in self.calls[destination].items()
            if units & others
        }

    @cache  # noqa: B019
    def links(self, source, destination, forward):
        """All ways of data along an edge: (number of the message, maker, its actor, user, its actor)."""
        alike = self.places[source] == self.places[destination]
        found = set()
        for a, b in self.feeds(source, destination):
            for one in self.where(source, a):
                for other in self.where(destination, b):
                    if alike and one % self.each != other % self.each:
                        continue
                    found.add((a, a, one, b, other) if forward else (a, b, other, a, one))
        return found

    def trained(self, source, destination):
        return not {source, destination} & self.dead

    def _wanted(self, position):
        wanted = set()
        for stage, calls in enumerate(self.calls):
            for call in calls:
                if position in self.where(stage, call):
                    wanted.add(("F", stage, call))
                    if stage not in self.dead:
                        wanted.add(("grad", stage, call))
            if position in self._living(self.places[stage]) and stage not in self.dead and len(self.raw.units) > 1:
                wanted.add(("reduced", stage))
        for source, destination in self.edges:
            for forward in (True, False) if self.trained(source, destination) else (True,):
                for number, _, maker, _, user in self.links(source, destination, forward):
                    if maker != user and position == maker:
                        wanted.add(("sent", source, destination, forward, number))
                    if maker != user and position == user:
                        wanted.add(("received", source, destination, forward, number))
        for group, stages in self.tied.items():
            if any(position in self._living(self.places[stage]) for stage in stages):
                wanted.add(("reduced", group))
        return wanted

    def _compute(self, kind, stage, call, position):
        if stage >= len(self.places) or (kind != "F" and stage in self.dead):
            return Reading(wrong=STRANGE)
        if call not in self.pieces:
            return Reading(wrong=UNKNOWN)
        if call not in self.calls[stage] or position not in self.where(stage, call):
            return Reading(wrong=STRANGE)
        ends = ()
        if len(self.places[stage]) > 1:
            ends = ((("stage", stage, position // self.each), position, (kind, call)),)
        half, weight = ("half", stage, call), ("weight", stage, call)
        if kind == "W":
            return Reading(weight, frozenset([half]), ends=ends)
        used = [] if kind == "F" else [("F", stage, call)]
        for source, destination in self.edges:
            if (destination if kind == "F" else source) != stage:
                continue
            if kind != "F" and not self.trained(source, destination):
                continue
            for number, maker, place, user, here in self.links(source, destination, kind == "F"):
                if (user, here) == (call, position):
                    own = ("F", source, maker) if kind == "F" else ("grad", destination, maker)
                    used.append(own if place == position else ("received", source, destination, kind == "F", number))
        if kind == "F":
            return Reading(("F", stage, call), frozenset(used), ends=ends)
        return Reading(("grad", stage, call), frozenset(used), (weight,) if kind == "B" else (half,), ends)

    def _message(self, action, position):
        source, destination = action.edge.source, action.edge.destination
        forward, sending = str(action.kind).endswith("_F"), str(action.kind).startswith("SEND")
        if (source, destination) not in self.edges or (not forward and not self.trained(source, destination)):
            return Reading(wrong=STRANGE)
        links = [link for link in self.links(source, destination, forward) if link[0] == action.microbatch]
        partners, makers = set(), set()
        for _, maker, place, _, there in links:
            if sending and place == position:
                makers.add(("F" if forward else "grad", source if forward else destination, maker))
                partners.add(there)
            elif not sending and there == position:
                partners.add(place)
        partners -= {position}
        if not partners:
            return Reading(wrong=STRANGE)
        content = (source, destination, forward, action.microbatch)
        ends = []
        for partner in sorted(partners):
            way = (position, partner) if sending else (partner, position)
            if self.lanes == "separate":
                ends.append(((*way, forward), sending, content))
            else:
                ends.append((tuple(sorted(way)), position, (*content, way)))
        return Reading(("sent" if sending else "received", *content), frozenset(makers), ends=tuple(ends))

    def _collective(self, action, position):
        if str(action.kind) != "REDUCE":
            return super()._collective(action, position)
        name = action.group or ("all of", position % self.each)
        if position not in self.members.get(name, ()):
            return Reading(wrong=STRANGE)
        whose = None if action.group else action.stage
        ends = ((("group", name), position, ("REDUCE", whose)),)
        if action.group is None and len(self.raw.units) == 1:
            ends = ()
        held = {stage for stage in range(len(self.places)) if position in self._living(self.places[stage])}
        if action.stage not in held or action.stage in self.dead:
            return Reading(wrong=STRANGE, ends=ends)
        finished = {action.stage} | (self.tied.get(action.group, set()) & held)
        weights = [("weight", s, c) for s in finished for c in self.calls[s] if position in self.where(s, c)]
        return Reading(("reduced", action.group or action.stage), frozenset(weights), ends=ends)

    def _together(self, queue):
        return {place + self.each * queue[2] for place in self.places[queue[1]]}
