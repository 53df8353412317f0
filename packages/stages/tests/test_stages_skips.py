"""Values that later stages use besides the hidden states: found, handed on, and right in every gradient."""

from __future__ import annotations

from collections import UserDict
from functools import partial

import pytest
import torch
from torch import nn

from pipegrid.core.edge import Edge
from pipegrid.stages import Names, check_stages, pipeline_stage, prove_cut
from pipegrid.stages.errors import CutError
from pipegrid.stages.torch_compat import num_forward_hooks
from stages_kit.skipping_models import (
    BESIDE,
    BLOCKS,
    EXPERTS,
    HYPER,
    SEVERAL,
    UNET,
    Beside,
    BlockResiduals,
    Experts,
    HyperConnections,
    SeveralTokens,
    UNet,
    ids,
    images,
)


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        ("Etttttttt|L", []),
        ("Ett|tt|tt|ttL", ["embed", "layers.2"]),
        ("E|t|t|t|t|t|t|t|tL", ["embed", "layers.2", "layers.5"]),
    ],
)
def test_residuals_of_blocks(layout, values):
    found = check_stages(BlockResiduals, layout, ids(), names=BLOCKS, loss=_mean, dtype=torch.float64)
    assert max(one.error for one in found.gradients) < 1e-12
    assert [one.value for one in found.proof.skips] == values


@pytest.mark.parametrize(
    ("positions", "sent", "passed_on"), [(8, 70, 136), pytest.param(16, 155, 315, marks=pytest.mark.thorough)]
)
def test_a_model_of_93_layers_in_blocks_of_12_sends_half_of_what_passing_on_sends(positions, sent, passed_on):
    """In tensors of the size of the hidden states, these included; four stages on each position."""
    stages = 4 * positions
    sizes = [93 // stages + (number < 93 % stages) for number in range(stages)]
    layout = "E" + "|".join("t" * size for size in sizes) + "L"
    make = partial(BlockResiduals, 93, block=12, embedding=False)
    proof = prove_cut(make, layout, ids(), names=BLOCKS)
    assert proof.holds
    unit = proof.boundaries[0].nbytes
    found = proof.traffic([stage % positions for stage in range(stages)])
    assert found == (sent * unit, passed_on * unit)


@pytest.mark.parametrize("layout", ["Ett|tt|tt|tL", "Et|t|t|t|t|t|tL"])
def test_a_unet(layout):
    found = check_stages(UNet, layout, images(), names=UNET, loss=_mean, dtype=torch.float64)
    assert max(one.error for one in found.gradients) < 1e-12
    assert {one.value for one in found.proof.skips} == {"blocks.0", "blocks.1", "blocks.2"}


def _mean(output):
    return output.square().mean()


def test_a_proof_says_what_is_handed_on_and_to_whom():
    found = prove_cut(UNet, "Ett|tt|tt|tL", images(), names=UNET, loss=_mean)
    assert str(found).splitlines()[4:] == [
        "  blocks.0 of stage 0 to stages 3: float32 (2, 4, 16), 512 B",
        "  blocks.1 of stage 0 to stages 1, 2: float32 (2, 4, 8), 256 B",
        "  blocks.2 of stage 1 to stages 2: float32 (2, 4, 4), 128 B",
    ]
    hidden = 256 + 64 + 256
    assert found.traffic(range(4)) == (hidden + 512 + 256 + 128, hidden + 3 * 512 + 256 + 128)
    assert found.traffic((0, 1, 0, 1)) == (hidden + 512 + 128, hidden + 3 * 512 + 256 + 128)


def test_stages_know_the_edges_that_a_plan_needs():
    stages = pipeline_stage(UNet, "Ett|tt|tt|tL", [0, 1, 2, 3], names=UNET, batch=images())
    assert stages[0].skips == (Edge(0, 2), Edge(0, 3))
    assert stages[0].graph.stage_edges == tuple(Edge(*ends) for ends in [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)])
    for stage in stages:
        stage.place((0, 1, 0, 1))
    assert stages[0].skips == (Edge(0, 2), Edge(0, 3))
    assert "3 values past others: 1.19 KiB of a microbatch go forward between positions" in stages[3].describe_skips()


def test_a_step_without_these_edges_is_an_error_that_says_what_to_do():
    first = pipeline_stage(UNet, "Ett|tt|tt|tL", 0, names=UNET)
    with pytest.raises(CutError, match=r"along edges that this step does not have: .* graph=stage\.graph"):
        first(*images())


