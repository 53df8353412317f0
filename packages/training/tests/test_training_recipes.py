"""Recipes through `Pipeline`: three updates with a script's own losses, batches, modes, ties and options by name.

Against one process; a few by day, and at night as many as there is time for.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from pipegrid.schedules import PipelineConfig

from .recipes import Recipe, require_the_run_of_one_process

SECONDS = float(os.environ.get("PIPEGRID_FUZZ_SECONDS", "1800"))
"""Of the nightly runs together; `PIPEGRID_FUZZ_SEED` is the first seed."""


def require_run(ranks, seed):
    recipe = Recipe.of(seed, ranks.world_size)
    try:
        config = PipelineConfig(variable_seq_lengths=True, deadline=60.0)
        require_the_run_of_one_process(recipe, ranks.shared_path / f"run {seed}", config=config)
    except BaseException as error:
        error.add_note(f"{recipe}")
        raise


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "seed",
    [
        *range(4),
        pytest.param(1795966543, id="means that are close"),
        pytest.param(50222, id="a table that is handed on"),
    ],
)
def test_three_updates_of_a_recipe_are_those_of_one_process(ranks, seed):
    require_run(ranks, seed)


@pytest.mark.few(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("seed", [100, 101, pytest.param(50006, id="weights below one")])
def test_three_updates_of_a_recipe_on_four_ranks_are_those_of_one_process(ranks, seed):
    require_run(ranks, seed)


def run_until_the_time_is_over(ranks):
    """As many recipes as there is time for on the first rank."""
    end = time.monotonic() + SECONDS / 2
    seed = torch.tensor(int(os.environ.get("PIPEGRID_FUZZ_SEED", time.time())))
    dist.broadcast(seed, 0)
    for number in range(int(seed), int(seed) + 10**6):
        goes_on = torch.tensor(time.monotonic() < end)
        dist.broadcast(goes_on, 0)
        if not goes_on:
            return
        require_run(ranks, number)


@pytest.mark.nightly
@pytest.mark.ranks(2, deadline=SECONDS + 300)
def test_many_recipes_on_two_ranks(ranks):
    run_until_the_time_is_over(ranks)


@pytest.mark.nightly
@pytest.mark.ranks(4, deadline=SECONDS + 300)
def test_many_recipes_on_four_ranks(ranks):
    run_until_the_time_is_over(ranks)
