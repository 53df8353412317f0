"""Schedules of other frameworks, from their objects or from JSON that a few lines write. No import of any of them.

Each document has, per rank:

- ``{"deepspeed": [...]}``: the steps of its schedule, each a list of instructions as they print
  (``"SendActivation(buffer_id=0)"``);
- ``{"hyperparallel": [...]}``: its steps as they print (``"MetaStep(type=MetaStepType.FWD, micro_index=0, ...)"``);
- ``{"dualpipe": [...]}``, ``{"dualpipev": [...]}``: what a step calls, in order (``"_recv_forward(0)"``), as
  `dualpipe_calls` notes it;
- ``{"jaxpp": [...]}``: its tasks, each ``[stage, microbatch, type]``, a list of such tasks that are fused, or null.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from attrs import evolve

from pipegrid.core.fields import Index, checked, shown
from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders.orders import Orders
from pipegrid.plans.orders.read import is_orders, orders_from_json
from pipegrid.plans.plan import Action, ActionKind, Plan, Step, actions_of, chain, from_csv, load_json

_MESSAGES = {"RecvActivation": "RECV_F", "SendActivation": "SEND_F", "RecvGrad": "RECV_B", "SendGrad": "SEND_B"}
_COMPUTES = {"ForwardPass": "F", "BackwardPass": "B"}
_ALONE = {"LoadMicroBatch", "ReduceGrads", "ReduceTiedGrads", "OptimizerStep"}
_COMMIT = "CommitP2P"
_INSTRUCTION = re.compile(r"(\w+)\(((?:\w+=\w{1,9}(?:, )?)*)\)", re.ASCII)
_META_STEP = re.compile(
    r"MetaStep\(type=(?:MetaStepType\.)?(\w+), micro_index=(\d{1,9}), stage_index=(\d{1,9})\)", re.ASCII
)
_META_STEPS = {
    f"{way}WD{end}": f"{kind}{phase}"
    for way, phase in (("F", "F"), ("B", "B"))
    for end, kind in (("", ""), ("_RECV", "RECV_"), ("_SEND", "SEND_"))
}
_CHUNK_CALL = re.compile(r"(\w+)\(((?:\d|True|False)(?:, (?:\d|True|False))*|)\)")
_CHUNK_MESSAGES = {
    "_recv_forward": "RECV_F",
    "_send_forward": "SEND_F",
    "_recv_backward": "RECV_B",
    "_send_backward": "SEND_B",
}
_CHUNK_CALLS = (
    *_CHUNK_MESSAGES,
    "_forward_compute_chunk",
    "_backward_compute_chunk",
    "_forward_backward_compute_chunk",
    "_weight_chunk",
    "_commit_and_wait_comm",
)
_PHASES = {"_commit_and_wait_comm": 0, "_weight_chunk": 0, "_forward_backward_compute_chunk": 2}  # of others, one
_MOST = 10**9  # stages and microbatches, as in the text of a plan
_MOST_FORWARDS = 10**7  # of all ranks of a table
_TASKS = {"FWD": "F", "BWD": "B", "BWD_I": "I", "BWD_W": "W"}


def orders_of_deepspeed(schedules: Sequence[Any]) -> Orders:
    """The order in which ranks of DeepSpeed's pipeline engine launch a step, by its schedules (0.19).

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
    given = dict(re.findall(r"(\w+)=(\d+)", match[2]))
    return match[1], int(given.get("buffer_id", 0)), int(given.get("phase", 0)), path


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


def orders_of_hyperparallel(exec_order: Mapping[int, Sequence[Any]] | Sequence[Sequence[Any]]) -> Orders:
    """The order in which ranks of HyperParallel launch a schedule, by its ``exec_order``.

    Each message alone, waited for at once: the default (``overlap_p2p`` waits later). Messages of shapes are left out.
    """
    rows = [exec_order[rank] for rank in sorted(exec_order)] if isinstance(exec_order, Mapping) else exec_order
    words = [
        [_meta_step(one, f"hyperparallel[{rank}][{number}]") for number, one in enumerate(_listed(own))]
        for rank, own in enumerate(rows)
    ]
    orders = orders_from_json(json.dumps({"ranks": words}))
    return evolve(
        orders, ranks=tuple(tuple(evolve(one, holds=bool(one.messages)) for one in own) for own in orders.ranks)
    )


