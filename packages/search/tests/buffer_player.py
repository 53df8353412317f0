"""A slow rival of the proof: every read of memory that is written as early or as late as it may be."""

import itertools

from pipegrid.plans import ActionKind, actions_of
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, dataflow_of
from pipegrid.search.buffers import ReceivedMessage

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W


class Player:
    """Every read of what comes to one position, step by step."""

    def __init__(self, plan, position):
        self.plan, self.position, self.flows = plan, position, dataflow_of(plan)
        self.reads = {}  # of each message, the steps
        self.received = {}
        self.views = {}  # by stage and microbatch: the messages of which what the stage has, or gives, may be a view
        self.copied = {}  # the same of a stage without a backward, whose outputs are copied where they are taken
        self.gradients = {}
        for step, one in enumerate(plan.positions[position]):
            for action in actions_of(one):
                self._play(action, step)

    def _messages(self, stage, direction, piece):
        for flow, number in self.flows.arriving(stage, direction, piece):
            kind = ActionKind.RECV_F if direction is FORWARD else ActionKind.RECV_B
            for sender, receiver in flow.routes:
                if receiver == self.position:
                    found = [m for m in self.received if (m.receive.kind, m.receive.edge) == (kind, flow.edge)]
                    yield from (m for m in found if self.plan.piece_of(m.receive) == number and m.sender == sender)

    def _local(self, stage, piece):
        for flow, number in self.flows.arriving(stage, FORWARD, piece):
            if flow.group is None and (self.position, self.position) in flow.links:
                yield from ((flow.producer, one) for one in flow.makers(number, self.position))

    def _read(self, messages, step):
        for message in messages:
            self.reads.setdefault(message, set()).add(step)

    def _play(self, action, step):
        plan, stage = self.plan, action.stage
        if action.microbatch is None:
            return
        piece, end = plan.piece_of(action), len(plan.positions[self.position])
        key, frozen = (stage, action.microbatch), stage in plan.forward_only
        if action.kind.is_receive:
            for flow in self.flows.crossing:
                if (flow.edge, flow.direction) == (action.edge, action.direction) and piece in flow.pieces:
                    for sender, receiver in flow.routes:
                        if receiver == self.position:
                            self.received[ReceivedMessage(action, sender)] = step
        elif action.kind is F:
            held = (self.copied if frozen else self.views).setdefault(key, set())
            held.update(self._messages(stage, FORWARD, piece))
            for producer, made in self._local(stage, piece):
                before = producer, made // plan.num_slices
                self._read(self.copied.get(before, ()), step)
                held |= self.views.get(before, set())
            self._read(held, step)
            unanswered = [flow for flow, _ in self.flows.leaving(stage, FORWARD, piece)]
            if not frozen and any(flow.edge not in plan.gradient_edges for flow in unanswered):
                self._read(held, end)
        elif action.kind in (B, I, W):
            came = self.gradients.setdefault(key, set())
            if action.kind is not W:
                came.update(self._messages(stage, BACKWARD, piece))
            self._read(came | self.views[key], step)
        elif action.edge is not None and action.direction is FORWARD:  # a send, or an exchange
            self._read(self.copied.get((action.edge.source, action.microbatch), ()), step)

    def is_harmless(self, arrivals):
        """Whether each read finds its message, whenever each is written, from its post to its first read."""
        for one, other in itertools.permutations(arrivals, 2):
            if one.slot != other.slot:
                continue
            steps = self.reads[one.message]
            for own in (one.posted, min(steps)):
                for written in (other.posted, min(self.reads[other.message])):
                    if any(own <= written <= step for step in steps):
                        return False
        return True

    def most_at_once(self, arrivals):
        """Per size, the most messages that are alive at once."""
        counts = {}
        for step in range(-1, len(self.plan.positions[self.position]) + 1):
            alive = {}
            for one in arrivals:
                if one.posted <= step <= max(self.reads[one.message]):
                    alive[one.nbytes] = alive.get(one.nbytes, 0) + 1
            counts = {size: max(counts.get(size, 0), alive.get(size, 0)) for size in {*counts, *alive}}
        return sum(counts.values())
