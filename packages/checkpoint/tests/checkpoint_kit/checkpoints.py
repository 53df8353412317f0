"""What tests of checkpoints compare: all values of modules and of an optimizer, however they are sharded."""

from __future__ import annotations

import torch

from stages_kit.gradients import full


def values_of(modules, optimizer):
    """Copies of the whole tensors of ``modules``, by name, and of the entries of the optimizer, by name and entry."""
    found = {}
    for module in modules:
        found |= {name: full(tensor).detach().clone() for name, tensor in module.state_dict().items()}
        for name, parameter in module.named_parameters():
            for entry, value in optimizer.state.get(parameter, {}).items():
                found[name, entry] = full(value).clone()
    return found


def require_same(found, expected):
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
