"""Payloads of several tensors over a bridge: what arrives where, the gradients that come back, and what is an error."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map

from pipegrid.bridges import (
    Axes,
    BridgeCommunicator,
    BridgeError,
    EdgeOptions,
    MultiModulePipelineCommunicator,
    Packed,
    ShapeError,
    Whole,
)
from pipegrid.bridges.bridge.structure import Structure
from pipegrid.core.edge import Direction, Edge
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import P2PMismatchError
from reshard_kit.grids import coords_of, grid, share

CONFIG = P2PConfig(deadline=20.0, open_deadline=20.0)

require_same = partial(torch.testing.assert_close, rtol=1e-13, atol=0)


# -- structures ---------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(),
    st.builds(Whole, gradient=st.booleans()),
    st.lists(st.sampled_from("bshxyz"), unique=True, max_size=4).map(lambda names: Axes(*names)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text("ab", min_size=1, max_size=2), st.integers(0, 3)), inner, max_size=3),
    ),
    max_leaves=8,
)


def count(tree):
    return sum(isinstance(leaf, (Axes, Whole)) for leaf in tree_leaves(tree))


def pruned(tree, victim, counter):
    """The payload without leaf number ``victim``: its place holds what no structure declares there."""
    if isinstance(tree, (Axes, Whole)):
        return ... if next(counter) == victim else "value"
    if isinstance(tree, dict):
        made = {key: pruned(part, victim, counter) for key, part in tree.items()}
        return {key: part for key, part in made.items() if part is not ...}
    if isinstance(tree, (list, tuple)):
        return type(tree)(part for part in (pruned(part, victim, counter) for part in tree) if part is not ...)
    return None


@given(TREES)
def test_a_structure_takes_a_payload_apart_and_puts_it_together(tree):
    if not count(tree):
        with pytest.raises(BridgeError, match="without a tensor"):
            Structure(tree)
        return
    structure = Structure(tree)
    assert len(structure.leaves) == count(tree)
    values = list(range(count(tree)))
    payload = structure.payload(values)
    assert structure.values(payload, name="edge") == values
    for leaf, value in zip(structure.leaves, values, strict=True):
        assert eval(f"payload{leaf.path}", {"payload": payload}) == value


@given(TREES.filter(count), st.integers(0, 7))
def test_a_missing_leaf_is_an_error_that_shows_the_declaration(tree, victim):
    victim %= count(tree)
    payload = pruned(tree, victim, itertools.count())
    if payload is ...:
        return
    with pytest.raises(ShapeError, match="the edge declares") as failure:
        Structure(tree).values(payload, name="edge")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("declared", "payload"),
    [
        ([Whole(), Whole()], {0: 1, 1: 2}),
        ({0: Whole()}, [1]),
        ([Whole(), None], (1, [])),
        ([Whole(), None], (1, {})),
        ([Whole(), []], (1, None)),
        ([Whole(), {}], (1, [])),
    ],
)
def test_a_container_of_another_kind_is_an_error(declared, payload):
    with pytest.raises(ShapeError, match="the edge declares"):
        Structure(declared).values(payload, name="edge")


@example([Axes(), Whole()], [[], Whole()])
@given(TREES.filter(count), TREES.filter(count))
def test_structures_that_differ_are_told_apart_by_their_text(one, other):
    def form(tree):
        if isinstance(tree, dict):
            return "dict", [(key, form(part)) for key, part in tree.items()]
        return (type(tree).__name__, list(map(form, tree))) if isinstance(tree, (list, tuple)) else tree

    assert (str(Structure(one)) == str(Structure(other))) == (form(one) == form(other))


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"a": 3}, r"payload\['a'\] is 3; declare Axes"),
        ([torch.float32], r"payload\[0\] is .*; declare Axes"),
        ({"a": None}, "without a tensor"),
    ],
)
def test_a_declaration_of_another_kind_is_an_error(declared, text):
    with pytest.raises(BridgeError, match=text):
        EdgeOptions(payload=declared)


def test_axes_are_names_and_payloads_go_direct():
    with pytest.raises(BridgeError, match="have a name twice"):
        Axes("b", "b")
    with pytest.raises(BridgeError, match="one more axis can be folded into the batch"):
        Axes(("s", "b"), "h")
    with pytest.raises(BridgeError, match="strategy 'direct' and no shape, not 'leader'"):
        EdgeOptions(payload=[Whole()], strategy="leader")
    with pytest.raises(BridgeError, match="no shape, not 'direct' and .*4"):
        EdgeOptions(payload=[Whole()], shape=(None, 4))


# -- on ranks -----------------------------------------------------------------------------------------------

DECLARED = {
    "features": Axes("b", "s", "h"),
    "deepstack": [Axes("b", "s", "h")] * 2,
    "grid": (Axes("b", "thw"), None),
    "positions": Axes("s", "h"),
    "table": Whole(),
    "scale": Whole(),
    "count": Whole(),
    "fixed": Axes("b", gradient=False),
}
ROWS, SEQUENCE = 4, 4


def whole_payload(seed, *, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "features": random(rows, SEQUENCE, 3),
        "deepstack": [random(rows, SEQUENCE, 2), random(rows, SEQUENCE, 1)],
        "grid": (torch.randint(0, 9, (rows, 3), generator=generator), None),
        "positions": random(SEQUENCE, 2),
        "table": random(2, 1, 3),
        "scale": random(),
        "count": 7,
        "fixed": random(rows),
    }


def held(leaf, whole, one, rank):
    """What ``rank`` of grid ``one`` holds of a whole leaf: from the grid's arithmetic alone."""
    if not isinstance(leaf, Axes):
        return whole
    batch, sequence = (leaf.names.index((name,)) if (name,) in leaf.names else None for name in "bs")
    return share(whole, one, rank, batch=batch, sequence=sequence).contiguous()


