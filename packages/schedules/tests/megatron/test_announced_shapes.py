"""A stage that is about to send another shape than the step's arguments make is told so; one that may is not."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.shapes import StageOutputError, sent_shape
from pipegrid.schedules.megatron.step_functions import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from pipegrid.schedules.runtime import PipelineError
from plan_kit.groups import Group

from ..kit.models import Model, call, forward_step, mean_loss
from ..kit.threads import in_threads

HIDDEN = 4


def expected(config=None, *, tp=None, cp=None, **sizes):
    return sent_shape(
        **{"seq_length": 8, "micro_batch_size": 3, "decoder_seq_length": None, **sizes},
        config=config or PipelineConfig(hidden_size=HIDDEN),
        tp_group=tp and Group(tp),
        cp_group=cp and Group(cp),
    )


def accepts(shape, *sizes, **options):
    payload = torch.ones(sizes)
    try:
        shape.check(options.get("payload", payload), sent=True, stage=1, microbatch=5)
    except StageOutputError:
        return False
    return True


def test_the_share_of_this_rank_is_exact_where_its_groups_are_known():
    shape = expected(cp=2)
    assert accepts(shape, 4, 3, HIDDEN)
    assert not accepts(shape, 8, 3, HIDDEN)
    parallel = PipelineConfig(hidden_size=HIDDEN, sequence_parallel=True)
    assert accepts(expected(parallel, cp=2, tp=2), 2, 3, HIDDEN)
    assert not accepts(expected(parallel, cp=2, tp=2), 4, 3, HIDDEN)


def test_without_groups_any_even_share_of_the_sequence_may_be_sent():
    assert [length for length in range(10) if accepts(expected(), length, 3, HIDDEN)] == [1, 2, 4, 8]


def test_tokens_may_lie_on_any_axes_before_the_last():
    for sizes in ((8, 3, HIDDEN), (3, 8, HIDDEN), (24, HIDDEN), (2, 4, 3, HIDDEN)):
        assert accepts(expected(cp=1), *sizes)
    for sizes in ((8, 3, HIDDEN + 1), (8, 2, HIDDEN), (7, 3, HIDDEN), (HIDDEN, 8, 3), (HIDDEN,), (), (0, 3, HIDDEN)):
        assert not accepts(expected(cp=1), *sizes)


def test_of_two_sequences_either_may_be_sent():
    shape = expected(cp=1, decoder_seq_length=2)
    assert [length for length in range(10) if accepts(shape, length, 3, HIDDEN)] == [2, 8]


def test_of_several_tensors_and_of_integers_nothing_is_said():
    wrong = torch.ones(5)
    for payload in ([wrong, wrong], {"x": wrong, "y": wrong}, wrong.long(), [None]):
        assert accepts(expected(), payload=payload)
    assert not accepts(expected(), payload=[wrong])
    expected().check(wrong, sent=False, stage=1, microbatch=5)


@pytest.mark.parametrize(
    "config",
    [
        PipelineConfig(),
        PipelineConfig(hidden_size=HIDDEN, variable_seq_lengths=True),
        PipelineConfig(hidden_size=HIDDEN, shapes="header"),
        SimpleNamespace(hidden_size=HIDDEN),  # of a model that knows nothing of pipelines
        SimpleNamespace(variable_seq_lengths=False),
    ],
    ids=["no hidden size", "variable", "header", "foreign", "foreign, fixed"],
)
def test_shapes_that_are_not_fixed_are_not_checked(config):
    assert expected(config, seq_length="any") is None


def test_shares_that_are_not_even_are_not_checked():
    assert expected(cp=3) is None


def test_a_foreign_config_that_fixes_shapes_is_read_alike():
    config = SimpleNamespace(hidden_size=HIDDEN, variable_seq_lengths=False, sequence_parallel=True)
    assert expected(config, tp=2, cp=1) == expected(
        PipelineConfig(hidden_size=HIDDEN, sequence_parallel=True), tp=2, cp=1
    )


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"seq_length": -4}, "seq_length is -4; it must be an integer of at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; it must be an integer of at least 1"),
        (
            {"config": SimpleNamespace(hidden_size="4", variable_seq_lengths=False)},
            "config.hidden_size is '4'; it must",
        ),
    ],
)
def test_sizes_must_be_sizes(sizes, text):
    with pytest.raises(StepArgumentError, match=text):
        expected(**sizes)


class Part(Model):
    def __init__(self, config, width=HIDDEN):
        super().__init__(config)
        self.layer = nn.Linear(HIDDEN, width)

    def forward(self, x):
        return self.layer(x)


def run(function, models, network, *, length=6):
    """Stage 0 reads microbatches of ``length`` tokens of 2 samples; they are said to have 6."""
    chunked = function is forward_backward_pipelining_with_interleaving
    network.calls(
        partial(call, function),
        [models[rank::2] if chunked else models[rank] for rank in range(2)],
        count=2,
        forward_step_func=partial(forward_step, data=lambda _: torch.ones(length, 2, HIDDEN)),
        pg_collection=SimpleNamespace(dp=None, cp=Group(1)),
        seq_length=6,
        micro_batch_size=2,
    )


BOTH = pytest.mark.parametrize(
    ("function", "stages"),
    [
        (forward_backward_pipelining_without_interleaving, 2),
        (forward_backward_pipelining_with_interleaving, 4),
    ],
    ids=["1f1b", "interleaved"],
)


@BOTH
def test_a_step_with_the_shapes_of_its_arguments_runs(function, stages, network):
    config = PipelineConfig(hidden_size=HIDDEN)
    models = [Part(config) for _ in range(stages)]
    run(function, models, network)
    assert all(model.layer.weight.grad is not None for model in models)


@BOTH
@pytest.mark.parametrize(("length", "width"), [(5, HIDDEN), (6, HIDDEN + 1)], ids=["length", "width"])
def test_a_wrong_shape_is_named_before_it_is_sent(function, stages, length, width, network):
    config = PipelineConfig(hidden_size=HIDDEN, deadline=2.0)
    models = [Part(config, width), *(Part(config) for _ in range(stages - 1))]
    text = (
        f"stage 0 sends a tensor of shape {(length, 2, width)} for microbatch 0, but seq_length, micro_batch_size and"
    )
    with pytest.raises(PipelineError, match=re.escape(text) + r" config.hidden_size make it \(6, 2, 4\)") as error:
        run(function, models, network, length=length)
    assert isinstance(error.value.__cause__, StageOutputError)
    assert network.messages == 0


def test_the_modules_of_a_graph_have_shapes_of_their_own(network):
    """The one config has one hidden size; the encoder's is another."""
    config = PipelineConfig(hidden_size=HIDDEN)
    graph = ModuleGraph({"images": 1, "language": 1}, {"images": ["language"]})

    def encode(iterator, model):
        return {"images": model(torch.ones(3, HIDDEN))[:, :2].clone()}, None

    def read(iterator, model):
        return model(nn.functional.pad(model.received["images"], (0, HIDDEN - 2))), mean_loss

    models = [Part(config), Part(config)]
    in_threads(
        [
            partial(
                call,
                forward_backward_pipelining_without_interleaving,
                model=models[stage],
                count=1,
                forward_step_func=(encode, read)[stage],
                seq_length=6,
                micro_batch_size=2,
                p2p_communicator=network.communicator(2, 0, graph, (stage,)),
            )
            for stage in range(2)
        ]
    )
    assert models[0].layer.weight.grad.abs().sum() > 0
