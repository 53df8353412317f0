"""Creation orders: all members create each group and lane, in orders that do not wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from pipegrid.plans.errors import Fault
from pipegrid.plans.orders.play import Program, Wait, cycles, play
from pipegrid.plans.plan import Lane, Plan
from pipegrid.plans.plan.dataflow import dataflow_of

Creation: TypeAlias = Sequence[Sequence[Lane | str]]
"""Per position, the groups (by name) and lanes that it creates before the first step, in order."""


def default_creation(plan: Plan) -> tuple[tuple[Lane | str, ...], ...]:
    """Per position its groups and lanes, taken from one order for the whole plan: groups, then lanes.

    Creating a group waits for all its members, so orders that disagree can wait for each other in a cycle;
    parts of one order cannot. A plan of computes alone needs none.
    """
    members = _members(plan) if plan.has_communication else {}
    return tuple(tuple(name for name in members if position in members[name]) for position in range(plan.num_positions))


def _members(plan: Plan) -> dict[Lane | str, tuple[int, ...]]:
    flows = dataflow_of(plan)
    return dict(flows.groups) | {lane: (lane.source, lane.destination) for lane in flows.lanes}


def check_creation(plan: Plan, creation: Creation, *, lanes: Literal["separate", "shared"] = "separate") -> list[Fault]:
    """The faults of an order of creation, for jobs that do not take `default_creation`.

    Creating a communicator waits for all its members. With shared lanes all lanes between two positions are
    one communicator, created in place of the first of them.
    """
    if len(creation) != plan.num_positions:
        return [Fault("creation", f"there are {len(creation)} lists; the plan has {plan.num_positions} positions")]
    members = _members(plan)
    faults = _check_members(creation, members)
    if faults:
        return faults
    programs = []
    events: dict[tuple[object, int], int] = {}  # (communicator, member) -> the event that the member has come to it
    for position, names in enumerate(creation):
        program = Program()
        created: set[object] = set()
        for name in names:
            program.ends.append(len(program.operations))
            communicator = _communicator(name, lanes)
            if communicator in created:
                continue
            created.add(communicator)
            own = {member: events.setdefault((communicator, member), len(events)) for member in members[name]}
            program.operations.append(own.pop(position))
            program.operations += [~event for event in own.values()]
        program.ends = [*program.ends[1:], len(program.operations)]
        programs.append(program)
    at = play(programs, len(events))
    for cycle in cycles(programs, at):
        lines = [
            f"\n      position {wait.position} creates {_name(creation, wait)} and waits for position "
            f"{setter.position}, which creates {_name(creation, setter)} later"
            for wait, setter in cycle
        ]
        faults.append(
            Fault(
                "creation",
                f"{len(cycle)} positions wait for each other in a cycle while they create groups and "
                f"lanes; put these in one order for all{''.join(lines)}",
                cycle[0][0].position,
            )
        )
    return faults


def _check_members(creation: Creation, members: Mapping[Lane | str, tuple[int, ...]]) -> list[Fault]:
    faults = []
    created: dict[Lane | str, set[int]] = {name: set() for name in members}
    for position, names in enumerate(creation):
        for name in names:
            what = _kind(name)
            if name not in members:
                faults.append(Fault("creation", f"creates {what}, which the plan does not have", position))
            elif position not in members[name]:
                faults.append(Fault("creation", f"creates {what}, whose members are {list(members[name])}", position))
            elif position in created[name]:
                faults.append(Fault("creation", f"creates {what} twice", position))
            else:
                created[name].add(position)
    for name, positions in created.items():
        missing = [position for position in members[name] if position not in positions]
        if missing:
            by = f"only positions {sorted(positions)} create it" if positions else "no position creates it"
            faults.append(
                Fault(
                    "creation",
                    f"{_kind(name)} is not created by positions {missing}; {by}, and wait for ever",
                )
            )
    return faults


def _communicator(name: Lane | str, lanes: str) -> object:
    if isinstance(name, Lane) and lanes == "shared":
        return frozenset((name.source, name.destination))
    return name


def _name(creation: Creation, wait: Wait) -> str:
    return _kind(creation[wait.position][wait.step])


def _kind(name: Lane | str) -> str:
    return f"lane {name}" if isinstance(name, Lane) else f"group {name!r}"
