"""Batches cut by rows: tensors, arrays, lists and what is in them, by names, by what a script says, and at random."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.errors import StepArgumentError
from pipegrid.training.pipeline.microbatches import Share, microbatch, microbatches
from pipegrid.training.pipeline.rows import Rows

ROWS, TOKENS = 6, 5
IDS = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)


class Pair(NamedTuple):
    """Two tensors of the same rows."""

    one: Any
    other: Any


def split(entries, count=3, *, ids=IDS, **rows):
    """The entries of each microbatch beside ids."""
    parts = Rows(**rows).split({"input_ids": ids, **entries}, count)
    return [{name: value for name, value in part.items() if name != "input_ids"} for part in parts]


def by_row(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


MROPE = by_row(3, ROWS, TOKENS)
CUT = {
    "a tensor": (by_row(ROWS, 2), lambda start, stop: by_row(ROWS, 2)[start:stop]),
    "an array": (by_row(ROWS).numpy(), lambda start, stop: by_row(ROWS).numpy()[start:stop]),
    "strings": (list("abcdef"), lambda start, stop: list("abcdef")[start:stop]),
    "numbers": (tuple(range(ROWS)), lambda start, stop: tuple(range(start, stop))),
    "images of sizes of their own": (
        [by_row(3, n + 1) for n in range(ROWS)],
        lambda start, stop: [by_row(3, n + 1) for n in range(start, stop)],
    ),
    "boxes": (
        [{"box": by_row(n)} for n in range(ROWS)],
        lambda start, stop: [{"box": by_row(n)} for n in range(start, stop)],
    ),
    "scales": ([by_row(ROWS, 1), by_row(ROWS, 2)], lambda start, stop: [by_row(ROWS, n)[start:stop] for n in (1, 2)]),
    "a named tuple": (Pair(by_row(ROWS), by_row(ROWS, 2)), lambda a, b: Pair(by_row(ROWS)[a:b], by_row(ROWS, 2)[a:b])),
    "a dict": (
        OrderedDict(sizes=by_row(ROWS, 2), names={"of": list("abcdef")}, kind="jpg"),
        lambda start, stop: OrderedDict(
            sizes=by_row(ROWS, 2)[start:stop], names={"of": list("abcdef")[start:stop]}, kind="jpg"
        ),
    ),
    "nothing": (None, lambda *_: None),
    "a text of as many letters": ("abcdef", lambda *_: "abcdef"),
    "a number": (2.5, lambda *_: 2.5),
    "a tensor without axes": (torch.tensor(2.5), lambda *_: torch.tensor(2.5)),
    "a size": ((224, 224), lambda *_: (224, 224)),
}


def require_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            require_equal(found[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", CUT)
def test_what_has_one_entry_for_each_row_is_cut(kind):
    value, expected = CUT[kind]
    for count, bounds in ((3, [(0, 2), (2, 4), (4, 6)]), (4, [(0, 2), (2, 4), (4, 5), (5, 6)]), (1, [(0, 6)])):
        for part, (start, stop) in zip(split({"x": value}, count), bounds, strict=True):
            require_equal(part["x"], expected(start, stop))


@pytest.mark.parametrize(
    ("name", "value", "axis"),
    [
        ("position_ids", MROPE, 1),
        ("position_ids", by_row(4, ROWS, TOKENS), 1),
        ("position_ids", by_row(ROWS, TOKENS), 0),
        ("position_ids", by_row(1, TOKENS), None),
        ("position_ids", by_row(ROWS, 7, 2), 0),
        ("attention_mask", by_row(ROWS, 1, TOKENS, TOKENS), 0),
        ("attention_mask", by_row(1, 1, TOKENS, TOKENS), None),
        ("cache_position", by_row(ROWS), None),
        ("head_mask", by_row(ROWS, 2), None),
        ("pixel_values", by_row(ROWS, 3, 2, 2), 0),
    ],
)
def test_entries_of_hugging_face_are_known_by_name(name, value, axis):
    for number, part in enumerate(split({name: value})):
        expected = value if axis is None else value.narrow(axis, 2 * number, 2)
        assert torch.equal(part[name], expected)


def test_positions_in_three_planes_are_cut_along_rows_also_where_there_are_three_of_them():
    ids, planes = IDS[:3], by_row(3, 3, TOKENS)
    for number, part in enumerate(split({"position_ids": planes}, ids=ids)):
        assert torch.equal(part["position_ids"], planes[:, number : number + 1])
    states = (by_row(3, TOKENS, 2), (by_row(3, TOKENS, 2), by_row(3, 1)), None)  # three entries, of no row
    for number, part in enumerate(split({"encoder_outputs": states}, ids=ids)):
        require_equal(part["encoder_outputs"][1][1], states[1][1][number : number + 1])
    with pytest.raises(StepArgumentError, match=r"'planes' is a tensor of shape \[3, 3, 5\], and the batch has 3 rows"):
        split({"planes": planes}, ids=ids)
    for axis in (0, 1):
        for number, part in enumerate(split({"planes": planes}, ids=ids, axes={"planes": axis})):
            assert torch.equal(part["planes"], planes.narrow(axis, number, 1))


def test_a_script_says_where_rows_are_and_what_is_whole():
    weights, scales = by_row(ROWS), [[by_row(2, ROWS)], [by_row(3, ROWS)]]
    entries = {
        "planes": by_row(2, ROWS),
        "more": {"scales": scales},
        "weights": weights,
        "set": {"of": {1, 2}, "x": MROPE},
    }
    axes = {"planes": 1, "more.scales": 3}
    for number, part in enumerate(split(entries, axes=axes, whole=("weights", "set"))):
        assert torch.equal(part["planes"], entries["planes"][:, 2 * number :][:, :2])
        assert torch.equal(part["more"]["scales"][1][0], scales[1][0][:, 2 * number :][:, :2])
        assert part["weights"] is weights
        assert part["set"] == entries["set"]
    (only, *_) = split({"name": weights}, whole="name")
    assert only["name"] is weights


class Held:
    """An object of a script with a tensor."""

    def __init__(self):
        self.sizes = by_row(ROWS)


@pytest.mark.parametrize(
    ("entries", "options", "text"),
    [
        ({"bias": by_row(1, 5)}, {}, r"'bias' is a tensor of shape \[1, 5\], and the batch has 6 rows: its first axis"),
        ({"images": [by_row(2), by_row(3)]}, {}, r"'images' is a list of 2, .* whole=\('images',\)"),
        ({"cu_seqlens": by_row(ROWS)}, {}, "'cu_seqlens' is of the whole batch, .* cut into 3 microbatches"),
        ({"pixel_values": by_row(ROWS, 4), "image_grid_thw": by_row(ROWS, 3)}, {}, "is of the whole batch"),
        ({"past_key_values": Held()}, {}, "'past_key_values' is a Held, and the batch has 6 rows"),
        ({"held": Held()}, {}, "'held' is a Held"),
        ({"names": set("abcdef")}, {}, "'names' is a set"),
        ({"x": [by_row(ROWS)] * ROWS}, {}, "'x' is a list of 6, .* its first axis or its second"),
        ({"x": by_row(6)}, {"axes": {"x": 1}}, r"rows has axis 1 of 'x', a tensor of shape \[6\]"),
    ],
)
def test_what_cannot_be_cut_is_a_typed_error_with_the_remedy(entries, options, text):
    with pytest.raises(StepArgumentError, match=text):
        split(entries, **options)


def test_what_is_said_twice_or_is_no_axis_is_a_typed_error():
    with pytest.raises(StepArgumentError, match="'x' is in rows and in whole"):
        Rows({"x": 0}, ("x",))
    with pytest.raises(StepArgumentError, match=r"rows\['x'\] is -1"):
        Rows({"x": -1})
    with pytest.raises(StepArgumentError, match=r"first axes of the batch are {'a': 6, 'b': 5}; .*rows={name: axis}"):
        Rows().number({"a": by_row(6), "b": by_row(5), "texts": ["a"]})
    assert Rows().number({"texts": ["a", "b"]}) == 2
    assert Rows({"b": 1}).number({"a": by_row(6), "b": by_row(5, 6)}) == 6


def test_what_an_entry_was_in_earlier_batches_decides_where_lengths_coincide():
    """Six rows, then the two of a last batch: a size, planes and an image stay what they were."""
    rows = Rows()
    wide = {"ids": by_row(6, 5), "size": (2, 3), "image": by_row(6, 3, 5, 5), "mask": by_row(6, 5, 5)}
    rows.split(wide, 3)
    (part, _) = rows.split(
        {"ids": by_row(2, 5), "size": (2, 3), "image": by_row(2, 2, 5, 5), "mask": by_row(2, 5, 5)}, 2
    )
    assert part["size"] == (2, 3)
    assert part["image"].shape == (1, 2, 5, 5)
    rows = Rows()
    rows.split({"ids": by_row(2, 5), "size": (2, 3), "name": None}, 2)  # cut, as lists of two rows are
    with pytest.raises(StepArgumentError, match="'size' is a tuple of 2, and the batch has 6 rows"):
        rows.split(wide, 3)
    rows.split({"ids": by_row(6, 5), "size": list("abcdef"), "name": list("abcdef")}, 3)
    assert rows.split({"ids": by_row(6, 5), "name": list("abcdef")}, 3)[1]["name"] == ["c", "d"]


def test_a_share_of_a_replica_and_the_rows_of_a_microbatch_follow_the_same_rule():
    cpu, rows = torch.device("cpu"), Rows(whole=("weights",))
    part = {"weights": by_row(4), "pixel_values": by_row(9, 4), "image_grid_thw": by_row(1, 3), "input_ids": IDS[:2]}
    assert microbatch(part, Share(), cpu, rows).rows == 2
    found = microbatch({"weights": by_row(4), "names": ["a", "b"], "input_ids": IDS[:2]}, Share(1, 2), cpu, rows)
    assert (found.inputs["names"], found.rows, len(found.inputs["weights"])) == (["b"], 1, 4)
    one = microbatches({"x": by_row(6, 2), "names": list("abcdef")}, count=None, size=2, rows=Rows())
    assert [each["names"] for each in one] == [["a", "b"], ["c", "d"], ["e", "f"]]


@st.composite
def batches(draw):
    """A batch of random entries, whose every number says its row; and the axes that a script gives for some."""
    rows = draw(st.integers(1, 5))
    axes = {}

    def entry(path, depth):
        kinds = ["tensor", "array", "list", "tuple", "plain", *(["dict"] if depth else [])]
        kind = draw(st.sampled_from(kinds))
        if kind == "dict":
            return {
                name: entry(f"{path}.{name}", depth - 1) for name in draw(st.sets(st.sampled_from("ab"), min_size=1))
            }
        if kind in ("list", "tuple"):
            width = draw(st.integers(0, 2))
            made = [[row] * width if width else f"row {row}" for row in range(rows)]
            axes[path] = 0
            return made if kind == "list" else tuple(made)
        if kind == "plain":
            return draw(st.sampled_from([None, 1.5, "text", True]))
        axis = draw(st.integers(0, 2))
        shape = [draw(st.integers(1, 4)) for _ in range(axis + draw(st.integers(0, 2)) + 1)]
        shape[axis] = rows
        numbers = torch.arange(rows).view(-1, *[1] * (len(shape) - axis - 1)).expand(shape).clone()
        axes[path] = axis
        return numbers if kind == "tensor" else numbers.numpy()

    found = {name: entry(name, 2) for name in ("c", "d", "e")}
    return {"input_ids": torch.arange(rows).view(-1, 1), **found}, axes, rows


def rows_in(value):
    """The rows that a part of an entry has numbers of."""
    if isinstance(value, dict):
        return set().union(*map(rows_in, value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*(rows_in(each) for each in value)) if value else set()
    if isinstance(value, str) and value.startswith("row"):
        return {int(value[4:])}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return set(value.reshape(-1).tolist())
    return {value} if type(value) is int else set()


@given(batches(), st.data())
def test_each_part_of_any_batch_has_the_rows_of_its_ids_and_no_others(drawn, data):
    batch, axes, rows = drawn
    count = data.draw(st.integers(1, rows))
    seen = []
    for part in Rows(axes).split(batch, count):
        own = set(part["input_ids"].flatten().tolist())
        seen += sorted(own)
        for name in ("c", "d", "e"):
            assert rows_in(part[name]) in (own, set())
            assert (rows_in(part[name]) == set()) == (rows_in(batch[name]) == set())
    assert seen == list(range(rows))
