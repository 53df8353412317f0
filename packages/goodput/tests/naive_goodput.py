"""A rival of the simulation of failures: second by second, with counters, for durations of whole seconds."""

from __future__ import annotations

import math


def rate(table, up):
    """Samples per second, and how many nodes train for it, with so many up."""
    best = (0.0, 0)
    for nodes, samples in table:
        if nodes <= up and samples > best[0]:
            best = (samples, nodes)
    return best


class Naive:
    def __init__(self, scenario, policy, every):
        self.given, self.policy, self.every = scenario, policy, every or math.inf
        self.replanned = [row for row in scenario.replanned.table if row[1]] if scenario.replanned else []
        self.least = min((nodes for nodes, _ in self.replanned), default=0) if policy == "re-plan" else math.inf
        self.nodes = scenario.throughput.nodes
        self.places = self.rate(self.nodes - scenario.spares * (policy == "spare"))[1]
        self.up, self.group = set(range(self.nodes)), []
        self.done = self.saved = self.part = 0
        self.since = 0  # steps after the last checkpoint that was begun
        self.mode, self.left, self.saving = "train", 0, None
        self.joins = False
        self.intact = True
        self.writing = None
        self.seconds = {"redone": 0.0, "checkpoints": 0, "recovery": 0, "waiting": 0}
        self.fewer = self.spares = 0.0
        self.begin()

    def rate(self, up):
        mine = self.least and up >= self.least
        return rate(self.replanned if mine else self.given.throughput.table, up)

    def step_of(self, nodes):
        return round(self.given.throughput.batch / self.rate(nodes)[0])

    def target(self):
        return self.rate(min(len(self.up), self.places))[1]

    def regroup(self):
        self.group = [*sorted(self.group), *sorted(self.up - set(self.group))][: self.target()]

    def begin(self):
        self.regroup()
        self.mode, self.part, self.intact, self.writing, self.stepped = "train", 0, True, None, False
        self.since = self.done - self.saved

    def joins_by_restart(self):
        return self.policy == "restart" or (self.policy == "re-plan" and len(self.group) < self.least)

    def cost(self, joins=False):
        if self.policy == "restart" or not self.intact or (joins and self.joins_by_restart()):
            return self.given.restart
        return self.given.replan if self.policy == "re-plan" else self.given.promote

    def halt(self, *, joins=False):
        save, cost = joins and self.joins_by_restart(), self.cost(joins)
        self.regroup()
        self.mode, self.joins, self.writing = "stop", False, None
        self.saving = self.given.checkpoint + self.given.write if save else None
        self.left = cost + (self.saving or 0)
        if self.saving == 0:
            self.saved = self.done

    def settle(self):
        while True:
            if self.mode == "stop" and self.left == 0:
                self.begin()
            elif self.mode == "train" and self.joins and self.part == 0:
                self.halt(joins=True)
            else:
                return

    def fail(self, node):
        self.up.discard(node)
        if node not in self.group:
            return
        self.group.remove(node)
        full = round(self.given.step)
        if self.mode == "train":
            self.seconds["redone"] += self.part / self.step_of(len(self.group) + 1) * full
        self.part, self.joins, self.writing = 0, False, None
        if self.policy == "restart":
            survives = False
        elif self.policy == "re-plan":
            survives = bool(self.group) and self.target() > 0 and len(self.up) >= self.least
        else:
            survives = bool(self.group) and (len(self.up) >= self.places or self.given.without_spares == "wait")
        self.intact = self.intact and survives
        if not self.intact:
            self.seconds["redone"] += (self.done - self.saved) * full
            self.done = self.saved
        self.go_on()

    def go_on(self):
        lacking = self.policy == "spare" and self.intact and len(self.up) < self.places
        if lacking or not self.target():
            self.mode = "wait"
        else:
            self.halt()

    def back(self, node):
        self.up.add(node)
        if self.mode == "wait":
            self.go_on()
        elif self.mode in {"train", "checkpoint"} and not self.joins:
            now, then = self.rate(len(self.group))[0], self.rate(min(len(self.up), self.places))[0]
            cost = self.cost(joins=True)
            if self.joins_by_restart():
                cost += self.given.checkpoint + self.given.write
            failures = self.given.failures
            fails = sum(not back for _, back, _ in failures.events)
            self.joins = then > now and (then - now) * failures.duration / fails > then * cost

    def second(self):
        given = self.given
        if self.mode == "train" and self.part == 0 and self.due():
            self.mode, self.left = "checkpoint", given.checkpoint
        if self.mode == "wait":
            self.seconds["waiting"] += 1
        elif self.mode == "stop":
            if self.saving:
                self.saving -= 1
                self.seconds["checkpoints"] += 1
                if self.saving == 0:
                    self.saved = self.done
            else:
                self.seconds["recovery"] += 1
            self.left -= 1
        elif self.mode == "checkpoint":
            self.seconds["checkpoints"] += 1
            self.left -= 1
            if self.left == 0:
                self.checkpointed()
        else:
            self.train()

    def due(self):
        return self.since >= self.every and self.writing is None and self.stepped

    def checkpointed(self):
        self.mode, self.since = "train", 0
        if self.given.write:
            self.writing = (self.done, self.given.write)
        else:
            self.saved = self.done

    def train(self):
        own, room, full = self.step_of(len(self.group)), self.step_of(self.places), round(self.given.step)
        room = room if self.policy == "spare" else full
        self.fewer += (own - room) / own
        self.spares += (room - full) / own
        self.part += 1
        if self.writing:
            value, left = self.writing
            self.writing = (value, left - 1)
            if left == 1:
                self.saved, self.writing = value, None
        if self.part == own:
            self.done, self.part, self.since, self.stepped = self.done + 1, 0, self.since + 1, True
            if self.due() and self.given.checkpoint == 0:
                self.checkpointed()

    def run(self):
        """The share of the work of all nodes without failures, and seconds by cause."""
        events = list(self.given.failures.events)
        end = round(self.given.failures.duration)
        for time in range(end):
            while events and events[0][0] == time:
                self.settle()
                _, back, node = events.pop(0)
                (self.back if back else self.fail)(node)
            self.settle()
            self.second()
        full = round(self.given.step)
        under_way = self.part / self.step_of(len(self.group)) if self.mode == "train" else 0.0
        self.seconds |= {"fewer_nodes": self.fewer, "idle_spares": self.spares}
        return (self.done + under_way) * full / end, self.seconds