def _meta_step(one: Any, path: str) -> str:
    match = _META_STEP.fullmatch(str(one).strip())
    if match is None or match[1] not in _META_STEPS:
        raise PlanError(f"{path}: {shown(str(one))} is no MetaStep of {', '.join(_META_STEPS)}", path=path)
    return f"{match[3]}{_META_STEPS[match[1]]}{match[2]}"


def dualpipe_calls(schedule: type, num_ranks: int, num_chunks: int) -> list[list[str]]:
    """The calls on each rank by ``step`` of DeepSeek's ``DualPipe`` or ``DualPipeV``, or of PithTrain's ``DualPipeV``.

    Its own ``step`` runs, with the parts that compute and send replaced by notes; no module, group or device is needed.
    Call it under ``torch.no_grad()``, after ``set_p2p_tensor_shapes`` and ``set_p2p_tensor_dtype``.
    """

    def calls_of(rank: int) -> list[str]:
        noted: list[str] = []

        def note(name: str, _: object, *given: object, **named: object) -> None:
            noted.append(f"{name}({', '.join(map(str, (*given, *named.values())))})")

        def method(name: str, call: Callable[..., object]) -> Callable[..., object]:
            return lambda *given, **named: call(name, *given, **named)

        own = ("step", "_forward_chunk", "_backward_chunk", "_forward_backward_chunk")
        silent = ("_reset_states", "_ensure_chunk_records_allocated", "setup_cu_seqlens")
        body = {name: vars(schedule)[name] for name in own}
        body |= {name: method(name, note) for name in _CHUNK_CALLS}
        body |= {name: method(name, lambda *_, **__: None) for name in silent}
        last, half = rank == num_ranks - 1, num_ranks // 2
        where: dict[str, object] = {"rank": rank, "pp_rank": rank, "num_ranks": num_ranks, "pp_size": num_ranks}
        where |= {"is_first_rank": False, "is_first_pp_rank": False, "is_last_rank": last, "is_last_pp_rank": last}
        where |= {"is_middle_rank": rank in (half - 1, half), "is_in_second_half": rank >= half}
        where |= {"module": (), "batch_dim": 0}
        type(schedule.__name__, (SimpleNamespace,), body)(**where).step(num_chunks=num_chunks)
        return noted

    return [calls_of(rank) for rank in range(num_ranks)]


def orders_of_dualpipe(calls: Sequence[Sequence[str]], *, folded: bool) -> Orders:
    """The order in which ranks of DualPipe launch a step, by its calls (`dualpipe_calls`).

    A chunk of phase 0 is of stage ``rank``, one of phase 1 of stage ``2 * ranks - 1 - rank``. Of `DualPipeV` these are
    one model (``folded``). Of `DualPipe` they are two copies of one, stages 0 to ranks - 1 and ranks to 2 * ranks - 1,
    and ranks of the second half name the phases the other way round.
    """
    count = len(calls)
    rows = [list(_chunk_launches(own, rank, count, folded=folded)) for rank, own in enumerate(calls)]
    return orders_from_json(json.dumps({"ranks": rows, "placement": [*range(count), *reversed(range(count))]}))


