"""What crosses the boundaries of a cut: proved where the hidden states alone do, else named; never a wrong proof."""

from __future__ import annotations

import copy
import gc
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipegrid.stages import check_stages, pipeline_stage, prove_cut
from pipegrid.stages.errors import CutError
from pipegrid.stages.proof.traced import Traced
from stages_kit import looped_models as looped

PLAIN = (("none", "tanh"),) * looped.LAYERS


def proof(script, end, layout):
    return prove_cut(lambda: looped.made(script, end), layout, looped.batch(), names=looped.NAMES)


def script_with(number, after, before="none"):
    return tuple((before, after if one == number else "tanh") for one in range(looped.LAYERS))


# -- against the numbers ------------------------------------------------------------------------------------

SCRIPTS = st.tuples(
    *(
        st.tuples(st.sampled_from(looped.BEFORE), st.sampled_from(looped.AFTER) | st.just("tanh"))
        for _ in range(looped.LAYERS)
    )
)


def require_right(whole, layout, given, names):
    """The proof holds exactly where the stages have the gradients of the model: with its skips, or else without any."""
    found = prove_cut(whole, layout, given, names=names)
    equal = looped.stages_are_the_model(whole, layout, given, names)
    assert (found.holds and not found.skips) == equal, str(found)
    if found.holds:
        assert looped.stages_are_the_model(whole, layout, given, names, proved=True), str(found)
    else:
        with pytest.raises(CutError, match="would not compute what the model computes") as error:
            found.require()
        assert len(str(error.value).splitlines()) <= 10


def require_right_loop(script, end, cuts, shared):
    require_right(looped.made(script, end, shared), looped.layouts(cuts), looped.batch(), looped.NAMES)


def require_right_pair(before, script, end, cuts):
    given = looped.batch() | {"words": looped.batch()["ids"].flip(1)}
    require_right(looped.made_pair(before, script, end), looped.pair_layouts(cuts), given, looped.PAIR)


def in_pair():
    return st.tuples(*(st.sampled_from(looped.IN_PAIR) for _ in range(3)))


