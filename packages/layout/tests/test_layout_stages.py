"""A layout answers which layers a stage builds; it is a value; its text and its JSON read back to it."""

from __future__ import annotations

import copy
import pickle
import re

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.layout import LayerType, LayoutError, LayoutGrammar, LayoutSyntaxError, PipelineParallelLayerLayout

SEED = "Et*3|(tt|)*29,m|L"
KINDS = list(LayerType)
# Few different stages, so that runs and repeated sequences of them are common.
STAGES = st.lists(st.lists(st.sampled_from(KINDS), max_size=4), min_size=1, max_size=4).flatmap(
    lambda menu: st.lists(st.sampled_from(menu), min_size=1, max_size=30)
)


@st.composite
def layouts(draw):
    stages = draw(STAGES)
    sizes = [pp for pp in range(1, len(stages) + 1) if len(stages) % pp == 0]
    return PipelineParallelLayerLayout(stages, draw(st.sampled_from(sizes)))


def test_the_seed():
    layout = PipelineParallelLayerLayout(SEED, 16)
    assert (layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size) == (16, 2)
    decoders = LayerType.decoder
    assert layout.layout[0] == ((LayerType.embedding, *[decoders] * 3), (decoders, decoders))
    assert all(layout.layout[rank] == ((decoders, decoders), (decoders, decoders)) for rank in range(1, 14))
    assert layout.layout[14] == ((decoders, decoders), (LayerType.mtp,))
    assert layout.layout[15] == ((decoders, decoders), (LayerType.loss,))
    assert layout.flatten_layout == ("embedding", *["decoder"] * 61, "mtp", "loss")
    assert layout.input_data == SEED
    assert str(layout) == SEED
    assert layout.validate_layer_layout(61, 1) is True
    assert (
        layout.pretty_repr()
        == """\
              VPP rank 0           VPP rank 1
PP rank 0     embedding,decoder*3  decoder*2
PP rank 1-13  decoder*2            decoder*2
PP rank 14    decoder*2            mtp
PP rank 15    decoder*2            loss"""
    )


def test_empty_stages_are_named_in_the_table():
    layout = PipelineParallelLayerLayout("E||t|L", 4)
    assert "PP rank 1  (empty stage)" in layout.pretty_repr()


def test_queries_are_chunk_major():
    layout = PipelineParallelLayerLayout("Ett|t||ttmL", 2)
    assert layout.get_layer_id_list(pp_rank=0, vp_stage=0) == [0, 1]
    assert layout.get_layer_id_list(pp_rank=1, vp_stage=0) == [2]
    assert layout.get_layer_id_list(pp_rank=0, vp_stage=1) == []
    assert layout.get_layer_id_list(pp_rank=1, vp_stage=1) == [3, 4]
    assert layout.get_layer_offset(pp_rank=0, vp_stage=1) == 3
    assert layout.get_num_layers_to_build(LayerType.mtp, vp_stage=1, pp_rank=1) == 1
    assert layout.get_num_layers_to_build("mtp", 0, 0) == 0
    assert layout.get_num_layers_to_build("embedding", 0, 0) == 1


def test_what_is_alone_needs_no_index():
    assert PipelineParallelLayerLayout("Ett|ttL", 2).get_layer_id_list(pp_rank=1) == [2, 3]
    assert PipelineParallelLayerLayout("Ett|ttL", 1).get_layer_id_list(vp_stage=1) == [2, 3]


@settings(max_examples=80, deadline=None)
@given(layouts())
def test_ids_partition_the_layers(layout):
    for kind in KINDS:
        ids = [
            identity
            for chunk in range(layout.virtual_pipeline_model_parallel_size)
            for rank in range(layout.pipeline_model_parallel_size)
            for identity in layout.get_layer_id_list(kind, vp_stage=chunk, pp_rank=rank)
        ]
        assert ids == list(range(layout.flatten_layout.count(kind)))


@settings(max_examples=80, deadline=None)
@given(layouts())
def test_the_text_is_canonical_and_reads_back(layout):
    text = str(layout)
    pp = layout.pipeline_model_parallel_size
    again = PipelineParallelLayerLayout(text, pp)
    assert again == layout
    assert hash(again) == hash(layout)
    assert str(again) == text
    plain = "|".join("".join(map(layout.grammar.symbol, stage)) for stage in layout.stages)
    assert len(text.replace(",", "")) <= len(plain)  # a comma after a count is for the eye
    assert PipelineParallelLayerLayout(plain, pp) == layout
    assert str(PipelineParallelLayerLayout(plain, pp)) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("t t t|, t", "t*3|t"),
        ("Et|tt|tt|tt|tL", "Et|(tt|)*3,tL"),
        ("tt|tt|t|tt|tt|t|tt|tt|t|L", "(tt|tt|t|)*3,L"),
        ("((ttt|)*9(t|)*9)*5L", "((t*3|)*9,(t|)*9)*5,L"),
        ("|||||", "|*5"),
        ("t*9,m*9", "t*9,m*9"),
    ],
)
def test_the_text_is_compressed(text, canonical):
    assert str(PipelineParallelLayerLayout(text, 1)) == canonical


