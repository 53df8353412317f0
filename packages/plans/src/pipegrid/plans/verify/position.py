"""Verification of each position in one pass over its steps, then of what positions do together: both have one order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import Factory, define

from pipegrid.plans.errors import PlanFault
from pipegrid.plans.orders.play import EventProgram
from pipegrid.plans.plan import OFFLOADING, SHARDING, Action, ActionKind, Lane, Step, for_piece, step_text
from pipegrid.plans.plan.parts import is_pair
from pipegrid.plans.verify.explain import out_of_sequence, step_of, unknown_microbatch, why_no_rule, why_refused
from pipegrid.plans.verify.table import ActionRule, EventIds, PositionTable, RuleKey

F, W = ActionKind.F, ActionKind.W


@define(eq=False)
class SharedLane:
    """The messages of one position and a partner over their one communicator, batch by batch.

    ``contents``: per exchange the id of its message, or a list of several; ``steps``: its step. ``here`` and ``there``:
    the events of the first exchange at both ends, where it blocks.
    """

    here: int | None
    there: int | None
    contents: list[int | list[int]] = Factory(list)
    steps: list[int] = Factory(list)


class PositionVerifier:
    """The verification of one position's steps, and what the verification between positions needs of them.

    ``faults``: what is wrong whatever the other positions do. ``program``: the events, for `play`. ``sent``
    and ``received``: per lane, the messages in order. ``exchanges``: per partner, with shared lanes. ``calls``: in
    order, per group its collectives, and per shared stage its computes: what must be the same for all, and the step.
    """

    def __init__(self, table: PositionTable, steps: Sequence[Step]) -> None:
        self.table, self.position, self.steps = table, table.position, steps
        self.faults: list[PlanFault] = []
        self.program = EventProgram()
        self.calls: dict[str | int, list[tuple[str, int]]] = {
            **{name: [] for name, members in table.ids.dataflow.groups.items() if table.position in members},
            **{stage: [] for stage, places in table.ids.dataflow.shared if table.position in places},
        }
        self.reduced: set[str] = set()  # names of groups, and numbers of stages reduced without one
        self.shards = False  # whether parameters are gathered or freed here
        self.offloads = False  # whether activations are copied to the host
        self.flags = bytearray(table.num_flags)
        self.num_actions = 0
        exchanges = table.ids.exchanges if table.blocking.rendezvous else {}
        ends = (((self.position, partner), (partner, self.position)) for partner in table.partners)
        self._shared_lanes = [SharedLane(exchanges.get(here), exchanges.get(there)) for here, there in ends]
        self._orders: list[list[int]] = [[] for _ in table.lanes]  # messages at this end of each lane
        self._waits: list[int] = []  # of the batch: it posts all its messages, and then waits for their other ends
        self._posted: list[tuple[int, int]] = []  # of the batch, with shared lanes: partner and message
        self._verify_steps()
        self.sent: dict[Lane, list[int]] = {}
        self.received: dict[Lane, list[int]] = {}
        for (lane, sends), order in zip(table.lanes, self._orders, strict=True):
            (self.sent if sends else self.received)[lane] = order
        self.exchanges = dict(zip(table.partners, self._shared_lanes, strict=True))
        self.faults += _missing_actions(table, self.flags, self.reduced)

    def _verify_steps(self) -> None:
        """Verify the actions of each step, and add their events; messages of a batch are waited for at its end."""
        table, program = self.table, self.program
        rules, routed, sliced, in_order = table.table, table.routed, table.sliced, table.blocking.in_order
        for index, step in enumerate(self.steps):
            actions = (step,) if isinstance(step, Action) else step
            self.num_actions += len(actions)
            pair = actions is step and is_pair(step)
            begins = len(program.operations)
            part: tuple[int, int] | None = None  # flow and piece whose messages block together, of a batch in order
            # Of a pair the backward first, so that it finds nothing that its forward makes.
            for action in reversed(actions) if pair else actions:
                kind, piece, edge = action.kind, action.microbatch, action.edge
                key: RuleKey = (kind, action.stage) if edge is None else (kind, edge.source, edge.destination)
                rule = rules.get((*key, piece) if routed else key)
                if rule is None or piece is None:
                    if in_order:
                        self._wait()
                    part = None
                    self._verify_collective(index, action)
                    continue
                if sliced:
                    piece = table.plan.piece_of(action)
                away = 0 if routed else piece
                if not self._may_run(index, action, rule, away):
                    continue
                if edge is None:
                    self._add_compute(index, action, rule, away)
                    continue
                if in_order and part != (rule.flow, piece):
                    self._wait()
                    part = rule.flow, piece
                self._add_message(rule, away)
            if pair:  # inputs of both before what either gives: an id to set is not negative
                program.operations[begins:] = sorted(program.operations[begins:], key=lambda event: event >= 0)
            if self._posted:
                self._exchange(index)
            self._wait()
            program.ends.append(len(program.operations))

    def _may_run(self, index: int, action: Action, rule: ActionRule, piece: int) -> bool:
        """Set the flag of the action, ``piece`` away from its rule. False: unknown or done; a fault: an input lacks."""
        flags, done = self.flags, rule.done + piece
        if piece >= self.table.num_pieces or flags[done]:
            self.faults.append(why_refused(self.table, flags, self.steps, index, action, rule))
            return False
        for needed in rule.needs:
            if not flags[needed + piece]:
                self.faults.append(why_refused(self.table, flags, self.steps, index, action, rule))
                break
        flags[done] = 1
        return True

    def _add_compute(self, index: int, action: Action, rule: ActionRule, piece: int) -> None:
        if rule.also is not None:
            self.flags[rule.also + piece] = 1
        if action.slice is not None and action.kind is not W:
            # Forward after the slice before it in the sequence, backward after the one behind.
            plan, step = self.table.plan, -1 if action.kind is F else 1
            if 0 <= action.slice + step < plan.num_slices and not self.flags[rule.done + piece + step]:
                self.faults.append(out_of_sequence(self.table, rule.done, self.steps, index, action))
        if rule.events:
            self._add_events(rule.events, piece)
            if action.stage in self.calls:
                self.calls[action.stage].append((str(action), index))

    def _add_message(self, rule: ActionRule, piece: int) -> None:
        self._add_events(rule.events, piece)
        for order, message, wait, partner in rule.messages:
            self._orders[order].append(message + piece)
            if wait is not None:
                self._waits.append(wait - piece)
            elif partner is not None:
                self._posted.append((partner, message + piece))

    def _add_events(self, events: Sequence[int], piece: int) -> None:
        """Add the events of a rule, which are for piece 0: ids to set, or ``~id`` to wait for."""
        for event in events:
            self.program.operations.append(event + piece if event >= 0 else event - piece)

    def _wait(self) -> None:
        """Wait for the other ends of what was posted."""
        if self._waits:
            self.program.operations += self._waits
            self._waits.clear()

    def _exchange(self, index: int) -> None:
        """Note what a batch exchanges with each of its partners over shared lanes."""
        contents: dict[int, int | list[int]] = {}
        for partner, message in self._posted:
            if partner in contents:
                others = contents[partner]
                contents[partner] = sorted([*(others if isinstance(others, list) else (others,)), message])
            else:
                contents[partner] = message
        self._posted.clear()
        for partner, content in contents.items():
            lane = self._shared_lanes[partner]
            if lane.here is not None and lane.there is not None:
                at = len(lane.steps)
                self.program.operations.append(lane.here + at)
                self._waits.append(~(lane.there + at))
            lane.contents.append(content)
            lane.steps.append(index)

    def _fault(self, rule: str, message: str, step: int) -> None:
        self.faults.append(PlanFault(rule, message, self.position, step))

    def _verify_collective(self, index: int, action: Action) -> None:
        """Verify a ``REDUCE`` or ``COLLECTIVE``; note the fault of an action without a rule."""
        ids, plan, position = self.table.ids, self.table.plan, self.position
        if action.kind in SHARDING:
            self._verify_sharding(index, action)
            return
        if action.kind in OFFLOADING:  # a copy waits for no other rank; the rest is `check_offloading`'s
            self.offloads = True
            if action.stage not in self.table.weights:
                self.faults.append(why_no_rule(plan, position, index, action))
            elif action.microbatch is None or action.microbatch >= plan.num_microbatches:
                self.faults.append(unknown_microbatch(action, plan.num_microbatches, position, index))
            return
        if action.kind not in (ActionKind.REDUCE, ActionKind.COLLECTIVE):
            self.faults.append(why_no_rule(plan, position, index, action))
            return
        name = ids.dataflow.group_of(action, position)
        members = () if name is None else ids.dataflow.groups.get(name, ())
        if name is not None and position not in members:
            whose = f"it has positions {list(members)}" if members else "the plan has no such group"
            self._fault("group", f"{action}: this position is not in the group; {whose}", index)
            return
        may, same = True, str(action)
        if action.kind is ActionKind.REDUCE:
            may, same = self._may_reduce(index, action), "REDUCE" if action.group is not None else same
        elif action.edge is not None:
            may = self._may_collect(index, action)
        elif action.microbatch is not None and action.microbatch >= plan.num_microbatches:
            self.faults.append(unknown_microbatch(action, plan.num_microbatches, position, index))
            may = False
        else:
            same = f"COLLECTIVE{'' if action.microbatch is None else action.microbatch}"
        if may and name is not None:
            calls = self.calls[name]
            self.program.operations.append(ids.called(name, len(calls), position))
            self._waits += [~ids.called(name, len(calls), other) for other in members if other != position]
            calls.append((same, index))

    def _verify_sharding(self, index: int, action: Action) -> None:
        """Verify an action of `check_sharding`. It is an event where a stage lies on several positions.

        Otherwise the ranks that gather together are one position's on its replicas, which run one proved order.
        """
        ids, stage = self.table.ids, action.stage
        self.shards = True
        if stage not in self.table.weights:
            self.faults.append(why_no_rule(self.table.plan, self.position, index, action))
            return
        places = ids.dataflow.together(stage, self.position)
        if places and action.kind is not ActionKind.RESHARD:
            calls, key = self.calls[stage], f"stage {stage}"  # no name of a group has a space
            self.program.operations.append(ids.called(key, len(calls), self.position))
            self._waits += [~ids.called(key, len(calls), other) for other in places if other != self.position]
            calls.append((str(action), index))

    def _may_reduce(self, index: int, action: Action) -> bool:
        table, stage = self.table, action.stage
        if stage not in table.weights:
            self.faults.append(why_no_rule(table.plan, self.position, index, action))
            return False
        if stage in table.plan.forward_only:
            self._fault("unneeded", f"{action}: stage {stage} has no backward to reduce", index)
            return False
        name = action.group or f"{stage}"
        if name in self.reduced:
            self._fault("duplicate", f"{action} is here a second time", index)
            return False
        self.reduced.add(name)
        for held in {stage, *table.tied.get(name, ())}:
            pieces = table.pieces[held]
            left = sum(not self.flags[table.weights[held] + piece] for piece in pieces)
            if left:
                what = f"{left} of {len(pieces)} {'microbatches' if table.plan.num_slices == 1 else 'slices'}"
                text = f"{action} comes before the last backward of stage {held}; {what} are not done"
                self._fault("dependency", text, index)
        return True

    def _may_collect(self, index: int, action: Action) -> bool:
        assert action.edge is not None
        assert action.direction is not None
        plan = self.table.plan
        rule = self.table.collectives.get((action.edge, action.direction))
        if rule is None:
            self.faults.append(why_no_rule(plan, self.position, index, action))
            return False
        group = plan.collective_edges[action.edge]
        if action.group != group:
            self._fault("group", f"{action}: edge {action.edge} already uses the group {group!r}", index)
            return False
        return self._may_run(index, action, rule, plan.piece_of(action))


def _missing_actions(table: PositionTable, flags: bytearray, reduced: set[str]) -> list[PlanFault]:
    """The actions that a position never does, one fault for each kind of action."""
    count, plan = table.span, table.plan
    found: dict[tuple[object, ...], list[list[Action]]] = {}
    for rule in (*table.table.values(), *table.collectives.values()):
        action, done = rule.action, rule.done
        if action.kind is ActionKind.B or not flags.count(0, done, done + count):
            continue  # B and I set one flag between them; it is looked at once, for I
        lacking = [piece for piece in range(count) if not flags[done + piece]]
        if action.kind is ActionKind.W:  # without an I the whole backward is missing
            lacking = [piece for piece in lacking if flags[rule.needs[0] + piece]]
        for piece in lacking:
            makers = table.makers_of(done + piece)
            makers = makers or [for_piece(action, plan.piece_of(action) + piece, plan.num_slices)]
            found.setdefault((action.kind, action.stage, action.edge, action.group), []).append(makers)
    faults = []
    for lacking_actions in found.values():
        listed = ", ".join(" or ".join(map(str, makers)) for makers in lacking_actions[:8])
        more = f" and {len(lacking_actions) - 8} more" if len(lacking_actions) > 8 else ""
        faults.append(PlanFault("missing", f"{listed}{more}: to be done here, and never done", table.position))
    remedy = "" if plan.has_communication else "; lower adds it to a plan of computes"
    reductions = {name: f"{min(stages)}REDUCE@{name}" for name, stages in table.tied.items()}
    reductions |= {f"{stage}": f"{stage}REDUCE" for stage in table.averaged}
    left = (action for name, action in reductions.items() if name not in reduced)
    never = f"to be done here, and never done{remedy}"
    return faults + [PlanFault("missing", f"{action}: {never}", table.position) for action in left]


def check_lanes(ids: EventIds, verifiers: Sequence[PositionVerifier]) -> list[PlanFault]:
    """On each lane, receives are in the order of the sends."""
    faults = []
    for verifier in verifiers:
        for lane, sent in verifier.sent.items():
            received = verifiers[lane.destination].received[lane]
            if sent == received or set(sent) != set(received):
                continue  # a message with one end only is reported where the other is missing
            number = _first_difference(sent, received)
            ends = []
            for sends, position, order in ((True, lane.source, sent), (False, lane.destination, received)):
                action = ids.message(order[number], sends=sends)
                ends.append(f"position {position}, step {step_of(action, verifiers[position].steps)}: {action}")
            text = f"lane {lane}: message {number} is sent by {ends[0]}, and received as another by {ends[1]}"
            faults.append(PlanFault("order", f"{text}; lanes are first in, first out"))
    return faults


def check_calls(ids: EventIds, verifiers: Sequence[PositionVerifier]) -> list[PlanFault]:
    """The members of a group do its collectives in one order, and the positions of a shared stage its computes."""
    faults = []
    together: list[tuple[str | int, tuple[int, ...]]] = [*ids.dataflow.groups.items(), *ids.dataflow.shared]
    for key, positions in together:
        first, *others = [(verifiers[position], verifiers[position].calls[key]) for position in positions]
        for other in others:
            ours, theirs = ([same for same, _ in calls] for _, calls in (first, other))
            if ours == theirs:
                continue
            number = _first_difference(ours, theirs)
            ways = "; ".join(_where(one, [step for _, step in calls], number) for one, calls in (first, other))
            if isinstance(key, str):
                text = f"group {key!r}: collective {number} differs between members: {ways}"
                faults.append(PlanFault("group", text))
                continue
            what = f"stage {key} lies on positions {list(positions)}, whose ranks may communicate inside it"
            text = f"its compute {number} differs between them: {ways}; put its computes in one order on all of them"
            faults.append(PlanFault("order", f"{what}, and {text}"))
    return faults


def check_exchanges(verifiers: Sequence[PositionVerifier]) -> Iterator[PlanFault]:
    """With one communicator for each pair of positions, the batches of the two match one to one, in order."""
    for verifier in verifiers:
        for partner, mine in verifier.exchanges.items():
            other = verifiers[partner]
            theirs = other.exchanges[verifier.position]
            if verifier.position > partner or mine.contents == theirs.contents:
                continue
            number = _first_difference(mine.contents, theirs.contents)
            ways = f"{_where(verifier, mine.steps, number)} against {_where(other, theirs.steps, number)}"
            what = f"positions {verifier.position} and {partner} share a lane, and their exchange {number}"
            yield PlanFault("order", f"{what} does not match: {ways}")


def _first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """The place of the first difference; of unequal lengths at most the end of the shorter one."""
    shorter = min(len(ours), len(theirs))
    return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)


def _where(verifier: PositionVerifier, steps: Sequence[int], number: int) -> str:
    """The step in which a position does its part ``number``, of those that it does in ``steps``."""
    if number >= len(steps):
        return f"position {verifier.position} has no more"
    return f"position {verifier.position}, step {steps[number]}: {step_text(verifier.steps[steps[number]])}"
