"""Settings of a step: what cannot be one is refused when the config is made, and when a foreign one is read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attrs import fields

from pipegrid.schedules import StepArgumentError, forward_backward_no_pipelining
from pipegrid.schedules.megatron.config import OF_MEGATRON, PipelineConfig, checked_option, option
from pipegrid.transport.errors import P2PUsageError

COUNTS = {
    "hidden_size": 1,
    "num_microbatches_with_partial_activation_checkpoints": 0,
    "wgrad_deferral_limit": 0,
    "microbatch_group_size_per_vp_stage": 1,
    "grad_bucket_bytes": 1,
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("bad", [-1, 2.0, "2", True, [1]])
def test_counts_are_integers_that_count(name, bad):
    with pytest.raises(
        P2PUsageError, match=rf"^PipelineConfig.{name} is .*; it must be an integer of at least {COUNTS[name]}$"
    ):
        PipelineConfig(**{name: bad})
    with pytest.raises(P2PUsageError, match=rf"^config\.{name} is "):
        checked_option(SimpleNamespace(**{name: bad}), name)


@pytest.mark.parametrize("name", COUNTS)
def test_the_least_count_and_the_default_are_fine(name):
    assert getattr(PipelineConfig(**{name: COUNTS[name]}), name) == COUNTS[name]
    assert checked_option(SimpleNamespace(**{name: COUNTS[name] + 1}), name) == COUNTS[name] + 1
    assert checked_option(SimpleNamespace(), name) == getattr(PipelineConfig(), name)


@pytest.mark.parametrize("name", ["hooks", "tied_parameters", "aux_loss_scalers"])
@pytest.mark.parametrize("bad", [3, 1.5, set(), object])
def test_what_is_no_list_is_named_with_its_option(name, bad):
    with pytest.raises(P2PUsageError, match=rf"^PipelineConfig.{name} is .*; it must be a list or tuple$"):
        PipelineConfig(**{name: bad})


def test_lists_become_tuples():
    hook = SimpleNamespace(before=print, after=print)
    assert PipelineConfig(hooks=[hook]).hooks == PipelineConfig(hooks=iter([hook])).hooks == (hook,)
    assert PipelineConfig(aux_loss_scalers=None).aux_loss_scalers is None


def test_a_group_of_no_microbatches_is_not_the_default():
    with pytest.raises(P2PUsageError, match="it must be an integer of at least 1"):
        PipelineConfig(microbatch_group_size_per_vp_stage=0)


def test_what_a_foreign_config_lacks_has_the_documented_default():
    for each in fields(PipelineConfig):
        assert option(SimpleNamespace(), each.name) == getattr(PipelineConfig(), each.name)


SET = {"cuda_graph_impl": "local", "gtp_weight_remat_size": 2, "expert_gtp_weight_remat_size": 2}


@pytest.mark.parametrize("name", OF_MEGATRON)
def test_an_option_of_megatron_that_changes_numbers_or_memory_is_an_error_by_name(name):
    """In the first call, and where it is set between two; with the value that it has unless it is set, nothing."""
    off = {other: values[-1] for other, (values, _) in OF_MEGATRON.items()}
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(pipeline_dtype=torch.float32, **off)

    def step():
        forward_backward_no_pipelining(
            forward_step_func=lambda iterator, model: (model(next(iterator)).sum(), lambda loss: (loss, {})),
            data_iterator=iter([torch.ones(1, 2)]),
            model=model,
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
        )

    step()
    gradient = model.weight.grad.clone()
    assert gradient.abs().sum() > 0
    setattr(model.config, name, SET.get(name, True))
    with pytest.raises(StepArgumentError, match=rf"config.{name} is (True|'local'|2), which the step functions here"):
        step()
    assert torch.equal(model.weight.grad, gradient)
    setattr(model.config, name, off[name])
    step()
    assert torch.equal(model.weight.grad, 2 * gradient)
