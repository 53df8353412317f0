"""The report says what each stage costs and holds, in numbers, as a table and as a picture."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from pipegrid.layout import LayerMemory, LayoutError, LayoutGrammar, PipelineParallelLayerLayout, report

SVG = "{http://www.w3.org/2000/svg}"
COSTS = {"embedding": 0.5, "decoder": 1.0, "loss": 1.5}


def test_numbers():
    one = report(PipelineParallelLayerLayout("Et|tt||tL", 4), COSTS)
    assert one.costs == (1.5, 2.0, 0.0, 2.5)
    assert one.costs_by_kind == (
        {"embedding": 0.5, "decoder": 1.0},
        {"decoder": 2.0},
        {},
        {"decoder": 1.0, "loss": 1.5},
    )
    assert (one.bottleneck, one.mean, one.spread) == (2.5, 1.5, 2.5)
    assert one.imbalance == pytest.approx(2.5 / 1.5)
    assert one.shares == pytest.approx((0.25, 1 / 3, 0.0, 2.5 / 6))
    assert (one.memory, one.rank_memory, one.limits) == (None, None, None)


def test_memory_of_chunks_that_share_a_rank():
    layout = PipelineParallelLayerLayout("tt|t|t|tt", 2)
    memory = {"decoder": LayerMemory(fixed=10, per_microbatch=1)}
    one = report(layout, {"decoder": 1}, memory=memory, in_flight=[[[3, 1], [2, 2]], [[1, 4]]], limit=[40, 50])
    assert one.memory == (20 + 2 * 3, 10 + 1, 10 + 2, 20 + 2 * 4)
    assert one.rank_memory == (max(30 + 2 * 3 + 1, 30 + 2 * 2 + 2), 30 + 1 + 2 * 4)
    assert one.limits == (40, 50)
    assert one.summary().endswith("memory: PP rank 0 is fullest, 37 of 40")


def test_table():
    one = report(PipelineParallelLayerLayout("Et|tt||tL", 2), COSTS, memory={"embedding": 1, "decoder": 2, "loss": 3})
    assert (
        str(one)
        == """\
stage  PP rank  VPP rank  cost  share  memory  layers
    0        0         0   1.5  25.0%      12  embedding,decoder  ##############
    1        1         0     2  33.3%      12  decoder*2          ###################
    2        0         1     0   0.0%       0  (empty stage)
    3        1         1   2.5  41.7%       5  decoder,loss       ########################
bottleneck 2.5 (stage 3), mean 1.5, spread 2.5, imbalance (max / mean) 1.6667
memory: PP rank 1 is fullest, 13"""
    )


def test_a_layout_that_costs_nothing():
    one = report(PipelineParallelLayerLayout("t|t", 2), [0, 0])
    assert (one.imbalance, one.shares) == (1.0, (0.0, 0.0))
    assert "imbalance (max / mean) 1.0000" in one.table()
    ET.fromstring(one.svg())


def test_the_picture_has_a_bar_per_layer_kind_and_stage():
    grammar = LayoutGrammar(symbols={"v": "vision"})
    layout = PipelineParallelLayerLayout("Ev|tt||tL", 4, grammar=grammar)
    one = report(layout, {**COSTS, "vision": 2}, memory=[1, 1, 1, 1, 1, 1], limit=8)
    root = ET.fromstring(one.svg())
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles[:4] == [
        "stage 0: embedding,vision, cost 2.5",
        "stage 1: decoder*2, cost 2",
        "stage 2: (empty stage), cost 0",
        "stage 3: decoder,loss, cost 2.5",
    ]
    assert titles[4] == "PP rank 0: memory 8 of 8"
    assert len(titles) == 8
    groups = root.findall(f"{SVG}g")
    heights = [[float(bar.get("height")) for bar in group.findall(f"{SVG}rect")] for group in groups]
    assert [len(bars) for bars in heights] == [2, 1, 0, 2, 1, 1, 1, 1]
    assert sum(heights[0]) == pytest.approx(sum(heights[3]))  # 2.5 each
    assert heights[1][0] == pytest.approx(sum(heights[0]) * 2 / 2.5, rel=1e-3)
    assert heights[4][0] == pytest.approx(sum(heights[0]))  # full: as high as the highest stage
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"vision", "decoder", "mean 1.75"} <= set(texts)


def test_text_in_the_picture_is_escaped():
    root = ET.fromstring(report(PipelineParallelLayerLayout("t|t", 2), [1, 1]).svg())
    assert root.find(f"{SVG}text").text == "'t|t', PP 2"


def test_plain_data():
    one = report(PipelineParallelLayerLayout("t|t", 2), [1, 3], memory=[1, 1], limit=9)
    data = json.loads(json.dumps(one.to_dict()))
    assert data["stages"][1] == {
        "stage": 1,
        "pp_rank": 1,
        "vp_stage": 0,
        "cost": 3.0,
        "share": 0.75,
        "memory": 1.0,
    }
    assert (data["bottleneck"], data["imbalance"], data["rank_memory"], data["limits"]) == (
        3.0,
        1.5,
        [2.0, 1.0],
        [9, 9],
    )


def test_costs_must_fit_the_layout():
    with pytest.raises(LayoutError, match=re.escape("costs must have 2 values, one for each of the layers")):
        report(PipelineParallelLayerLayout("t|t", 2), [1, 2, 3])