def weighted(tree, factor):
    """Gradients: ``factor`` times the value of each leaf that has one."""
    return tree_map(lambda leaf: factor * leaf if getattr(leaf, "requires_grad", False) else None, tree)


def lane_of(one, rank):
    """The coordinates of a rank along dp and cp."""
    coords = coords_of(one, rank)
    return coords.get("dp", 0), coords.get("cp", 0)


PAIRS = {
    "fan in": (grid(0, dp=2), grid(2)),
    "fan out": (grid(0), grid(1, dp=2)),
    "lanes that cross": (grid(0, dp=2), grid(2, dp=2)),
    "tensor parallel": (grid(0, tp=2), grid(2, tp=2)),
    "copies and lanes": (grid(0, tp=2), grid(2, dp=2)),
    "context parallel": (grid(0, cp=2), grid(2, dp=2)),
    "from lanes to context parallel": (grid(0, dp=2), grid(2, cp=2)),
    "the same ranks": (grid(0, dp=2), grid(0, tp=2)),
}


def on_ranks(pair, shapes, backend):
    """A case of the matrix; a few of them run every time."""
    nightly = (pair, shapes, backend) not in EVERY_TIME
    mode = "streams" if pair == "the same ranks" else None  # both ends on a rank, which sends first
    marks = [pytest.mark.ranks(4, backend=backend, fake_nccl=mode), *([pytest.mark.nightly] if nightly else [])]
    return pytest.param(pair, shapes, marks=marks, id=f"{pair}-{shapes}-{backend}")


EVERY_TIME = (
    ("copies and lanes", "variable", "gloo"),
    ("from lanes to context parallel", "fixed", "gloo"),
    ("the same ranks", "fixed", "fake_nccl"),
)
CASES = [on_ranks(*case) for case in itertools.product(PAIRS, ("fixed", "variable"), ("gloo", "fake_nccl"))]


@pytest.mark.parametrize(("pair", "shapes"), CASES)
def test_every_leaf_arrives_by_its_own_axes_and_gradients_come_back(ranks, pair, shapes):
    src, dst = PAIRS[pair]
    bridge = BridgeCommunicator(src, dst, payload=DECLARED, config=CONFIG, shapes=shapes, device=ranks.device)
    if not (bridge.is_source or bridge.is_destination):
        return
    receivers = list(bridge.dst.ranks)
    for step in range(3):
        whole = whole_payload(step, rows=ROWS * (1 + step % 2) if shapes == "variable" else ROWS)
        with bridge.batch():
            sending = receiving = None
            if bridge.is_source:
                mine = tree_map(lambda leaf, value: held(leaf, value, src, ranks.rank), DECLARED, whole)
                sending = bridge.isend_forward(mine)
            if bridge.is_destination:
                receiving = bridge.irecv_forward()
        back = None
        if receiving is not None:
            arrived = receiving.result()
            require_same(arrived, tree_map(lambda leaf, value: held(leaf, value, dst, ranks.rank), DECLARED, whole))
            assert [leaf.requires_grad for leaf in tree_leaves(arrived) if isinstance(leaf, torch.Tensor)] == [
                True, True, True, False, True, True, True, False
            ]  # fmt: skip
            back = weighted(arrived, 1.0 + sum(lane_of(dst, ranks.rank)))
        with bridge.batch():
            answering = None if back is None else bridge.isend_backward(back)
            gradients = bridge.irecv_backward() if bridge.is_source else None
        if gradients is not None:
            require_same(gradients.result(), expected_gradients(whole, src, dst, ranks.rank, receivers))
        for handle in (sending, answering):
            if handle is not None:
                handle.wait()
    bridge.destroy()


