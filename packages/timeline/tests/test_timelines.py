"""Pictures of schedules: what is drawn is what happened, in every format, alone and side by side."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    Actor,
    Costs,
    Routes,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    routed,
    simulate,
    zero_bubble_v,
)
from pipegrid.timeline import timeline
from pipegrid.timeline.ascii import ascii_timeline
from pipegrid.timeline.kinds import COLOURS, tint
from pipegrid.timeline.perfetto import perfetto, write_perfetto
from pipegrid.timeline.svg import svg, write_svg
from pipegrid.timeline.timeline import (
    Counter,
    Flow,
    Span,
    Timeline,
    TimelineError,
    as_panels,
    scaled,
    summary,
    time_text,
)

SVG = "{http://www.w3.org/2000/svg}"


def two_stages(**options) -> Timeline:
    """Two stages, one microbatch, with the activation and the gradient on their way between them."""
    spans = [
        Span(0, 0, 1, "F", 0, 0),
        Span(0, 1, 1.5, "SEND_F", 0, 0),
        Span(1, 1, 1.5, "RECV_F", 1, 0),
        Span(1, 1.5, 2.5, "F", 1, 0),
        Span(1, 2.5, 4.5, "B", 1, 0),
        Span(1, 4.5, 5, "SEND_B", 1, 0),
        Span(0, 4.5, 5, "RECV_B", 0, 0),
        Span(0, 5, 7, "B", 0, 0),
    ]
    return Timeline(["images (rank 0)", "language (rank 1)"], spans, [Flow(1, 2), Flow(5, 6)], **options)


def rectangles(text: str) -> list[dict[str, str]]:
    return [element.attrib for element in ET.fromstring(text).iter(f"{SVG}rect")]


def bubbles(text: str) -> list[float]:
    """Widths of the rows' backgrounds (the legend's swatch is 14 wide)."""
    found = [float(r["width"]) for r in rectangles(text) if r.get("class") == "bubble"]
    return [width for width in found if width != 14]


def texts(text: str) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(text).iter(f"{SVG}text")]


def test_figures_count_work_once_and_transfers_not_at_all():
    timeline = two_stages()
    assert timeline.makespan == 7
    assert timeline.busy == (3, 3)
    assert timeline.bubble == pytest.approx(1 - 6 / 14)
    assert timeline.stages == ((0,), (1,))


def test_overlapping_work_of_one_row_is_busy_once():
    spans = [Span(0, 0, 2, "F", 0, 0), Span(0, 1, 3, "B", 0, 1), Span(0, 1, 2, "W", 0, 1)]
    timeline = Timeline(["both ranks"], spans)
    assert timeline.busy == (3,)
    assert timeline.bubble == 0


def test_a_timeline_is_a_value():
    assert two_stages() == two_stages()
    assert hash(two_stages()) == hash(two_stages())
    assert two_stages(title="a") != two_stages(title="b")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Span(0, 2, 1, "F", 3, 4), r"3F4 on row 0 starts at 2 and ends before, at 1"),
        (lambda: Span(0, 0, float("nan"), "F", 3, 4), r"Span.end is nan; it must be a finite number"),
        (lambda: Span(0, 0, 1, ""), r"Span.kind is ''; it must be a string that is not empty"),
        (lambda: Timeline(["a"], [Span(1, 0, 1, "F", 0, 5)]), r"'0F5' is on row 1; the timeline has 1 rows"),
        (lambda: Timeline(["a"], [], counters=[Counter(2, "live", [])]), r"'live' is on row 2"),
        (lambda: Timeline(["a"], [], [Flow(0, 1)]), r"a flow names span 1; the timeline has 0 spans"),
        (
            lambda: Timeline(["a", "b"], [], notes=["only one"]),
            r"there are 1 notes for 2 rows; give one for each",
        ),
        (lambda: Counter(0, "live", [(1, 1), (0, 2)]), r"counter 'live' on row 0 go back in time"),
        (lambda: as_panels([]), r"timeline is \[\] .*; give timeline"),
    ],
)
def test_what_does_not_fit_together_is_refused(build, message):
    with pytest.raises(TimelineError, match=message):
        build()


def test_svg_has_a_named_row_a_number_per_microbatch_and_a_legend():
    text = svg(two_stages(title="two <stages> & one microbatch", notes=["idle 57%", "idle 58%"]))
    shown = texts(text)
    for expected in (
        "two <stages> & one microbatch",
        "images (rank 0)",
        "language (rank 1)",
        "idle 57%",
        "makespan 7 · bubble 57.1%",
        "F forward",
        "B backward",
        "activation on its way",
        "bubble",
        "Numbers are microbatches.",
    ):
        assert expected in shown
    assert shown.count("0") >= 4  # each compute is numbered
    tips = [element.text for element in ET.fromstring(text).iter(f"{SVG}title")]
    assert "1F0: 1.5 to 2.5 (1)" in tips


def test_svg_places_spans_to_scale_and_never_outside():
    text = svg(two_stages(), width=700)
    assert bubbles(text) == [700, 700]
    left = next(float(r["x"]) for r in rectangles(text) if r.get("class") == "bubble")
    forward = next(r for r in rectangles(text) if r.get("fill") == "#0072b2")
    assert float(forward["x"]) == pytest.approx(left, abs=1)
    assert float(forward["width"]) == pytest.approx(100, abs=1)
    whole = ET.fromstring(text)
    for r in rectangles(text)[1:]:
        assert 0 <= float(r["x"]) <= float(r["x"]) + float(r["width"]) <= float(whole.attrib["width"])
        assert 0 <= float(r["y"]) <= float(r["y"]) + float(r["height"]) <= float(whole.attrib["height"])


def test_svg_shades_the_later_stages_of_a_row():
    one = Timeline(["p"], [Span(0, 0, 1, "F", 0, 0), Span(0, 1, 2, "F", 4, 0)])
    text = svg(one)
    spans = [r["fill"] for r in rectangles(text) if "fill" in r and float(r["width"]) > 14]
    assert len(set(spans)) == 2
    assert spans[0] == "#0072b2"
    assert any("Darkest: the first stage" in line for line in texts(text))


def test_collectives_look_like_no_shade_of_a_compute():
    def apart(one, other):
        return sum(abs(int(one[i : i + 2], 16) - int(other[i : i + 2], 16)) for i in (1, 3, 5))

    shades = [tint(COLOURS[kind], share / 10) for kind in "FBIW" for share in range(7)]
    for kind in ("REDUCE", "COLLECTIVE"):
        assert min(apart(COLOURS[kind], shade) for shade in shades) > 70
        spans = [Span(0, 0, 1, "F", 0, 0), Span(0, 1, 2, "F", 4, 0)]
        spans += [Span(0, 2, 4, kind, 0, 0), Span(0, 4, 6, kind, 4, 0)]  # 200 wide each, where an F is 100
        drawn = rectangles(svg(Timeline(["p"], spans), width=600))[1:]
        fills = [r["fill"] for r in drawn if 150 < float(r["width"]) < 300]
        assert fills == [COLOURS[kind], "url(#hatch)"] * 2


def test_svg_draws_arrows_only_when_asked():
    flows = re.compile('class="flow"')
    assert len(flows.findall(svg(two_stages()))) == 0
    assert len(flows.findall(svg(two_stages(), arrows=True))) == 2


def test_svg_draws_live_activations_under_the_row():
    counted = two_stages(counters=[Counter(0, "live microbatches", [(0, 1), (7, 0)])])
    assert 'class="memory"' in svg(counted)
    assert "peak live microbatches 1" in summary(counted)


def test_planned_and_measured_share_a_file_and_a_scale(tmp_path):
    planned = scaled(two_stages(title="planned"), 2e-3, unit="s")
    slower = scaled(two_stages(title="measured"), 4e-3, unit="s")
    measured = scaled(slower, 1.0, unit="s")
    write_svg([planned, measured], tmp_path / "both.svg", width=700)
    text = (tmp_path / "both.svg").read_text()
    assert "makespan 14 ms" in text
    assert "makespan 28 ms" in text
    assert bubbles(text) == [350, 350, 700, 700]  # the longer one fills the width, the other its share of it

    write_perfetto([planned, measured], tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "planned", 2: "measured"}
    slices = [e for e in events if e["ph"] == "X"]
    ends = {pid: max(e["ts"] + e["dur"] for e in slices if e["pid"] == pid) for pid in names}
    assert ends == {1: pytest.approx(14_000), 2: pytest.approx(28_000)}


def test_timelines_without_a_common_unit_each_fill_the_width():
    measured = scaled(two_stages(), 4e-3, unit="s")
    assert bubbles(svg([two_stages(), measured], width=700)) == [700] * 4


def test_a_clock_that_did_not_start_at_zero_is_drawn_from_zero():
    late = Timeline(["rank 0"], [Span(0, 1000.0, 1000.5, "F", 0, 0), Span(0, 1000.5, 1002.0, "B", 0, 0)], unit="s")
    assert bubbles(svg(late, width=700)) == [700]
    slices = [e for e in perfetto(late)["traceEvents"] if e["ph"] == "X"]
    assert [e["ts"] for e in slices] == [0, 500_000]
    assert "|F0" in ascii_timeline(late)


def test_perfetto_arrows_start_and_end_inside_the_slices_of_a_send_and_its_receive():
    events = perfetto(two_stages())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]

    def around(point):
        (found,) = (e for e in slices if e["tid"] == point["tid"] and e["ts"] <= point["ts"] < e["ts"] + e["dur"])
        return found

    starts = [e for e in events if e["ph"] == "s"]
    assert len(starts) == 2
    for start in starts:
        (finish,) = (e for e in events if e["ph"] == "f" and e["id"] == start["id"])
        assert around(start)["cat"].replace("SEND", "RECV") == around(finish)["cat"]
        assert finish["bp"] == "e"


def in_nanoseconds(event):
    start = round(event["ts"] * 1000)
    return start, start + round(event.get("dur", 0) * 1000)


FREE_SENDS = lower(
    multi_module_1f1b(ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]}), 4), collectives={Edge(0, 1): "bridge"}
)


@pytest.mark.parametrize("costs", [Costs(), Costs(latency=0.1), Costs(F=0.3, I=0.1, W=0)], ids=["free", "slow", "no W"])
@pytest.mark.parametrize(
    "plan",
    [
        lower(one_f_one_b(4, 8)),
        one_f_one_b(4, 8),
        lower(interleaved_1f1b(4, 8)),
        lower(zero_bubble_v(4, 8)),
        FREE_SENDS,
    ],
    ids=["1f1b", "1f1b computes", "interleaved", "zbv", "a bridge"],
)
def test_each_end_of_an_arrow_of_a_simulated_plan_lies_in_one_slice(plan, costs):
    drawn = timeline(simulate(plan, costs))
    events = perfetto(drawn)["traceEvents"]
    slices = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault(event["tid"], []).append((*in_nanoseconds(event), event["name"]))
    ends = [event for event in events if event["ph"] in "sf"]
    assert len(ends) == 2 * len(drawn.flows) > 0
    spans = [span for flow in drawn.flows for span in (drawn.spans[flow.source], drawn.spans[flow.destination])]
    for event, span in zip(ends, spans, strict=True):
        at, _ = in_nanoseconds(event)
        assert [name for start, end, name in slices[event["tid"]] if start <= at < end] == [span.name]
    for span, event in zip(drawn.spans, (event for event in events if event["ph"] == "X"), strict=True):
        if span.is_compute and span.duration > 0:
            assert event["tid"] % 64 == 0  # work is on the row's own track


KINDS = ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE", "COLLECTIVE", "data"]


@st.composite
def any_timeline(draw):
    rows = draw(st.integers(1, 4))
    spans = []
    for _ in range(draw(st.integers(0, 20))):
        start = draw(st.floats(-10, 1000, allow_nan=False))
        length = draw(st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.0, 500.0]))
        stage, microbatch = draw(st.none() | st.integers(0, 7)), draw(st.none() | st.integers(0, 2000))
        row = draw(st.integers(0, rows - 1))
        spans.append(Span(row, start, start + length, draw(st.sampled_from(KINDS)), stage, microbatch))
    flows = []
    if spans:
        index = st.integers(0, len(spans) - 1)
        flows = [Flow(draw(index), draw(index)) for _ in range(draw(st.integers(0, 5)))]
    return Timeline([f"row {i}" for i in range(rows)], spans, flows, unit=draw(st.sampled_from(["", "s"])))


@given(any_timeline())
def test_any_timeline_can_be_drawn_in_every_format(timeline):
    ET.fromstring(svg(timeline, arrows=True))
    events = json.loads(json.dumps(perfetto(timeline)))["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(timeline.spans)
    tracks: dict[int, list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            tracks.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for slices in tracks.values():  # a viewer drops slices that overlap on one track
        for (_, end), (start, _) in itertools.pairwise(sorted(slices)):
            assert start >= end - 0.002
    bars = [line for line in ascii_timeline(timeline, width=60).splitlines() if "|" in line]
    assert len(bars) == len(timeline.rows)
    assert len({(line.index("|"), line.rindex("|")) for line in bars}) == 1
    assert max(len(line) for line in bars) <= 60 + len("row 0 ||")


def test_ascii_shows_kind_and_microbatch_to_scale():
    spans = [
        Span(0, 0, 1, "F", 0, 0),
        Span(1, 1, 2, "F", 1, 0),
        Span(1, 2, 4, "B", 1, 0),
        Span(0, 4, 6, "B", 0, 0),
    ]
    assert ascii_timeline(Timeline(["a", "bb"], spans, title="two")) == (
        "two\nmakespan 6 · bubble 50.0%\n a |F0......B0==|\nbb |..F0B0==....|\n"
    )


def test_ascii_marks_later_stages_of_a_row():
    spans = [Span(0, 0, 1, "F", 0, 0), Span(0, 1, 2, "F", 3, 0)]
    assert "|F0-F0'|" in ascii_timeline(Timeline(["p"], spans))


@pytest.mark.parametrize(("width", "legend"), [(200, "one ' for each earlier stage of the row"), (20, "too narrow")])
def test_ascii_explains_the_marks_that_it_has_room_for(width, legend):
    spans = [Span(0, start, start + 1.0, "F", microbatch=start // 2, stage=start % 2) for start in range(10)]
    drawn = ascii_timeline(Timeline(["p"], spans), width=width)
    row, explained = drawn.splitlines()[-2:]
    assert legend in explained
    assert ("'" in row) == ("'" in explained)


def test_ascii_keeps_to_its_width():
    spans = [Span(0, index, index + 1, "F", 0, index) for index in range(500)]
    drawn = ascii_timeline(Timeline(["p"], spans), width=50).splitlines()
    assert [len(line) for line in drawn if "|" in line] == [len("p ||") + 50]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "s", "1.5 s"),
        (0.0123, "s", "12.3 ms"),
        (4.2e-5, "s", "42 µs"),
        (28.5, "", "28.5"),
        (12345678, "", "12345678"),
        (34633500000, "", "34.63e9"),
        (1e9, "", "1e9"),
    ],
)
def test_times_are_written_as_people_write_them(value, unit, text):
    assert time_text(value, unit) == text


def test_units_of_other_replicas_are_named_with_their_home():
    moves = {(unit, 1): 0 for unit in (2, 3)}
    plan = lower(routed(one_f_one_b(2, 2), Routes([2, 2], moves=moves, dead=[Actor(1, 1)])))
    drawn = timeline(plan)
    assert drawn.rows == (
        "stage 0, replica 0 (position 0)",
        "stage 1, replica 0 (position 1)",
        "stage 0, replica 1 (position 2)",
        "nothing, replica 1 (position 3)",
    )
    assert drawn.title == "2 replicas of 2 positions, 4 units"
    names = {row: {span.name for span in drawn.on_row(row) if span.kind == "F"} for row in range(4)}
    assert names == {0: {"0F0", "0F1"}, 1: {"1F0", "1F1", "1F0@1", "1F1@1"}, 2: {"0F0", "0F1"}, 3: set()}
    assert "F0@1" in ascii_timeline(drawn, width=400)
    assert "0@1 is microbatch 0 of replica 1, computed for it" in ascii_timeline(drawn)
    assert "0@1: microbatch 0 of replica 1, computed for it." in svg(drawn)
    arrows = {(drawn.spans[flow.source].row, drawn.spans[flow.destination].row) for flow in drawn.flows}
    assert arrows == {(0, 1), (1, 0), (2, 1), (1, 2)}
    alone = timeline(routed(one_f_one_b(2, 2), Routes([2, 2], moves=moves, dead=[Actor(1, 1)])))
    assert {(alone.spans[flow.source].row, alone.spans[flow.destination].row) for flow in alone.flows} == arrows
