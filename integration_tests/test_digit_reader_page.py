"""The page of a digit reader's run, while it goes on and at its end; and what a person reads before the first step."""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from digit_reader.command_line import parse_options
from digit_reader.display import Figures
from digit_reader.opening import opening, plan_of_step, shape
from digit_reader.page import RunPage, Strip, curves, png
from digit_reader.vocabulary import targets_of
from pipegrid.schedules import verify

SHAPES = [
    [],
    ["--placement", "colocated"],
    ["--placement", "mixed", "--language", "pp=2,vpp=2", "--schedule", "zero_bubble_v"],
    ["--schedule", "u_shape"],
    ["--language", "pp=1,dp=2", "--schedule", "gpipe"],
]


def figures(step, loss=1.0, accuracy=None):
    return Figures(step=step, loss=loss, samples_per_second=600.0, accuracy=accuracy, bubble=0.4)


@pytest.mark.parametrize("arguments", SHAPES, ids=" ".join)
def test_the_opening_names_every_module_and_draws_the_plan(arguments):
    options = parse_options(arguments)
    text = opening(options)
    plan = plan_of_step(options)
    assert verify(plan).plan.num_microbatches == options.microbatches
    for name in options.grids:
        assert re.search(rf"^{name} +ranks? \d", shape(options), re.MULTILINE)
    assert sum("|" in line and "(position" in line for line in text.splitlines()) == plan.num_positions
    assert str(options.out / "index.html") in text


def test_a_page_follows_the_run_and_ends_complete(tmp_path):
    options = parse_options(["--out", str(tmp_path / "run"), "--steps", "60"])
    page = RunPage(options, [], difference=3e-6)
    file = tmp_path / "run" / page.write(done=False)
    early = file.read_text()
    assert 'http-equiv="refresh"' in early
    assert "come after a few steps" in early
    assert "plan, 1f1b" in early
    assert "<figure>" not in early
    page.rows += [figures(20), figures(40, 0.5, 0.25), figures(60, 0.01, 0.75)]
    page.strips = [Strip(407, [[0.0, 1.0]], targets_of(407)), Strip(8, [[0.0]], targets_of(9))]
    page.write(done=True)
    late = file.read_text()
    assert 'http-equiv="refresh"' not in late
    assert "60 of 60</b>" in late
    assert "75.0%</b>" in late
    assert 'class="good">407: four hundred and seven<' in late
    assert 'class="bad">8: nine<' in late
    assert 'class="good">&#10003; After the first step' in late
    assert "3.0e-06" in late
    assert [path.name for path in file.parent.iterdir()] == ["index.html"]
    RunPage(options, page.rows, difference=1e-4).write(done=True)
    assert 'class="bad">&#10007; After the first step' in file.read_text()
    RunPage(options, page.rows).write(done=True)
    assert "Not measured in this run" in file.read_text()


@given(
    st.lists(st.tuples(st.floats(1e-5, 50), st.none() | st.floats(0, 1)), min_size=1, max_size=40),
    st.integers(0, 20),
)
def test_curves_lie_inside_their_picture(values, later):
    rows = [figures(step, loss, accuracy) for step, (loss, accuracy) in enumerate(values, 1)]
    picture = ET.fromstring(curves(rows, len(rows) + later).split("</svg>")[0] + "</svg>")
    lines = {path.get("class"): path.get("d") for path in picture.iter("path") if path.get("class") != "axis"}
    drawn = {css: [tuple(map(float, point.split())) for point in line[1:].split("L")] for css, line in lines.items()}
    assert all(len(points) > 1 for points in drawn.values()), "a line through one point is not to be seen"
    drawn |= {dot.get("class"): [(float(dot.get("cx")), float(dot.get("cy")))] for dot in picture.iter("circle")}
    assert set(drawn) == {"loss"} | ({"exact"} if any(accuracy is not None for _, accuracy in values) else set())
    for points in drawn.values():
        assert all(56 <= x <= 944 and 9.9 <= y <= 214.1 for x, y in points)
        assert points == sorted(points, key=lambda point: point[0])
    heights = [y for _, y in drawn["loss"]]
    for (above, below), (first, second) in zip(itertools.pairwise(heights), itertools.pairwise(rows), strict=True):
        if not math.isclose(first.loss, second.loss, rel_tol=0.05):
            assert (above > below) == (first.loss < second.loss)


@given(st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False))
def test_a_strip_is_a_picture_of_its_pixels(height, width, random):
    pixels = [[random.random() for _ in range(width)] for _ in range(height)]
    read = image.imread(io.BytesIO(base64.b64decode(png(pixels))))
    assert read.shape[:2] == (height, width)
    assert np.allclose(read if read.ndim == 2 else read[..., 0], pixels, atol=1 / 255)


def test_a_strip_is_right_if_all_words_are():
    strip = Strip(407, [[0.0]], targets_of(407))
    assert strip.is_right
    assert not evolve(strip, number=408).is_right
    assert not evolve(strip, tokens=strip.tokens[1:]).is_right
