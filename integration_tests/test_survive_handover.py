"""A job that survives deaths while it can, and goes on from its last checkpoint when a stage is on no rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pipegrid.topology import serve_store
from pipegrid.training.restart import NO_PROGRESS, PREEMPTED, read_attempts
from survive.launching import until_done

from .kit import processes
from .survive_cases import Kill
from .survive_handover_ranks import RANKS, Attempts, rank_main


def play(context, attempts, folder):
    """Run the ranks by the example's launcher; exit codes by attempt, and outcomes of the last one by rank."""

    def start(number, *, address):
        ranks = [
            context.Process(target=rank_main, args=(attempts, number, rank, address, str(folder)))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        return ranks

    with serve_store() as address:
        codes = until_done(partial(start, address=address), restarts=3, seconds=90.0)
    paths = [(rank, folder / f"outcome.{len(codes) - 1}.{rank}") for rank in range(RANKS)]
    return codes, {rank: torch.load(path) for rank, path in paths if path.exists()}, processes.logs(folder)


def test_all_ranks_start_again_from_what_survivors_have_saved_and_lose_nothing(context, tmp_path):
    attempts = Attempts(
        steps=7,
        # Of the last stage first one replica, then the other; then, of all ranks again, one in the middle of a save.
        kills=((Kill(3, "B", 1), Kill(2, "F", 4)), (Kill(1, "write", 5),)),
    )
    codes, outcomes, logs = play(context, attempts, tmp_path)
    assert codes == [[1, 1, -9, -9], [0, -9, 0, 0]], logs
    assert "JobFailedError: position 1 of the pipeline is dead in all 2 replicas" in logs
    assert [(one.restart, one.step, one.end) for one in read_attempts(tmp_path / "checkpoints")] == [
        (0, 4, ""),
        (1, 7, "finished"),
    ]
    assert {outcome["first"] for outcome in outcomes.values()} == {4}, logs  # saved after the first death
    wanted = attempts.alone()
    for outcome in outcomes.values():
        for name, value in outcome["weights"].items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-12)


def test_a_signal_stops_those_that_live_though_the_rank_that_kept_the_record_is_dead(context, tmp_path):
    attempts = Attempts(steps=9, kills=((Kill(0, "B", 1),),), stopped=(3, 2))
    codes, outcomes, logs = play(context, attempts, tmp_path)
    assert codes == [[-9, PREEMPTED, PREEMPTED, PREEMPTED]], logs
    assert [(one.step, one.end) for one in read_attempts(tmp_path / "checkpoints")] == [(3, "preempted")], logs
    assert (tmp_path / "checkpoints" / "save-0002-step-00000003").is_dir(), logs
    assert outcomes.keys() == {1, 2, 3}, logs


@pytest.mark.nightly
def test_a_stage_that_dies_at_one_step_twice_ends_the_run(context, tmp_path):
    both = (Kill(2, "F", 3), Kill(3, "F", 3))
    codes, _, logs = play(context, Attempts(steps=6, kills=(both, both)), tmp_path)
    assert codes == [[1, 1, -9, -9], [1, 1, -9, -9], [NO_PROGRESS] * RANKS], logs
    assert [one.step for one in read_attempts(tmp_path / "checkpoints")] == [3, 3], logs
