"""Ranks of an encoder or of a language model killed with -9, on one grid and over a bridge: the others go on."""

from __future__ import annotations

from functools import partial

import pytest

from . import test_survive
from .survive_bridge_ranks import ModulesCase, rank_main, whole_matrix
from .survive_cases import Kill

require_undisturbed = partial(test_survive.require_undisturbed, main=rank_main)
require_all = partial(test_survive.require_all, main=rank_main)


# Ranks: 0 and 1 are the encoder's, 2 and 3 the first of the language model, 4 and 5 the second.
KILLS = (Kill(0, "SEND_F", 1, 1), Kill(3, "RECV_B", 2), Kill(4, "B", 3, 2))


@pytest.mark.parametrize("bridge", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["one grid", "a bridge"])
def test_an_encoder_and_a_language_model_go_on_wherever_ranks_are_killed(context, tmp_path, bridge):
    case = ModulesCase(replicas=2, kills=KILLS, bridge=bridge, skips=(1, 6), strict=True)
    require_undisturbed(context, case, tmp_path / "case")


@pytest.mark.nightly
@pytest.mark.parametrize("bridge", [False, True], ids=["one grid", "a bridge"])
@pytest.mark.parametrize(
    ("schedule", "skips", "strict"),
    [("1f1b", (), False), ("1f1b", (1, 6), True), ("zero_bubble_h1", (0, 5), True)],
    ids=["1f1b", "skips", "split backwards"],
)
def test_any_rank_of_two_modules_may_be_killed_anywhere(context, tmp_path, bridge, schedule, skips, strict, capsys):
    case = ModulesCase(replicas=2, schedule=schedule, bridge=bridge, skips=skips, strict=strict)
    require_all(context, tmp_path, whole_matrix(case), capsys)
