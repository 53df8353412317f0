"""The state of a job on its way to a new process: the same bits in every tensor, the same draws of every generator."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.gradients.main_grad import accumulate_in_main_grad
from pipegrid.survive import SurviveError, handover
from pipegrid.survive.handover import JobState


def made(seed, width=4):
    """A model with buffers, a frozen parameter, an odd layout in memory and a gradient in another type."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))
    model[0].bias.requires_grad_(requires_grad=False)
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    model.register_buffer("of this run", torch.rand(2).bfloat16(), persistent=False)
    accumulate_in_main_grad(model, dtype=torch.float64)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=seed / 100)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    return model, {"optimizer": optimizer, "scheduler": scheduler}


def train(model, parts):
    for _ in range(3):
        model.seen += 1
        model(torch.randn(5, 3)).square().sum().backward()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad, parameter.main_grad = parameter.main_grad.float(), None
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["scheduler"].step()
    model(torch.randn(5, 3)).square().sum().backward()  # gradients that wait for more


def contents(model, parts):
    """Everything, with names; draws last, since they change the generators."""
    found = {f"parameter {name}": value.detach().clone() for name, value in model.named_parameters()}
    found |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    found |= {
        f"main_grad {n}": p.main_grad for n, p in model.named_parameters() if getattr(p, "main_grad", None) is not None
    }
    states = parts["optimizer"].state_dict()["state"]
    found |= {f"state {n} {name}": value for n, state in states.items() for name, value in state.items()}
    plain = parts["optimizer"].state_dict()["param_groups"], parts["scheduler"].state_dict(), random.random()
    return found | {"draws": torch.rand(3)}, plain


@pytest.mark.ranks(3)
def test_a_new_process_has_the_bits_of_its_peer(ranks):
    """Rank 1 is the first with the state, and sends it to 0 and 2."""
    here = dist.get_rank()
    model, parts = made(1 if here == 1 else 7)
    if here == 1:
        train(model, parts)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    step = JobState(model, parts).hand_over(dist.group.WORLD, {0, 2}, 12 if here == 1 else None)
    assert step == 12
    assert [parameter.data_ptr() for parameter in model.parameters()] == places  # what others refer to is the same
    tensors, plain = contents(model, parts)
    assert len(tensors) > 20
    gathered = [None] * 3
    dist.all_gather_object(gathered, (tensors, plain))
    for others, other_plain in gathered:
        assert others.keys() == tensors.keys()
        assert all(torch.equal(tensors[name], others[name]) for name in tensors)
        assert all(tensors[name].dtype == others[name].dtype for name in tensors)
        assert other_plain == plain
    train(model, parts)
    dist.all_gather_object(gathered, contents(model, parts)[0])
    assert all(torch.equal(gathered[0][name], other[name]) for other in gathered for name in other)


def test_a_new_process_with_another_model_is_an_error_there(monkeypatch):
    peer = {"held": handover._outline(JobState(made(1, width=5)[0], {})._held())}
    monkeypatch.setattr(handover._Wire, "receive_text", lambda _: json.dumps(peer))
    with pytest.raises(SurviveError, match=r"not those of its peer; only one of them has \[\('0//0\.bias', '\[4\]'"):
        JobState(made(1)[0], {})._receive(handover._Wire(None, 0))


def test_no_rank_with_the_state_is_an_error(monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 2])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(RuntimeError, match=r"none of the ranks \[0, 2\] has the state"):
        JobState({}, {}).hand_over(None, {0, 2}, None)
