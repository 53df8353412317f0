"""Settings of a step: what cannot be one is refused when the config is made, and when a foreign one is read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attrs import fields

from pipegrid.schedules.megatron.config import PipelineConfig, checked_option, option
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


def test_a_group_of_no_microbatches_is_not_the_default():
    with pytest.raises(P2PUsageError, match="it must be an integer of at least 1"):
        PipelineConfig(microbatch_group_size_per_vp_stage=0)


def test_what_a_foreign_config_lacks_has_the_documented_default():
    for each in fields(PipelineConfig):
        assert option(SimpleNamespace(), each.name) == getattr(PipelineConfig(), each.name)