def _chunk_launches(calls: Iterable[Any], rank: int, count: int, *, folded: bool) -> Iterator[Any]:
    stages = (rank, 2 * count - 1 - rank)
    if not folded and rank >= count // 2:
        stages = stages[::-1]
    done = Counter[tuple[str, int]]()
    weights: list[str] = []
    queued: list[str] = []

    def word(kind: str, phase: int) -> str:
        number = done[kind, phase]
        done[kind, phase] += 1
        return f"{stages[phase]}{kind}{number}"

    for number, call in enumerate(_listed(calls)):
        path = f"dualpipe{'v' * folded}[{rank}][{number}]"
        match = _CHUNK_CALL.fullmatch(str(call))
        given = [json.loads(one.lower()) for one in match[2].split(", ") if one] if match else []
        phases = [one for one in given if not isinstance(one, bool)]
        if match is None or match[1] not in _CHUNK_CALLS or any(phase > 1 for phase in phases):
            raise PlanError(f"{path}: {shown(str(call))} is no call of {', '.join(_CHUNK_CALLS)}", path=path)
        name = match[1]
        if len(phases) != _PHASES.get(name, 1):
            raise PlanError(f"{path}: {shown(str(call))} has not the phases of {name}", path=path)
        if kind := _CHUNK_MESSAGES.get(name):
            # In its half: the first receives nothing from before, the last from after.
            if stages[phases[0]] % count != (0 if kind in ("RECV_F", "SEND_B") else count - 1):
                queued.append(word(kind, phases[0]))
            continue
        if name in ("_commit_and_wait_comm", "_weight_chunk") and queued:
            yield {"batch": queued}
            queued = []
        if name == "_weight_chunk":
            if not weights:
                raise PlanError(f"{path}: a weight chunk, and no backward before it has put one off", path=path)
            yield weights.pop(0)
        computes = [word("F", phases[0])] if "forward" in name else []
        if "backward" in name:
            backward = word("B", phases[-1])
            split = any(one is True for one in given)
            weights += [backward.replace("B", "W")] if split else []
            computes.append(backward.replace("B", "I") if split else backward)
        yield from [f"({';'.join(computes)})"] if len(computes) > 1 else computes
    if queued or weights:
        raise PlanError(f"rank {rank} ends with {' '.join(queued + weights)} not launched")


def plan_of_jaxpp(tasks: Sequence[Sequence[Any]]) -> Plan:
    """The plan of computes of JaxPP's ``schedule.tasks(num_microbatches)``.

    A fused task of a forward and of a backward of another microbatch is a pair; any other is its tasks in turn.
    """
    rows = [
        ",".join(word for number, entry in enumerate(own) for word in _words(entry, f"jaxpp[{rank}][{number}]"))
        for rank, own in enumerate(tasks)
    ]
    return from_csv("\n".join(rows) + "\n")


def _words(entry: Any, path: str) -> list[str]:
    words = [_task(task, path) for task in _fused(entry)]
    kinds, pieces = ([re.sub(letters, " ", word) for word in words] for letters in (r"\d+", r"[A-Z]"))
    paired = kinds in ([" F ", " B "], [" F ", " I "]) and pieces[0] != pieces[1]
    return [f"({';'.join(words)})"] if paired else words


def _fused(entry: Any) -> Sequence[Any]:
    is_fused = isinstance(entry, (tuple, list)) and not (entry and isinstance(entry[0], int))
    return entry if is_fused else () if entry is None else (entry,)


def _task(task: Any, path: str) -> str:
    if hasattr(task, "stage_id"):
        task = (task.stage_id, task.mubatch_idx, task.fwd_or_bwd.name)
    match task:
        case (int(stage), int(microbatch), str(kind)) if kind in _TASKS and bool not in map(type, task):
            if min(stage, microbatch) >= 0 and max(stage, microbatch) < _MOST:
                return f"{stage}{_TASKS[kind]}{microbatch}"
    raise PlanError(
        f"{path} is {shown(task)}; a task is [stage, microbatch, type], its type one of {', '.join(_TASKS)}", path=path
    )