def test_too_few_values_are_an_error():
    second = pipeline_stage(UNet, "Ett|tt|tt|tL", 3, names=UNET)
    second.set_input_tensor([torch.zeros(2, 4, 8)])
    second.set_skips({Edge(0, 3): []})
    with pytest.raises(CutError, match="stage 3 takes blocks.0 of stage 0, and 0 values came along edge 0>3"):
        second(*images())


def test_a_layer_that_a_later_call_leaves_out_is_an_error(monkeypatch):
    first = pipeline_stage(UNet, "Ett|tt|tt|tL", 0, names=UNET)
    for kept in (True, False):
        monkeypatch.setattr(UNet, "kept", kept)
        first.set_skips({})
        first(*images())
        if kept:
            assert first.take_skips().keys() == {Edge(0, 2), Edge(0, 3)}
    with pytest.raises(CutError, match="blocks.0 has not returned blocks.0 on stage 0, which later stages use"):
        first.take_skips()


def test_values_that_nobody_expects_are_an_error():
    last = pipeline_stage(BlockResiduals, "Etttttttt|L", 1, names=BLOCKS)
    last.set_input_tensor([torch.zeros(2, 5, 6)])
    last.set_skips({Edge(0, 1): [torch.zeros(2, 5, 6)]})
    last(*ids())
    with pytest.raises(CutError, match="values came to stage 1 along edges 0>1, and by its call it uses none"):
        last.take_skips()


class Weights(nn.Module):
    """A tied table, one that every stage reads, and perhaps a weight of the head before the layers."""

    def __init__(self, early=False):
        super().__init__()
        self.early, self.scale = early, nn.Parameter(torch.linspace(1, 2, 4))
        self.embed, self.layers = nn.Embedding(20, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4)

    def forward(self, ids):
        hidden = self.embed(ids) + (self.head.bias if self.early else 0)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) * self.scale
        return nn.functional.linear(self.head(hidden), self.embed.weight)


WEIGHTS = Names("layers", embedding=("embed", "scale"), head=("head",))


def test_weights_that_other_stages_read():
    found = check_stages(Weights, "Et|t|t|tL", ids(), names=WEIGHTS, loss=_mean, dtype=torch.float64)
    assert max(one.error for one in found.gradients) < 1e-12
    assert [(one.value, one.users) for one in found.proof.skips] == [("embed.weight", (3,)), ("scale", (1, 2, 3))]


class Decoder(nn.Module):
    """A head whose bias has two names, as of RoBERTa."""

    def __init__(self):
        super().__init__()
        self.dense, self.decoder = nn.Linear(4, 4), nn.Linear(4, 20)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 20))
        self.decoder.bias = self.bias

    def forward(self, hidden):
        return self.decoder(self.dense(hidden).tanh())


class HeadBefore(nn.Module):
    """A head that is registered before the layers, so on the first stage, with a weight that is the embedding's."""

    def __init__(self):
        super().__init__()
        self.head, self.embed = Decoder(), nn.Embedding(20, 4)
        self.embed.weight = self.head.decoder.weight
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


@pytest.mark.parametrize("layout", ["Et|tt|tL", "E|tttt|L"])
def test_a_parameter_that_is_handed_on_is_there_under_each_of_its_names(layout):
    batch = (torch.arange(10).view(2, 5),)
    found = check_stages(HeadBefore, layout, batch, names=Names("layers"), loss=_mean, dtype=torch.float64)
    assert found.proof.holds
    assert max(one.error for one in found.gradients) < 1e-12


def test_a_weight_of_a_later_stage_is_named_with_its_line():
    found = prove_cut(lambda: Weights(early=True), "Et|tttL", ids(), names=WEIGHTS, loss=_mean)
    with pytest.raises(CutError, match=r"head\.bias is on stage 1, and stage 0 uses it by add in the model \(test_s"):
        found.require()


