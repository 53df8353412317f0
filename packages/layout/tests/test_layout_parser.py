"""Layout strings are read as written, textual repetition included; every fault is shown at its column."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.layout import LayoutError, LayoutGrammar, LayoutSyntaxError, PipelineParallelLayerLayout
from pipegrid.layout.parser import MAX_LAYERS

NAMES = LayoutGrammar(symbols={letter: f"kind_{letter}" for letter in "abcdfpqxy"})


def read(text: str, grammar: LayoutGrammar | None = None) -> str:
    """The expanded text of a layout string: letters and separators only."""
    grammar = LayoutGrammar() if grammar is None else grammar
    stages = PipelineParallelLayerLayout.parse_str_to_list(text, grammar=grammar)
    return "|".join("".join(map(grammar.symbol, stage)) for stage in stages)


def brute_force(text: str) -> str:
    """Expand by rewriting: the innermost group or repeated letter, again and again."""
    text = re.sub(r"[\s,]", "", text)
    while True:
        rewritten = re.sub(
            r"(?:\(([A-Za-z|]*)\)|([A-Za-z|]))\*(\d+)",
            lambda match: f"({(match[1] if match[2] is None else match[2]) * int(match[3])})",
            text,
            count=1,
        )
        if rewritten == text:
            rewritten = re.sub(r"\(([A-Za-z|]*)\)(?!\*)", r"\1", text, count=1)
        if rewritten == text:
            return text
        text = rewritten


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("Et*3|(tt|)*29,m|L", "Ettt|" + "tt|" * 29 + "m|L"),
        ("(t|t)*2", "t|tt|t"),
        ("E||t|L", "E||t|L"),
        ("t*0", ""),
        ("(Et|t)*0L", "L"),
        ("|*3", "|||"),
        ("", ""),
        ("((t|)*2m|)*2", "t|t|m|" * 2),
        (" E t * 3 |\n(tt|) * 2 ,\tL ", "Ettt|tt|tt|L"),
        ("(((t)))", "t"),
        ("()*5", ""),
        ("t*007", "t" * 7),
        ("t*2*3", "t" * 6),
        ("Et*2 * 3 *1|(t|)*2*2 L", "E" + "t" * 6 + "|" + "t|" * 4 + "L"),
        ("t*2*0*999999999", ""),
        ("t*999999*999999*0 m", "m"),
        ("(t*2*2|)*3*0E", "E"),
        ("t*0" + "0" * 5000, ""),
        ("((t*999999)*999999)*0 m", "m"),
        ("t,,t,", "tt"),
        ("Et,*2|L", "Ett|L"),
        ("E(t|),*,2,*3|L", "E" + "t|" * 6 + "|L"),
        ("e", "e"),
    ],
)
def test_repetition_is_textual(text, expanded):
    assert read(text) == expanded


def test_repetition_across_separators():
    assert read("xy(ab|cd|ef)*2,pq", NAMES) == "xyab|cd|efab|cd|efpq"


def test_stages_are_counted():
    assert PipelineParallelLayerLayout.get_num_stages_from_str("Et*3|(tt|)*29,m|L") == 32
    assert PipelineParallelLayerLayout.get_num_stages_from_str("") == 1


SPACES = st.sampled_from(["", "", "", " ", "\t", ",", ", "])
LETTERS = st.sampled_from("Eetm|L")
ITEMS = st.recursive(
    LETTERS,
    lambda item: (
        st.builds(
            lambda items, space, times: f"({''.join(items)}){space}{times}",
            st.lists(item, max_size=4),
            SPACES,
            st.sampled_from(["", "*0", "*1", "* 2", "*3", "*2*2", "*3 * 0", ",*,2"]),
        )
        | st.builds("{}{}*{}".format, LETTERS, SPACES, st.integers(0, 4))
        | st.builds("{}*{}{}*{}".format, LETTERS, st.integers(0, 3), SPACES, st.integers(0, 3))
        | st.builds(",".join, st.lists(item, min_size=1, max_size=3))
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.builds("".join, st.lists(ITEMS, max_size=5)))
def test_expansion_equals_a_brute_force_expander(text):
    assert read(text) == brute_force(text)


@pytest.mark.parametrize(
    ("text", "column", "found", "expected"),
    [
        ("Et*3|(txt|)*29,m|L", 7, "'x'", "a layer (E embedding, e encoder, t decoder, m mtp, L loss)"),
        ("Et*", 2, "'*' at the end of the text", "a whole number after it"),
        ("Et* |L", 4, "'|' after '*'", "a whole number"),
        ("Et*-1", 3, "'-' after '*'", "a whole number"),
        ("Et*²", 3, "'²' after '*'", "a whole number"),
        ("*3", 0, "'*'", "a layer, '|' or ')' before it"),
        ("t*2*", 3, "'*' at the end of the text", "a whole number after it"),
        ("t*2*|", 4, "'|' after '*'", "a whole number"),
        ("t**2", 2, "'*' after '*'", "a whole number"),
        ("(*2*3)", 1, "'*'", "a layer, '|' or ')' before it"),
        (",*3", 1, "'*'", "a layer, '|' or ')' before it"),
        ("t*1,2", 4, "'2'", "'*' before a count"),
        ("t (*3)", 3, "'*'", "a layer, '|' or ')' before it"),
        ("E(t|(tt)", 1, "'(' that is never closed", "a ')' after it"),
        ("E(t|tt))L", 7, "')'", "its '(' before it"),
        ("Et3|L", 2, "'3'", "'*' before a count"),
        ("E, t;L", 4, "';'", "a layer"),
        ("E\ud800", 1, "'\\ud800'", "a layer"),
    ],
)
def test_an_error_points_at_its_column(text, column, found, expected):
    with pytest.raises(LayoutSyntaxError) as caught:
        read(text)
    error = caught.value
    assert isinstance(error, LayoutError)
    assert isinstance(error, ValueError)
    assert (error.text, error.column) == (text, column)
    assert error.found == found
    assert expected in error.expected
    headline, shown, marker = str(error).splitlines()
    assert headline.startswith(f"layout string, column {column} (from 0): found {found}, expected ")
    assert shown == "  " + text.replace("\ud800", "?")
    assert marker == "  " + " " * column + "^"


def test_the_caret_is_right_under_wide_and_unprintable_text():
    with pytest.raises(LayoutSyntaxError) as caught:
        read("t\nt(\u65e5")  # a newline is shown as a space, a wide character takes two columns
    assert str(caught.value).splitlines()[1:] == ["  t t(\u65e5", "      ^"]


def test_a_long_text_is_shown_around_the_caret():
    text = "t" * 5000 + "?" + "t" * 5000
    with pytest.raises(LayoutSyntaxError) as caught:
        read(text)
    _, shown, marker = str(caught.value).splitlines()
    assert len(shown) < 120
    assert shown[len(marker) - 1] == "?"
    assert shown.startswith("  ...t")
    assert shown.endswith("t...")


@pytest.mark.parametrize(
    ("text", "column", "what"),
    [
        ("t*1000001", 0, "layers"),
        ("E(tt|)*500000", 5, "layers"),
        ("((t*999999)*999999)*999999", 10, "layers"),
        ("|*1000000", 0, "stages"),
        ("t|(|||)*400000", 6, "stages"),
        ("t*" + "9" * 5000, 0, "layers"),
        ("(" * 30_000 + "t*2" + ")*2" * 30_000, 30_000 + 3 + 3 * 18, "layers"),
    ],
)
def test_an_expansion_past_the_bound_is_an_error_before_it_is_built(text, column, what):
    with pytest.raises(LayoutSyntaxError, match=f"more than 1,000,000 {what} up to here, expected at most") as caught:
        read(text)
    assert caught.value.column == column


def test_the_bound_itself_is_legal():
    assert PipelineParallelLayerLayout.get_num_stages_from_str(f"|*{MAX_LAYERS - 1}") == MAX_LAYERS
    assert len(PipelineParallelLayerLayout.parse_str_to_list(f"t*{MAX_LAYERS}")[0]) == MAX_LAYERS
    assert read(f"(t*{MAX_LAYERS})*0 (t*{MAX_LAYERS})*0 L") == "L"


def test_nesting_of_any_depth_and_many_removed_groups_take_linear_time():
    depth = 30_000  # a recursive parser, or one that copies a group at each level, does not survive this
    assert read("(" * depth + "t*9" + ")*1" * depth) == "t" * 9
    assert read("(t*999999)*0" * 10_000) == ""
    assert read("(t" * depth + ")" * depth) == "t" * depth


def test_an_error_survives_pickling():
    with pytest.raises(LayoutSyntaxError) as caught:
        read("Et*x")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.column, copy.text) == (str(caught.value), 3, "Et*x")


class TestGrammar:
    def test_registered_symbols_are_read_beside_the_standard_ones(self):
        grammar = LayoutGrammar(symbols={"v": "vision"})
        stages = PipelineParallelLayerLayout.parse_str_to_list("Ev*2|tL", grammar=grammar)
        assert stages == [["embedding", "vision", "vision"], ["decoder", "loss"]]
        assert grammar.registered == {"v": "vision"}

    def test_of_several_letters_for_one_kind_the_last_is_written(self):
        grammar = LayoutGrammar(symbols={"n": "encoder"})
        layout = PipelineParallelLayerLayout("en|n", 1, grammar=grammar)
        assert str(layout) == "nn|n"

    def test_an_unregistered_letter_names_the_known_ones(self):
        with pytest.raises(LayoutSyntaxError, match="v vision"):
            read("vw", LayoutGrammar(symbols={"v": "vision"}))

    @pytest.mark.parametrize(
        ("symbols", "rule"),
        [
            ({"vv": "vision"}, "'vv': 'vision'; it must be one ASCII letter"),
            ({"|": "vision"}, "must be one ASCII letter"),
            ({"é": "vision"}, "must be one ASCII letter"),
            ({"v": "vision tower"}, "'v': 'vision tower'; it must be one ASCII letter and a name"),
            ({"v": 3}, "'v': 3; it must be one ASCII letter and a name"),
            ({"v": None}, "'v': None; it must be one ASCII letter and a name"),
            ({"t": "vision"}, "'t' is decoder in every layout, not 'vision'"),
            ([("v", "vision")], "must map a letter to a kind"),
        ],
    )
    def test_a_bad_registration_is_an_error(self, symbols, rule):
        with pytest.raises(LayoutError, match=re.escape(rule)):
            LayoutGrammar(symbols=symbols)

    def test_it_is_a_value(self):
        grammar = LayoutGrammar(symbols={"v": "vision"})
        assert grammar == LayoutGrammar(symbols={"v": "vision"})
        assert grammar != LayoutGrammar()
        assert hash(grammar) == hash(LayoutGrammar(symbols={"v": "vision"}))
        assert pickle.loads(pickle.dumps(grammar)) == grammar
        with pytest.raises(TypeError):
            grammar.symbols["w"] = "audio"