@settings(max_examples=80, deadline=None)
@given(layouts())
def test_json_both_ways(layout):
    assert PipelineParallelLayerLayout.from_json(layout.to_json()) == layout


def test_json_keeps_registered_symbols():
    grammar = LayoutGrammar(symbols={"v": "vision"})
    layout = PipelineParallelLayerLayout("v*3|v", 2, grammar=grammar)
    again = PipelineParallelLayerLayout.from_json(layout.to_json())
    assert (again, again.grammar) == (layout, grammar)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[]",
        "{",
        '{"layout": "t"}',
        '{"layout": "t", "pipeline_model_parallel_size": 1, "vpp": 2}',
        '{"layout": 3, "pipeline_model_parallel_size": 1}',
        '{"layout": "t", "pipeline_model_parallel_size": true}',
        '{"layout": "t", "pipeline_model_parallel_size": 1, "symbols": [1]}',
        '{"layout": "v", "pipeline_model_parallel_size": 1, "symbols": {"v": null}}',
        "[" * 100_000,
        None,
    ],
)
def test_bad_json_is_a_layout_error(text):
    with pytest.raises(LayoutError):
        PipelineParallelLayerLayout.from_json(text)


def test_from_str_is_the_constructor():
    assert PipelineParallelLayerLayout.from_str("Et|L", 2) == PipelineParallelLayerLayout("Et|L", 2)


def test_lists_and_strings_are_equal_where_the_stages_are():
    by_name = PipelineParallelLayerLayout([["embedding", "decoder"], [], [LayerType.decoder, "loss"]], 3)
    assert by_name == PipelineParallelLayerLayout("Et||tL", 3)
    assert by_name != PipelineParallelLayerLayout("Et||tL", 1)
    assert len({by_name, PipelineParallelLayerLayout("E,t||tL", 3)}) == 1
    assert by_name.input_data == [["embedding", "decoder"], [], ["decoder", "loss"]]


def test_it_is_immutable():
    given_list = [["embedding"], ["loss"]]
    layout = PipelineParallelLayerLayout(given_list, 2)
    given_list[0].append("decoder")
    layout.input_data.append([])
    assert str(layout) == "E|L"
    assert layout.input_data == [["embedding"], ["loss"]]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        layout.stages = ()


def test_it_copies_pickles_and_shows_itself():
    layout = PipelineParallelLayerLayout(SEED, 16)
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert copy.deepcopy(layout) == layout
    assert repr(layout) == f"PipelineParallelLayerLayout('{SEED}', 16)"


@pytest.mark.parametrize(
    ("layout", "pp", "rule"),
    [
        ("Et|t|L", 2, "3 stages do not divide by pipeline_model_parallel_size 2"),
        ("Et|L", 0, "pipeline_model_parallel_size is 0; it must be an integer of at least 1"),
        ("Et|L", True, "is True; it must be an integer of at least 1"),
        ("Et|L", "2", "is '2'; it must be an integer of at least 1"),
        ([["decodr"]], 1, "stage 0, layer 0: 'decodr' is not a kind of layer (did you mean 'decoder'?)"),
        ([["decoder"], ["t"]], 1, "stage 1, layer 0: 't' is not a kind of layer"),
        ([["decoder"], None], 1, "a list of stages, each a list of kinds, got [['decoder'], None]"),
        (["decoder"], 1, "a list of stages, each a list of kinds, got ['decoder']"),
        ([], 1, "layout must be a string or a list of stages, each a list of kinds, got []"),
        (None, 1, "layout must be a string or a list of stages, each a list of kinds, got None"),
        ([[["decoder"]]], 1, "stage 0, layer 0: ['decoder'] is not a kind of layer"),
    ],
)
def test_a_bad_layout_is_an_error(layout, pp, rule):
    with pytest.raises(LayoutError, match=re.escape(rule)):
        PipelineParallelLayerLayout(layout, pp)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"pp_rank": 0}, "vp_stage is None; it must be an integer of 0 to 1"),
        ({"vp_stage": 0}, "pp_rank is None; it must be an integer of 0 to 1"),
        ({"pp_rank": 2, "vp_stage": 0}, "pp_rank is 2; it must be an integer of 0 to 1"),
        ({"pp_rank": -1, "vp_stage": 0}, "pp_rank is -1; it must be an integer of 0 to 1"),
        ({"pp_rank": 0, "vp_stage": True}, "vp_stage is True; it must be an integer of 0 to 1"),
        ({"pp_rank": 0, "vp_stage": 0, "layer_type": "vision"}, "'vision' is not a kind of layer"),
    ],
)
@pytest.mark.parametrize("query", ["get_num_layers_to_build", "get_layer_offset", "get_layer_id_list"])
def test_a_bad_question_is_an_error(query, arguments, rule):
    layout = PipelineParallelLayerLayout("Et|t|t|L", 2)
    with pytest.raises(LayoutError, match=re.escape(rule)):
        getattr(layout, query)(**arguments)


