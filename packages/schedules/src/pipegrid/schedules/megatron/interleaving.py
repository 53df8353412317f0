"""The seeds' interleaved step function: several chunks of the model on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.generators import interleaved_1f1b
from pipegrid.schedules.gradients.reduce import collection_of
from pipegrid.schedules.lowering import Receives, lower
from pipegrid.schedules.megatron.config import checked_option, config_of, option
from pipegrid.schedules.megatron.counts import require_communicator
from pipegrid.schedules.megatron.step import Ties, announce, require_microbatches, run_step
from pipegrid.schedules.plan.plan import Plan
from pipegrid.schedules.verify.verify import verify


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
) -> list[Any]:
    """One step of interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), for one module.

    Chunk ``c`` of rank ``r`` is stage ``c * P + r`` of ``P * V`` stages. Arguments and result as for
    `forward_backward_pipelining_without_interleaving`, except:

    - ``model`` is the list of this rank's V chunks. The config of the first is read, where
      ``microbatch_group_size_per_vp_stage`` is how many microbatches N a chunk runs before the next chunk has its turn
      (default P), and with ``overlap_p2p_comm`` receives are posted a compute ahead, so that transfers hide behind
      it. With ``overlap_moe_expert_parallel_comm`` one forward more runs before the first backward, so that a model
      that interleaves two microbatches has both. ``no_sync_func``, ``grad_sync_func`` and ``param_sync_func`` may be
      lists, one per chunk.
    - ``data_iterator`` is a list with one iterator per chunk (None where a chunk needs no data).
    - ``p2p_communicator`` is a `P2PCommunicator`, whose stages lie round and round on its ranks (no placement).

    Raises:
        StepArgumentError: the lists do not fit each other, or not ``P <= N <= M and (M % N == 0 or M % N >= P)``.
    """
    if p2p_communicator is None:
        raise StepArgumentError(
            "p2p_communicator is needed: there is no global parallel state to make one from. Pass "
            "P2PCommunicator(pp_group, config)"
        )
    require_communicator(p2p_communicator)
    if getattr(p2p_communicator, "graph", None) is not None:
        raise StepArgumentError(
            "p2p_communicator serves a graph of modules, and the interleaved schedule is one of a single module: run "
            "another plan over the graph with PipelineRuntime"
        )
    chunks = _chunks(model, data_iterator, p2p_communicator)
    ranks, here = p2p_communicator.total_stages, p2p_communicator.current_stage
    config = config_of(chunks[0][0])
    group_size = checked_option(config, "microbatch_group_size_per_vp_stage")
    if group_size is None:
        group_size = ranks
    require_microbatches(num_microbatches)
    _require_group_size(group_size, ranks, num_microbatches)
    receives: Receives = "early" if option(config, "overlap_p2p_comm") else "late"
    extra_warmup = int(bool(option(config, "overlap_moe_expert_parallel_comm")))
    models = {chunk * ranks + here: part for chunk, (part, _) in enumerate(chunks)}
    return run_step(
        plan=lambda ties: interleaved_plan(
            ranks, len(chunks), num_microbatches, group_size, receives, ties, extra_warmup
        ),
        communicator=p2p_communicator,
        forward_step_func=forward_step_func,
        data_iterators={chunk * ranks + here: iterator for chunk, (_, iterator) in enumerate(chunks)},
        models=models,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        pg_collection=pg_collection,
        interleaved=True,
        shapes=announce(
            adjust_tensor_shapes_fn,
            models,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            collection=None if pg_collection is None else collection_of(pg_collection, "model"),
        ),
    )


@lru_cache(maxsize=64)
def interleaved_plan(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int,
    receives: Receives = "late",
    tied: Ties = (),
    extra_warmup: int = 0,
) -> Plan:
    """The verified plan that the interleaved step function runs. Pure."""
    plan = lower(
        interleaved_1f1b(
            num_ranks, num_microbatches, num_chunks=num_chunks, group_size=group_size, extra_warmup=extra_warmup
        ),
        receives=receives,
        tied=dict(tied),
    )
    verify(plan)
    return plan


def _chunks(model: Any, data_iterator: Any, communicator: Any) -> list[tuple[Any, Any]]:
    """Per chunk its model and its iterator."""
    if not isinstance(model, Sequence) or len(model) < 2:
        found = f"a list of {len(model)}" if isinstance(model, Sequence) else type(model).__name__
        raise StepArgumentError(
            f"model is {found}; interleaving takes a list of at least two chunks. With one, use "
            "forward_backward_pipelining_without_interleaving"
        )
    iterators = [None] * len(model) if data_iterator is None else data_iterator
    if not isinstance(iterators, Sequence) or len(iterators) != len(model):
        found = f"a list of {len(iterators)}" if isinstance(iterators, Sequence) else type(iterators).__name__
        raise StepArgumentError(
            f"data_iterator is {found} and model a list of {len(model)} chunks; pass one iterator for each chunk"
        )
    configured = getattr(communicator, "virtual_pipeline_model_parallel_size", None)
    if configured is not None and configured != len(model):
        raise StepArgumentError(
            f"the communicator was made with virtual_pipeline_model_parallel_size={configured}, but model is a list of "
            f"{len(model)} chunks"
        )
    return list(zip(model, iterators, strict=True))


def _require_group_size(group_size: int, ranks: int, num_microbatches: int) -> None:
    last = num_microbatches % group_size
    if not ranks <= group_size <= num_microbatches or 0 < last < ranks:
        raise StepArgumentError(
            f"{num_microbatches} microbatches in groups of {group_size} over {ranks} ranks: the interleaved step takes "
            "groups of at least as many microbatches as ranks, at most all of them, and a last group that is full or "
            "as long as the pipeline. Change num_microbatches or config.microbatch_group_size_per_vp_stage, or run "
            "interleaved_1f1b's plan with PipelineRuntime, which takes any number"
        )