def expected_gradients(whole, src, dst, rank, receivers):
    """The sum over the parts of the destination, cut as the source has it; of a whole leaf on its first lane."""
    lanes = {lane_of(dst, other): other for other in receivers}

    def gradient(leaf, value):
        if not (isinstance(value, torch.Tensor) and value.is_floating_point() and leaf.gradient):
            return None
        value = value.clone().requires_grad_()
        parts = {lane: held(leaf, value, dst, other) for lane, other in lanes.items()}
        sum(((1.0 + sum(lane)) * part * part.detach()).sum() for lane, part in parts.items()).backward()
        cut = [isinstance(leaf, Axes) and (name,) in leaf.names for name in "bs"]
        gives = all(is_cut or place == 0 for is_cut, place in zip(cut, lane_of(src, rank), strict=True))
        return held(leaf, value.grad if gives else torch.zeros_like(value), src, rank)

    return tree_map(gradient, DECLARED, whole)


@pytest.mark.ranks(3)
def test_packed_leaves_are_cut_between_samples(ranks):
    """One lane of four samples to two lanes: tokens and images follow the samples."""
    src, dst = grid(0), grid(1, dp=2)
    declared = {"tokens": Axes("b", "h"), "images": Axes("b", "thw")}
    bridge = BridgeCommunicator(src, dst, payload=declared, config=CONFIG, shapes="variable")
    tokens, images = (3, 0, 2, 4), (1, 0, 2, 1)
    rows = torch.arange(9.0).repeat(2, 1).T.contiguous()
    sizes = torch.arange(12).view(4, 3)
    if bridge.is_source:
        bridge.send_forward({"tokens": Packed(rows, tokens), "images": Packed(sizes, images)})
        assert torch.equal(bridge.recv_backward()["tokens"], 2 * rows)
    else:
        lane = ranks.rank - 1
        arrived = bridge.recv_forward()
        assert torch.equal(arrived["tokens"], rows[slice(0, 3) if lane == 0 else slice(3, 9)])
        assert torch.equal(arrived["images"], sizes[slice(0, 1) if lane == 0 else slice(1, 4)])
        bridge.send_backward({"tokens": 2 * arrived["tokens"].detach(), "images": None})
    bridge.destroy()


@pytest.mark.ranks(2)
def test_a_wrong_payload_is_one_line_on_its_sender_and_leaves_the_edge_as_it_was(ranks):
    declared = {"x": Axes("b", "h"), "n": Whole(), "fixed": Axes("b", gradient=False)}
    bridge = BridgeCommunicator(grid(0), grid(1), payload=declared, config=CONFIG)
    x, ids = torch.randn(2, 3), torch.arange(2)
    good = {"x": x, "n": 2, "fixed": ids}
    if bridge.is_source:
        wrong = [
            ({"x": x, "n": 2}, ShapeError, r"payload is a dict with the keys \['x', 'n'\]; the edge declares"),
            ({**good, "x": None}, ShapeError, r"payload\['x'\] is None; the edge declares \[b, h\]"),
            ({**good, "x": 3.0}, ShapeError, r"payload\['x'\] is 3.0; the edge declares"),
            ({**good, "x": x[0]}, ShapeError, r"payload\['x'\] is a tensor of shape \(3,\) of .*; the edge declares"),
            ({**good, "n": "two"}, ShapeError, r"payload\['n'\] is 'two'; the edge declares whole"),
            ({**good, "n": Packed(x, (2,))}, ShapeError, r"payload\['n'\] is Packed, but whole has no batch axis"),
            ({**good, "fixed": torch.ones(2, requires_grad=True)}, BridgeError, "declared without gradient"),
            (x, ShapeError, "payload is a tensor of shape|payload is tensor"),
        ]
        for payload, error, text in wrong:
            with pytest.raises(error, match=text) as failure:
                bridge.send_forward(payload)
            assert "\n" not in str(failure.value)
        with pytest.raises(BridgeError, match="no payload that was sent"):
            bridge.irecv_backward()
        with pytest.raises(ShapeError, match=r"samples belong to a leaf: Packed\(leaf, samples\)"):
            bridge.isend_forward(good, samples=[2])
        bridge.send_forward(good)
        for payload, text in (
            ({**good, "n": 3}, r"sends .*3.* as payload\['n'\], but .*2.* was agreed"),
            ({**good, "n": 2.0}, r"payload\['n'\]"),
            ({**good, "x": x[:1]}, r"as payload\['x'\], but .*was agreed with the first message"),
        ):
            with pytest.raises(ShapeError, match=text):
                bridge.send_forward(payload)
        assert torch.equal(bridge.recv_backward()["x"], x)
    else:
        with pytest.raises(BridgeError, match="no payload that was received"):
            bridge.isend_backward(None)
        with pytest.raises(ShapeError, match="have a shape each; leave the shape out"):
            bridge.irecv_forward((2, 3))
        arrived = bridge.recv_forward()
        require_same(arrived, good)
        back = {"x": arrived["x"].detach(), "n": None, "fixed": None}
        for grads, text in (
            ({**back, "fixed": torch.ones(2)}, r"payload\['fixed'\] is .*, its leaf has no gradient"),
            ({**back, "n": torch.ones(())}, r"payload\['n'\] is .*, its leaf has no gradient"),
            (
                {**back, "x": torch.ones(2, 2)},
                r"payload\['x'\] is a tensor of shape \(2, 2\) of torch.float32, its leaf",
            ),
            ({"x": back["x"]}, "the edge declares"),
        ):
            with pytest.raises(ShapeError, match=text):
                bridge.send_backward(grads)
        bridge.send_backward({**back, "n": 2})  # a stage may give back the number that it was given
    bridge.destroy()


