"""The proof that no slot is written while it is read: a replay of a position's steps that counts who holds what.

The replay shares only the list of messages with the colouring, and for sends when they are known to be there: it
computes no lifetimes. The holders of a message that is received, and of a copy of a local value, are:

- each forward that takes it, from there to the last backward of its microbatch;
- each later forward of the position whose input may be a view of it, by outputs of trained stages, likewise;
- where a stage has no backward, the forward until the last of its outputs is taken.

A slot is free when its message has no holder; of a send, when a compute has started that could not without it; of
activations on the host, when the backward is done that their `RELOAD` is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipegrid.plans.errors import PlanFault
from pipegrid.plans.plan import Action, ActionKind, Plan, actions_of
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, dataflow_of
from pipegrid.search.buffers.causality import arrivals_known
from pipegrid.search.buffers.lifetimes import LAST
from pipegrid.search.buffers.messages import Buffered, SlotArrival, copies_at, outputs_taken, received_at, sent_at

F, B, I = ActionKind.F, ActionKind.B, ActionKind.I
_MEMORY = {True: "host", False: "device"}


def faults_of(plan: Plan, position: int, arrivals: Sequence[SlotArrival]) -> list[PlanFault]:
    """What is wrong with the slots of ``position``; nothing where no message comes to a slot that is held."""
    replay = _Replay(plan, position, sends=any(arrival.message.action.kind.is_send for arrival in arrivals))
    for arrival in arrivals:
        replay.expect(arrival)
    return replay.run()


class _Replay:
    def __init__(self, plan: Plan, position: int, *, sends: bool) -> None:
        self.plan, self.position = plan, position
        self.faults: list[PlanFault] = []
        self.flows = dataflow_of(plan)
        taken = (*received_at(plan, self.flows, position), *copies_at(plan, self.flows, position))
        self.first = {one.message: one.step for one in taken}  # of each message, the step that has it at the latest
        self.by_reader: dict[tuple[int, object, int], list[Buffered]] = {}  # stage, direction, piece
        self.reads_left: Counter[Buffered] = Counter()
        for message, _, flow, piece in taken:
            for user in flow.users(piece, self.position):
                self.by_reader.setdefault((flow.consumer, flow.direction, user), []).append(message)
                self.reads_left[message] += 1
        self.posted: dict[int, list[SlotArrival]] = {}  # by step
        self.slot_of: dict[Buffered, int] = {}
        self.in_slot: dict[int, Buffered] = {}
        self.size_of: dict[int, int] = {}
        self.host_slots: dict[int, bool] = {}
        self.holders: dict[Buffered, set[tuple[int, int]]] = {}
        self.taken: dict[tuple[int, int], set[Buffered]] = {}  # by stage and microbatch
        self.left = Counter(reader for action in plan.actions(position) for reader in self.readers_that_end(action))
        self.kept: set[Buffered] = set()  # until the end of the step
        self.shown: dict[int, list[Buffered]] = {}  # by step, the sends that it shows to be there
        self.on_host: dict[tuple[int, int], Buffered] = {}  # by stage and piece
        for step, one in enumerate(plan.positions[position]):
            self.first |= {Buffered(a, position): step for a in actions_of(one) if a.kind is ActionKind.OFFLOAD}
        if sends:
            self.first |= {one.message: one.step for one in sent_at(plan, self.flows, position)}
            for message, known in arrivals_known(plan, self.flows, position).items():
                if known is not None:
                    self.shown.setdefault(known, []).append(message)

    def fault(self, rule: str, text: str, step: int | None = None) -> None:
        self.faults.append(PlanFault(rule, text, self.position, step))

    def expect(self, arrival: SlotArrival) -> None:
        message, slot = arrival.message, arrival.slot
        if message not in self.first:
            self.fault("unknown-message", f"{_named(message)} is nothing that this position has")
            return
        if message in self.slot_of:
            self.fault("duplicate", f"{_named(message)} has two slots, {self.slot_of[message]} and {slot}")
            return
        if arrival.posted > self.first[message]:
            self.fault("late-post", f"{message.action} comes to its slot after its step, at step {arrival.posted}")
        if self.host_slots.setdefault(slot, message.on_host) != message.on_host:
            self.fault("memory", f"{message.action} is on the {_MEMORY[message.on_host]}, and slot {slot} is not")
        if self.size_of.setdefault(slot, arrival.nbytes) != arrival.nbytes:
            self.fault(
                "size", f"{message.action} has {arrival.nbytes} bytes, and slot {slot} takes {self.size_of[slot]}"
            )
        self.slot_of[message] = slot
        self.posted.setdefault(arrival.posted, []).append(arrival)

    def run(self) -> list[PlanFault]:
        self.post(-1)
        for step, one in enumerate(self.plan.positions[self.position]):
            self.post(step)
            for action in actions_of(one):
                self.take(action)
            for action in actions_of(one):
                self.let_go(action)
            for message in self.shown.get(step, ()):
                self.free(message)
        return self.faults

    def post(self, step: int) -> None:
        for arrival in self.posted.get(step, ()):
            if (held := self.in_slot.get(arrival.slot)) is not None:
                text = f"{arrival.message.action} comes to slot {arrival.slot}, whose {held.action} is read later"
                self.fault("overwritten", text, max(step, 0))
            self.in_slot[arrival.slot] = arrival.message

    def take(self, action: Action) -> None:
        if action.kind is ActionKind.OFFLOAD:
            self.on_host[action.stage, self.plan.piece_of(action)] = Buffered(action, self.position)
        if action.kind not in (F, B, I):
            return
        stage, piece = action.stage, self.plan.piece_of(action)
        direction = FORWARD if action.kind is F else BACKWARD
        reader = stage, piece // self.plan.num_slices
        own = self.taken.setdefault(reader, set())
        for message in self.by_reader.get((stage, direction, piece), ()):
            self.reads_left[message] -= 1
            own.add(message)
        if action.kind is F:
            for flow, one in self.flows.arriving(stage, FORWARD, piece):
                trained = flow.producer not in self.plan.forward_only
                if trained and flow.group is None and (self.position, self.position) in flow.links:
                    for made in flow.makers(one, self.position):
                        own |= self.taken.get((flow.producer, made // self.plan.num_slices), set())
            edges = (flow.edge for flow, _ in self.flows.leaving(stage, FORWARD, piece))
            if stage not in self.plan.forward_only and not self.plan.gradient_edges.issuperset(edges):
                self.kept |= own  # no gradient comes back for all that the forward gives
        for message in own:
            self.holders.setdefault(message, set()).add(reader)

    def readers_that_end(self, action: Action) -> list[tuple[int, int]]:
        """The stages, each with its microbatch, for which ``action`` is one of those after which they are done."""
        if action.kind in LAST and action.microbatch is not None:
            return [(action.stage, action.microbatch)]
        taken = outputs_taken(self.plan, self.flows, self.position, action)
        return [(stage, microbatch) for stage, microbatch in taken if stage in self.plan.forward_only]

    def free(self, message: Buffered) -> None:
        if message in self.slot_of and self.in_slot.get(self.slot_of[message]) == message:
            del self.in_slot[self.slot_of[message]]

    def let_go(self, action: Action) -> None:
        if action.kind in (B, I) and (away := self.on_host.pop((action.stage, self.plan.piece_of(action)), None)):
            self.free(away)
        for reader in self.readers_that_end(action):
            self.left[reader] -= 1
            if self.left[reader]:
                continue
            for message in self.taken.pop(reader, set()):
                self.holders[message].discard(reader)
                if not self.holders[message] and not self.reads_left[message] and message not in self.kept:
                    self.free(message)


def _named(message: Buffered) -> str:
    return f"{message.action} {'from' if message.action.kind.is_receive else 'to'} {message.peer}"