LOOPS = (
    SCRIPTS,
    st.sampled_from(looped.END),
    st.sets(st.integers(0, looped.LAYERS), min_size=1, max_size=3),
    st.sampled_from(looped.SHARED),
)
PAIRS = (
    in_pair(),
    in_pair(),
    st.sampled_from(looped.PAIR_END),
    st.sets(st.integers(1, 5), min_size=1, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(*LOOPS)
def test_a_cut_is_proved_exactly_where_its_stages_are_the_model(script, end, cuts, shared):
    require_right_loop(script, end, cuts, shared)


@settings(max_examples=25, deadline=None)
@given(*PAIRS)
def test_a_cut_of_two_lists_is_proved_exactly_where_its_stages_are_the_model(before, script, end, cuts):
    require_right_pair(before, script, end, cuts)


@pytest.mark.nightly
@settings(max_examples=3000, deadline=None)
@given(*LOOPS)
def test_many_cuts_are_proved_exactly_where_their_stages_are_the_model(script, end, cuts, shared):
    require_right_loop(script, end, cuts, shared)


@pytest.mark.nightly
@settings(max_examples=1500, deadline=None)
@given(*PAIRS)
def test_many_cuts_of_two_lists_are_proved_exactly_where_their_stages_are_the_model(before, script, end, cuts):
    require_right_pair(before, script, end, cuts)


# -- what is named ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "end", "values"),
    [
        (script_with(2, "residual"), "none", ["blocks.1[0]"]),
        (PLAIN, "first", ["embed"]),
        (script_with(1, "tap"), "taps", ["blocks.1[0]"]),
        (script_with(1, "second"), "taps", ["blocks.1[1]"]),
        (script_with(0, "write"), "buffer", ["blocks.0[0]"]),
        (PLAIN, "embed", ["embed.weight"]),
        (PLAIN, "other", ["other.weight"]),
    ],
    ids=["residual", "skip", "tap", "output of a layer", "buffer", "embedding again", "another embedding"],
)
def test_a_value_that_a_part_returns_is_handed_on(script, end, values):
    """What the model's own code makes of it, it makes on each stage."""
    found = proof(script, end, "Ettt|ttL")
    assert found.holds, str(found)
    assert [one.value for one in found.skips] == values
    found = check_stages(lambda: looped.made(script, end), "Ettt|ttL", looped.batch(), names=looped.NAMES)
    assert found.holds


def test_a_value_that_a_layer_keeps_to_itself_is_named_with_its_lines():
    found = prove_cut(looped.Tapped(), "Ettt|ttL", looped.batch(), names=looped.NAMES)
    with pytest.raises(CutError, match=r"made by cos in blocks\.1 \(looped_models\.py:") as error:
        found.require()
    assert len(str(error.value).splitlines()) <= 10


def test_a_proof_prints_what_is_sent_at_each_boundary():
    assert str(proof(PLAIN, "mask", "Et|tt|ttL")).splitlines() == [
        "'Et|tt|ttL': proved",
        "  stage 1, after blocks.0: float64 (3, 4, 6), float64 (3, 4, 6), 1.12 KiB",
        "  stage 2, after blocks.2: float64 (3, 4, 6), float64 (3, 4, 6), 1.12 KiB",
    ]


def test_the_error_names_the_layers_after_which_a_stage_may_end():
    found = prove_cut(looped.Tapped(2), "Etttt|tL", looped.batch(), names=looped.NAMES)
    assert found.alone == ("blocks.0", "blocks.1")
    with pytest.raises(CutError, match=r"A stage may end after blocks\.0, blocks\.1;"):
        found.require()


class Ordered(looped.Looped):
    """Its layers in another order, or one of them twice."""

    order = (0, 1, 2, 3, 4)

    def forward(self, ids, mask):
        hidden = self.embed(ids)
        for number in self.order:
            hidden = self.blocks[number](hidden)[0]
        return self.head(hidden).square().mean()


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ((1, 0, 2, 3, 4), "layers run in the order blocks.1, blocks.0, blocks.2"),
        ((0, 1, 1, 3, 4), "twice ran blocks.1, not at all blocks.2"),
        ((0, 1, 2, 3, 4, 0), "twice ran blocks.0, not at all none"),
        ((0, 1, 2, 4), "twice ran none, not at all blocks.3"),
    ],
)
def test_layers_out_of_their_order_are_named(order, text):
    model = Ordered(PLAIN, "none")
    model.order = order
    found = prove_cut(model, "Ettt|ttL", looped.batch(), names=looped.NAMES)
    assert not found.holds
    with pytest.raises(CutError, match=text):
        found.require()


class Reading(looped.Looped):
    """The host reads a value that depends on parameters."""

    def forward(self, ids, mask):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)[0]
            if hidden.abs().max() > 1e6:
                hidden = hidden / 2
        return self.head(hidden).square().mean()


class Unreadable(looped.Looped):
    """A forward that goes around torch."""

    def forward(self, ids, mask):
        hidden = torch.from_numpy(self.embed(ids).detach().numpy())
        for block in self.blocks:
            hidden = block(hidden)[0]
        return self.head(hidden).square().mean()


