"""A slow rival of the proof: every read of memory that is written as early or as late as it may be."""

import itertools

from pipegrid.plans import Action, ActionKind, actions_of
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, dataflow_of
from pipegrid.search.buffers import Buffered

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
        self.away = {}  # by stage and piece, what is on the host
        for step, one in enumerate(plan.positions[position]):
            for action in actions_of(one):
                self._play(action, step)

    def _messages(self, stage, direction, piece):
        for flow, number in self.flows.arriving(stage, direction, piece):
            kind = ActionKind.RECV_F if direction is FORWARD else ActionKind.RECV_B
            for sender, receiver in flow.routes:
                if receiver == self.position:
                    found = [m for m in self.received if (m.action.kind, m.action.edge) == (kind, flow.edge)]
                    yield from (m for m in found if self.plan.piece_of(m.action) == number and m.peer == sender)

        for copy in self.received:
            if copy.peer == self.position and direction is FORWARD and copy.action.stage == stage:
                for flow, number in self.flows.arriving(stage, FORWARD, piece):
                    if (flow.edge, number) == (copy.action.edge, self.plan.piece_of(copy.action)):
                        yield copy

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
        if action.kind is ActionKind.OFFLOAD:
            self.away[stage, piece] = Buffered(action, self.position)
            self._read([self.away[stage, piece]], step)
        elif action.kind in (B, I) and (stage, piece) in self.away:
            self._read([self.away[stage, piece]], step)
        if action.kind.is_receive:
            for flow in self.flows.between_positions:
                if (flow.edge, flow.direction) == (action.edge, action.direction) and piece in flow.pieces:
                    for sender, receiver in flow.routes:
                        if receiver == self.position:
                            self.received[Buffered(action, sender)] = step
        elif action.kind is F:
            held = (self.copied if frozen else self.views).setdefault(key, set())
            held.update(self._messages(stage, FORWARD, piece))
            for producer, made in self._local(stage, piece):
                before = producer, made // plan.num_slices
                self._read(self.copied.get(before, ()), step)
                held |= self.views.get(before, set())
            self._read(held, step)
            for flow, number in self.flows.leaving(stage, FORWARD, piece) if frozen else ():
                if flow.group is None and (self.position, self.position) in flow.links:
                    whole, part = divmod(number, plan.num_slices)
                    part = part if plan.num_slices > 1 else None
                    copy = Action(ActionKind.RECV_F, flow.consumer, whole, flow.edge, slice=part)
                    self.received[Buffered(copy, self.position)] = step
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

    def play_sends(self):
        """The reads of what is sent: as long as this position can go on while its receiver stays where it was."""
        reached = {}
        for step, one in enumerate(self.plan.positions[self.position]):
            for action in actions_of(one):
                for flow in self.flows.between_positions if action.kind.is_send else ():
                    piece = self.plan.piece_of(action)
                    if (flow.edge, flow.direction) != (action.edge, action.direction) or piece not in flow.pieces:
                        continue
                    for sender, receiver in flow.routes:
                        if sender == self.position:
                            first = self._first_use(flow, piece, receiver)
                            if (receiver, first) not in reached:
                                reached[receiver, first] = self._reach(receiver, first)
                            self.reads[Buffered(action, receiver)] = {step, reached[receiver, first]}

    def _first_use(self, flow, piece, place):
        users, kinds = flow.users(piece, place), (F,) if flow.direction is FORWARD else (B, I)
        for step, one in enumerate(self.plan.positions[place]):
            for action in actions_of(one):
                if action.kind in kinds and action.stage == flow.consumer and self.plan.piece_of(action) in users:
                    return step
        raise AssertionError

    def _reach(self, stopped, first):
        """The compute that this position cannot start while position ``stopped`` has not begun step ``first``."""
        steps = [[(n, a) for n, one in enumerate(own) for a in actions_of(one)] for own in self.plan.positions]
        steps = [[(n, a) for n, a in own if a.kind in (F, B, I, W)] for own in steps]
        done, at, moved = set(), [0] * len(steps), True
        while moved:
            moved = False
            for place, own in enumerate(steps):
                while at[place] < len(own):
                    step = own[at[place]][0]
                    if place == stopped and step >= first:
                        break
                    together = [a for n, a in own if n == step]  # a pair
                    if not all(self._made(a, place, done) for a in together):
                        break
                    done.update(
                        (place, a.stage, a.kind is F, self.plan.piece_of(a)) for a in together if a.kind is not W
                    )
                    at[place] += len(together)
                    moved = True
        own, count = steps[self.position], at[self.position]
        return own[count][0] if count < len(own) else len(self.plan.positions[self.position])

    def _made(self, action, place, done):
        if action.kind is W:
            return True
        way = FORWARD if action.kind is F else BACKWARD
        return all(
            origin == place or (origin, flow.producer, way is FORWARD, maker) in done
            for flow, piece in self.flows.arriving(action.stage, way, self.plan.piece_of(action))
            if flow.group is None
            for origin in flow.origins(place)
            for maker in flow.makers(piece, origin)
        )

    def is_harmless(self, arrivals):
        """Whether each read finds its message, whenever each is written, from its post to its first read."""
        for one, other in itertools.permutations(arrivals, 2):
            if one.slot != other.slot:
                continue
            if one.message.on_host != other.message.on_host:
                return False
            steps = self.reads[one.message]
            for own in (one.posted, min(steps)):
                for written in (other.posted, min(self.reads[other.message])):
                    if any(own <= written <= step for step in steps):
                        return False
        return True

    def most_at_once(self, arrivals):
        """Of each size, in each memory, the most messages that are alive at once."""
        counts = {}
        for step in range(-1, len(self.plan.positions[self.position]) + 1):
            alive = {}
            for one in arrivals:
                if one.posted <= step <= max(self.reads[one.message]):
                    kind = one.nbytes, one.message.on_host
                    alive[kind] = alive.get(kind, 0) + 1
            counts = {size: max(counts.get(size, 0), alive.get(size, 0)) for size in {*counts, *alive}}
        return sum(counts.values())
