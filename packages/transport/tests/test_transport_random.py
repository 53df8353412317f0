"""Thousands of messages of random sizes on several lanes at once, with random waits: every byte compared."""

import random

import pytest
import torch

from pipegrid.transport import LaneSpec, P2PConfig, open_lanes

DEADLINE = 40.0
WINDOW = 12  # messages under way
LANES = (
    LaneSpec(0, 1, "a"),
    LaneSpec(0, 1, "b"),
    LaneSpec(1, 0, "a"),
    LaneSpec(1, 0, "b"),
    LaneSpec(0, 0),
    LaneSpec(1, 1),
)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def script(seed, messages, *, vary):
    """What both ranks will do, in order: lane and payload's size, dtype and first value."""
    dice = random.Random(seed)
    fixed = {lane: (dice.choice([0, 1, 7, 300]), dice.choice(DTYPES)) for lane in LANES}
    plan = []
    for number in range(messages):
        lane = dice.choice(LANES)
        size, dtype = (dice.choice([0, 1, 2, 33, 1000, 20000]), dice.choice(DTYPES)) if vary else fixed[lane]
        plan.append((lane, size, dtype, number))
    return plan


def payload_of(size, dtype, number):
    return ((torch.arange(size) * 7 + number) % 101).to(dtype)


@pytest.mark.few(2)
@pytest.mark.ranks(2, deadline=300)
@pytest.mark.parametrize(
    ("messages", "settings"),
    [
        (10_000, {}),
        (2_000, {"variable_seq_lengths": True}),
        (2_000, {"strict": True}),
        (1_000, {"strict": True, "variable_seq_lengths": True}),
        pytest.param(10_000, {"variable_seq_lengths": True}, marks=pytest.mark.nightly),
        pytest.param(10_000, {"strict": True}, marks=pytest.mark.nightly),
        pytest.param(10_000, {"strict": True, "variable_seq_lengths": True}, marks=pytest.mark.nightly),
        pytest.param(10_000, {"communicators": "shared"}, marks=pytest.mark.nightly),
    ],
    ids=lambda value: "-".join(value) or "agreed" if isinstance(value, dict) else str(value),
)
def test_every_byte_arrives(ranks, messages, settings):
    torch.set_num_threads(1)
    vary = settings.get("variable_seq_lengths", False)
    plan = script(seed=messages, messages=messages, vary=vary)
    dice = random.Random(1000 + ranks.rank)
    config = P2PConfig(deadline=DEADLINE, open_deadline=DEADLINE, **settings)
    # Both ranks follow one script, but wait at random: on a device group receives start in the script's order only so.
    with open_lanes(LANES, config=config, rank=ranks.rank) as lanes, lanes.in_order():
        waiting = []

        def finish(index):
            handle, expected = waiting.pop(index)
            if expected is None:
                handle.wait()
                return
            received = handle.result().detach()
            assert received.dtype is expected.dtype
            assert torch.equal(received, expected)
            if dice.random() < 0.5:
                handle.release()

        for lane, size, dtype, number in plan:
            if ranks.rank not in lane.pair:
                continue
            if ranks.rank == lane.source:
                waiting.append((lanes[lane].isend(payload_of(size, dtype, number)), None))
            if ranks.rank == lane.destination:
                waiting.append((lanes[lane].irecv(), payload_of(size, dtype, number)))
            if dice.random() < 0.1:
                waiting[dice.randrange(len(waiting))][0].is_completed()
            # Now and then wait for a random one; always where too many are under way.
            while waiting and (len(waiting) > WINDOW or dice.random() < 0.3):
                finish(dice.randrange(len(waiting)))
        while waiting:
            finish(dice.randrange(len(waiting)))
        assert sum(lane.stats.messages for lane in lanes.values()) == sum(
            (ranks.rank == lane.source) + (ranks.rank == lane.destination) for lane, *_ in plan
        )
        assert all(lane.error is None for lane in lanes.values())
