"""The page of a timeline in Chromium: it loads without an error or a request, and does what a reader asks of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipegrid.schedules import Costs, interleaved_1f1b, lower, simulate, timeline, write_html, zero_bubble_v

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("PySide6") is None, reason="`nox -s browser` installs a Chromium (pyside6-webengine)"
)


def browse(page, *options):
    """The values of the scripts, one for each."""
    command = [sys.executable, str(ROOT / "tools" / "browse.py"), str(page), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_reader_follows_a_microbatch_through_planned_and_measured_rows(tmp_path):
    costs = Costs(F=1e-3, I=1e-3, W=1e-3, message=4e6, bandwidth=1e10)
    planned = timeline(simulate(lower(zero_bubble_v(4, 8)), costs), unit="s", title="planned")
    write_html([planned, timeline(planned, title="measured")], tmp_path / "two.html")
    pixels = """(() => { const c = document.getElementById("picture");
      return [...c.getContext("2d").getImageData(0, 0, c.width, c.height).data.subarray(0, 3)] })()"""
    press = 'document.dispatchEvent(new KeyboardEvent("keydown", { key: "w" })), timeline.state.view.to < 1'
    tip = (
        "((panel) => timeline.lines({ panel, row: panel.row[40], span: 40 }).join('; '))(timeline.state.page.panels[0])"
    )
    frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))"
    scripts = [
        "timeline.state.page.panels.map((panel) => panel.start.length)",
        "timeline.find('2F3'), [timeline.state.followed, document.getElementById('found').textContent]",
        f"timeline.theme('light'), {frame}",
        pixels,
        f"timeline.theme('dark'), {frame}",
        pixels,
        press,
        tip,
        "performance.getEntriesByType('resource').length",
    ]
    found = browse(tmp_path / "two.html", *(part for one in scripts for part in ("--script", one)))
    counts, followed, _, light, _, dark, zoomed, told, requests = found
    assert counts == [len(planned.spans)] * 2
    assert followed == [3, "2F3"]
    assert light == [255, 255, 255]
    assert dark == [27, 28, 31]
    assert zoomed
    assert planned.spans[40].name in told
    assert "measured: from" in told
    assert requests == 0


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_a_page_has_the_colours_of_the_machine(tmp_path, theme):
    write_html(timeline(zero_bubble_v(2, 2)), tmp_path / "page.html")
    script = ("--script", "document.documentElement.dataset.theme")
    assert browse(tmp_path / "page.html", *script, *(["--dark"] if theme == "dark" else [])) == [theme]


def test_an_error_of_a_script_is_named(tmp_path):
    write_html(timeline(zero_bubble_v(2, 2)), tmp_path / "page.html")
    with pytest.raises(AssertionError, match="nothing is not defined"):
        browse(tmp_path / "page.html", "--script", "nothing")


def test_a_step_of_64_positions_and_512_microbatches_moves(tmp_path):
    """Prints what a frame took, at each zoom; how much it draws is bounded, the time depends on the machine.

    Slow frames are coarser ones, of which none is left at rest.
    """
    write_html(timeline(simulate(interleaved_1f1b(64, 512, num_chunks=2))), tmp_path / "large.html")
    slow = "[1, 2, 3].reduce((last) => last.then(() => new Promise((done) => {"
    slow += " timeline.move(0); requestAnimationFrame(() => setTimeout(done, 0)); })), Promise.resolve())"
    rest = "new Promise((done) => setTimeout(() => done(timeline.state.least), 1000))"
    _, least, frames = browse(
        tmp_path / "large.html",
        *("--script", slow, "--script", rest, "--frames", "--picture", str(tmp_path / "large.png")),
    )
    assert least == 3
    for frame in frames:
        print(json.dumps(frame))
    assert max(frame["boxes"] for frame in frames) < 131_072 / 3
    assert (tmp_path / "large.png").stat().st_size > 10_000