def plan_of_megatron(
    schedule_table: Sequence[tuple[int, int]],
    num_warmup_microbatches: Sequence[int],
    *,
    forward_only: bool = False,
    overlap: bool = False,
) -> Plan:
    """The computes of an interleaved schedule of Megatron-LM, which plans by a table and one number per rank.

    Rank r runs the forwards in the order of the table, the first of them alone, then a backward after each forward, in
    the order of the table with the chunks reversed, then the backwards that are left. A chunk c of it is stage
    ``c * ranks + r``. Its messages are those that `lower` adds: Megatron's own follow from the same numbers.

    Args:
        schedule_table: (microbatch, chunk) of each forward, as ``get_schedule_table`` makes it.
        num_warmup_microbatches: per pipeline rank, its forwards before the first backward.
        forward_only: without backwards, as in an evaluation.
        overlap: ``overlap_moe_expert_parallel_comm``: a forward and the backward after it are a pair.

    Raises:
        PlanError: an entry that is no such pair, one that is there twice or not at all, or more forwards before
            the first backward than there are.
    """
    name = "num_warmup_microbatches"
    warmup = checked(num_warmup_microbatches, tuple[Index, ...], name, partial(PlanError, path=name))
    entries = [_entry(entry, f"schedule_table[{number}]") for number, entry in enumerate(schedule_table)]
    microbatches, chunks = (1 + max((entry[part] for entry in entries), default=-1) for part in (0, 1))
    if not entries or len(set(entries)) != len(entries) or len(entries) != microbatches * chunks:
        raise PlanError(
            f"schedule_table has {len(entries)} entries up to microbatch {microbatches - 1} and chunk {chunks - 1}; it "
            "must have each microbatch with each chunk, once",
            path="schedule_table",
        )
    if not warmup or max(warmup) > len(entries):
        raise PlanError(
            f"{name} is {list(warmup)}; it must have a number for each rank, of at most the {len(entries)} forwards",
            path=name,
        )
    ranks = len(warmup)

    def row(rank: int) -> Sequence[Step]:
        forwards = [Action(ActionKind.F, chunk * ranks + rank, microbatch) for microbatch, chunk in entries]
        if forward_only:
            return forwards
        backwards = [
            Action(ActionKind.B, (chunks - 1 - chunk) * ranks + rank, microbatch) for microbatch, chunk in entries
        ]
        first = warmup[rank]
        paired: list[Step] = list(zip(forwards[first:], backwards, strict=False))
        if not overlap:
            paired = [action for pair in paired for action in actions_of(pair)]
        return [*forwards[:first], *paired, *backwards[len(forwards) - first :]]

    return Plan(
        positions=[row(rank) for rank in range(ranks)],
        graph=chain(chunks * ranks),
        placement=[stage % ranks for stage in range(chunks * ranks)],
        num_microbatches=microbatches,
        forward_only=range(chunks * ranks) if forward_only else (),
    )


def _entry(entry: Sequence[int], path: str) -> tuple[int, int]:
    numbers = checked(entry, tuple[Index, ...], path, partial(PlanError, path=path))
    if len(numbers) != 2:
        raise PlanError(f"{path} is {shown(entry)}; it must be (microbatch, chunk)", path=path)
    return numbers[0], numbers[1]


def read_schedule(text: str) -> Plan | Orders | None:
    """The orders or the plan in a document: of this module, `orders_from_json` or `plan_of_megatron`; else None."""
    if is_orders(text):
        return orders_from_json(text)
    try:
        document = load_json(text)
    except PlanError:
        return None
    readers: dict[str, Callable[[list[Any]], Plan | Orders]] = {
        "deepspeed": orders_of_deepspeed,
        "hyperparallel": orders_of_hyperparallel,
        "dualpipe": partial(orders_of_dualpipe, folded=False),
        "dualpipev": partial(orders_of_dualpipe, folded=True),
        "jaxpp": plan_of_jaxpp,
    }
    for name, read in readers.items():
        if isinstance(document, dict) and name in document:
            rows = document[name]
            listed = isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows)
            if document.keys() != {name} or not listed:
                raise PlanError(f"{name} is alone in its document, a list with a list for each rank", path=name)
            return read(rows)
    return _plan_of_table(document) if isinstance(document, dict) and "schedule_table" in document else None


def _plan_of_table(document: dict[str, Any]) -> Plan:
    """The plan of a document with the arguments of `plan_of_megatron`."""
    known = ("schedule_table", "num_warmup_microbatches", "forward_only", "overlap")
    if unknown := document.keys() - set(known):
        name = min(unknown)
        raise PlanError(f"a table of Megatron-LM has {', '.join(known)}, not {name!r}", path=name)
    document = {"forward_only": False, "overlap": False} | document
    kinds, rules = (list, list, bool, bool), ("a list", "a list", *["true or false"] * 2)
    for name, kind, rule in zip(known, kinds, rules, strict=True):
        if not isinstance(document.get(name), kind):
            raise PlanError(f"{name} is {shown(document.get(name))}; it must be {rule}", path=name)
    table, warmup = document["schedule_table"], document["num_warmup_microbatches"]
    if len(table) * len(warmup) > _MOST_FORWARDS:
        raise PlanError(
            f"{len(warmup)} ranks with {len(table)} forwards each; at most {_MOST_FORWARDS} of all are read"
        )
    return plan_of_megatron(table, warmup, forward_only=document["forward_only"], overlap=document["overlap"])