class TestRules:
    @pytest.mark.parametrize(
        ("text", "pp", "counts", "own_stage"),
        [
            ("Ett|ttL", 2, (4, 0), False),
            ("Ett|ttL", 2, (4, None), False),
            ("E||t|L", 4, (1, 0), False),
            ("Et|(tt|)*29|L", 8, (59, 0), False),
            ("Et|t|t|mL", 2, (3, 1), False),
            ("Et|t|t|mmL", 4, (3, 2), False),
            ("Et|t|m|L", 4, (2, 1), True),
            ("Et|t|tm|L", 4, (3, 1), True),
            ("EtmL", 1, (1, 1), False),
            ("Et|mL", 1, (1, 1), False),
            ("Eee|t|L", 3, (1, 0), False),
        ],
    )
    def test_valid_layouts_return_whether_mtp_is_apart(self, text, pp, counts, own_stage):
        assert PipelineParallelLayerLayout(text, pp).validate_layer_layout(*counts) is own_stage

    @pytest.mark.parametrize(
        ("text", "pp", "counts", "stage", "rule"),
        [
            ("|Et|tL", 3, (2, 0), 1, "embedding must be the first layer of the first stage, 0"),
            ("tE|tL", 2, (2, 0), 0, "embedding must be the first layer"),
            ("Et|EtL", 2, (2, 0), 1, "embedding must be the first layer of the first stage, 0, and occur once"),
            ("EEt|tL", 2, (2, 0), 0, "embedding must be the first layer of the first stage, 0, and occur once"),
            ("EttL|", 2, (2, 0), 0, "loss must be the last layer of the last stage, 1"),
            ("Et|Lt", 2, (2, 0), 1, "loss must be the last layer"),
            ("Et|tLL", 2, (2, 0), 1, "loss must be the last layer"),
            ("EtL|tL", 2, (2, 0), 0, "loss must be the last layer of the last stage, 1"),
            ("tt|tL", 2, (3, 0), None, "has 0 embedding layers, the model 1"),
            ("Et|t", 2, (2, 0), None, "has 0 loss layers, the model 1"),
            ("Et|tL", 2, (3, 0), None, "has 2 decoder layers, the model 3"),
            ("Et|ttttL", 2, (3, 0), None, "has 5 decoder layers, the model 3"),
            ("Et|tmL", 2, (2, 0), None, "has 1 mtp layers, the model 0"),
            ("Et|mtL", 2, (2, 1), 1, "mtp layers must follow all decoders"),
            ("Et|t|m|tL", 4, (3, 1), 3, "mtp layers must follow all decoders"),
            ("Et|m|t|L", 2, (2, 1), 1, "on one stage of the last chunk, 3 or later"),
            ("Et|t|m|L", 2, (2, 1), 2, "on one stage of the last chunk, 3 or later"),
            ("Etm|L", 2, (1, 1), 0, "on one stage of the last chunk, 1 or later"),
            ("Et|m|m|L", 4, (1, 2), 2, "together on one stage"),
            ("Etm|L", 1, (1, 1), 0, "on one stage of the last chunk, 1 or later"),
            ("Et|tL", 2, (-1, 0), None, "number of decoder layers is -1; it must be an integer of at least 0"),
            ("Et|tL", 2, ("2", 0), None, "number of decoder layers is '2'; it must be an integer of at least 0"),
            ("Et|tL", 2, (2, True), None, "number of mtp layers is True; it must be an integer of at least 0"),
        ],
    )
    def test_each_rule_names_the_offending_stage(self, text, pp, counts, stage, rule):
        layout = PipelineParallelLayerLayout(text, pp)
        with pytest.raises(LayoutError, match=re.escape(rule)) as caught:
            layout.validate_layer_layout(*counts)
        assert not isinstance(caught.value, LayoutSyntaxError)
        assert caught.value.stage == stage
        if stage is not None:
            rank, chunk = layout.position(stage)
            assert str(caught.value).startswith(f"stage {stage} (pp rank {rank}, chunk {chunk}) of layout '")

    def test_one_module_of_several_needs_neither_embedding_nor_loss(self):
        grammar = LayoutGrammar(symbols={"v": "vision"})
        layout = PipelineParallelLayerLayout("v*3|v*3", 2, grammar=grammar)
        layout.validate_counts({"vision": 6})
        with pytest.raises(LayoutError, match="has 6 vision layers, the model 5"):
            layout.validate_counts({"vision": 5})
        with pytest.raises(LayoutError, match="has 6 vision layers, the model 0"):
            layout.validate_counts({"decoder": 0})
        with pytest.raises(LayoutError, match="embedding must be the first layer of the first stage, 0"):
            PipelineParallelLayerLayout("t|E", 2).validate_counts({"decoder": 1, "embedding": 1})

    def test_an_error_text_stays_short_for_a_long_layout(self):
        text = "E|" + "|".join("tme"[i * i % 7 % 3] + "t" * (i * i % 5) for i in range(500))
        layout = PipelineParallelLayerLayout(text, 1)
        with pytest.raises(LayoutError) as caught:
            layout.validate_layer_layout(1)
        assert len(str(caught.value)) < 300