class Sequences(nn.Module):
    """torch's own encoder and decoder, whose forward takes no ``encoder_outputs``."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.core = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, source, target):
        return self.head(self.core(self.words(source), self.words(target)))


@pytest.mark.parametrize("layout", ["Ee|e|t|tL", "Eee|ttL", "Eeet|tL"])
def test_a_decoder_reads_what_its_encoder_made(layout):
    names = Names(
        {"encoder": "core.encoder.layers", "decoder": "core.decoder.layers"}, embedding=("words",), head=("head",)
    )
    batch = {"source": torch.arange(10).reshape(2, 5), "target": torch.arange(8).reshape(2, 4)}
    found = check_stages(Sequences, layout, batch, names=names, loss=_mean, dtype=torch.float64)
    assert max(one.error for one in found.gradients) < 1e-12


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["Et|t|t|tmmL", "Et|tt|t|mmL", "Et|tt|tmm|L", "Ett|tt|mm|L", "Etttt|mm|L"])
def test_predictions_of_several_tokens(layout, tied):
    """The layers ``m`` beside the head, on the stage before it, or alone on one."""
    found = check_stages(
        lambda: SeveralTokens(tied=tied), layout, ids(), names=SEVERAL, loss=_mean, dtype=torch.float64
    )
    assert max(one.error for one in found.gradients) < 1e-12
    values = [one.value for one in found.proof.skips]
    assert ("embed.weight" in values) is not tied
    assert ("layers.3" in values) is layout.endswith("mm|L")
    assert ("mtp.0" in values) is layout.endswith("mm|L")


class Exits(nn.Module):
    """A head after every layer; ``read``: a layer reads what the head has returned."""

    def __init__(self, read=False):
        super().__init__()
        self.read = read
        self.embed, self.layers = nn.Embedding(20, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4)

    def forward(self, ids):
        hidden, exits = self.embed(ids), []
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
            exits.append(self.head(hidden))
            if self.read:
                hidden = hidden + exits[-1]
        return torch.stack(exits)


@pytest.mark.parametrize("layout", ["Et|tt|tL", "Ettt|tL"])
def test_a_head_after_every_layer_runs_on_the_last_stage(layout):
    found = check_stages(Exits, layout, ids(), names=BLOCKS, loss=_mean, dtype=torch.float64)
    assert max(one.error for one in found.gradients) < 1e-12
    assert [one.value for one in found.proof.skips] == ["layers.0", "layers.1"]


def test_a_layer_that_reads_what_a_head_behind_it_returned_is_an_error():
    with pytest.raises(
        CutError, match=r"head\.weight is on stage 2, and stage 1 uses it by t in head \(test_stages_skips"
    ):
        prove_cut(lambda: Exits(read=True), "Et|tt|tL", ids(), names=BLOCKS, loss=_mean).require()


def _balanced(output):
    return _mean(output[0]) + output[1]


@pytest.mark.parametrize("layout", ["Et|t|t|tL", "Ett|ttL", "Etttt|L"])
def test_a_loss_of_all_routers(layout):
    """The model takes their logits by hooks, and adds them up behind the layers."""
    found = check_stages(Experts, layout, ids(), names=EXPERTS, loss=_balanced, dtype=torch.float64)
    assert max(one.error for one in found.gradients) < 1e-12
    expected = [f"layers.{layer}.gate[1]" for layer in range(4 if layout == "Etttt|L" else layout.count("t") - 1)]
    there = [one.value for one in found.proof.skips]
    assert there == (expected[:2] if layout == "Ett|ttL" else expected)


def test_hooks_of_an_earlier_call_that_needed_none_on_a_stage_are_an_error():
    first, last = pipeline_stage(Experts, "Ett|ttL", [0, 1], names=EXPERTS)

    def step(**options):
        for stage in (first, last):
            stage.set_skips({})
        last.set_input_tensor([first(*ids(), **options)])
        last.set_skips(first.take_skips())
        return last(*ids(), **options)

    step(balanced=False)
    with pytest.raises(CutError, match=r"by a hook what layers\.0\.gate returns, and it put its hooks on this stage"):
        step()


class Sharing(nn.Module):
    """A layer that makes keys and values, and leaves them in a mapping, or reads those of an earlier one."""

    def __init__(self, name, *, reads):
        super().__init__()
        self.name, self.reads, self.query = name, reads, nn.Linear(4, 4)
        self.key = None if reads else nn.Linear(4, 4)

    def forward(self, hidden, kept):
        if self.reads:
            keys, values = kept[self.name]
        else:
            keys = self.key(hidden).transpose(1, 2)
            values = keys.tanh()
            kept[self.name] = keys, values
        return hidden + (self.query(hidden) @ keys).softmax(-1) @ values.transpose(1, 2)


class SharedKeys(nn.Module):
    """Two layers make keys, of two names; four read them."""

    def __init__(self, container=dict):
        super().__init__()
        names = ("full", "sliding", "full", "sliding", "sliding", "full")
        self.container, self.embed, self.head = container, nn.Embedding(20, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(Sharing(name, reads=number > 1) for number, name in enumerate(names))

    def forward(self, ids):
        hidden, kept = self.embed(ids), self.container()
        for layer in self.layers:
            hidden = layer(hidden, kept)
        return self.head(hidden)


@pytest.mark.parametrize("layout", ["Et|tt|t|ttL", "E|tt|ttttL", "Et|t|t|t|t|tL"])
@pytest.mark.parametrize("container", [dict, UserDict])
def test_what_layers_leave_in_a_mapping_for_later_ones_is_handed_on(container, layout):
    batch = (torch.arange(10).view(2, 5),)
    make = partial(SharedKeys, container)
    found = check_stages(make, layout, batch, names=Names("layers"), loss=_mean, dtype=torch.float64)
    assert found.proof.holds
    assert max(one.error for one in found.gradients) < 1e-12
    assert {one.value for one in found.proof.skips} >= {"layers.0, 1['full'][0]", "layers.0, 1['full'][1]"}


class Box:
    """No mapping: nothing says what a layer leaves in it."""

    def __init__(self):
        self.entries = {}

    def __setitem__(self, name, entry):
        self.entries[name] = entry

    def __getitem__(self, name):
        return self.entries[name]


def test_what_layers_leave_in_another_object_is_refused():
    batch = (torch.arange(10).view(2, 5),)
    proof = prove_cut(partial(SharedKeys, Box), "Et|tt|t|ttL", batch, names=Names("layers"), loss=_mean)
    assert not proof.holds


class Scaled(nn.Module):
    """Adds to each layer what its own code makes of the embedding before the first one."""

    def __init__(self, code):
        super().__init__()
        self.code, self.embed = code, nn.Embedding(20, 4)
        self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 4)

    def forward(self, ids):
        first = hidden = self.code(self.embed(ids))
        for layer in self.layers:
            hidden = layer(hidden).tanh() + first
        return self.head(hidden)


@pytest.mark.parametrize("layout", ["E|tttt|L", "E|t|tt|tL", "E||t|tttL", "Et|t|ttL"])
@pytest.mark.parametrize("code", [lambda h: h * 2.0, lambda h: h.mul(3.0).add_(1.0)], ids=["scaled", "in place"])
def test_what_own_code_makes_of_the_embedding_before_the_layers_is_used_again(layout, code):
    batch = (torch.arange(10).view(2, 5),)
    found = check_stages(lambda: Scaled(code), layout, batch, names=Names("layers"), loss=_mean, dtype=torch.float64)
    assert found.proof.holds
    assert max(one.error for one in found.gradients) < 1e-12


def test_a_random_change_of_the_embedding_that_is_used_again_is_refused():
    batch = (torch.arange(10).view(2, 5),)
    proof = prove_cut(lambda: Scaled(lambda h: h * torch.rand(4)), "E|tt|ttL", batch, names=Names("layers"), loss=_mean)
    assert not proof.holds


def test_an_embedding_that_a_layer_writes_to_is_refused_where_it_is_used_again():
    """The tensor that a stage makes again is another one than that which its first layer writes to."""

    class Writing(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden.mul_(0.5))

    def make():
        model = Scaled(lambda h: h * 2.0)
        model.layers[0] = Writing(4, 4)
        return model

    proof = prove_cut(make, "E|tt|ttL", (torch.arange(10).view(2, 5),), names=Names("layers"), loss=_mean)
    assert not proof.holds


class Random(nn.Module):
    """Uses again what its own code has drawn between layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(20, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, ids):
        hidden = first = nn.functional.dropout(self.embed(ids), 0.5)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden + first


