"""Ranks killed with -9: the others go on, with the weights of an undisturbed run, and none of them hangs."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from .kit import processes
from .kit.programs import run
from .survive_cases import PLACES, Case, Kill, whole_matrix
from .survive_pipelines import module
from .survive_ranks import ALONE, rank_main

ROOT = Path(__file__).parents[1]
SECONDS = 60.0  # for a case of up to 8 ranks, which take a second or two of a machine that may do other work


def play(context, case, folder, main=rank_main):
    """Run a case, ``main`` on each rank: outcomes by rank. The store lives here, in the launcher's place."""
    folder.mkdir(parents=True)
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    ranks = [
        context.Process(target=main, args=(case, rank, store.port, str(folder))) for rank in range(case.world_size)
    ]
    for rank in ranks:
        rank.start()
    seconds = SECONDS * max(1.0, case.world_size / 8)
    stuck, logs = processes.end(ranks, seconds), processes.logs(folder)
    assert stuck == [], f"ranks {stuck} had not ended after {seconds} s\n{logs}"
    outcomes = {
        number: torch.load(path) | {"code": ranks[number].exitcode}
        for number in range(case.world_size)
        if (path := folder / f"outcome.{number}").exists()
    }
    return outcomes, logs


def require_undisturbed(context, case, folder, main=rank_main, *, within=1e-12):
    """Run a case whose ranks all are killed where it says; the others have what one process has, or they retire."""
    outcomes, logs = play(context, case, folder, main)
    dead = {kill.rank for kill in case.kills}
    wanted, faults = ALONE[case.job](case), []
    if outcomes.keys() != {*range(case.world_size)} - dead:
        faults.append(f"outcomes of ranks {sorted(outcomes)}")
    for rank, outcome in outcomes.items():
        if rank in case.retiring:
            said = outcome.get("error", "no error")
            if (outcome["code"], said.split(":")[0]) != (0, "RankRetiredError"):
                faults.append(f"rank {rank} ended with code {outcome['code']}: {said}")
            continue
        if "error" in outcome:
            faults.append(f"rank {rank}: {outcome['error']}")
            continue
        far = {name: (value - wanted[name]).abs().max().item() for name, value in outcome["weights"].items()}
        faults += [f"rank {rank}: {name} differs by {by}" for name, by in far.items() if not by <= within]
        named = {int(number) for event in outcome["events"] for number in re.findall(r"rank (\d+) is dead", event)}
        if named != dead:
            faults.append(f"rank {rank}: events {outcome['events']}")
    if faults:
        pytest.fail("\n".join([*faults, logs]), pytrace=False)


def require_all(context, folder, cases, capsys, main=rank_main):
    """`require_undisturbed` of many runs; says how many kills they were."""
    for number, case in enumerate(cases):
        require_undisturbed(context, case, folder / str(number), main)
    kills = sum(len(case.kills) for case in cases)
    with capsys.disabled():
        sys.stdout.write(f"\n{kills} kills in {len(cases)} runs: weights, norms and losses within 1e-12\n")


