"""A language model of Hugging Face under pipegrid and under torch.distributed.pipelining, on two ranks over gloo.

    python tools/bench/hf_pipelining.py [--quick] [--rounds N] [--only questions steps]
                                      [--schedules 1f1b zero_bubble_v]

- glue: lines of code from the model to a step, `hf_parts/ours.py` beside `hf_parts/peer.py`. The peer's part writes the
  model's forward again, since a stage of torch's is a module of the user's; `pipeline()`, which cuts a traced model, is
  asked as well.
- what each runs: the same questions to both, each with the gradients of the whole model in one process (float64), or
  the first line of the error.
- steps: the same model, batch and schedule by turns; the ratio is the median over rounds with its quartiles.
  Bound: 1.1 of torch.

Exits with 1 where our gradients are wrong, or the bound is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
from attrs import frozen

from hf_parts.job import Batch, batches_of, lines_of_code, loss_of, maker
from hf_parts.ours import Ours
from hf_parts.peer import Peer
from runtime_parts.processes import on_ranks
from runtime_parts.table import meets, pair_ratios, spread_against
from runtime_parts.timing import RunnerError, by_turns, timed

RANKS, BOUND, RIGHT = 2, 1.1, 1e-9
PARTS = ("questions", "steps")
FOLDER = Path(__file__).parent / "hf_parts"


@frozen
class Kind:
    """A schedule of ours and the peer's of that name, with the layers of each stage for both."""

    schedule: str
    peer: str
    layout: str
    bounds: Sequence[int]


ONE = Kind("1f1b", "Schedule1F1B", "Ett|ttL", [0, 2, 4])
INTERLEAVED = Kind("interleaved_1f1b", "ScheduleInterleaved1F1B", "Et|t|t|tL", [0, 1, 2, 3, 4])
ZBV = Kind("zero_bubble_v", "ScheduleZBVZeroBubble", "Et|t|t|tL", [0, 1, 2, 3, 4])


TIMED = (ONE, ZBV)


@frozen
class Question:
    """What both are asked to run: a small model of four layers, in float64."""

    text: str
    kind: Kind
    microbatches: int = 4
    padded: bool = False
    ragged: bool = False
    tied: bool = False
    compiled: bool = False


QUESTIONS = (
    Question("1F1B", ONE),
    Question("1F1B, padded texts", ONE, padded=True),
    Question("1F1B, microbatches of unequal length", ONE, ragged=True),
    Question("1F1B, head tied to the embedding", ONE, tied=True),
    Question("interleaved 1F1B, 3 microbatches", INTERLEAVED, microbatches=3),
    Question("ZB-V", ZBV),
    Question("ZB-V, 3 microbatches", ZBV, microbatches=3),
    Question("ZB-V, compiled layers", ZBV, compiled=True),
)


@frozen
class Step:
    """A runner's step on some batch."""

    run: Callable[[list[Batch]], None]
    batches: list[Batch]

    def step(self) -> None:
        """See `runtime_parts.runners.Runner`."""
        self.run(self.batches)


def gradients_of(runner: Ours | Peer) -> dict[str, torch.Tensor]:
    """The gradients on this rank, by the parameters' names in the whole model."""
    parts = runner.stages if isinstance(runner, Ours) else [runner.whole]
    named = [pair for part in parts for pair in part.named_parameters(remove_duplicate=False)]
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def worst_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest relative difference of a gradient on any rank; infinite where a parameter has none on all."""
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    floor = 1e-3 * norm / len(expected) ** 0.5
    errors = [
        float((gradient - expected[name]).norm() / torch.maximum(expected[name].norm(), floor))
        for name, gradient in found.items()
    ]
    have: list[Any] = [None] * RANKS
    dist.all_gather_object(have, set(found))
    worst = torch.tensor(max(errors, default=0.0) if set(expected) <= set().union(*have) else float("inf"))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def answer(question: Question, make_runner: Callable[[], Ours | Peer], expected: Mapping[str, torch.Tensor]) -> str:
    """The error of the gradients, or the first line of what went wrong on some rank."""
    made: list[Ours | Peer] = []
    batches = batches_of(question.microbatches, 8, padded=question.padded, ragged=question.ragged)

    class Made:
        """Made and run in one, since a constructor may be what fails."""

        def step(self) -> None:
            made.append(make_runner())
            made[0].step(batches)

    try:
        timed(Made())
        error = worst_error(gradients_of(made[0]), expected)
        text = f"right ({error:.0e})" if error < RIGHT else f"wrong gradients ({error:.1e})"
    except RunnerError as failure:
        text = " ".join(str(failure).split())
    finally:
        if made and isinstance(made[0], Ours):
            made[0].pipe.destroy()
    texts = [""] * RANKS
    dist.all_gather_object(texts, text)
    return next((each for each in texts if not each.startswith(("another rank", "right"))), texts[0])


def whole_gradients(question: Question) -> dict[str, torch.Tensor]:
    """Of the whole model in this process."""
    whole = maker(4, 16, tied=question.tied, dtype=torch.float64)()
    words = torch.zeros(())
    for batch in batches_of(question.microbatches, 8, padded=question.padded, ragged=question.ragged):
        loss, count = loss_of(whole(**batch).logits, batch)
        torch.autograd.backward(loss)
        words = words + count
    return {name: p.grad / words for name, p in whole.named_parameters(remove_duplicate=False)}


def ask(question: Question) -> tuple[str, str]:
    """Both answers."""
    kind, make = question.kind, maker(4, 16, tied=question.tied, dtype=torch.float64)
    expected = whole_gradients(question)
    ours = answer(
        question,
        lambda: Ours(make, kind.layout, kind.schedule, compiled=question.compiled, ragged=question.ragged),
        expected,
    )
    peer = answer(
        question,
        lambda: Peer(make, list(kind.bounds), kind.peer, question.microbatches, compiled=question.compiled),
        expected,
    )
    return ours, peer


def traced() -> str:
    """What torch's own splitter says of the model."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    batch = batches_of(1, 8)[0]
    try:
        pipeline(
            maker(4, 16)().eval(),
            mb_args=(),
            mb_kwargs={**batch, "use_cache": False},
            split_spec={"model.layers.2": SplitPoint.BEGINNING},
        )
    except Exception as error:  # noqa: BLE001 -- the peer's failure is what is reported
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:90]}"
    return "cut in two"


