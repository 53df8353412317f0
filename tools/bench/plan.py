"""How fast plans are made, proved and simulated, beside what torch does with the same schedules.

    python tools/bench/plan.py [--positions 64 --microbatches 512] [--repeat 3] [--torch-limit 60]

Prints the best of ``repeat`` times, in seconds of this process's CPU (all of it is one thread, and a busy
machine would blur the clock): generating, proving and simulating an existing
plan, and for torch.distributed.pipelining its private `_validate_schedule`, `_add_send_recv` and
`_simulate_comms_compute` on the same computes in the same run. Then, what each makes of tables with mistakes.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import (
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import from_text
from pipegrid.plans.plan.plan import Plan
from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.simulate.simulation import simulate
from pipegrid.plans.verify.verify import verify

T = TypeVar("T")

VERIFY_TARGET, LOWER_TARGET, SIMULATE_TARGET = 1.0, 1.5, 2.0  # seconds, for 64 positions x 512 microbatches x 2 chunks
SLOW = 3.0  # seconds; what takes longer is not repeated
SCALES = ((4, 16), (8, 32), (16, 128), (64, 512))


def best(function: Callable[[], T], repeat: int) -> tuple[float, T]:
    """The best CPU time of ``repeat`` calls in seconds, and what the last returned."""
    times = []
    while True:
        start = time.process_time()
        result = function()
        times.append(time.process_time() - start)
        if len(times) >= repeat or times[-1] > SLOW:
            return min(times), result


def line(what: str, seconds: float, note: str = "") -> None:
    """One row of the report."""
    print(f"  {what:<58} {1000 * seconds:>12,.1f} ms  {note}".rstrip())


def against(seconds: float, target: float) -> str:
    """The target, and whether it was met."""
    return f"target {target:g} s: {'met' if seconds < target else 'MISSED'}"


def ours(positions: int, microbatches: int, repeat: int) -> None:
    """Generate, lower, prove and simulate."""
    size = f"{positions} positions x {microbatches} microbatches x 2 chunks"
    print(f"pipegrid.schedules, interleaved_1f1b, {size}")
    seconds, plan = best(lambda: interleaved_1f1b(positions, microbatches), repeat)
    line("generate, all positions", seconds, f"{sum(map(len, plan.positions)):,} computes")
    for make in (zero_bubble_v, dualpipe_v):
        seconds, _ = best(lambda make=make: make(positions, microbatches), repeat)  # type: ignore[misc]
        line(f"generate, {make.__name__}", seconds)
    seconds, _ = best(lambda: verify(plan), repeat)
    line("verify, computes alone", seconds, against(seconds, VERIFY_TARGET))
    seconds, lowered = best(lambda: lower(plan), repeat)
    actions = sum(1 for p in range(positions) for _ in lowered.actions(p))
    line("lower", seconds, f"{actions:,} actions; {against(seconds, LOWER_TARGET)}")
    for lanes in ("separate", "shared"):
        seconds, _ = best(lambda lanes=lanes: verify(lowered, lanes=lanes), repeat)  # type: ignore[misc]
        line(f"verify, lowered, {lanes} lanes", seconds, against(seconds, VERIFY_TARGET))
    costs = Costs(F=0.5, I=0.5, W=0.5, latency=0.01)
    for what, subject in (("computes alone", plan), ("lowered", lowered)):
        seconds, simulation = best(lambda subject=subject: simulate(subject, costs), repeat)  # type: ignore[misc]
        note = f"makespan {simulation.makespan:.1f}; {against(seconds, SIMULATE_TARGET)}"
        line(f"simulate, {what}", seconds, note)
    print()


def torch_orders(plan: Plan, schedules: Any) -> dict[int, list[Any]]:
    """The computes of ``plan`` as torch's own actions."""
    kinds = {kind.value: kind for kind in schedules._ComputationType}  # noqa: SLF001 -- the peer is private
    return {
        position: [
            schedules._Action(action.stage, kinds[action.kind.value], action.microbatch)  # noqa: SLF001
            for action in plan.actions(position)
        ]
        for position in range(plan.num_positions)
    }


