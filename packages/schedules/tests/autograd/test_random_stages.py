"""Random stages: backwards in two halves have the gradients of whole ones, whatever a stage is made of."""

from __future__ import annotations

import random

import pytest
import torch

from ..kit.random_stages import OPERATORS, gradients_of, program


def both(steps, outputs):
    """The gradients in halves, and whole."""
    return gradients_of(steps, outputs, halves=True), gradients_of(steps, outputs)


def check(seed):
    steps, outputs = program(random.Random(seed))
    for mine, reference in zip(*both(steps, outputs), strict=True):
        if mine is None or reference is None:
            rest = reference if mine is None else mine
            assert rest is None or not rest.any(), f"seed {seed}: {steps} -> {outputs}"
        else:
            scale = 1 + reference.abs().max().item()
            assert (mine - reference).abs().max().item() < 1e-9 * scale, f"seed {seed}: {steps} -> {outputs}"


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_between_two_others(name):
    for k in range(3):
        for second in (0, 2):
            steps = [("linear", 0, 1, k), (name, 2, second, k), ("linear", 3, 1, (k + 1) % 3)]
            for mine, reference in zip(*both(steps, [4, 2]), strict=True):
                torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_stages(start):
    for seed in range(start, start + 50):
        check(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("start", range(1_000, 11_000, 1_000))
def test_ten_thousand_random_stages(start):
    for seed in range(start, start + 1_000):
        check(seed)
