"""Optimizers around a step: those that need gradients of other ranks are errors, others update as in one process."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pipegrid.core.errors import StepArgumentError
from pipegrid.schedules import PipelineConfig, clip_grad_norm_
from pipegrid.topology import HyperCommGrid
from pipegrid.training import Names, Pipeline

from .kit.layered import WORDS, Layered

IDS = torch.arange(8 * 5).remainder(WORDS).view(8, 5)
NAMES = Names("layers")


def make():
    torch.manual_seed(1)
    return Layered()


def squares(output, batch):
    return output.square().mean()


def job(layout="Et|tttL", sizes=(1, 2), **options):
    return Pipeline(make, layout, HyperCommGrid([*sizes], ["dp", "pp"]), names=NAMES, loss=squares, **options)


def by_lbfgs(pipeline, optimizer):
    def closure():
        optimizer.zero_grad()
        return pipeline.step({"ids": IDS})

    optimizer.step(closure)


def by_scaler(pipeline, optimizer):
    pipeline.step({"ids": IDS})
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def by_step(pipeline, optimizer):
    pipeline.step({"ids": IDS})
    optimizer.step()


class Prodigy(torch.optim.SGD):
    """It has the name of an optimizer that estimates a distance from all parameters."""


class Clipping(torch.optim.SGD):
    """It has an option of LAMB's."""

    def __init__(self, parameters, lr):
        super().__init__([{"params": parameters, "max_grad_norm": 1.0}], lr)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", [None, False])
@pytest.mark.parametrize(
    ("update", "optimizer", "text"),
    [
        (by_lbfgs, torch.optim.LBFGS, "LBFGS makes its step of sums over all parameters"),
        (by_scaler, torch.optim.SGD, r"GradScaler leaves an update out .*LossScaler\(\)"),
        (by_step, Prodigy, "Prodigy makes its step of sums over all parameters"),
        (by_step, Clipping, r"Clipping has max_grad_norm, .*Pipeline\.clip\(\)"),
    ],
    ids=["LBFGS", "GradScaler", "Prodigy", "LAMB"],
)
def test_what_decides_by_the_gradients_of_a_rank_is_refused_where_others_have_more(
    ranks, update, optimizer, text, check
):
    with job(config=PipelineConfig(variable_seq_lengths=True, check=check), num_microbatches=2) as pipeline:
        before = [one.detach().clone() for one in pipeline.parameters()]
        with pytest.raises(StepArgumentError, match=text):
            update(pipeline, optimizer(pipeline.parameters(), lr=0.1))
        assert all(map(torch.equal, before, pipeline.parameters()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("update", "optimizer"), [(by_lbfgs, torch.optim.LBFGS), (by_scaler, torch.optim.SGD)])
def test_it_is_right_where_each_rank_has_the_whole_model(ranks, update, optimizer):
    whole = make()

    class OneProcess:
        def step(self, batch):
            loss = squares(whole(**batch), batch)
            loss.backward()
            return loss

    update(OneProcess(), optimizer(whole.parameters(), lr=0.1))
    with job("EttttL", (2, 1), num_microbatches=2) as pipeline:
        update(pipeline, optimizer(pipeline.parameters(), lr=0.1))
        for found, right in zip(pipeline.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-5)


@pytest.mark.ranks(2)
def test_a_closure_that_steps_the_job_is_one_process(ranks):
    """The watch of the first update begins inside of the optimizer's step."""
    whole = make()
    expected = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    with job(num_microbatches=2) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            expected.zero_grad()
            squares(whole(IDS), {}).backward()
            expected.step()
            by_lbfgs(pipeline, optimizer)
        right = dict(whole.named_parameters())
        for name, one in pipeline.named_parameters():
            torch.testing.assert_close(one, right[name])


@pytest.mark.ranks(2)
def test_averaged_weights_are_copies_of_stages(ranks):
    with job(num_microbatches=2) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        averaged = [AveragedModel(stage) for stage in pipeline.stages["model"]]
        for _ in range(2):
            pipeline.step({"ids": IDS})
            optimizer.step()
            optimizer.zero_grad()
            for mean, stage in zip(averaged, pipeline.stages["model"], strict=True):
                mean.update_parameters(stage)
                assert copy.deepcopy(stage).state_dict().keys() == stage.state_dict().keys()
        for mean, stage in zip(averaged, pipeline.stages["model"], strict=True):
            now = [one.detach().clone() for one in stage.parameters()]
            assert not any(map(torch.equal, mean.module.parameters(), now))
            stage.load_state_dict(mean.module.state_dict())
            assert all(map(torch.equal, mean.module.parameters(), stage.parameters()))


@pytest.mark.ranks(2)
def test_a_step_without_gradients_is_an_error_and_evaluation_is_none(ranks):
    with job(num_microbatches=2) as pipeline:
        with torch.no_grad(), pytest.raises(StepArgumentError, match=r"no_grad\(\).* evaluate\(\) has the loss"):
            pipeline.step({"ids": IDS})
        assert all(one.grad is None for one in pipeline.parameters())
        with torch.no_grad():
            assert pipeline.evaluate({"ids": IDS}).isfinite()
        assert pipeline.step({"ids": IDS}).isfinite()


@pytest.mark.ranks(2)
def test_a_pipeline_that_is_dropped_without_an_end_is_not_kept_by_its_hook(ranks):
    pipeline = job(config=PipelineConfig(variable_seq_lengths=True, check=False), num_microbatches=2)
    gone = [weakref.ref(stage) for stage in pipeline.stages["model"]]
    pipeline.step({"ids": IDS})
    ranks.barrier()
    del pipeline
    gc.collect()
    assert [one() for one in gone] == [None]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sizes", "clip", "told"),
    [
        ((1, 2), lambda pipeline, norm: nn.utils.clip_grad_norm_(pipeline.parameters(), norm), True),
        ((1, 2), lambda pipeline, norm: pipeline.clip(norm), False),
        ((1, 2), lambda pipeline, norm: clip_grad_norm_(pipeline.stages, pipeline.groups, norm), False),
        ((2, 1), lambda pipeline, norm: nn.utils.clip_grad_norm_(pipeline.parameters(), norm), False),
    ],
    ids=["torch's", "Pipeline's", "of gradients", "replicas"],
)
def test_a_norm_of_stages_that_clips_nothing_at_first_is_told_of(ranks, sizes, clip, told):
    """Later it would clip each rank otherwise; where it clips at first, the update is an error."""
    layout = "Et|tttL" if sizes == (1, 2) else "EttttL"
    with job(layout, sizes) as pipeline, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        for _ in range(2):
            pipeline.step({"ids": IDS})
            clip(pipeline, 1e6)
            optimizer.step()
            optimizer.zero_grad()
    texts = [str(one.message) for one in found if "Pipeline.clip() clips to that of all" in str(one.message)]
    assert len(texts) == (told and dist.get_rank() == 0)
