"""Modules on the ranks of the world, the picture of it, and the command line."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.topology import GridError, PlacementError, describe, place
from pipegrid.topology.__main__ import main

ENCODER = {"tp": 1, "dp": 2}
LANGUAGE = {"tp": 2, "pp": 2, "dp": 1}


def spans(grids):
    return {name: (grid.ranks.start, grid.ranks.stop) for name, grid in grids.items()}


def test_modules_follow_one_another():
    grids = place({"images": ENCODER, "language": LANGUAGE}, world_size=6, backend="gloo")
    assert spans(grids) == {"images": (0, 2), "language": (2, 6)}
    assert grids["language"].dim_names == ("tp", "pp", "dp")
    assert grids["language"].backend == "gloo"
    assert grids["images"].world_size == 6


def test_modules_on_the_same_ranks():
    both = [("images", "language")]
    assert spans(place({"images": {"dp": 4}, "language": LANGUAGE}, world_size=4, together=both)) == {
        "images": (0, 4),
        "language": (0, 4),
    }
    nested = place({"images": ENCODER, "language": LANGUAGE, "audio": {"dp": 3}}, world_size=7, together=both)
    assert spans(nested) == {"images": (0, 2), "language": (0, 4), "audio": (4, 7)}


def test_modules_at_offsets():
    grids = place({"language": LANGUAGE, "images": ENCODER}, world_size=6, offsets={"language": 2, "images": 0})
    assert spans(grids) == {"language": (2, 6), "images": (0, 2)}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_sequence_of_modules_covers_the_world_without_overlap(sizes):
    grids = place({f"m{i}": {"dp": size} for i, size in enumerate(sizes)}, world_size=sum(sizes))
    assert [rank for grid in grids.values() for rank in grid.ranks] == list(range(sum(sizes)))


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"world_size": 8}, "do not fit a world of 8 ranks: ranks 6..7 are left over"),
        ({"world_size": 5}, "they need 6 ranks, 1 more than there are"),
        ({"world_size": 7, "offsets": {"language": 3}}, r"ranks 2..2 hold no module \(a gap\)"),
        ({"world_size": 7, "offsets": {"images": 1, "language": 3}}, r"ranks 0..0 hold no module \(a gap\)"),
        (
            {"world_size": 5, "offsets": {"language": 1}},
            r"'images' \(0..1\) and 'language' \(1..4\) overlap in part\.",
        ),
        ({"world_size": 6, "offsets": {"audio": 1}}, r"offsets {'audio': 1} must name modules of \['images', 'lang"),
        ({"world_size": 6, "together": [("images", "audio")]}, r"together \[\('images', 'audio'\)\]"),
        (
            {"world_size": 6, "together": [("images", "language"), ("images",)]},
            r"together \[.*\] and offsets {} must name modules of .* once",
        ),
        (
            {"world_size": 6, "together": [("images", "language")], "offsets": {"language": 1}},
            "module 'language' is together with 'images', which alone may have an offset",
        ),
    ],
)
def test_a_placement_that_does_not_fit_says_why(keywords, text):
    with pytest.raises(PlacementError, match=text) as caught:
        place({"images": ENCODER, "language": LANGUAGE}, **keywords)
    assert isinstance(caught.value, ValueError)


def test_the_error_has_a_table_of_the_modules():
    with pytest.raises(PlacementError) as caught:
        place({"images": ENCODER, "language": LANGUAGE}, world_size=8)
    assert str(caught.value).splitlines()[1:] == [
        "module    dimensions      size  ranks",
        "--------  --------------  ----  -----",
        "images    tp=1 dp=2       2     0..1",
        "language  tp=2 pp=2 dp=1  4     2..5",
    ]


def test_no_modules_and_no_dims_are_errors():
    with pytest.raises(PlacementError, match=r"a world of 4 ranks: ranks 0\.\.3 are left over"):
        place({}, world_size=4)
    with pytest.raises(GridError, match=r"shape\[0\] is 0"):
        place({"images": {"tp": 0}}, world_size=4)
    with pytest.raises(GridError, match=r"shape \[\] and dim_names \[\] must be .*, at least one"):
        place({"images": {}}, world_size=1)


@pytest.fixture
def _plain(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)


@pytest.mark.usefixtures("_plain")
def test_the_picture_has_a_row_for_each_rank():
    grids = place({"images": ENCODER, "language": LANGUAGE}, world_size=6)
    assert describe(grids).splitlines() == [
        "rank  images   language",
        "----  -------  -----------",
        "0     tp0 dp0",
        "1     tp0 dp1",
        "2              tp0 pp0 dp0",
        "3              tp1 pp0 dp0",
        "4              tp0 pp1 dp0",
        "5              tp1 pp1 dp0",
    ]


@pytest.mark.usefixtures("_plain")
def test_a_large_world_has_a_row_for_each_stretch_of_ranks():
    grids = place(
        {"images": {"dp": 512}, "audio": {"dp": 256}, "language": {"tp": 8, "dp": 128}},
        world_size=1536,
        together=[("images", "audio")],
    )
    assert describe(grids).splitlines()[2:] == [
        "0..255     dp=512  dp=256",
        "256..511   dp=512",
        "512..1535                  tp=8 dp=128",
    ]
    assert len(describe(grids, max_rows=1536).splitlines()) == 2 + 1536


def test_rich_draws_the_same_cells():
    pytest.importorskip("rich", reason="the extra `describe` is not installed")
    grids = place({"images": ENCODER, "language": LANGUAGE}, world_size=6)
    lines = describe(grids).splitlines()
    assert len(lines) == 3 + 6 + 1
    assert [cell.strip() for cell in lines[-2].strip("│").split("│")] == ["5", "", "tp1 pp1 dp0"]
    assert "\x1b[" not in describe(grids)
    assert "\x1b[" in describe(grids, color=True)


def run(*arguments):
    command = [sys.executable, "-m", "pipegrid.topology", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_draws_the_world():
    done = run("describe", "--world", "16", "images:tp=1,dp=8", "language:tp=2,pp=2,dp=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tp0 dp7" in done.stdout
    assert "tp1 pp1 dp1" in done.stdout


def test_the_command_line_exits_with_2_and_the_reason():
    done = run("describe", "--world", "17", "images:tp=1,dp=8", "language:tp=2,pp=2,dp=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "ranks 16..16 are left over" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--world", "8", "images:dp=8", "language:tp=2,dp=4", "--together", "images,language"], 0, "tp1 dp3"),
        (["--world", "3", "b@1:dp=2", "a@0:dp=1"], 0, "dp1"),
        (["--world", "128", "--max-rows", "9", "a:dp=128"], 0, "0..127"),
        (["--world", "8", "images"], 2, "'images' is not a module name[@offset]:dim=size"),
        (["--world", "8", "images:tp=two"], 2, "'images:tp=two' is not a module"),
        (["--world", "8", "images:tp=2,tp=4"], 2, "'images:tp=2,tp=4' is not a module"),
        (["--world", "8", "a:tp=4", "a:tp=4"], 2, "modules ['a', 'a'] must have a name each"),
        (["--world", "8", "a:tp=0,dp=8"], 2, "shape[0] is 0"),
        (["--world", "0", "a:tp=1"], 2, "world_size is 0; it must be an integer of at least 1"),
        (["--world", "4", "a:tp=4", "--together", "a,b"], 2, "together [['a', 'b']]"),
    ],
)
def test_the_command_lines_arguments(arguments, status, text, capsys):
    assert main(["describe", *arguments]) == status
    printed = capsys.readouterr()
    assert text in (printed.err if status else printed.out)


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="the system has no SIGPIPE")
def test_the_command_line_ends_quietly_when_its_output_is_closed():
    """As into ``head -1`` once it has its line; here it has none to begin with, so that time decides nothing."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pipegrid.topology", "describe", "--world", "8", "images:tp=1,dp=8"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
