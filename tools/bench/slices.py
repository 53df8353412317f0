"""Slices of a sequence on a Hugging Face decoder: Seq1F1B beside 1F1B, two ranks over gloo, few long texts.

    python tools/bench/slices.py [--rounds 9] [--tokens 1024] [--microbatches 2]

Gradients of all are compared first. Then steps by turns; a ratio is the median over rounds with its quartiles, beside
what `simulate` says of the plans with slices of that length. Memory is the peak of the bytes that graphs keep for
backwards on the rank with most. No bound: a slice has fewer rows and an explicit mask, which each machine prices anew.
Exits with 1 where a gradient differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from hf_parts.job import maker
from pipegrid.schedules import (
    Costs,
    PipelineConfig,
    balanced_slices,
    get_forward_backward_func,
    one_f_one_b,
    seq1f1b,
    simulate,
    slice_times,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.training import pipeline_stage, sequence_slices
from pipegrid.transport import P2PCommunicator
from runtime_parts.memory import Meter
from runtime_parts.processes import on_ranks
from runtime_parts.table import pair_ratios
from runtime_parts.timing import by_turns, timed

RANKS, LAYERS, WIDTH, ROWS, SLICES = 2, 4, 256, 2, (2, 4)


@frozen
class Sliced:
    """A step of Seq1F1B, or of 1F1B where ``lengths`` are one."""

    run: Any
    stage: nn.Module
    batches: list[dict[str, Any]]
    pipe: P2PCommunicator
    groups: Any
    num_microbatches: int

    def step(self) -> None:
        """See `runtime_parts.runners.Runner`."""
        self.run(
            forward_step_func=forward_step,
            data_iterator=iter(self.batches),
            model=self.stage,
            num_microbatches=self.num_microbatches,
            p2p_communicator=self.pipe,
            pg_collection=self.groups,
        )


def forward_step(batches: Iterator[dict[str, Any]], stage: nn.Module) -> tuple[Any, Any]:
    """The model's own loss."""
    return stage(**next(batches)), lambda output: (output.loss, output.loss.detach())


def runners_of(stage: Any, groups: Any, options: argparse.Namespace) -> dict[str, Sliced]:
    """1F1B and Seq1F1B over the same stage and texts."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 128, (ROWS, options.tokens), generator=generator) for _ in range(options.microbatches)]
    made = {}
    for lengths in ((options.tokens,), *(lengths_of(options.tokens, count) for count in SLICES)):
        config = PipelineConfig(variable_seq_lengths=True, deadline=120.0)
        sliced = {"schedule": "seq1f1b", "num_slices": len(lengths)} if len(lengths) > 1 else {"schedule": "1f1b"}
        stage.config = config
        plain = [{"input_ids": text, "labels": text} for text in texts]
        made[label(lengths)] = Sliced(
            get_forward_backward_func(**sliced),
            stage,
            plain if len(lengths) == 1 else [part for each in plain for part in sequence_slices(each, lengths)],
            P2PCommunicator(groups.pp, config),
            groups,
            options.microbatches,
        )
    return made


def label(lengths: Sequence[int]) -> str:
    """The name of a row."""
    return "1f1b" if len(lengths) == 1 else f"seq1f1b, {' '.join(map(str, lengths))} tokens"


def attention_share(tokens: int) -> float:
    """Of causal attention in the FLOPs of a layer with an MLP of 3 matrices of 4 h: 32 h² and 2 h tokens per token."""
    return 2 * tokens / (32 * WIDTH + 2 * tokens)


def lengths_of(tokens: int, count: int) -> tuple[int, ...]:
    """Slices of equal time."""
    return balanced_slices(tokens, count, attention=attention_share(tokens), multiple_of=16)


def predicted(lengths: Sequence[int], options: argparse.Namespace) -> tuple[float, float]:
    """Makespan and peak over those of 1F1B, in simulation with a backward of two forwards."""
    plans = one_f_one_b(RANKS, options.microbatches), seq1f1b(RANKS, options.microbatches, num_slices=len(lengths))
    costs = Costs(
        slice_lengths=tuple(lengths), slice_times=slice_times(lengths, attention=attention_share(options.tokens))
    )
    whole, sliced = (simulate(plan, costs) for plan in plans)
    return sliced.makespan / whole.makespan, sliced.peak() / whole.peak()


def _rank(report: Callable[[Any], None], options: argparse.Namespace) -> None:
    grid = HyperCommGrid([1, RANKS], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    stage = pipeline_stage(maker(LAYERS, WIDTH), "Ett|ttL", dist.get_rank())
    runners = runners_of(stage, ProcessGroupCollection.from_grid(grid), options)
    peaks, errors = {}, {}
    expected: dict[str, torch.Tensor] = {}
    for name, runner in runners.items():
        stage.zero_grad()
        meter = Meter(list(stage.parameters()))
        with meter.watching():
            timed(runner)
        peaks[name] = meter.peak
        gradients = {each: parameter.grad for each, parameter in stage.named_parameters() if parameter.grad is not None}
        expected = expected or gradients
        errors[name] = max(float((gradients[each] - grad).norm() / grad.norm()) for each, grad in expected.items())
    report((peaks, errors, by_turns(runners, options.rounds, before=stage.zero_grad)))
    for runner in runners.values():
        runner.pipe.close()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of timed steps")
    parser.add_argument("--tokens", type=int, default=1024, help="of a text")
    parser.add_argument("--microbatches", type=int, default=2, help="of a step")
    options = parser.parse_args()
    with on_ranks(RANKS, _rank, options) as reports:
        found = reports.next()
    size = f"{LAYERS} layers of width {WIDTH}, {options.microbatches} microbatches of {ROWS} x {options.tokens} tokens"
    print(f"torch {torch.__version__}, gloo, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; Llama, {size}")
    print(f"  {'milliseconds, medians':<40}{'step':>9}{'over 1f1b':>22}{'simulated':>11}{'peak':>7}{'simulated':>11}")
    steps = {
        name: [max(column) for column in zip(*(times[name] for *_, times in found), strict=True)]
        for name in found[0][0]
    }
    most = {name: max(peaks[name] for peaks, *_ in found) for name in steps}
    for lengths in ((options.tokens,), *(lengths_of(options.tokens, count) for count in SLICES)):
        name = label(lengths)
        line = f"  {name:<40}{1e3 * statistics.median(steps[name]):>9.1f}"
        ratios = pair_ratios(steps[name], steps["1f1b"])
        if len(lengths) > 1 and ratios is not None:
            time, memory = predicted(lengths, options)
            spread = f"{ratios.median:.2f} [{ratios.lower:.2f}, {ratios.upper:.2f}]"
            line += f"{spread:>22}{time:>11.2f}{most[name] / most['1f1b']:>7.2f}{memory:>11.2f}"
        print(line)
    worst = max(error for _, errors, _ in found for error in errors.values())
    print(f"  largest difference of a gradient from that of 1F1B: {worst:.1e} (float32)")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