class Placed(nn.Module):
    """An embedding that returns lengths as well: the batch determines them, and other stages have a stand-in."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(looped.WORDS, looped.WIDTH)

    def forward(self, ids, mask):
        return self.words(ids), mask.sum(1)


class Listed(looped.Looped):
    """The host lists what the embedding returns."""

    def __init__(self, script, end):
        super().__init__(script, end)
        self.embed = Placed()

    def forward(self, ids, mask):
        hidden, lengths = self.embed(ids, mask)
        for block in self.blocks:
            hidden = block(hidden)[0] * max(lengths.tolist())
        return self.head(hidden).square().mean()


def test_a_list_of_what_the_embedding_returns_is_named():
    found = prove_cut(Listed(PLAIN, "none"), "Ettt|ttL", looped.batch(), names=looped.NAMES)
    with pytest.raises(CutError, match=r"made by sum in embed .* used by tolist in the model \(test_stages_proof"):
        found.require()


class Keeping(looped.Looped):
    """Adds the hidden state of the forward before."""

    kept = None

    def forward(self, ids, mask):
        hidden = first = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)[0]
        if self.kept is not None:
            hidden = hidden + self.kept
        self.kept = first
        return self.head(hidden).square().mean()


def test_a_tensor_that_a_model_keeps_from_an_earlier_forward_is_said():
    model = Keeping(PLAIN, "none")
    first, _ = pipeline_stage(model, "Ettt|ttL", [0, 1], names=looped.NAMES)
    with pytest.warns(UserWarning, match="keeps a tensor of an earlier forward"):
        first(**looped.batch())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Reading, "a value that the batch does not determine is read by _local_scalar_dense in the model"),
        (Unreadable, "the model does not run on shapes: "),
    ],
)
def test_what_a_trace_cannot_decide_is_said_and_is_no_error(kind, text):
    found = prove_cut(kind(PLAIN, "none"), "Ettt|ttL", looped.batch(), names=looped.NAMES)
    assert not found.holds
    assert text in str(found)
    found.require()


# -- what a trace leaves alone ------------------------------------------------------------------------------


def test_a_model_its_buffers_its_batch_and_the_generators_are_as_before():
    class Counting(looped.Looped):
        def __init__(self):
            super().__init__(PLAIN, "none")
            self.norm, self.drop = nn.BatchNorm1d(looped.WIDTH), nn.Dropout(0.5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, ids, mask):
            self.seen += 1
            mask.mul_(2)
            hidden = self.drop(self.embed(ids))
            for block in self.blocks:
                hidden = block(hidden)[0]
            return self.head(self.norm(hidden.flatten(0, 1))).square().mean()

    model, given = Counting(), looped.batch()
    before, mask, state = copy.deepcopy(model.state_dict()), given["mask"].clone(), torch.get_rng_state()
    hooks = [len(one._forward_hooks) for one in model.modules()]
    found = prove_cut(model, "Ettt|ttL", given, names=looped.Names("blocks", embedding=("embed", "other")))
    assert found.holds, str(found)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(given["mask"], mask)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(one._forward_hooks) for one in model.modules()] == hooks


def test_tied_parameters_are_used_on_both_of_their_stages():
    class Tied(looped.Looped):
        def __init__(self):
            super().__init__(PLAIN, "none")
            self.head = nn.Linear(looped.WIDTH, looped.WORDS, bias=False)
            self.head.weight = self.embed.weight

    assert prove_cut(Tied(), "Ettt|ttL", looped.batch(), names=looped.NAMES).holds


# -- what layers tell each other through Python -------------------------------------------------------------------


class Hosted(looped.Looped):
    """Its layers and its own code share what is no tensor."""

    depth, kept = 0, {}

    def __init__(self, way):
        super().__init__(PLAIN, "none")
        self.way = way

    def forward(self, ids, mask):
        hidden, generator = self.embed(ids), torch.Generator().manual_seed(3)
        for number, block in enumerate(self.blocks):
            hidden = self.after(number, block(hidden)[0], generator)
        if self.way == "size":
            hidden = hidden / sum(one.numel() for one in self.parameters())
        return self.head(hidden).square().mean()

    def after(self, number, hidden, generator):
        """What the model does with the result of a layer, which may be on any stage."""
        return hidden


class Telling(nn.Module):
    """A layer that takes part in it."""

    def __init__(self, model, number):
        super().__init__()
        self.__dict__["model"], self.number, self.cache = model, number, {}
        self.linear = nn.Linear(looped.WIDTH, looped.WIDTH)

    def forward(self, hidden):
        model = self.model
        if model.way == "class counter":
            Hosted.depth += 1
            hidden = hidden / Hosted.depth
        elif model.way == "generator":
            hidden = hidden + torch.randn(hidden.shape, generator=model.generator, dtype=hidden.dtype)
        elif model.way == "number" and self.number == 0:
            Hosted.kept["norm"] = hidden.abs().mean().item()
        elif model.way == "number" and self.number == 4:
            hidden = hidden * Hosted.kept.get("norm", 1.0)
        elif model.way == "next forward":
            hidden = hidden / (1 + Hosted.depth) if self.number == 0 else hidden
            Hosted.depth += self.number == 4
        elif model.way == "python random":
            hidden = hidden * random.random()
        elif model.way == "own cache":
            hidden = hidden * self.cache.setdefault("table", torch.ones(looped.WIDTH, dtype=hidden.dtype))
        return self.linear(hidden), hidden


def hosted(way):
    model = Hosted(way).double()
    model.generator = torch.Generator().manual_seed(4)
    model.blocks = nn.ModuleList(Telling(model, number) for number in range(looped.LAYERS)).double()
    return model


@pytest.mark.parametrize(
    ("way", "stage", "whole"),
    [
        (
            "class counter",
            "stage 0 computes div(float64 (3, 4, 6), 4) in blocks.0",
            "div(float64 (3, 4, 6), 6) in blocks.0",
        ),
        ("generator", "generator after 0 draws", "generator after 3 draws"),
        ("number", "mul(float64 (3, 4, 6), 1.0) in blocks.4", "mul(float64 (3, 4, 6), 1.0"),
        ("next forward", "div(float64 (3, 4, 6), 1) in blocks.0", "div(float64 (3, 4, 6), 2) in blocks.0"),
        ("size", "div(float64 (3, 4, 6), 133) in the model", "div(float64 (3, 4, 6), "),
    ],
)
def test_a_stage_that_runs_with_other_arguments_is_named_with_both_lines(way, stage, whole):
    found = prove_cut(hosted(way), "Ettt|ttL", looped.batch(), names=looped.NAMES)
    with pytest.raises(CutError, match="what layers share through Python") as error:
        found.require()
    line = next(line for line in str(error.value).splitlines() if " where the model computes " in line)
    theirs, ours = line.split(" where the model computes ")
    assert stage in theirs
    assert whole in ours
    assert theirs.count("(test_stages_proof.py:") == ours.count("(test_stages_proof.py:") == 1


@pytest.mark.parametrize("way", ["none", "python random", "own cache"])
def test_what_each_stage_does_alone_is_proved(way):
    assert prove_cut(hosted(way), "Ettt|ttL", looped.batch(), names=looped.NAMES).holds


def test_a_proof_leaves_no_trace_on_the_host():
    for way in ("class counter", "own cache", "number", "next forward", "generator"):
        model = hosted(way)
        state = model.generator.get_state()
        prove_cut(model, "Ettt|ttL", looped.batch(), names=looped.NAMES)
        assert (Hosted.depth, Hosted.kept, model.blocks[0].cache) == (0, {}, {})
        assert torch.equal(model.generator.get_state(), state)


def test_random_numbers_of_the_host_between_layers_are_an_error():
    class Dropping(looped.Looped):
        def forward(self, ids, mask):
            hidden = self.embed(ids)
            for block in self.blocks:
                if random.random() > 0.01:
                    hidden = block(hidden)[0]
            return self.head(hidden).square().mean()

    random.seed(3)
    found = prove_cut(Dropping(PLAIN, "none"), "Ettt|ttL", looped.batch(), names=looped.NAMES)
    with pytest.raises(CutError, match="draws from Python's or numpy's random generator between its layers"):
        found.require()


def test_a_proof_leaves_none_of_its_tensors():
    """A cycle through tensors of torch is not always seen by gc: 200 of them stayed for each proof."""
    assert not proof(PLAIN, "mask", "Et|tt|ttL").faults
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Traced]
