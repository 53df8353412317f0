"""The places of stages, said once: by the grid, and the name of a schedule where ranks have several stages."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from pipegrid.schedules import PipelineConfig, PlanError, StepArgumentError, get_forward_backward_func, stage_places
from pipegrid.training import CutError, Names, pipeline_stage, tie_stage_parameters
from pipegrid.transport import P2PCommunicator

from .kit.jobs import grid_of
from .kit.layered import WIDTH, WORDS, Layered

MICROBATCHES = 3


class Turned(nn.Linear):
    """A layer whose result is a view of other memory: rows and columns changed places."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x).transpose(-1, -2).contiguous().transpose(-1, -2).relu()


def make():
    torch.manual_seed(0)
    return Layered(Turned, tied=True).double()


stages_by = partial(pipeline_stage, make, names=Names("layers"))


def batch(index):
    return torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(index))


def run(stages, config, communicator, groups, schedule):
    for stage in stages:
        stage.config = config
    return get_forward_backward_func(schedule=schedule)(
        forward_step_func=lambda batches, stage: (stage(next(batches)), lambda y: (y.square().mean(), None)),
        data_iterator=[map(batch, range(MICROBATCHES)) for _ in stages],
        model=stages,
        num_microbatches=MICROBATCHES,
        p2p_communicator=communicator,
        pg_collection=groups,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("schedule", "layout"), [("zero_bubble_v", "Et|t|t|tL"), ("interleaved_1f1b", "Et|t|t|tL"), ("1f1b", "Ett|ttL")]
)
def test_the_name_of_a_schedule_places_the_stages_and_ties_them(ranks, schedule, layout):
    """Layers send views; the gradients are those of one process."""
    grid, groups = grid_of(pp=2)
    stages = stages_by(layout, grid, schedule=schedule)
    places = stage_places(schedule, 2, 1 if schedule == "1f1b" else 2)
    assert [stage.number for stage in stages] == [n for n, place in enumerate(places) if place == ranks.rank]
    assert stages[0].placement == places
    ties = tie_stage_parameters(stages[0].ties, stages, grid)
    assert len(ties) == (schedule != "zero_bubble_v")  # in a V one rank has both copies
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=30, tied_parameters=ties)
    communicator = P2PCommunicator(groups.pp, config, placement=places)
    run(stages, config, communicator, groups, schedule)
    whole = make()
    for index in range(MICROBATCHES):
        (whole(batch(index)).square().mean() / MICROBATCHES).backward()
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-14, msg=name)
    communicator.close()


@pytest.mark.ranks(2)
def test_a_layout_with_other_than_pp_times_chunks_stages_is_an_error_at_once(ranks):
    grid, groups = grid_of(pp=2)
    for layout, schedule, text in (
        ("Et|t|t|tL", None, r"'Et\|t\|t\|t,?L' has 4 stages, and 2 are needed: one stage on each rank of pp 2"),
        ("Et|tttL", "zero_bubble_v", r"2 stages, and 4 are needed: the places of zero_bubble_v of pp 2 is \(0, 1, 1"),
        ("Et|t|ttL", "interleaved_1f1b", "3 stages, and 4 are needed"),
        ("EttttL", None, "1 stages, and 2 are needed"),
    ):
        with pytest.raises(CutError, match=text):
            stages_by(layout, grid, schedule=schedule)
    with pytest.raises(PlanError, match="zero_bubble_w"):
        stages_by("Et|t|t|tL", grid, schedule="zero_bubble_w")
    with pytest.raises(CutError, match="schedule is '1f1b', and stage is 0; give the grid"):
        stages_by("Ett|ttL", 0, schedule="1f1b")
    assert stages_by("Ett|ttL", grid).number == ranks.rank
    stage = stages_by("Et|t|t|tL", ranks.rank)
    with pytest.raises(CutError, match=r"has 4 stages, 1 of them here, .* has 2 pp ranks; .* pp x chunks"):
        tie_stage_parameters(stage.ties, stage, grid)
    stage = pipeline_stage(untied, "Et|t|t|tL", ranks.rank, names=Names("layers"))
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=30)
    communicator = P2PCommunicator(groups.pp, config)
    stage.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    text = (
        rf"model of stage {ranks.rank} is stage {ranks.rank} of the 4 of its layout, .* has 2 stages of module 'model'"
    )
    with pytest.raises(StepArgumentError, match=text):
        run([stage], config, communicator, groups, "1f1b")
    communicator.close()


def untied():
    model = make()
    model.out.weight = nn.Parameter(model.word.weight.detach().clone())
    return model


@pytest.mark.ranks(2)
def test_places_that_disagree_are_an_error(ranks):
    grid, groups = grid_of(pp=2)
    stages = stages_by("Et|t|t|tL", grid, schedule="zero_bubble_v")
    with pytest.raises(CutError, match=r"placement is \(0, 1, 0, 1\), .* placed \(0, 1, 1, 0\): leave placement out"):
        tie_stage_parameters(stages[0].ties, stages, grid, placement=(0, 1, 0, 1))
    with pytest.raises(CutError, match=r"placement is \(0, 1\), of 2 stages; those here are of 4"):
        tie_stage_parameters(stages[0].ties, stages, grid, placement=(0, 1))
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=30)
    communicator = P2PCommunicator(groups.pp, config)  # whose stages lie round and round
    stages = pipeline_stage(untied, "Et|t|t|tL", grid, names=Names("layers"), schedule="zero_bubble_v")
    text = ("the model of stage 2 is stage 3 of the 4", "the model of stage 3 is stage 2 of the 4")[ranks.rank]
    with pytest.raises(StepArgumentError, match=text):
        run(stages, config, communicator, groups, "interleaved_1f1b")
    communicator.close()
