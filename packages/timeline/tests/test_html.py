"""Timelines as a page: its data reads back equal, nothing comes from elsewhere, and its arithmetic is right."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from collections import defaultdict
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.plans import Actor, Costs, Routes, lower, routed, simulate
from pipegrid.plans.generators import interleaved_1f1b, one_f_one_b, seq1f1b, zero_bubble_v
from pipegrid.timeline import (
    Counter,
    Flow,
    Span,
    Timeline,
    TimelineError,
    amount,
    html,
    scaled,
    time_text,
    timeline,
    write_html,
)
from pipegrid.timeline.html import NONE, SCRIPTS
from pipegrid.timeline.kinds import COLOURS, OTHER, TRANSFER_KINDS, tint
from pipegrid.timeline.recording import Recorded, Recording, Track

PAGE = files("pipegrid.timeline") / "page"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed; it runs the page's arithmetic")


def document_of(page):
    """The data of a page, as its scripts read it."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def column(packed):
    """A column of the data, by the format alone."""
    code = {"f64": "d", "i32": "i", "u32": "I"}[packed["type"]]
    data = zlib.decompress(base64.b64decode(packed["data"]))
    values = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
    return [None if value == NONE or math.isnan(value) else value for value in values]


def read_back(page):
    """The timelines of a page."""
    found = []
    for panel in document_of(page)["panels"]:
        columns = {name: column(packed) for name, packed in panel["columns"].items()}
        names = ("row", "start", "end", "kind", "stage", "microbatch", "label", "slice", "memory", "home")
        spans = [
            Span(row, start, end, panel["kinds"][kind], stage, microbatch, panel["labels"][label], *rest)
            for row, start, end, kind, stage, microbatch, label, *rest in zip(
                *(columns[name] for name in names), strict=True
            )
        ]
        flows = [
            Flow(*ends) for ends in zip(*(columns[name] for name in ("source", "destination", "bytes")), strict=True)
        ]
        counters = [
            Counter(
                one["row"], one["name"], zip(*(column(one["columns"][name]) for name in ("time", "value")), strict=True)
            )
            for one in panel["counters"]
        ]
        texts = (panel["notes"], panel["title"], panel["unit"], panel["replicas"])
        found.append(Timeline(panel["rows"], spans, flows, counters, *texts))
    return found


times = st.floats(-1e3, 1e3, allow_nan=False)
words = st.text(max_size=6) | st.sampled_from(["optimizer", "</script>", "<!--", "\u2028", "$data"])


@st.composite
def spans_on(draw, rows):
    """A span of row 0 to ``rows`` - 1, of any kind; those with a stage have a microbatch."""
    start, length = draw(times), draw(st.floats(0, 50))
    kind = draw(st.sampled_from(["F", "B", "I", "W", "SEND_F", "RECV_B", "REDUCE", "data"]))
    numbers = st.integers(0, 9)
    stage, microbatch = draw(st.none() | numbers), draw(st.none() | numbers)
    label, piece = draw(words), draw(st.none() | st.integers(0, 3))
    memory = draw(st.none() | st.integers(-(2**40), 2**40))
    return Span(draw(st.integers(0, rows - 1)), start, start + length, kind, stage, microbatch, label, piece, memory)


@st.composite
def timelines(draw):
    """Any timeline: rows with overlapping spans, empty rows, flows between any spans, counters, notes."""
    rows = draw(st.integers(1, 4))
    spans = draw(st.lists(spans_on(rows), max_size=25))
    ends = st.integers(0, len(spans) - 1)
    flows = draw(st.lists(st.builds(Flow, ends, ends, st.none() | st.floats(0, 1e12)), max_size=20)) if spans else []
    points = st.lists(st.tuples(times, st.floats(0, 1e9)), max_size=30).map(
        lambda some: sorted(some, key=lambda p: p[0])
    )
    counters = draw(st.lists(st.builds(Counter, st.integers(0, rows - 1), st.just("held"), points), max_size=3))
    notes = draw(st.just([]) | st.lists(words, min_size=rows, max_size=rows))
    names = [f"stage {row} (position {row})" for row in range(rows)]
    return Timeline(names, spans, flows, counters, notes, draw(words), draw(st.sampled_from(["", "s"])))


