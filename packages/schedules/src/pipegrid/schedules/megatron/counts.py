"""Counts and tables of the 1F1B family: warmup per rank, and the order of chunks. Pure.

Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 2.2 (1F1B and its interleaved form).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Count, Index, checked, checked_arguments
from pipegrid.schedules.megatron.place import require_job
from pipegrid.transport.base import Communicator
from pipegrid.transport.job import JobTopology


@checked_arguments(StepArgumentError)
def get_pp_rank_microbatches(
    num_microbatches: Count,
    num_model_chunks: Count,
    microbatch_group_size_per_vp_stage: Count | None,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: Any = None,
) -> tuple[int, bool, int, int]:
    """Number of microbatches of this rank: in all, in its warmup, and after it.

    A microbatch counts once per chunk. With one chunk the warmup is the distance to the loss in stages; with V > 1
    chunks it is ``2 (P - r - 1) + (V - 1) N`` (one more where MoE communication overlaps).

    Args:
        num_microbatches: M, per chunk.
        num_model_chunks: V.
        microbatch_group_size_per_vp_stage: N; None is P.
        forward_only: everything is warmup.
        overlap_moe_expert_parallel_comm: one more microbatch in flight.
        p2p_communicator: its job has this rank's stage (and for a graph of modules ``distance_to_sink``); or an object
            with ``total_stages`` and ``current_stage``. None: no pipeline.

    Returns:
        ``(total, all_in_warmup, warmup, remaining)``, with warmup capped at total.
    """
    total = num_microbatches * num_model_chunks
    if p2p_communicator is None:
        job = JobTopology(total_stages=1)
    elif isinstance(p2p_communicator, Communicator):
        job = require_job(p2p_communicator)
    else:  # nothing is sent: the two numbers are enough
        job = JobTopology(
            *[
                checked(getattr(p2p_communicator, name, None), rule, f"p2p_communicator.{name}", StepArgumentError)
                for name, rule in (("total_stages", Count), ("current_stage", Index))
            ]
        )
    if forward_only:
        warmup = total
    else:
        chain = job.total_stages - job.current_stage - 1
        distance = chain if job.distance_to_sink is None else job.distance_to_sink
        if num_model_chunks == 1:
            warmup = distance
        else:
            group = microbatch_group_size_per_vp_stage
            group = job.total_stages if group is None else group
            warmup = 2 * distance + (num_model_chunks - 1) * group + int(overlap_moe_expert_parallel_comm)
    warmup = min(warmup, total)
    return total, warmup == total, warmup, total - warmup


def size_of(group: Any) -> int:
    """Number of ranks of a group; None is one rank."""
    return 1 if group is None else int(group.size())


@checked_arguments(StepArgumentError)
def get_schedule_table(
    num_microbatches: Count, num_model_chunks: Count, microbatch_group_size_per_vp_stage: Count
) -> list[tuple[int, int]]:
    """``(microbatch, chunk)`` in the order of forwards: groups of N microbatches, chunk-major inside a group.

    The last group is shorter where N does not divide the number of microbatches.
    """
    table: list[tuple[int, int]] = []
    for start in range(0, num_microbatches, microbatch_group_size_per_vp_stage):
        group = range(start, min(start + microbatch_group_size_per_vp_stage, num_microbatches))
        table.extend((microbatch, chunk) for chunk in range(num_model_chunks) for microbatch in group)
    return table


@checked_arguments(StepArgumentError)
def convert_schedule_table_to_order(
    num_warmup_microbatches: Index, num_model_chunks: Count, schedule_table: Sequence[tuple[int, int]]
) -> list[int]:
    """One list of chunks, forwards as ``chunk + 1`` and backwards as ``chunk - V``.

    Warmup forwards, then forward/backward pairs, then the remaining backwards: the order of CUDA graph capture of
    model chunks.

    Raises:
        StepArgumentError: more warmup forwards than forwards, or a chunk outside the range.
    """
    count = len(schedule_table)
    if num_warmup_microbatches > count:
        raise StepArgumentError(
            f"num_warmup_microbatches is {num_warmup_microbatches}, and schedule_table has {count} forwards in all"
        )
    for place, entry in enumerate(schedule_table):
        if not isinstance(entry, (tuple, list)) or len(entry) != 2 or entry[1] not in range(num_model_chunks):
            raise StepArgumentError(
                f"entry {place} of schedule_table is {entry!r}; it must be (microbatch, chunk) with a chunk of "
                f"0..{num_model_chunks - 1}"
            )
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    order = forwards[:num_warmup_microbatches]
    for index in range(num_warmup_microbatches, count):
        order += [forwards[index], backwards[index - num_warmup_microbatches]]
    return order + backwards[count - num_warmup_microbatches :]


def get_tensor_shapes(
    *, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None, config: Any, tp_group: Any, cp_group: Any
) -> list[tuple[int, ...]]:
    """Shapes ``(sequence, batch, hidden)`` of the activations between stages.

    The sequence length is ``decoder_seq_length`` unless None; it is divided over the cp ranks and, with
    ``config.sequence_parallel``, over the tp ranks. With ``config.variable_seq_lengths`` neighbours agree on shapes at
    run time, and the result is ``[()]``.

    Args:
        seq_length: tokens of a sample.
        micro_batch_size: samples of a microbatch.
        decoder_seq_length: tokens of a sample in the decoder, where that differs.
        config: ``hidden_size``, ``sequence_parallel``, ``variable_seq_lengths``.
        tp_group: any object with ``size()``; None is one rank.
        cp_group: likewise.

    Raises:
        StepArgumentError: a size is not an integer of at least 1 (unchecked where lengths vary), or the sequence does
            not divide.
    """
    if getattr(config, "variable_seq_lengths", False):
        return [()]
    seq_length = checked(seq_length, Count, "seq_length", StepArgumentError)
    micro_batch_size = checked(micro_batch_size, Count, "micro_batch_size", StepArgumentError)
    decoder_seq_length = checked(decoder_seq_length, Count | None, "decoder_seq_length", StepArgumentError)
    hidden_size = checked(getattr(config, "hidden_size", None), Count, "config.hidden_size", StepArgumentError)
    sequence = seq_length if decoder_seq_length is None else decoder_seq_length
    cp, tp = size_of(cp_group), size_of(tp_group) if getattr(config, "sequence_parallel", False) else 1
    if sequence % (cp * tp):
        raise StepArgumentError(
            f"a sequence of {sequence} tokens does not divide over cp {cp} x sequence-parallel tp {tp} ranks; "
            f"pad it to {-(-sequence // (cp * tp)) * cp * tp}, or set variable_seq_lengths"
        )
    return [(sequence // cp // tp, micro_batch_size, hidden_size)]


def check_first_val_step(first_val_step: bool | None, forward_only: bool, cond: bool) -> bool:
    """``cond``; in a forward-only run with a ``first_val_step``, both of them."""
    if first_val_step is not None and forward_only:
        return first_val_step and cond
    return cond