@pytest.mark.ranks(2)
def test_ranks_that_declare_different_edges_do_not_open_them(ranks):
    """Most of these would put elements in wrong places, or round them, without an error."""
    x = {"x": Axes("b", "h")}
    for argument, here, there in (
        ("payload", x, {**x, "y": Axes("b")}),
        ("dim_mapping", {"b": 0, "s": 1, "h": 2}, {"s": 0, "b": 1, "h": 2}),
        ("tensor_ndim", 2, 3),
        ("src_lanes", (1,), (2,)),
        ("strategy", "direct", "leader"),
        ("comm_dtype", None, torch.bfloat16),
    ):
        with pytest.raises(P2PMismatchError, match="open lane .* different settings .*payload") as failure:
            BridgeCommunicator(grid(0), grid(1), config=CONFIG, **{argument: (here, there)[ranks.rank]})
        assert "\n" not in str(failure.value)
        ranks.barrier()


@pytest.mark.ranks(3)
def test_source_ranks_that_send_different_numbers_are_named(ranks):
    bridge = BridgeCommunicator(grid(0, dp=2), grid(2), payload=[Axes("b"), Whole()], config=CONFIG)
    if bridge.is_source:
        bridge.send_forward([torch.ones(1), ranks.rank])
    else:
        with pytest.raises(ShapeError, match=r"payload\[1\]: ranks 0 and 1 send .*; they send the same"):
            bridge.recv_forward()
    bridge.destroy()


@pytest.mark.ranks(4)
def test_the_verbs_of_many_modules_carry_payloads_and_add_up_their_gradients(ranks):
    grids = {"enc": grid(0, dp=2), "one": grid(2), "two": grid(3)}
    comm = MultiModulePipelineCommunicator(
        grids,
        {"enc": ["one", "two"], "one": [], "two": []},
        CONFIG,
        edges={
            ("enc", name): EdgeOptions(
                payload={"x": Axes("b", "h"), "ids": Axes("b"), "late": Axes("b", gradient=name == "two")}
            )
            for name in ("one", "two")
        },
    )
    assert comm.payload_edges == {Edge(0, 1), Edge(0, 2)}
    rows = torch.arange(6.0).view(2, 3)
    if ranks.rank < 2:
        own = slice(ranks.rank, ranks.rank + 1)
        payload = {"x": rows[own], "ids": torch.tensor([ranks.rank]), "late": rows[own, 0]}
        comm.send_forward({"enc": payload})
        back = comm.recv_backward()["enc"]
        assert torch.equal(back["x"], 5 * payload["x"])
        assert torch.equal(back["late"], 3 * payload["late"])
        assert back["ids"] is None
    else:
        arrived = comm.recv_forward()["enc"]
        require_same(arrived, {"x": rows, "ids": torch.tensor([0, 1]), "late": rows[:, 0]})
        late = 3 * arrived["late"].detach() if ranks.rank == 3 else None
        comm.send_backward({"enc": {"x": ranks.rank * arrived["x"].detach(), "ids": None, "late": late}})
    if ranks.rank < 2:
        with pytest.raises(ShapeError, match="the edge declares"):
            comm.isend(rows, edge=Edge(0, 1), direction=Direction.FORWARD)
    comm.destroy()
