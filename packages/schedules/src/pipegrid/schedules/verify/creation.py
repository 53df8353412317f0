"""Groups and lanes are made by all their members, in orders that do not wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pipegrid.schedules.errors import Fault
from pipegrid.schedules.plan.plan import Lane, Plan
from pipegrid.schedules.verify.deadlock import Program, cycles, play


def check_creation(plan: Plan, *, lanes: Literal["separate", "shared"] = "separate") -> list[Fault]:
    """The faults of the plan's creation order.

    Creating a communicator waits for all its members. With shared lanes all lanes between two positions are
    one communicator, made where the first of them stands.
    """
    if not plan.communicates:
        return []
    members: dict[Lane | str, tuple[int, ...]] = {group.name: group.positions for group in plan.groups}
    members |= {lane: (lane.source, lane.destination) for lane in plan.lanes}
    faults = _check_members(plan, members)
    if faults:
        return faults
    programs = []
    marks: dict[tuple[object, int], int] = {}  # (communicator, member) -> "this member has come to it"
    where: dict[int, tuple[int, int]] = {}
    for position, names in enumerate(plan.creation):
        program = Program()
        made: set[object] = set()
        for index, name in enumerate(names):
            thing = _communicator(name, lanes)
            if thing in made:
                continue
            made.add(thing)
            program.begin(index)
            numbers = {member: marks.setdefault((thing, member), len(marks)) for member in members[name]}
            where[numbers[position]] = (position, index)
            program.operations.append(numbers.pop(position))
            program.operations += [~number for number in numbers.values()]
        programs.append(program)
    at = play(programs, len(marks))
    for cycle in cycles(programs, at):
        lines = [
            f"\n      position {position} creates {_name(plan, position, index)} and waits for position "
            f"{where[mark][0]}, which creates {_name(plan, *where[mark])} later"
            for position, index, mark in cycle
        ]
        faults.append(
            Fault(
                "creation",
                f"{len(cycle)} positions wait for each other in a cycle while they create groups and "
                f"lanes; put these in one order for all{''.join(lines)}",
                cycle[0].position,
            )
        )
    return faults


def _check_members(plan: Plan, members: Mapping[Lane | str, tuple[int, ...]]) -> list[Fault]:
    faults = []
    created: dict[Lane | str, set[int]] = {name: set() for name in members}
    for position, names in enumerate(plan.creation):
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
            by = f"only positions {sorted(positions)} create it" if positions else "nobody creates it"
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


def _name(plan: Plan, position: int, index: int) -> str:
    return _kind(plan.creation[position][index])


def _kind(name: Lane | str) -> str:
    return f"lane {name}" if isinstance(name, Lane) else f"group {name!r}"