def copied(orders: dict[int, list[Any]]) -> dict[int, list[Any]]:
    """Fresh lists: torch's `_add_send_recv` empties those it is given."""
    return {rank: list(own) for rank, own in orders.items()}


def stage_to_rank(plan: Plan) -> Callable[[int], int]:
    """Where torch finds a stage."""
    return [places[0] for places in plan.placement].__getitem__


def compared_at(positions: int, microbatches: int, repeat: int, schedules: Any, limit: float) -> bool:
    """Both on one plan; False once torch took longer than ``limit`` seconds for a step."""
    print(f"the same computes, {positions} positions x {microbatches} microbatches x 2 chunks")
    plan = interleaved_1f1b(positions, microbatches)
    orders, where = torch_orders(plan, schedules), stage_to_rank(plan)
    pairs: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        (
            "verify / _validate_schedule",
            lambda: verify(plan),
            lambda: schedules._validate_schedule(orders, positions, plan.num_stages, microbatches),  # noqa: SLF001
        ),
        (
            "lower / _add_send_recv",
            lambda: lower(plan),
            lambda: schedules._add_send_recv(copied(orders), where, plan.num_stages),  # noqa: SLF001
        ),
    ]
    lowered, theirs = None, None
    for what, our_step, their_step in pairs:
        our_time, lowered = best(our_step, repeat)
        their_time, theirs = best(their_step, repeat)
        line(what, our_time, f"torch {1000 * their_time:,.1f} ms, {their_time / our_time:.1f} times as long")
        if their_time > limit:
            print(f"  (torch is over the limit of {limit:g} s, so nothing larger is asked of it)")
            return False
    assert lowered is not None
    our_time, _ = best(lambda: (verify(lowered), simulate(lowered)), repeat)
    their_time, _ = best(
        lambda: schedules._simulate_comms_compute(theirs, where, plan.num_stages),  # noqa: SLF001
        repeat,
    )
    note = f"torch {1000 * their_time:,.1f} ms, {their_time / our_time:.1f} times as long"
    line("verify and simulate, lowered / _simulate_comms_compute", our_time, note)
    print()
    return their_time <= limit


CROSSED = """
0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
"""
MISTAKES = {
    "right": "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n",
    "a forward twice": "0: 0F0 0F1 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n",
    "a backward twice": "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1B0 1F1 1B1\n",
    "a backward missing": "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1\n",
    "B, and I and W of the same": "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1I0 1W0 1F1 1B1\n",
    "orders that wait for each other": "0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1\n",
    "sends that cross (only buffering saves them)": CROSSED,
}


def verdict(call: Callable[[], Any], refusals: tuple[type[BaseException], ...]) -> str:
    """What a check says: accepted, refused, or the error it stumbles over."""
    try:
        call()
    except PlanError as error:
        return f"refused ({', '.join(sorted({fault.rule for fault in error.faults}))})"
    except refusals as error:
        return f"refused ({str(error).strip().splitlines()[0][:44]})"
    except Exception as error:  # noqa: BLE001 -- the peer's own failures are what is reported
        return f"fails with {type(error).__name__} ({str(error).strip().splitlines()[0][:34]})"
    return "accepted"


