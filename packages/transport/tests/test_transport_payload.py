"""Payloads to tensors and back, without ranks."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from pipegrid.core.lanes import Tally
from pipegrid.transport import P2PUsageError, is_single_shape
from pipegrid.transport.messages.payload import (
    ExpectedShape,
    carried,
    check_sendable,
    flatten,
    receive_buffers,
    signature_of,
)
from pipegrid.transport.messages.trees import unflatten

CPU = torch.device("cpu")
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


class Output(NamedTuple):
    hidden: Any
    mask: Any


def tensors_of(shape, dtype):
    return torch.ones(shape, dtype=torch.float32).to(dtype)


class TestFlatten:
    def test_keeps_structure_and_none(self):
        a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
        payload = {"x": a, 7: [None, (b, [])], "y": {"z": c}}
        found, tree = flatten(payload)
        assert found == [a, b, c]
        assert unflatten(tree, found) == payload

    def test_of_one_tensor_is_just_that(self):
        a = torch.zeros(1)
        assert flatten(a) == ([a], 0)
        assert flatten(None) == ([], None)

    @pytest.mark.parametrize(
        ("payload", "text"),
        [
            (3.0, "contains a float"),
            (["text"], "contains a str"),
            ({(1, 2): None}, r"a dict with keys \[\(1, 2\)\]"),
            ({True: None}, r"a dict with keys \[True\]"),
            ([{"a": {1, 2}}], "contains a set"),
            (Output(None, None), r"contains a Output; it must consist of .* \(not subclasses"),
            ([OrderedDict(x=None)], "contains a OrderedDict; it must consist of"),
            (torch.Size([2]), "contains a Size; it must consist of"),
        ],
    )
    def test_says_what_is_no_payload(self, payload, text):
        with pytest.raises(P2PUsageError, match=text):
            flatten(payload)


class TestSendable:
    def check(self, tensor, dtype=None):
        check_sendable(tensor, device=CPU, dtype=dtype, lane="0>1")

    def test_contiguous_tensors_of_any_dtype_are(self):
        for dtype in DTYPES:
            self.check(tensors_of((2, 3), dtype))

    @pytest.mark.parametrize(
        "tensor",
        [torch.zeros(2, 3).t(), torch.zeros(4)[::2], torch.zeros(1).expand(3)],
        ids=["transposed", "strided", "expanded"],
    )
    def test_others_are_refused_with_the_remedy(self, tensor):
        with pytest.raises(P2PUsageError, match=r"not contiguous.*send tensor\.contiguous\(\)"):
            self.check(tensor)

    @pytest.mark.parametrize(
        "tensor",
        [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(1, dtype=torch.complex64).conj().imag],
        ids=["conjugate", "negative"],
    )
    def test_views_that_change_values_are_refused_with_the_remedy(self, tensor):
        assert tensor.is_contiguous()
        with pytest.raises(P2PUsageError, match=r"a view .*send tensor\.resolve_(conj|neg)\(\), a copy"):
            self.check(tensor)
        self.check(tensor.resolve_conj().resolve_neg())

    @pytest.mark.filterwarnings("ignore:.*quantiz.*:")
    def test_quantized_tensors_are_refused_with_the_remedy(self):
        tensor = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
        with pytest.raises(P2PUsageError, match=r"quantized tensor, whose scale does not travel; send its int_repr"):
            self.check(tensor)
        self.check(tensor.int_repr())

    def test_parts_of_distributed_tensors_are_refused_with_the_remedy(self):
        class Distributed(torch.Tensor):
            to_local = torch.Tensor.detach

        with pytest.raises(P2PUsageError, match=r"a DTensor, .* send its to_local\(\)"):
            self.check(torch.ones(2).as_subclass(Distributed))

    @pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
    def test_nested_and_sparse_tensors_have_no_contiguous_copy(self):
        for tensor in (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.zeros(2, 2).to_sparse()):
            with pytest.raises(P2PUsageError, match=r"it is nested or torch\.\w+; send a dense copy"):
                self.check(tensor)

    def test_of_another_device_are_refused(self):
        with pytest.raises(P2PUsageError, match="tensors of device cpu, got one of meta"):
            self.check(torch.zeros(2, device="meta"))

    def test_of_another_floating_dtype_are_refused_and_integers_are_not(self):
        self.check(torch.zeros(2, dtype=torch.int64), torch.bfloat16)
        with pytest.raises(P2PUsageError, match=r"torch\.float32, but pipeline_dtype is torch\.bfloat16"):
            self.check(torch.zeros(2), torch.bfloat16)


NOTHING = torch.zeros(1, dtype=torch.uint8)


class TestCarried:
    def test_a_plain_tensor_goes_as_it_is(self):
        tensor = torch.ones(3)
        assert carried([tensor], NOTHING)[0] is tensor

    def test_no_graph_goes_along(self):
        assert not carried([torch.ones(3, requires_grad=True)], NOTHING)[0].requires_grad
        assert not carried([torch.ones(3, requires_grad=True)] * 2, NOTHING)[0].requires_grad

    def test_exotic_dtypes_go_as_bytes_of_the_same_memory(self):
        tensor = torch.ones(3, dtype=torch.complex64)
        (wire,) = carried([tensor], NOTHING)
        assert wire.dtype is torch.uint8
        assert wire.data_ptr() == tensor.data_ptr()
        assert carried([torch.ones((), dtype=torch.complex64)], NOTHING)[0].numel() == 8

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn])
    @pytest.mark.parametrize("rows", [1, 2])
    def test_the_number_of_rows_decides_nothing(self, rows, dtype):
        """One element may have any stride, and is contiguous."""
        batch = torch.ones(rows, 2).to(dtype)
        column = batch[:, 1] if rows == 1 else batch[:, 1].contiguous()
        assert column.is_contiguous()
        (wire,) = carried([column], NOTHING)
        assert wire.data_ptr() == column.data_ptr()
        assert bytes(wire.tolist()) == rows * bytes(torch.ones(1).to(dtype).view(torch.uint8).tolist())

    @pytest.mark.parametrize("tensors", [[], [torch.zeros(0)], [torch.zeros(0, 3), torch.zeros(2, 0)]])
    def test_a_message_of_no_bytes_goes_as_one(self, tensors):
        assert list(carried(tensors, NOTHING)) == [NOTHING]

    def test_empty_tensors_among_others_do_not_go(self):
        full = torch.ones(3)
        assert len(carried([torch.zeros(0), full, torch.zeros(2, 0)], NOTHING)) == 1


class TestShapes:
    @pytest.mark.parametrize("x", [(2, 3), [2, 3], torch.Size([2, 3]), torch.Size([]), (), (0,), [torch.tensor(2)]])
    def test_single(self, x):
        assert is_single_shape(x)

    @pytest.mark.parametrize("x", [[], [(2, 3)], [()], [[2], [3]], None, 3, "23", (2, -1), (2, None), (True,), (2.0,)])
    def test_not_single(self, x):
        assert not is_single_shape(x)

    def test_an_expectation_is_one_shape_or_a_list_with_none(self):
        assert ExpectedShape.of([2, 3]) == ExpectedShape(True, ((2, 3),))
        assert ExpectedShape.of([(2, 3), None, ()]) == ExpectedShape(False, ((2, 3), None, ()))
        assert str(ExpectedShape.of([(2, 3), None])) == "[[2, 3], None]"

    @pytest.mark.parametrize("shapes", [3, "ab", [2, None], {"a": (2,)}, [(2,), "x"]])
    def test_anything_else_is_refused(self, shapes):
        with pytest.raises(P2PUsageError, match="shapes of a receive are"):
            ExpectedShape.of(shapes)


UNREAD = Tally()


def buffers_for(payload, expected=None, dtype=None, tally=UNREAD):
    expected = None if expected is None else ExpectedShape.of(expected)
    return receive_buffers(signature_of(*flatten(payload)), expected, device=CPU, tally=tally, dtype=dtype)


class TestWithoutMemory:
    """Tensors that gloo would read beyond their end, or that have no shape."""

    def check(self, tensor):
        check_sendable(tensor, device=CPU, dtype=None, lane="0>1")

    @pytest.mark.parametrize("offset", [0, 2])
    def test_a_freed_storage(self, offset):
        tensor = torch.ones(4)
        view = tensor[offset:]
        self.check(view)
        tensor.untyped_storage().resize_(0)
        with pytest.raises(P2PUsageError, match=r"of shape \[\d\] without memory: it was freed"):
            self.check(view)

    def test_a_fake_tensor(self):
        with FakeTensorMode(), pytest.raises(P2PUsageError, match="or is a fake tensor"):
            self.check(torch.ones(4))

    def test_an_uninitialized_parameter(self):
        with pytest.raises(P2PUsageError, match="a parameter without a shape; run its module once"):
            self.check(torch.nn.LazyLinear(2).weight)

    def test_a_tensor_of_no_elements_needs_none(self):
        self.check(torch.ones(0, 3))


@pytest.mark.parametrize("levels", [101, 900])
def test_a_payload_has_at_most_100_levels(levels):
    payload = torch.ones(1)
    for _ in range(100):
        payload = [payload]
    assert len(flatten(payload)[0]) == 1
    for _ in range(levels - 100):
        payload = [payload]
    with pytest.raises(P2PUsageError, match="more than 100 levels, or contains itself"):
        flatten(payload)


def test_a_payload_does_not_contain_itself():
    payload = []
    payload.append(payload)
    with pytest.raises(P2PUsageError, match="or contains itself"):
        flatten(payload)


class TestReceiveBuffers:
    @given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=5)), max_size=4))
    def test_buffers_are_like_what_was_announced(self, parts):
        payload = [tensors_of(shape, dtype) for dtype, shape in parts]
        buffers = buffers_for(payload, tally=(tally := Tally()))
        for _ in range(2):
            made = buffers.take()
            assert [(b.shape, b.dtype, b.is_contiguous()) for b in made] == [(p.shape, p.dtype, True) for p in payload]
            buffers.keep()  # from now on from templates
        assert tally.allocations == 2

    def test_floating_tensors_require_grad_and_others_do_not(self):
        buffers = buffers_for(
            [torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.complex64)]
        )
        assert [t.requires_grad for t in buffers.payload(buffers.take())] == [True, False, True]

    def test_where_the_sender_marks_some_only_those_do(self):
        buffers = buffers_for({"x": torch.zeros(1, requires_grad=True), "mask": torch.zeros(1)})
        received = buffers.payload(buffers.take())
        assert received["x"].requires_grad
        assert not received["mask"].requires_grad

    def test_buffers_given_back_are_used_again_without_their_past(self):
        buffers = buffers_for(torch.zeros(3), tally=(tally := Tally()))
        first = buffers.take()
        (buffers.payload(first) * 2).sum().backward()
        buffers.release(first, ())
        again = buffers.payload(buffers.take())
        assert again.data_ptr() == first[0].data_ptr()
        assert again.is_leaf
        assert again.grad is None
        assert tally.allocations == 1

    @pytest.mark.parametrize(
        ("sent", "expected"),
        [
            (torch.zeros(2, 3), (2, 3)),
            ([torch.zeros(2, 3)], (2, 3)),
            (torch.zeros(2, 3), [(2, 3)]),
            ((torch.zeros(2), None, torch.zeros(())), [(2,), None, ()]),
            (None, [None]),
        ],
    )
    def test_an_expected_shape_that_fits_decides_the_form(self, sent, expected):
        buffers = buffers_for(sent, expected)
        received = buffers.payload(buffers.take())
        if is_single_shape(expected):
            assert received.shape == expected
        else:
            assert [None if part is None else tuple(part.shape) for part in received] == list(expected)

    @pytest.mark.parametrize(
        ("sent", "expected"),
        [
            (torch.zeros(2, 3), (3, 2)),
            (torch.zeros(2, 3), (6,)),
            (torch.zeros(2, 3), [(2, 3), (2, 3)]),
            ([torch.zeros(2), None], [(2,), (2,)]),
            (None, (2,)),
            ({"a": torch.zeros(2)}, (2,)),
        ],
    )
    def test_an_expected_shape_that_does_not_fit_has_no_buffers(self, sent, expected):
        assert buffers_for(sent, expected) is None

    def test_where_shapes_vary_only_the_form_counts(self):
        signature = signature_of(*flatten([torch.zeros(2), torch.zeros(3)]))
        for expected, fits in (([(), ()], True), ([(9,), None], True), ([()], False), ((), False)):
            found = receive_buffers(signature, ExpectedShape.of(expected), device=CPU, tally=UNREAD, exact=False)
            assert (found is not None) == fits

    def test_nor_has_another_floating_dtype(self):
        assert buffers_for(torch.zeros(2), dtype=torch.float16) is None
        assert buffers_for(torch.zeros(2, dtype=torch.int8), dtype=torch.float16) is not None
