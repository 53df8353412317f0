"""The orders of the museum of hangs on ranks: `test_museum_ranks.py` runs a copy of this file, and reads the ends."""

from __future__ import annotations

import pytest

from kit.museum import BACKENDS, orders_of, play, table

# Seconds: enough for a rank to come to where it hangs, and, where it does not, for a busy machine.
HANGS, ENDS = 4.0, 120.0


def _marks(name, model, verdict):
    backend, mode = BACKENDS[model]
    deadline = HANGS if verdict == "hangs" else ENDS
    return pytest.mark.ranks(len(orders_of(name).ranks), backend=backend, fake_nccl=mode, deadline=deadline)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, id=f"{name}/{model}", marks=_marks(name, model, verdict))
        for (name, model), verdict in table().items()
        if model in BACKENDS
    ],
)
def test_orders(ranks, name, model):
    play(ranks, name, model)
