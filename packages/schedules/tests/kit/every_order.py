"""The least makespan of a chain by brute force: every order of every position, started as early as it can be.

Slow, obvious, and written without a look at the package's search: operations are appended in the order of their
starts, and all that can come next is tried. States that were met before are not tried again.
"""

from __future__ import annotations


def least_makespan(placement, microbatches, times, *, hop=0, limit=float("inf"), size=1, input_release=0, frozen=0):
    """``times``: of F, I and W of any stage; ``size``: memory of a stage's microbatch; ``frozen``: first stages."""
    stages, positions = len(placement), max(placement) + 1
    left = {(kind, s): 0 if kind != "F" and s < frozen else microbatches for kind in "FIW" for s in range(stages)}
    best = [float("inf")]
    seen = set()

    def ready(kind, stage, m, ends):
        """When the inputs of an operation are there; None if they are not yet made."""
        needs = []
        if kind == "F" and stage:
            needs.append(("F", stage - 1))
        elif kind == "I":
            needs.append(("F", stage))
            if stage + 1 < stages:
                needs.append(("I", stage + 1))
        elif kind == "W":
            needs.append(("I", stage))
        if any((*need, m) not in ends for need in needs):
            return None
        far = [hop if placement[s] != placement[stage] else 0 for _, s in needs]
        return max((ends[(*need, m)] + travel for need, travel in zip(needs, far, strict=True)), default=0)

    def go(ends, free, live, last):
        if all(count == 0 for count in left.values()):
            best[0] = min(best[0], max(free))
            return
        for position in range(positions):
            work = sum(times[kind] * n for (kind, s), n in left.items() if placement[s] == position)
            if work and max(free[position], last) + work >= best[0]:
                return
        key = (tuple(sorted(ends.items())), last)
        if key in seen:
            return
        seen.add(key)
        for (kind, stage), count in list(left.items()):
            m, position = microbatches - count, placement[stage]
            at = ready(kind, stage, m, ends) if count else None
            if at is None or (kind == "F" and live[position] + size > limit + 1e-9):
                continue
            start = max(at, free[position])
            if start < last:
                continue
            gives = (
                0 if stage < frozen else {"F": size, "I": -size * input_release, "W": -size * (1 - input_release)}[kind]
            )
            left[kind, stage] -= 1
            frees, lives = list(free), list(live)
            frees[position], lives[position] = start + times[kind], lives[position] + gives
            go({**ends, (kind, stage, m): frees[position]}, frees, lives, start)
            left[kind, stage] += 1

    go({}, [0] * positions, [0] * positions, 0)
    return best[0]
