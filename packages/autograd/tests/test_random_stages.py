"""Random stages: backwards in two halves have the gradients of whole ones, whatever a stage is made of."""

from __future__ import annotations

import random

import pytest
import torch

from autograd_kit.random_stages import OPERATORS, gradients_of, program


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_between_two_others(name):
    for k in range(3):
        for second in (0, 2):
            steps = [("linear", 0, 1, k), (name, 2, second, k), ("linear", 3, 1, (k + 1) % 3)]
            halves, whole = gradients_of(steps, [4, 2], halves=True), gradients_of(steps, [4, 2])
            torch.testing.assert_close(halves, whole, rtol=1e-9, atol=1e-9)


SEEDS = [
    range(50),
    range(50, 100),
    *(pytest.param(range(start, start + 1_000), marks=pytest.mark.nightly) for start in range(100, 11_000, 1_000)),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_stages(seeds):
    for seed in seeds:
        steps, outputs = program(random.Random(seed))
        halves, whole = gradients_of(steps, outputs, halves=True), gradients_of(steps, outputs)
        for mine, reference in zip(halves, whole, strict=True):
            if mine is None or reference is None:
                rest = reference if mine is None else mine
                assert rest is None or not rest.any(), f"seed {seed}: {steps} -> {outputs}"
            else:
                scale = 1 + reference.abs().max().item()
                assert (mine - reference).abs().max().item() < 1e-9 * scale, f"seed {seed}: {steps} -> {outputs}"
