"""Models with what is hard to do again, with ranks killed: losses, parameters and statistics as undisturbed."""

from __future__ import annotations

import random

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipegrid.planner import survivable
from pipegrid.schedules import one_f_one_b
from pipegrid.survive import PipelineJob, SurviveError, Survivors
from pipegrid.topology import HyperCommGrid
from pipegrid.topology.grid import Grid

from .survive_cases import Kill
from .survive_models_ranks import IN_HALVES, OVERFLOWS, PLACES, TRAITS, ModelCase
from .test_survive import play, require_all, require_undisturbed

ALL = ModelCase("models", 2, 3, schedule="zero_bubble_h1", traits=TRAITS)
PAIRS = ModelCase("models", 2, 2, traits=("tied", "dropout", "scaled", "per_token", "norm"), pairs=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        evolve(
            ALL, kills=(Kill(4, "I", 1), Kill(0, "after all_reduce", 2, 1), Kill(5, "clip", 3), Kill(1, "optimizer", 4))
        ),
        evolve(PAIRS, kills=(Kill(3, "B", 1, 1),)),
    ],
    ids=["all of it", "tensor-parallel peers retire"],
)
def test_a_step_is_that_of_an_undisturbed_run_whatever_the_model_has(context, tmp_path, case):
    require_undisturbed(context, case, tmp_path / "case")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        evolve(ALL, add="by_unit", kills=(Kill(4, "I", 1), Kill(0, "after all_reduce", 2, 9))),
        pytest.param(evolve(PAIRS, add="by_unit", kills=(Kill(3, "B", 1, 1),)), marks=pytest.mark.nightly),
    ],
    ids=["all of it", "tensor-parallel peers retire"],
)
def test_gradients_added_by_unit_have_the_bits_of_an_undisturbed_run(context, tmp_path, case):
    require_equal_bits(context, tmp_path, case)


def require_equal_bits(context, folder, *cases):
    """Runs with kills, each with the bits of one without; these have the values of one process."""
    steps = max(kill.step for case in cases for kill in case.kills)
    wanted, logs = play(context, evolve(cases[0], kills=(Kill(0, "never", steps),)), folder / "undisturbed")
    assert all("error" not in outcome for outcome in wanted.values()), logs
    for number, case in enumerate(cases):
        case = evolve(case, kills=(*case.kills, Kill(0, "never", steps)))
        found, logs = play(context, case, folder / str(number))
        killed = {kill.rank for kill in case.kills if kill.place != "never"}
        assert found.keys() == wanted.keys() - killed, logs
        for rank in found.keys() - {*case.retiring}:
            assert "error" not in found[rank], logs
            unlike = [
                name
                for name, value in found[rank]["weights"].items()
                if not torch.equal(value, wanted[rank]["weights"][name])
            ]
            assert unlike == [], (rank, case)


@pytest.mark.ranks(2)
def test_what_is_sharded_over_replicas_comes_from_the_checkpoint_and_that_is_said_beforehand(ranks):
    """By `survivable`, and by `Survivors` before anything is sent: it has no store."""
    grid, stage = HyperCommGrid([2], ["dp"]), nn.Linear(4, 4)
    fully_shard(stage, mesh=init_device_mesh("cpu", (2,)))
    for dead in range(2):
        assert survivable({"model": Grid([2], ["dp"])}, (dead,)).survives
        said = survivable({"model": Grid([2], ["dp"])}, (dead,), sharding="parameters")
        assert str(said) == f"without rank {dead}: restart, parameters and optimizer from a checkpoint"
    job = PipelineJob(grid, one_f_one_b(1, 2))
    with pytest.raises(
        SurviveError, match=r"'weight' is sharded over replicas by fully_shard, .* only in a checkpoint"
    ):
        Survivors(None, job, modules=stage, retire=job.retire)


def in_turn(case: ModelCase, seed: int) -> list[ModelCase]:
    """Runs in which ranks are killed at each place of a step, until one replica of each position is left."""
    chance, cases = random.Random(seed), []
    places = list(PLACES if case.schedule == "1f1b" else IN_HALVES)
    chance.shuffle(places)
    while places:
        actors = [
            position * case.replicas + replica
            for position in range(case.positions)
            for replica in chance.sample(range(case.replicas), k=case.replicas - 1)
        ]
        chance.shuffle(actors)
        ranks = [actor * case.tp + chance.randrange(case.tp) for actor in actors]
        chosen = [places.pop() for _ in ranks if places]
        if chosen[0] == "vote":  # there is one where another rank has died
            chosen = [*(chosen[1:2] or ["F"]), "vote", *chosen[2:]]
        cases.append(evolve(case, kills=tuple(map(Kill, ranks, chosen, in_steps(case, chosen)))))
    return cases


def in_steps(case: ModelCase, places: list[str]) -> list[int]:
    """Steps that come to ``places`` one after the other: none to what an overflow skips, and a vote after a death."""
    skipped = ("clip", "after clip", "optimizer") if "scaled" in case.traits else ()
    late = ("optimizer", "after optimizer")
    steps, step = [], 0
    for number, place in enumerate(places):
        if place != "vote" or places[number - 1] in late:  # on a death that late, the others vote in the next step
            step += 2 if step + 1 == OVERFLOWS and place in skipped else 1
        steps.append(step)
    return steps


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mistake", "traits", "place"),
    [
        ("a divisor of those that live", (), "F"),
        ("masks of the rank that computes", ("dropout",), "F"),
        ("statistics of the rank that computes", ("norm",), "F"),
        ("buffers as they are", ("norm",), "B"),
        ("gradients as they are", ("scaled",), "unscale"),
        ("loss scales as they are", ("scaled",), "clip"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_a_planted_mistake_is_found(context, tmp_path, mistake, traits, place):
    case = ModelCase("models", 2, 2, (Kill(0, place),), traits=traits)
    require_undisturbed(context, case, tmp_path / "right")
    with pytest.raises(pytest.fail.Exception, match="differs by"):
        require_undisturbed(context, evolve(case, mistake=mistake), tmp_path / "mistaken")


@pytest.mark.nightly
def test_gradients_added_as_they_come_have_other_bits(context, tmp_path):
    with pytest.raises(AssertionError, match=r"words"):
        require_equal_bits(context, tmp_path, evolve(ALL, kills=(Kill(4, "I", 1), Kill(0, "F", 2))))


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
@pytest.mark.parametrize("traits", [*((trait,) for trait in (*TRAITS, "frozen_stage")), TRAITS], ids="+".join)
def test_each_model_goes_on_wherever_ranks_are_killed(context, tmp_path, traits, schedule, capsys):
    require_all(context, tmp_path, in_turn(evolve(ALL, traits=traits, schedule=schedule), len(traits)), capsys)


@pytest.mark.nightly
def test_tensor_parallel_replicas_go_on_wherever_ranks_are_killed(context, tmp_path, capsys):
    require_all(context, tmp_path, in_turn(PAIRS, 0), capsys)