def test_what_the_models_own_code_draws_is_not_handed_on():
    """Each stage would draw another mask."""
    found = prove_cut(Random, "Ett|ttL", ids(), names=Names("layers", embedding=("embed",)), loss=_mean)
    with pytest.raises(CutError, match="made by .* in the model"):
        found.require()


def test_torch_keeps_the_forward_hooks_of_a_module_in_one_table():
    """A fact of torch, by which hooks of a model's own code are found: there is no public way to ask."""
    module = torch.nn.Linear(1, 1)
    hooks = [module.register_forward_hook(print, with_kwargs=bool(number)) for number in range(2)]
    assert num_forward_hooks(module) == 2
    hooks[0].remove()
    assert num_forward_hooks(module) == 1


def test_hyper_connections_cross_a_boundary_as_several_tensors():
    found = check_stages(HyperConnections, "Ettt|tttt|tL", ids(), names=HYPER, loss=_mean, dtype=torch.float64)
    assert max(one.error for one in found.gradients) < 1e-12
    assert not found.proof.skips
    assert [len(one.sent) for one in found.proof.boundaries] == [4, 4]


@pytest.mark.parametrize("layout", ["Ett|tt|tt|ttL", "Et||ttttt|ttL", "E|tttttttt|L"])
def test_norms_and_scales_in_lists_beside_the_layers(layout):
    """They are all on the first stage, which hands them on to those that use them."""
    found = check_stages(Beside, layout, ids(), names=BESIDE, loss=_mean, dtype=torch.float64)
    assert max(one.error for one in found.gradients) < 1e-12
    values = {one.value for one in found.proof.skips}
    assert {"scales.7", "norms.7.weight", "norms.7.bias"} <= values
