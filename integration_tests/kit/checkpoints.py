"""What tests of checkpoints compare: all values of a training state."""

from __future__ import annotations

import torch


def values_of(state):
    """Every tensor and every entry of an optimizer state, by whole-model names."""
    found = {}
    for slot in state.slots():
        found[slot.held.key] = slot.tensor().detach().clone()
        for optimizer in state.optimizers:
            for entry, value in optimizer.state.get(slot.tensor(), {}).items():
                found[slot.held.key, entry] = value.clone()
    return found


def require_equal(found, expected):
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