def timings(kind: Kind, *, quick: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step on this rank, by turns."""
    layers, width, length, count = (4, 16, 8, 4) if quick else (8, 128, 64, 8)
    make, batches = maker(layers, width), batches_of(count, length, padded=True)
    each = layers // (len(kind.bounds) - 1)
    layout = "|".join(("E" if n == 0 else "") + f"t*{each}" for n in range(len(kind.bounds) - 1)) + "L"
    ours = Ours(make, layout, kind.schedule, compiled=False, ragged=False)
    peer = Peer(make, [each * n for n in range(len(kind.bounds))], kind.peer, count, compiled=False)
    runners = {"ours": Step(ours.step, batches), "torch": Step(peer.step, batches)}
    for runner in runners.values():
        timed(runner)

    def clear() -> None:
        for part in (*ours.stages, peer.whole):
            part.zero_grad()

    seconds = by_turns(runners, rounds, before=clear)
    ours.pipe.destroy()
    return seconds


def timed_of(options: argparse.Namespace) -> list[Kind]:
    """The schedules whose steps are timed."""
    return [kind for kind in TIMED if "steps" in options.only and kind.schedule in options.schedules]


def _rank(report: Callable[[Any], None], options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    report([ask(question) for question in QUESTIONS] if "questions" in options.only else [])
    for kind in timed_of(options):
        try:
            report(timings(kind, quick=options.quick, rounds=options.rounds))
        except RunnerError as error:
            report(" ".join(str(error).split()))


def report(asked: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The lines on glue and on what each runs."""
    ours, peer = (lines_of_code((FOLDER / f"{name}.py").read_text()) for name in ("ours", "peer"))
    yield f"glue, lines of code from the model to a step: pipegrid {ours}, torch {peer}"
    if not asked:
        return
    yield f"torch's pipeline() on the model: {traced()}"
    yield ""
    yield f"  {'gradients of one process, float64':<40}{'pipegrid':<18}torch"
    for question, (mine, other) in zip(QUESTIONS, asked, strict=True):
        yield f"  {question.text:<40}{mine[:100]:<18}{other[:100]}"


def timing_line(kind: Kind, ranks: Sequence[Any]) -> tuple[bool, str]:
    """Whether the bound holds, and the line of a schedule."""
    if isinstance(ranks[0], str):
        return True, f"  {kind.schedule:<18}{next(each for each in ranks if not each.startswith('another'))[:100]}"
    ours, peer = ([max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0])
    ratios = pair_ratios(ours, peer)
    cells = "".join(f"{1e3 * statistics.median(times):>9.1f}" for times in (ours, peer))
    return meets(ratios, BOUND), f"  {kind.schedule:<18}{cells}{spread_against(ratios, BOUND, digits=3)}"


def main() -> int:
    """Ask, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds; its figures say little")
    parser.add_argument("--rounds", type=int, help="of timed steps (default 25)")
    names = [kind.schedule for kind in TIMED]
    parser.add_argument("--schedules", nargs="+", choices=names, default=names, help="which are timed")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="which parts")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 25)
    with on_ranks(RANKS, _rank, options) as reports:
        asked = reports.next()[0]
        timed_by = [reports.next() for _ in timed_of(options)]
    print(f"torch {torch.__version__}, gloo, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print("\n".join(report(asked)))
    good = all(mine.startswith("right") for mine, _ in asked)
    if "steps" in options.only:
        print(f"\n  {'milliseconds':<18}{'ours':>9}{'torch':>9}{'ours/torch':>28}")
    for kind, ranks in zip(timed_of(options), timed_by, strict=True):
        met, line = timing_line(kind, ranks)
        good &= met
        print(line)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
