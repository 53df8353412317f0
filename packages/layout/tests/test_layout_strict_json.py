"""The reader of JSON documents: numbers are finite, keys stand once, and every reader has its own typed error."""

import json
import math

import pytest

from pipegrid.core.strict_json import read_json
from pipegrid.layout import LayoutError, PipelineParallelLayerLayout

BEYOND = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 310, "9" * 5000]


@pytest.mark.parametrize("number", BEYOND, ids=lambda text: text[:10])
def test_a_number_that_is_not_finite_is_an_error(number):
    with pytest.raises(ValueError, match="is no finite number"):
        read_json(f'{{"a": [1, {number}]}}')


@pytest.mark.parametrize("number", BEYOND, ids=lambda text: text[:10])
def test_a_document_of_another_program_may_have_such_numbers(number):
    assert not math.isfinite(read_json(number, finite=False))


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_a_layout_with_such_a_number_is_a_layout_error(number):
    with pytest.raises(LayoutError, match="no finite number"):
        PipelineParallelLayerLayout.from_json(f'{{"layout": "EL", "pipeline_model_parallel_size": {number}}}')


@pytest.mark.parametrize("number", [1.7976931348623157e308, 5e-324, -0.0, 12, int("1" * 300)])
def test_finite_numbers_are_read_exactly(number):
    assert repr(read_json(json.dumps(number))) == repr(number)


def test_a_document_that_nests_too_deeply_is_no_json():
    with pytest.raises(json.JSONDecodeError, match="too deeply"):
        read_json("[" * 200_000)
