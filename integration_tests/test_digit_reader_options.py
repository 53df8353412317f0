"""What can be asked of the digit reader: defaults that fit, and one line for what does not."""

from __future__ import annotations

import re

import pytest

from digit_reader.command_line import parse_options
from digit_reader.modules import DEFAULTS, ENCODERS, LANGUAGE
from digit_reader.options import SCHEDULE_NAMES, OptionsError
from pipegrid.schedules import fitting_schedules


def parsed(text):
    return parse_options(text.split())


@pytest.mark.parametrize(("placement", "encoders"), DEFAULTS)
def test_the_grids_that_stand_for_none_fill_four_processes(placement, encoders):
    options = parsed(f"--placement {placement} --modules {','.join(encoders)}")
    assert options.encoders == encoders
    assert {rank for grid in options.place().values() for rank in grid.ranks} == {0, 1, 2, 3}


def test_what_is_not_asked_for_is_the_run_of_the_readme():
    options = parsed("")
    assert options.grids == {"images": {"tp": 1, "dp": 2, "pp": 1}, LANGUAGE: {"tp": 1, "dp": 1, "pp": 2}}
    assert (options.layout, options.graph, options.schedule) == ("Ett|ttL", (("images", LANGUAGE),), "1f1b")


def test_a_mixed_placement_has_both_encoders_and_one_of_them_beside_the_language_model():
    options = parsed("--placement mixed")
    grids = options.place()
    assert options.encoders == ENCODERS
    assert grids["images"].ranks == grids[LANGUAGE].ranks
    assert set(grids["signal"].ranks).isdisjoint(grids[LANGUAGE].ranks)


def test_a_u_has_one_stage_more_than_places():
    options = parsed("--schedule u_shape")
    assert options.layout == "Ett|t|tL"
    assert options.stage_placement() == {LANGUAGE: (0, 1, 0)}


@pytest.mark.parametrize(
    ("asked", "lanes"),
    [
        ("--language pp=1 --schedule gpipe", 2),
        ("--language pp=2", 1),
        ("--language pp=3 --images dp=1 --batch 48", 1),
        ("--language pp=1 --images dp=1 --processes 2", 1),
        ("--language pp=2 --processes 6", 2),
    ],
)
def test_lanes_of_the_language_model_fill_the_processes(asked, lanes):
    assert parsed(asked).grids[LANGUAGE]["dp"] == lanes


@pytest.mark.parametrize(
    ("language", "layout"),
    [
        ("pp=2,vpp=2", "Et|t|t|tL"),
        ("dp=2,pp=1", "Et*4,L"),
        ('pp=2,layout="E|ttttL"', "E|ttttL"),
        ("pp=1,vpp=2,dp=2", "Ett|ttL"),
    ],
)
def test_a_layout_that_is_not_given_shares_the_decoders_evenly(language, layout):
    assert parsed(f"--language {language}").layout == layout


@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_schedule_runs_or_says_which_would(name, vpp):
    asked = f"--schedule {name} --language pp=2,vpp={vpp}"
    if name in fitting_schedules(vpp):
        assert parsed(asked).schedule == name
        return
    with pytest.raises(OptionsError, match=f"not run vpp={vpp} stages on a place; use vpp=[12].*, or one of ") as error:
        parsed(asked)
    assert str(error.value).endswith(", ".join(fitting_schedules(vpp)))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("--modules signal", "the encoders are images, or images,signal"),
        ("--modules images,images", "the encoders are images, or images,signal"),
        ("--signal dp=1", "--signal: the module is not part of the run; add --modules images,signal"),
        ("--placement mixed --modules images", "has no signal; add it, or use separate or colocated"),
        ("--placement mixed --images dp=3", "images has 3 ranks, language 2; use --images dp=2"),
        ("--placement colocated --modules images,signal --signal pp=2", "use --signal dp=2,pp=2"),
        ("--placement colocated --images dp=2 --language pp=2", "ranks 2..3 are left over"),
        ("--modules images,signal --signal pp=3", "the encoder has 2 layers; use pp=1 or pp=2"),
        ("--modules images,signal --images dp=2", "images 2 + signal 1 + language 2 need 5"),
        ("--modules images,signal --signal tp=2", "no tensor-parallel layers; use tp=1"),
        ("--modules images,signal --graph images>language", "'signal' is missing from the graph"),
        ("--modules images,signal --graph images>signal,signal>language", "use images>language,signal>language"),
        ("--language pp=2,layout=Et|t|t|tL", "use pp=4, or a layout with 2 stages, or vpp=2"),
        ("--language pp=2,vpp=2,layout=Ett|ttL", "use pp=1, or a layout with 4 stages, or vpp=1"),
        ("--language pp=2,layout=Ett|ttL --schedule u_shape", "use pp=1, or a layout with 3 stages"),
        ("--language pp=2,layout=Et|t|t|tL --schedule gpipe", "use pp=4, or a layout with 2 stages"),
        ("--language pp=2,vpp=0", "a size is a whole number of at least 1"),
        ("--images pp=2", "the images module knows tp, dp only"),
        ("--images dp:2", "write name=value, separated by commas: dp=2"),
        ("--deadline 0", "give a positive number of seconds"),
        ("--images dp=3 --language dp=2 --processes 5", "over 6 replicas need a multiple of 24; 48 or 72 would do"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(asked, text):
    with pytest.raises(OptionsError, match=re.escape(text)) as error:
        parsed(asked)
    assert "\n" not in str(error.value)