def judged(schedules: Any) -> None:
    """What each check makes of the same tables."""
    print("verdicts on tables of 2 positions and 2 microbatches")
    for what, text in MISTAKES.items():
        plan = from_text(text)
        orders, where = torch_orders(plan, schedules), stage_to_rank(plan)
        computes = {r: [a for a in own if a.is_compute_op] for r, own in orders.items()}

        def simulated(computes: dict[int, list[Any]] = computes, orders: dict[int, list[Any]] = orders) -> None:
            full = orders
            if all(a.is_compute_op for own in orders.values() for a in own):
                full = schedules._add_send_recv(copied(computes), where, 2)  # noqa: B023, SLF001
            schedules._simulate_comms_compute(full, where, 2)  # noqa: B023, SLF001

        print(f"  {what}")
        print(f"    verify                   {verdict(lambda: verify(plan), (PlanError,))}")  # noqa: B023
        checked = verdict(
            lambda: schedules._validate_schedule(computes, 2, 2, 2),  # noqa: B023, SLF001
            (AssertionError,),
        )
        print(f"    _validate_schedule       {checked}")
        print(f"    _simulate_comms_compute  {verdict(simulated, (AssertionError, RuntimeError, ValueError))}")
    print()


def reads_its_own(schedules: Any) -> None:
    """Which named schedules torch's checks can read at all."""
    print("torch's checks on the named schedules, 4 positions x 8 microbatches")
    for make in (gpipe, one_f_one_b, interleaved_1f1b, zero_bubble_h1, zero_bubble_v, dualpipe_v):
        plan = make(4, 8)
        orders, where = torch_orders(plan, schedules), stage_to_rank(plan)

        def simulated(
            orders: dict[int, list[Any]] = orders,
            where: Callable[[int], int] = where,
            stages: int = plan.num_stages,
        ) -> None:
            full = schedules._add_send_recv(copied(orders), where, stages)  # noqa: SLF001
            schedules._simulate_comms_compute(full, where, stages)  # noqa: SLF001

        checked = verdict(
            lambda orders=orders, stages=plan.num_stages: schedules._validate_schedule(  # type: ignore[misc] # noqa: SLF001
                orders, 4, stages, 8
            ),
            (AssertionError,),
        )
        played = verdict(simulated, ())
        print(f"  {make.__name__:<19} _validate_schedule: {checked}; _simulate_comms_compute: {played}")
    plan = dualpipe_v(4, 8)
    orders, where = with_pairs(torch_orders(plan, schedules), schedules), stage_to_rank(plan)
    checked = verdict(lambda: schedules._validate_schedule(orders, 4, 8, 8), (AssertionError,))  # noqa: SLF001
    played = verdict(
        lambda: schedules._simulate_comms_compute(  # noqa: SLF001
            schedules._add_send_recv(copied(orders), where, 8),  # noqa: SLF001
            where,
            8,
        ),
        (),
    )
    print(f"  the same, F and B in torch's OVERLAP_F_B: _validate_schedule: {checked};")
    print(f"  {'':<19} _simulate_comms_compute: {played}")


def with_pairs(orders: dict[int, list[Any]], schedules: Any) -> dict[int, list[Any]]:
    """An F and the B of another stage right after it as one action, as torch's own DualPipeV has them."""
    kinds = schedules._ComputationType  # noqa: SLF001
    paired: dict[int, list[Any]] = {}
    for rank, own in orders.items():
        result: list[Any] = []
        for action in own:
            last = result[-1] if result else None
            if (
                last is not None
                and last.computation_type == kinds.FORWARD
                and action.computation_type == kinds.FULL_BACKWARD
                and last.stage_index != action.stage_index
            ):
                result[-1] = schedules._Action(-1, kinds.OVERLAP_F_B, None, (last, action))  # noqa: SLF001
            else:
                result.append(action)
        paired[rank] = result
    return paired


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--torch-limit", type=float, default=60, help="seconds after which torch is not asked")
    arguments = parser.parse_args()
    ours(arguments.positions, arguments.microbatches, arguments.repeat)

    import torch
    from torch.distributed.pipelining import schedules

    print(f"torch {torch.__version__}, torch.distributed.pipelining.schedules\n")
    for positions, microbatches in SCALES:
        if positions > arguments.positions or not compared_at(
            positions, microbatches, arguments.repeat, schedules, arguments.torch_limit
        ):
            break
    judged(schedules)
    reads_its_own(schedules)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    main()
