"""Plans with mistakes in them: each way in which a hand could get a table wrong, alone or several at once.

A change is ``(what, steps)``: the mistake as a verb and what it concerns, and the position's steps with it.
"""

from __future__ import annotations

from attrs import evolve

from pipegrid.schedules.errors import PlanError


def single_mutations(plan):
    """Every plan that differs from ``plan`` by one mistake, as (what it is, plan)."""
    for position, steps in enumerate(plan.positions):
        for what, changed in _changes(steps, plan.num_microbatches):
            mutant = _with(plan, position, changed)
            if mutant is not None:
                yield what, mutant


def random_mutant(plan, rng, count):
    """``plan`` with ``count`` random mistakes (fewer where one is refused at birth), as (what they are, plan).

    Each kind of mistake is as likely as every other, however many places there are for it.
    """
    mistakes = []
    for _ in range(count):
        position = rng.randrange(plan.num_positions)
        kinds = {}
        for change in _changes(plan.positions[position], plan.num_microbatches):
            kinds.setdefault(change[0][0], []).append(change)
        if not kinds:
            continue
        what, steps = rng.choice(kinds[rng.choice(sorted(kinds))])
        mutant = _with(plan, position, steps)
        if mutant is not None:
            mistakes.append(what)
            plan = mutant
    return mistakes, plan


def _with(plan, position, steps):
    positions = list(plan.positions)
    positions[position] = tuple(steps)
    try:
        return evolve(plan, positions=positions)
    except PlanError:  # refused at birth
        return None


def _changes(steps, num_microbatches):
    steps = list(steps)
    for i, step in enumerate(steps):
        before, after = steps[:i], steps[i + 1 :]
        batch = step if isinstance(step, tuple) else (step,)
        for j in range(i + 1, len(steps)):
            swapped = steps.copy()
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield ("flip" if j == i + 1 else "swap", step, swapped[i]), swapped
        for a, action in enumerate(batch):
            rest = (*batch[:a], *batch[a + 1 :])
            yield ("drop", action), [*before, *([rest] if rest else []), *after]
            yield ("duplicate", action), [*before, step, action, *after]
            if rest:
                yield ("unbatch", action), [*before, action, rest, *after]
            for microbatch in range(num_microbatches + 1) if action.microbatch is not None else ():
                if microbatch != action.microbatch:
                    other = (*batch[:a], evolve(action, microbatch=microbatch), *batch[a + 1 :])
                    yield ("renumber", action, microbatch), [*before, other, *after]
        if all(action.kind.is_receive for action in batch):
            left = [*before, *after]
            for j in range(len(steps)):
                if j != i:
                    yield ("move", step, j), [*left[:j], step, *left[j:]]
        if after:
            both = (*batch, *(after[0] if isinstance(after[0], tuple) else (after[0],)))
            if all(action.kind.is_message for action in both):
                yield ("batch", *both), [*before, both, *after[1:]]
