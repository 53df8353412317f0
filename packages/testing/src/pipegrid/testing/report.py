"""What a person reads when a test on ranks fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from pipegrid.testing.follow import GRACE, RankRecord, Run, State

_WIDTH = 100


def failure_text(run: Run) -> str | None:
    """Why the test failed, rank by rank, the first failure first; ``None`` if it did not."""
    given_up = ("skipped", "xfailed")
    broken = [record for record in run.records if record.failed and _outcome(record) not in given_up]
    never = [
        f"planned fault '{plan.kind}' after {plan.after} s never happened: the test took {run.seconds:.2f} s"
        for plan in run.unfired
    ]
    if any(_outcome(record) in given_up for record in run.records):
        never = []  # only a test that passed can have missed a fault
    if not broken and not never and run.timed_out is None:
        return None
    lines = [_headline(run, broken, never)]
    order = sorted(run.records, key=lambda record: (record not in broken, record.ended_at or float("inf"), record.rank))
    for record in order:
        lines.extend(_rank_lines(run, record))
    return "\n".join(lines)


def _headline(run: Run, broken: list[RankRecord], never: list[str]) -> str:
    world = f"{run.job.world_size} ranks"
    if run.timed_out is not None:
        waiting = ", ".join(str(record.rank) for record in run.records if record.open)
        return f"{world}: {run.timed_out}; unfinished: rank {waiting}"
    if broken:
        first = min(broken, key=lambda record: record.ended_at or 0.0)
        how = "died" if first.state is State.DEAD else "failed"
        return f"{world}: rank {first.rank} {how}{' first' if len(broken) > 1 else ''}: {_summary(first)}"
    return f"{world}: " + "; ".join(never)


def _rank_lines(run: Run, record: RankRecord) -> Iterator[str]:
    position = "" if record.position is None else f", at position '{record.position}'"
    if record.position is not None and record.open:
        position += f" for {max(0.0, run.ended_at - record.position_at):.1f} s"
    yield f" rank {record.rank}: {_state(run, record)}{position} ".center(_WIDTH, "-")
    if record.finished is not None and record.finished.text:
        yield record.finished.text
    if record.stacks:
        yield record.stacks.rstrip()


def _state(run: Run, record: RankRecord) -> str:
    planned = "" if record.fault is None else f" (planned fault: {record.fault.text})"
    if record.state is State.DEAD:
        return f"died, {exit_text(record.exit_code)}{planned}"
    if record.finished is not None:
        return f"{record.finished.outcome}{planned}"
    if record.state is State.STOPPED:
        return f"stopped{planned}"
    if record.state is State.STARTING:
        return "still starting"
    if record.suspended:
        return "suspended by a signal"
    waited = "at the deadline" if run.timed_out else f"{GRACE:g} s after the first failure"
    return f"still running {waited}{planned}"


def exit_text(code: int | None) -> str:
    """``code`` in words: a status, or the name of a signal."""
    if code is None or code >= 0:
        return f"exit status {code}"
    return f"by signal {signal.Signals(-code).name}"


def _summary(record: RankRecord) -> str:
    return exit_text(record.exit_code) if record.finished is None else record.finished.summary


def _outcome(record: RankRecord) -> str | None:
    return None if record.finished is None else record.finished.outcome
