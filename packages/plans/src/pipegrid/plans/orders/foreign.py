"""Schedules of DeepSpeed and JaxPP, from their objects or from JSON that a few lines write. No import of either.

``{"deepspeed": [...]}`` has per rank the steps of its schedule, each a list of instructions as they print
(``"SendActivation(buffer_id=0)"``); ``{"jaxpp": [...]}`` per rank its tasks, each ``[stage, microbatch, type]``, a
list of such tasks that are fused, or null.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pipegrid.core.fields import shown
from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders.orders import Orders
from pipegrid.plans.orders.others import plan_of_table
from pipegrid.plans.orders.read import is_orders, orders_from_json
from pipegrid.plans.plan import Plan, from_csv, load_json

_MESSAGES = {"RecvActivation": "RECV_F", "SendActivation": "SEND_F", "RecvGrad": "RECV_B", "SendGrad": "SEND_B"}
_COMPUTES = {"ForwardPass": "F", "BackwardPass": "B"}
_ALONE = {"LoadMicroBatch", "ReduceGrads", "ReduceTiedGrads", "OptimizerStep"}
_COMMIT = "CommitP2P"
_INSTRUCTION = re.compile(r"(\w+)\(([\w=, ]*)\)")
_TASKS = {"FWD": "F", "BWD": "B", "BWD_I": "I", "BWD_W": "W"}


def orders_of_deepspeed(schedules: Sequence[Any]) -> Orders:
    """What the ranks of DeepSpeed's pipeline engine launch in a step, by its schedules (0.19).

    A message outside of ``CommitP2P`` is launched alone, and the rank waits for its sends: DeepSpeed's do where the
    backend holds the host. What a message carries follows from its buffer. Shapes, in a first step, are left out.
    ``schedules``: per rank, its schedule, or the steps that this yields.
    """
    instructions = [
        [
            _instruction(one, f"deepspeed[{rank}][{number}]")
            for number, step in enumerate(_listed(own.steps() if hasattr(own, "steps") else own))
            for one in _listed(step)
        ]
        for rank, own in enumerate(schedules)
    ]
    folded = any(name == _COMMIT or phase for own in instructions for name, _, phase, _ in own)
    count = len(schedules)
    places = [*range(count), *(reversed(range(count)) if folded else ())]
    rows = [list(_launches(own, rank, count)) for rank, own in enumerate(instructions)]
    return orders_from_json(json.dumps({"ranks": rows, "placement": places}))


def _listed(value: Any) -> Iterable[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise PlanError(f"{shown(value)} is neither a schedule with steps() nor a list of what that yields")
    return value


def _instruction(one: Any, path: str) -> tuple[str, int, int, str]:
    """Name, buffer and phase of an instruction, and its place."""
    match = _INSTRUCTION.fullmatch(str(one).strip())
    known = {*_MESSAGES, *_COMPUTES, *_ALONE, _COMMIT}
    if match is None or match[1] not in known:
        raise PlanError(
            f"{path}: {shown(str(one))} is no instruction that is known: {', '.join(sorted(known))}", path=path
        )
    given = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", match[2])}
    return match[1], given.get("buffer_id", 0), given.get("phase", 0), path


def _launches(instructions: Sequence[tuple[str, int, int, str]], rank: int, count: int) -> Iterator[Any]:
    """The launches of a rank as a document of orders has them."""
    enters = {phase: "ForwardPass" for _, _, phase, _ in instructions}  # what puts a microbatch into a buffer
    enters |= {phase: name for name, _, phase, _ in instructions if name == "RecvActivation"}
    batches = any(name == _COMMIT for name, *_ in instructions)
    buffers: dict[tuple[int, int], int] = {}  # phase and buffer: the microbatch in it
    entered = Counter[int]()
    queued: list[str] = []
    for name, buffer, phase, path in instructions:
        if name == _COMMIT and queued:
            yield {"batch": queued}
            queued = []
        if name == enters[phase]:
            buffers[phase, buffer] = entered[phase]
            entered[phase] += 1
        if (kind := _MESSAGES.get(name) or _COMPUTES.get(name)) is None:
            continue
        if (phase, buffer) not in buffers:
            raise PlanError(f"{path}: {name} of buffer {buffer}, which has no microbatch yet", path=path)
        word = f"{2 * count - 1 - rank if phase else rank}{kind}{buffers[phase, buffer]}"
        if batches and name in _MESSAGES:
            queued.append(word)
        else:
            yield word
            yield from [word.replace("SEND", "WAIT_SEND")] if name.startswith("Send") else []
    if queued:
        raise PlanError(f"rank {rank} queues {' '.join(queued)} and never comes to {_COMMIT}")


def plan_of_jaxpp(tasks: Sequence[Sequence[Any]]) -> Plan:
    """The plan of computes of JaxPP's task lists, as ``schedule.tasks(num_microbatches)`` makes them.

    Its messages are those that `lower` adds. A fused task is its tasks one after the other.
    """
    rows = [
        ",".join(_task(task, f"jaxpp[{rank}][{number}]") for number, entry in enumerate(own) for task in _fused(entry))
        for rank, own in enumerate(tasks)
    ]
    return from_csv("\n".join(rows) + "\n")


def _fused(entry: Any) -> Sequence[Any]:
    is_fused = isinstance(entry, (tuple, list)) and not (entry and isinstance(entry[0], int))
    return entry if is_fused else () if entry is None else (entry,)


def _task(task: Any, path: str) -> str:
    if hasattr(task, "stage_id"):
        task = (task.stage_id, task.mubatch_idx, task.fwd_or_bwd.name)
    match task:
        case (int(stage), int(microbatch), str(kind)) if kind in _TASKS and min(stage, microbatch) >= 0:
            return f"{stage}{_TASKS[kind]}{microbatch}"
    raise PlanError(
        f"{path} is {shown(task)}; a task is [stage, microbatch, type], its type one of {', '.join(_TASKS)}", path=path
    )


def read_schedule(text: str) -> Plan | Orders | None:
    """The orders or the plan in a document: of this module, `orders_from_json` or `plan_of_megatron`; else None."""
    if is_orders(text):
        return orders_from_json(text)
    try:
        document = load_json(text)
    except PlanError:
        return None
    for name, read in (("deepspeed", orders_of_deepspeed), ("jaxpp", plan_of_jaxpp)):
        if isinstance(document, dict) and name in document:
            rows = document[name]
            if (
                document.keys() != {name}
                or not isinstance(rows, list)
                or not all(isinstance(row, list) for row in rows)
            ):
                raise PlanError(f"{name} is alone in its document, a list with a list for each rank", path=name)
            return read(rows)
    return plan_of_table(text)