# Each with six places, so that all are there; in the end one replica of each position is left.
SEVERAL = {
    "sums": Case(
        "sums", 1, 7, tuple(Kill((2 * n) % 7, place, n) for n, place in enumerate(PLACES["sums"][:6], start=1))
    ),
    "sums, the others": Case(
        "sums", 1, 4, tuple(Kill(n, place, n) for n, place in enumerate(PLACES["sums"][6:], start=1))
    ),
    "on a device that is behind the host": Case(
        "late sums", 1, 4, (Kill(2, "compute"), Kill(1, "largest", 2), Kill(0, "after sum", 3))
    ),
    "several at once": Case("sums", 1, 5, (Kill(0, "compute"), Kill(3, "compute"), Kill(1, "vote"))),
    "the next while they agree": Case("sums", 1, 4, (Kill(0, "compute"), Kill(1, "after vote"))),
    "the next as they connect": Case("sums", 1, 5, (Kill(2, "compute"), Kill(0, "after build"), Kill(3, "build"))),
    "the next as they connect a pipeline": Case("pipeline", 2, 3, (Kill(2, "F"), Kill(5, "build"))),
    "a pipeline": Case(
        "pipeline",
        2,
        4,
        (
            Kill(0, "F", 1, 2),
            Kill(7, "SEND_B", 2),
            Kill(3, "after SEND_F", 3, 1),
            Kill(4, "REDUCE", 4),
            Kill(1, "norm", 5),
            Kill(6, "optimizer", 6),
        ),
    ),
    "a pipeline of split backwards": Case(
        "pipeline",
        2,
        4,
        (
            Kill(5, "W", 1),
            Kill(2, "I", 2, 1),
            Kill(7, "RECV_F", 3, 2),
            Kill(0, "after RECV_B", 4),
            Kill(4, "after REDUCE", 5),
            Kill(3, "in between", 6),
        ),
        schedule="zero_bubble",
    ),
    "a pipeline over NCCL": Case(
        "pipeline", 2, 3, (Kill(0, "after REDUCE"), Kill(4, "B", 2), Kill(1, "SEND_F", 3)), backend="legacy"
    ),
    "a pipeline's edges": Case(
        "pipeline",
        2,
        4,
        (
            Kill(1, "between", 1),
            Kill(4, "done", 2),
            Kill(6, "after done", 3),
            Kill(0, "after norm", 4),
            Kill(3, "after optimizer", 5),
            Kill(7, "B", 6, 3),
        ),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", SEVERAL.values(), ids=SEVERAL)
def test_the_others_go_on_wherever_ranks_are_killed(context, tmp_path, case):
    require_undisturbed(context, case, tmp_path / "case")


@pytest.mark.thorough
def test_the_tensor_parallel_peer_of_a_dead_rank_retires_and_the_others_go_on(context, tmp_path):
    case = Case("sums", 1, 4, (Kill(3, "compute"),), pairs=True)
    outcomes, logs = play(context, case, tmp_path / "case")
    assert outcomes.keys() == {0, 1, 2}, logs
    assert outcomes[2]["error"].startswith("RankRetiredError: rank 2 retires"), logs
    assert outcomes[2]["code"] == 0
    for rank in (0, 1):
        torch.testing.assert_close(outcomes[rank]["weights"], ALONE["sums"](case), rtol=0, atol=1e-12)


@pytest.mark.nightly
def test_the_example_is_as_accurate_as_undisturbed(tmp_path):
    """`nox -s example -- survive`, short: three deaths, a restart, another death, and a picture of the first."""
    short = ("--steps", 30, "--every", 6, "--checkpoint-every", 4)
    done = run(ROOT / "docs/examples/survive/run.py", *short, "--out", tmp_path / "out")
    assert done.returncode == 0, (done.stdout, done.stderr)
    for said in ("attempt 0: exit codes of its ranks [-9, 1, -9, -9]", "attempt 1", "3 ranks are left"):
        assert said in done.stdout, (done.stdout, done.stderr)
    drawn = (tmp_path / "out" / "three_steps.svg").read_text()
    for title in ("step 5, undisturbed", "step 6: rank 3 is killed", "step 7, without rank 3", ">vote<", ">dead<"):
        assert title in drawn


@pytest.mark.thorough
def test_the_loop_of_the_page_trains(context, tmp_path):
    case = Case("page", 2, 1)
    outcomes, logs = play(context, case, tmp_path / "case")
    for rank in range(2):
        assert "error" not in outcomes[rank], logs
        before = module(rank).state_dict()
        assert all(not torch.equal(before[name], after) for name, after in outcomes[rank]["weights"].items())


def test_an_undisturbed_run_is_that_of_one_process(context, tmp_path):
    require_undisturbed(context, Case("pipeline", 2, 2), tmp_path / "case")


def test_a_stage_on_no_rank_ends_the_job_by_its_name(context, tmp_path):
    kills = (Kill(1, "F"), Kill(3, "B"), Kill(2, "F", 2))
    outcomes, logs = play(context, Case("pipeline", 2, 2, kills), tmp_path / "case")
    assert outcomes.keys() == {0}, logs
    assert outcomes[0]["error"].startswith("JobFailedError: position 1 of the pipeline is dead in all 2 replicas"), logs


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (ValueError("label 11 of 10"), "JobFailedError: .*ValueError: label 11 of 10"),
        (RuntimeError("out of memory"), "(JobFailed|Runtime)Error: "),  # its own, or that of a connection it has ended
    ],
    ids=["the script's own", "of a device"],
)
def test_an_error_without_a_death_ends_all_ranks(context, tmp_path, error, others):
    case = Case("sums", 1, 3, (Kill(1, "compute", error=error),))
    outcomes, logs = play(context, case, tmp_path / "case")
    said = {rank: outcome["error"] for rank, outcome in outcomes.items()}
    assert said.pop(1) == f"{type(error).__name__}: {error}", logs
    assert said.keys() == {0, 2}, logs
    for text in said.values():
        assert re.match(others, text), logs


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        Case("pipeline", 2, 2),
        Case("pipeline", 2, 2, schedule="zero_bubble"),
        Case("pipeline", 2, 4),
        Case("pipeline", 2, 4, schedule="zero_bubble"),
        Case("pipeline", 4, 4, heartbeat=10.0, deadline=40.0),
        *(Case("pipeline", 2, 2, backend=mode) for mode in ("legacy", "serial", "nccl2", "lazy")),
    ],
    ids=lambda case: f"{case.positions} x {case.replicas}, {case.schedule}, {case.backend}",
)
def test_a_pipeline_goes_on_wherever_any_rank_is_killed(context, tmp_path, case, capsys):
    require_all(context, tmp_path, whole_matrix(case), capsys)
