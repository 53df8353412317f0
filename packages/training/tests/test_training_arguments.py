"""Wrong arguments of `Pipeline`: a typed error with the value and the rule, alike on each rank, before any message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipegrid.schedules import PipelineConfig, PipelineError
from pipegrid.topology import HyperCommGrid
from pipegrid.training import Names, Pipeline

from .kit.layered import Layered

WRONG = [
    ({"grid": 3}, "grid is 3; it must be a HyperCommGrid"),
    ({"layout": 3}, "layout is 3; it must be a string or a PipelineParallelLayerLayout"),
    ({"topology": ["a"]}, r"topology is \['a'\] \(list\); it must be a mapping"),
    ({"schedule": None}, "schedule is None; it must be a string"),
    ({"config": {"check": False}}, "config is .*; it must be a PipelineConfig"),
    ({"num_microbatches": 2.0}, "num_microbatches is 2.0; it must be an integer of at least 1"),
    ({"microbatch_size": True}, "microbatch_size is True; it must be an integer of at least 1"),
    ({"rows": ["x"]}, "rows is .*; it must be a mapping"),
    ({"whole": 3}, "whole is 3; it must be a list or tuple or a string"),
    ({"loss": "mean"}, "loss is 'mean'; it must be a function or another callable"),
    ({"names": "layers"}, "names is 'layers'; it must be a Names"),
    ({"forward": 3}, "forward is 3; it must be a function or another callable"),
    ({"parallelize": 3}, "parallelize is 3; it must be a function or another callable"),
    ({"edges": {("a", "b"): 1}}, "edges.* is 1; it must be an EdgeOptions"),
    ({"device": "gpu"}, "device is 'gpu'; it must be a torch.device or its name, or None"),
    ({"monitor": 3}, "monitor is 3; give True, False or a Monitor"),
    ({"spare": None}, "spare is None; it must be a list or tuple"),
    ({"host": ""}, "host is ''; it must be a string that is not empty"),
]


@pytest.mark.ranks(2)
def test_a_wrong_argument_is_an_error_by_name(ranks):
    right = {"layout": "Et|tttL", "grid": HyperCommGrid([1, 2], ["dp", "pp"]), "names": Names("layers")}
    for wrong, text in WRONG:
        with pytest.raises(ValueError, match=text) as caught:
            Pipeline(Layered, **{**right, **wrong})
        assert type(caught.value).__module__.startswith("pipegrid.")
        texts = [None] * 2
        dist.all_gather_object(texts, str(caught.value))
        assert len({*texts}) == 1 or "object at" in texts[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", ["data", "DP", "fsdp"])
def test_replicas_under_a_name_that_nothing_sums_over_are_an_error(ranks, dim):
    """They would train apart: a dim that is not known was taken for one that divides the model."""
    grid = HyperCommGrid([2, 1], [dim, "pp"])
    with pytest.raises(ValueError, match=f"module 'model' has a grid of the dims .*, and '{dim}' is not known"):
        Pipeline(Layered, "EttttL", grid, names=Names("layers"), config=PipelineConfig(check=False))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [-1, float("nan"), True, "3", None, torch.tensor(-1), torch.tensor(torch.inf)])
def test_a_count_that_is_none_is_an_error(ranks, count):
    grid = HyperCommGrid([1, 2], ["dp", "pp"])
    config = PipelineConfig(check=False, variable_seq_lengths=True)

    def loss(output, batch):
        return output.square().sum(), count

    text = "the count of .sum, count. is .*; it must be a finite number of at least 0"
    with (
        Pipeline(Layered, "Et|tttL", grid, names=Names("layers"), config=config, loss=loss, monitor=True) as pipeline,
        pytest.raises(PipelineError, match=text),
    ):
        pipeline.step({"ids": torch.arange(4)})


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("layout", "schedule"), [("Et||tttL", "1f1b"), ("E|||tt||ttL", "zero_bubble_v")])
def test_an_empty_stage_trains_saves_and_loads(ranks, layout, schedule):
    """The step is compared with one process; so is the update."""
    how = {"num_microbatches": 2, "schedule": schedule, "names": Names("layers"), "loss": lambda out, _: out.mean()}
    batch = {"ids": torch.arange(8)}
    losses = []
    for step in (2, 1):
        torch.manual_seed(0)
        with Pipeline(Layered, layout, HyperCommGrid([1, 3], ["dp", "pp"]), **how) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.parameters())
            pipeline.load(ranks.shared_path, optimizer)
            for _ in range(step):
                losses.append(pipeline.step(batch).item())
                optimizer.step()
                optimizer.zero_grad()
            pipeline.save(ranks.shared_path, optimizer, step=step)
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overflow", [lambda out, _: out.mean() * torch.inf, lambda out, _: (out * 0).sqrt().mean()])
def test_an_overflow_that_one_process_has_too_is_no_wrong_cut(ranks, overflow):
    grid = HyperCommGrid([1, 2], ["dp", "pp"])
    with Pipeline(Layered, "Et|tttL", grid, names=Names("layers"), num_microbatches=2, loss=overflow) as pipeline:
        pipeline.step({"ids": torch.arange(4)})
        assert not torch.isfinite(pipeline.clip(1.0))
