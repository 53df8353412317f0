"""Counts and tables of the 1F1B family: warmup per rank, and the order of chunks. Pure.

Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 2.2 (1F1B and its interleaved form).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pipegrid.schedules.arguments import is_integer, require_integer, require_items, shown
from pipegrid.schedules.errors import StepArgumentError

require_size = partial(require_integer, error=StepArgumentError)
"""What all sizes of a step are checked by."""

_MICROBATCHES = "give the microbatches of a step"
_CHUNKS = "give the model chunks of a rank, 1 without interleaving"


def _require_group(size: Any) -> None:
    remedy = "a group has that many microbatches; without a wish of your own, give the number of ranks"
    require_size("microbatch_group_size_per_vp_stage", size, remedy)


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int | None,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: Any = None,
) -> tuple[int, bool, int, int]:
    """How many microbatches this rank runs in all, in its warmup, and after it.

    A microbatch counts once per chunk. With one chunk the warmup is the distance to the loss in stages; with
    chunks it is ``2 (P - r - 1) + (V - 1) N`` (one more where MoE communication overlaps).

    Args:
        num_microbatches: M, per chunk.
        num_model_chunks: V.
        microbatch_group_size_per_vp_stage: N; None stands for P.
        forward_only: everything is warmup.
        overlap_moe_expert_parallel_comm: one more microbatch in flight.
        p2p_communicator: says where this rank stands (``total_stages``, ``current_stage``, and for a graph of
            modules ``distance_to_sink``). None means no pipeline at all.

    Returns:
        ``(total, all_in_warmup, warmup, remaining)``, with warmup capped at total.

    Raises:
        StepArgumentError: one of the sizes is no integer of at least 1.
    """
    require_size("num_microbatches", num_microbatches, _MICROBATCHES)
    require_size("num_model_chunks", num_model_chunks, _CHUNKS)
    if microbatch_group_size_per_vp_stage is not None:
        _require_group(microbatch_group_size_per_vp_stage)
    total = num_microbatches * num_model_chunks
    stages = 1 if p2p_communicator is None else require_communicator(p2p_communicator).total_stages
    if forward_only:
        warmup = total
    else:
        distance = 0 if p2p_communicator is None else _distance_to_loss(p2p_communicator)
        if num_model_chunks == 1:
            warmup = distance
        else:
            group = stages if microbatch_group_size_per_vp_stage is None else microbatch_group_size_per_vp_stage
            warmup = 2 * distance + (num_model_chunks - 1) * group + int(overlap_moe_expert_parallel_comm)
    warmup = min(warmup, total)
    return total, warmup == total, warmup, total - warmup


def require_communicator(communicator: Any) -> Any:
    """``communicator``, where it says at which of how many stages this rank stands, or at which of a graph.

    Raises:
        StepArgumentError: it does not.
    """
    missing = [name for name in ("total_stages", "current_stage") if not is_integer(getattr(communicator, name, None))]
    if missing and not (hasattr(communicator, "graph") and hasattr(communicator, "stages")):
        raise StepArgumentError(
            f"p2p_communicator is {shown(communicator)}, which has no number {missing[0]!r}; pass a P2PCommunicator or "
            "a MultiModulePipelineCommunicator"
        )
    return communicator


def size_of(name: str, group: Any) -> int:
    """The ranks of a group; None is one rank.

    Raises:
        StepArgumentError: no group.
    """
    if group is None:
        return 1
    size = getattr(group, "size", None)
    if isinstance(group, type) or not callable(size) or not is_integer(ranks := size(), least=1):
        raise StepArgumentError(f"{name} is {shown(group)}; pass a process group, or None for one rank")
    return int(ranks)


def _distance_to_loss(communicator: Any) -> int:
    """Stages between this rank and the last; in a graph of modules, on the longest path."""
    distance = getattr(communicator, "distance_to_sink", None)
    if distance is None:
        distance = communicator.total_stages - communicator.current_stage - 1
    return int(distance)


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """``(microbatch, chunk)`` in the order of forwards: groups of N microbatches, chunk-major inside a group.

    The last group is shorter where N does not divide the number of microbatches.

    Raises:
        StepArgumentError: one of the sizes is no integer of at least 1.
    """
    require_size("num_microbatches", num_microbatches, _MICROBATCHES)
    require_size("num_model_chunks", num_model_chunks, _CHUNKS)
    _require_group(microbatch_group_size_per_vp_stage)
    table: list[tuple[int, int]] = []
    for start in range(0, num_microbatches, microbatch_group_size_per_vp_stage):
        group = range(start, min(start + microbatch_group_size_per_vp_stage, num_microbatches))
        table.extend((microbatch, chunk) for chunk in range(num_model_chunks) for microbatch in group)
    return table


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Sequence[tuple[int, int]]
) -> list[int]:
    """One list of chunks, forwards as ``chunk + 1`` and backwards as ``chunk - V``.

    First the warmup forwards, then forward/backward pairs, then the remaining backwards. This is the order
    that CUDA graph capture of model chunks asks for.

    Raises:
        StepArgumentError: more warmup forwards than there are, or a table with a chunk that does not exist.
    """
    require_size("num_model_chunks", num_model_chunks, _CHUNKS)
    require_size("num_warmup_microbatches", num_warmup_microbatches, "get_pp_rank_microbatches counts them", least=0)
    remedy = "make the table with get_schedule_table"
    require_items("schedule_table", schedule_table, object, remedy, error=StepArgumentError)
    if num_warmup_microbatches > len(schedule_table):
        raise StepArgumentError(
            f"num_warmup_microbatches is {num_warmup_microbatches}, and schedule_table has {len(schedule_table)} "
            "forwards in all; give at most these, as get_pp_rank_microbatches does"
        )
    for place, entry in enumerate(schedule_table):
        if not isinstance(entry, (tuple, list)) or len(entry) != 2 or entry[1] not in range(num_model_chunks):
            raise StepArgumentError(
                f"entry {place} of schedule_table is {entry!r}; it must be (microbatch, chunk) with a chunk of "
                f"0..{num_model_chunks - 1}: make the table with get_schedule_table, for the same num_model_chunks"
            )
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    order = forwards[:num_warmup_microbatches]
    for index in range(num_warmup_microbatches, len(schedule_table)):
        order += [forwards[index], backwards[index - num_warmup_microbatches]]
    return order + backwards[len(schedule_table) - num_warmup_microbatches :]


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: Any,
    cp_group: Any,
) -> list[tuple[int, ...]]:
    """Shapes ``(sequence, batch, hidden)`` of the activations between stages.

    The sequence is the decoder's where one is given; it is cut over the cp ranks and, with
    ``config.sequence_parallel``, over the tp ranks. With ``config.variable_seq_lengths`` the shape is agreed
    at run time, and the answer is ``[()]``.

    Args:
        seq_length: tokens of a sample.
        micro_batch_size: samples of a microbatch.
        decoder_seq_length: tokens of a sample on the decoder's side, where it differs.
        config: ``hidden_size``, ``sequence_parallel``, ``variable_seq_lengths``.
        tp_group: anything with ``size()``; None stands for one rank.
        cp_group: likewise.

    Raises:
        StepArgumentError: a size is no integer of at least 1 (nothing is asked of sizes where lengths vary), or the
            sequence does not divide over the ranks that share it.
    """
    if getattr(config, "variable_seq_lengths", False):
        return [()]
    require_size("seq_length", seq_length, "give the tokens of a sample, or set config.variable_seq_lengths")
    require_size("micro_batch_size", micro_batch_size, "give the samples of a microbatch")
    if decoder_seq_length is not None:
        require_size("decoder_seq_length", decoder_seq_length, "give None where it is that of seq_length")
    hidden_size = require_size(
        "config.hidden_size",
        getattr(config, "hidden_size", None),
        "set it to the last axis of the activations, or set config.variable_seq_lengths",
    )
    sequence = seq_length if decoder_seq_length is None else decoder_seq_length
    cp, tp = size_of("cp_group", cp_group), size_of("tp_group", tp_group)
    tp = tp if getattr(config, "sequence_parallel", False) else 1
    if sequence % (cp * tp):
        raise StepArgumentError(
            f"a sequence of {sequence} tokens cannot be shared evenly by cp {cp} x sequence-parallel tp {tp} ranks; "
            f"pad it to {-(-sequence // (cp * tp)) * cp * tp}, or set variable_seq_lengths"
        )
    return [(sequence // cp // tp, micro_batch_size, hidden_size)]


def check_first_val_step(first_val_step: bool | None, forward_only: bool, cond: bool) -> bool:
    """``cond``, and in a forward-only run where ``first_val_step`` is given, that as well."""
    if first_val_step is not None and forward_only:
        return first_val_step and cond
    return cond