class Balance(HTMLParser):
    """Elements that are open, and everything that leads out of the page."""

    VOID = ("meta", "input", "br", "link", "img")

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.leads, self.count = [], [], defaultdict(int)

    def handle_starttag(self, tag, attributes):
        self.count[tag] += 1
        self.leads += [value for name, value in attributes if name in ("src", "href", "action", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in self.VOID, tag
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@given(st.lists(timelines(), min_size=1, max_size=2))
def test_the_data_of_a_page_reads_back_equal(drawn):
    page = html(drawn)
    assert read_back(page) == drawn
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert parser.leads == []
    assert (parser.count["html"], parser.count["canvas"], parser.count["script"]) == (1, 1, 2)


def test_a_page_needs_nothing_else(tmp_path):
    write_html(timeline(one_f_one_b(2, 3)), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page == html(timeline(one_f_one_b(2, 3)))
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|\bfetch\(|XMLHttpRequest|\bimport\(|@import|url\(", page)
    assert page.startswith("<!DOCTYPE html>")
    with pytest.raises(TimelineError, match="give timeline"):
        html([])


def test_messages_have_their_bytes_and_computes_their_memory():
    plan = one_f_one_b(3, 4)
    costs = Costs(message=5e6, bandwidth=1e9)
    for source in (plan, lower(plan)):
        drawn = timeline(simulate(source, costs))
        assert {flow.bytes for flow in drawn.flows} == {5e6}
        assert read_back(html(drawn)) == [drawn]
    assert {flow.bytes for flow in timeline(plan).flows} == {None}
    sliced = timeline(simulate(seq1f1b(2, 2, num_slices=3), Costs(message=6e6, slice_lengths=(1, 2, 3))))
    assert {(sliced.spans[flow.source].slice, flow.bytes) for flow in sliced.flows} == {(0, 1e6), (1, 2e6), (2, 3e6)}
    tracks = [Track(0, 0, [Recorded(0, 0.0, 1.0, memory=4096), Recorded(1, 1.0, 2.0)])]
    assert [span.memory for span in timeline(Recording(one_f_one_b(1, 1), tracks)).spans] == [4096, None]


@pytest.fixture(scope="module")
def largest():
    """The page of 64 positions with two stages each, 512 microbatches: 131,072 boxes."""
    drawn = timeline(simulate(interleaved_1f1b(64, 512, num_chunks=2)))
    assert len(drawn.spans) == 131_072
    return html(drawn)


def test_a_step_of_130000_actions_is_a_file_of_a_megabyte_and_a_half(largest):
    assert len(largest) < 1_600_000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Calls the harness with the arithmetic that a written page contains."""
    page = html(timeline(one_f_one_b(1, 1)))
    scripts = page.split("</script>\n<script>\n")[1].split("</script>")[0]
    assert scripts == "".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    pure = tmp_path_factory.mktemp("page") / "pure.js"
    pure.write_text("".join((PAGE / name).read_text(encoding="utf-8") for name in ("data.js", "model.js")))
    harness = [NODE, str(Path(__file__).parent / "harness.js"), str(pure)]
    with subprocess.Popen(harness, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:

        def call(drawn, *calls):  # of timelines, or of a page
            page = drawn if isinstance(drawn, str) else html(drawn)
            node.stdin.write(json.dumps({"document": document_of(page), "calls": calls}) + "\n")
            node.stdin.flush()
            return json.loads(node.stdout.readline())

        yield call
        node.stdin.close()


@needs_node
def test_the_scripts_are_javascript(tmp_path):
    whole = tmp_path / "page.js"
    whole.write_text("".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS))
    subprocess.run([NODE, "--check", str(whole)], check=True)


@needs_node
@given(drawn=st.lists(timelines(), min_size=1, max_size=2))
def test_the_page_unpacks_what_was_packed(run, drawn):
    (panels,) = run(drawn, ["columns"])
    for panel, one in zip(panels, drawn, strict=True):
        assert panel["start"] == [span.start for span in one.spans]
        assert panel["end"] == [span.end for span in one.spans]
        for name in ("row", "kind", "label"):
            assert panel[name] == [getattr(span, name) for span in one.spans]
        for name in ("stage", "microbatch", "slice", "home"):
            found = [None if value == NONE else value for value in panel[name]]
            assert found == [getattr(span, name) for span in one.spans]
        assert list(zip(panel["source"], panel["destination"], strict=True)) == [
            (f.source, f.destination) for f in one.flows
        ]


def of_track(drawn, row, beside):
    return [i for i, span in enumerate(drawn.spans) if span.row == row and (span.kind in TRANSFER_KINDS) == beside]


@needs_node
@given(drawn=timelines(), view=st.tuples(times, times).map(sorted), least=st.floats(0, 60), beside=st.booleans())
def test_what_is_drawn_is_every_visible_span_once(run, drawn, view, least, beside):
    (first, last), track = view, int(beside)
    for row in range(len(drawn.rows)):
        (boxes, order) = run(drawn, ["cull", row, track, first, last, least], ["order", row, track, first, last, least])
        seen = [
            index
            for index in of_track(drawn, row, beside)
            if drawn.spans[index].end >= first and drawn.spans[index].start <= last
        ]
        wide = {index for index in seen if drawn.spans[index].duration >= least}
        alone = [box for box in boxes if box[1] == 1 and box[0] in wide]
        assert sorted(box[0] for box in alone) == sorted(wide)
        for index, _, start, end, height, _ in alone:
            span = drawn.spans[index]
            low, high = drawn.shares.get(span, (0.0, 1.0))  # less than all where work overlaps
            assert (start, end) == (span.start, span.end)
            assert height == pytest.approx(high - low, abs=1e-6)
        blocks = {(box[0], box[2]): box for box in boxes if box not in alone}
        assert sum(box[1] for box in blocks.values()) == len(seen) - len(wide)
        assert order == sorted(box[5] for box in boxes)


@needs_node
@given(
    lengths=st.lists(st.tuples(st.floats(0.01, 5), st.floats(0, 3), st.sampled_from("FBIW")), min_size=1, max_size=60),
    least=st.floats(0.1, 40),
)
def test_blocks_keep_the_time_of_each_kind(run, lengths, least):
    """What is painted of a colour, width times height, is the time of its spans; and boxes are few."""
    now, spans = 0.0, []
    for length, gap, kind in lengths:
        spans.append(Span(0, now + gap, now + gap + length, kind, 0, 0))
        now += gap + length
    drawn = Timeline(["row"], spans)
    boxes, colours = run(drawn, ["cull", 0, 0, 0.0, now, least], ["colours"])
    wanted = defaultdict(float)
    for span, colour in zip(spans, colours, strict=True):
        assert colour == COLOURS[span.kind]
        wanted[span.kind] += span.duration
    by_colour = defaultdict(float)
    for _, _, start, end, height, colour in boxes:
        assert 0 <= height <= 1 + 1e-6
        by_colour[colour] += (end - start) * height
    assert sorted(by_colour.values()) == pytest.approx(sorted(wanted.values()), abs=1e-5 * now)
    assert len(boxes) <= 4 * (2 * now / least + 2)


@needs_node
@given(drawn=timelines(), time=times, slack=st.floats(0.001, 30), beside=st.booleans())
def test_the_pointer_hits_the_nearest_span(run, drawn, time, slack, beside):
    for row in range(len(drawn.rows)):
        (found,) = run(drawn, ["hit", row, int(beside), time, slack])
        away = {
            index: max(drawn.spans[index].start - time, time - drawn.spans[index].end, 0.0)
            for index in of_track(drawn, row, beside)
        }
        near = {index: distance for index, distance in away.items() if distance <= slack}
        if found == -1:
            assert not [index for index, distance in near.items() if distance < slack * (1 - 1e-9)]
        else:
            assert away[found] == min(near.values())


@needs_node
@given(drawn=timelines(), microbatch=st.integers(0, 10))
def test_a_microbatch_is_followed_through_all_rows(run, drawn, microbatch):
    (spans, flows), found = run(drawn, ["follow", microbatch], ["search", f" MB {microbatch}"])
    assert spans == [i for i, span in enumerate(drawn.spans) if span.microbatch == microbatch]
    assert flows == [i for i, flow in enumerate(drawn.flows) if drawn.spans[flow.source].microbatch == microbatch]
    assert found == ([None, None, microbatch] if spans else None)
    units = sorted({span.microbatch for span in drawn.spans} - {None})
    assert run(drawn, ["units"]) == [[[unit, f"microbatch {unit}"] for unit in units]]


@pytest.fixture(scope="module", params=["computes", "lowered"])
def with_routes(request):
    """Three replicas of two positions with 3, 4 and 2 units; the first stage of replica 1 is dead."""
    routes = Routes([3, 4, 2], moves={(3 + m, 0): 2 * (m % 2) for m in range(4)}, dead=[Actor(0, 1)])
    plan = routed(one_f_one_b(2, 4), routes)
    return lower(plan) if request.param == "lowered" else plan


@needs_node
def test_one_unit_is_followed_where_replicas_act_apart(run, with_routes):
    drawn, homes = timeline(with_routes), 3
    actions = [action for position in range(6) for action in with_routes.actions(position)]
    wanted = [(microbatch, home) for home, count in enumerate((3, 4, 2)) for microbatch in range(count)]
    (units,) = run(drawn, ["units"])
    assert units == [[m * homes + home, f"microbatch {m} of replica {home}"] for m, home in wanted]
    for number, (unit, _) in enumerate(units):
        (spans, flows), found = run(drawn, ["follow", unit], ["search", "{}@{}".format(*wanted[number])])
        assert spans == [index for index, action in enumerate(actions) if action.microbatch == number]
        assert len(spans) == (4 if not with_routes.has_communication else 8)
        assert flows == [i for i, flow in enumerate(drawn.flows) if flow.source in spans]
        assert found == [None, None, unit]
    assert run(drawn, ["search", "mb 3"], ["search", "3@0"], ["search", "0@3"]) == [
        [None, None, 3 * homes + 1],
        None,
        None,
    ]
    ((_, at_home, _), (_, away, _)) = run(drawn, ["search", "1F2@1"], ["search", "0F2@1"])
    assert (str(actions[at_home]), str(actions[away])) == ("1F5", "0F5")
    assert drawn.spans[away].home == 1


@needs_node
def test_a_unit_has_its_counterpart_and_a_panel_without_replicas_its_microbatch(run, with_routes):
    drawn, plain = timeline(with_routes), timeline(one_f_one_b(2, 4))
    (twins,) = run([drawn, scaled(drawn, 2.0, unit="s")], ["twins"])
    assert twins == [-1 if span.microbatch is None else index for index, span in enumerate(drawn.spans)]
    for home in range(3):
        ((spans, _),) = run([drawn, plain], ["follow", 2 * 3 + home, 1])
        assert spans == [index for index, span in enumerate(plain.spans) if span.microbatch == 2]


@needs_node
@given(drawn=timelines())
def test_actions_are_found_by_the_name_that_plans_give_them(run, drawn):
    names = [span.name for span in drawn.spans]
    found, *searched = run(drawn, ["names"], *(["search", name] for name in names))
    assert found == names
    for name, result in zip(names, searched, strict=True):
        if name.strip() and not re.fullmatch(r"(m|mb|microbatch)?\s*\d+", name.strip().lower()):
            panel, span, _ = result
            assert panel == 0
            assert name.strip().lower() in names[span].lower()
    assert run(drawn, ["search", "no such thing"], ["search", "  "]) == [None, None]


@needs_node
def test_flows_colours_and_counterparts(run):
    planned = timeline(zero_bubble_v(3, 4))
    measured = scaled(planned, 0.5, unit="s")
    flows, colours, twins, apart, paired = run(
        [planned, measured], ["flows", 5], ["colours"], ["twins"], ["arrange", False], ["arrange", True]
    )
    assert flows == [
        [i for i, flow in enumerate(planned.flows) if flow.destination == 5],
        [i for i, flow in enumerate(planned.flows) if flow.source == 5],
    ]
    for span, colour in zip(planned.spans, colours, strict=True):
        share = 0.6 * planned.stages[span.row].index(span.stage)
        assert colour == tint(COLOURS.get(span.kind, OTHER), share)
    assert twins == list(range(len(planned.spans)))
    assert apart == [[0, 0, True], [0, 1, False], [0, 2, False], [1, 0, True], [1, 1, False], [1, 2, False]]
    assert paired == [[0, 0, True], [1, 0, False], [0, 1, True], [1, 1, False], [0, 2, True], [1, 2, False]]


@needs_node
@given(drawn=timelines(), view=st.tuples(times, times).map(sorted), least=st.floats(0.01, 100))
def test_curves_keep_their_peaks(run, drawn, view, least):
    (first, last) = view
    for number, counter in enumerate(drawn.counters):
        points, value = run(drawn, ["curve", number, first, last, least], ["value", number, last])
        shown = list(zip(points[::2], points[1::2], strict=True))
        assert shown == sorted(shown, key=lambda point: point[0])
        before = [amount for time, amount in counter.points if time <= first][-1:]
        inside = [amount for time, amount in counter.points if first < time <= last]
        assert max((value for _, value in shown), default=None) == max(before + inside, default=None)
        assert len(shown) <= 2 * ((last - first) / least + 2)
        assert value == next((amount for time, amount in reversed(counter.points) if time <= last), 0)


@needs_node
@given(at=st.floats(0, 1), factors=st.lists(st.floats(0.5, 2), max_size=12), share=st.floats(-3, 3))
def test_zooming_keeps_what_is_under_the_pointer(run, at, factors, share):
    drawn, view = timeline(one_f_one_b(2, 2)), {"from": 0.2, "to": 0.8}
    for factor in factors:
        (zoomed,) = run(drawn, ["zoomed", view, at, factor])
        assert -0.0201 <= zoomed["from"] < zoomed["to"] <= 1.0201
        width, wanted = zoomed["to"] - zoomed["from"], (view["to"] - view["from"]) * factor
        if zoomed["from"] > -0.0199 and zoomed["to"] < 1.0199:
            assert width == pytest.approx(max(wanted, 1e-7))
            place = (at - view["from"]) / (view["to"] - view["from"])
            assert (at - zoomed["from"]) / width == pytest.approx(place, abs=1e-6)
        view = zoomed
    (moved,) = run(drawn, ["moved", view, share])
    assert moved["to"] - moved["from"] == pytest.approx(view["to"] - view["from"])
    assert -0.0201 <= moved["from"] < moved["to"] <= 1.0201


@needs_node
@given(values=st.lists(st.floats(1e-4, 1e15), min_size=1, max_size=30), unit=st.sampled_from(["", "s", "units"]))
def test_numbers_read_as_in_every_other_picture(run, values, unit):
    (texts,) = run(timeline(one_f_one_b(1, 1)), ["texts", values, unit])
    assert texts == [[amount(value), time_text(value, unit)] for value in values]


@needs_node
@given(view=st.tuples(times, times).map(sorted), most=st.integers(2, 30))
def test_ticks_are_round_and_few(run, view, most):
    first, last = view
    (ticks,) = run(timeline(one_f_one_b(1, 1)), ["ticks", first, last, most])
    assert 1 <= len(ticks) + 1 <= most + 2
    steps = {round(after - before, 9) for before, after in itertools.pairwise(ticks)}
    assert all(first - 1e-6 <= tick <= last + 1e-6 for tick in ticks)
    for step in steps:
        assert re.match(r"[125]0*e|[125](\.0*)?e", f"{step:.6e}") or step < 1e-6


@needs_node
def test_130000_boxes_are_few_for_a_frame(run, largest):
    """No frame of a picture 1500 pixels wide has more than a third of the boxes, at any zoom."""
    (frames,) = run(largest, ["frames", 1500])
    assert max(frames) <= 131_072 / 3
    assert frames[-1] < 1000
