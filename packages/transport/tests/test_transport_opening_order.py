"""The order in which ranks open their lanes: equal on both ends of every pair, and short along a chain."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.lanes import opening_key, pipeline_lanes
from pipegrid.transport import LaneSpec, open_lanes
from pipegrid.transport.control import connector

from .two_ranks import config

RANKS = st.integers(0, 200)
PAIRS = st.sets(st.tuples(RANKS, RANKS).filter(lambda pair: pair[0] < pair[1]), min_size=1, max_size=80)


def rounds(pairs):
    """How many pairs lie one behind the other: each rank knows its own pairs alone, and a pair needs both its ranks."""
    left = {
        rank: sorted((pair for pair in pairs if rank in pair), key=opening_key)
        for rank in {r for p in pairs for r in p}
    }
    passed = 0
    while any(left.values()):
        free = [pair for pair in pairs if all(left[rank] and left[rank][0] == pair for rank in pair)]
        assert free, f"stuck: {left}"
        for first, second in free:
            left[first].pop(0), left[second].pop(0)
        passed += 1
    return passed


def chain(ranks):
    return {spec.pair for spec in pipeline_lanes(ranks)}


@given(PAIRS)
def test_no_ranks_wait_for_each_other(pairs):
    assert len({opening_key(pair) for pair in pairs}) == len(pairs)
    assert rounds(pairs) <= 2 * len({second - first for first, second in pairs})


@given(st.integers(2, 130), st.integers(0, 9), st.integers(1, 9))
def test_a_chain_opens_in_three_rounds(length, first, stride):
    assert rounds(chain([first + stride * n for n in range(length)])) <= 3


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_chains_side_by_side_open_in_three_rounds(tp):
    assert rounds({pair for lane in range(tp) for pair in chain(range(lane, 64 * tp, tp))}) <= 3


@pytest.mark.parametrize(("sources", "destinations"), [(4, 4), (2, 8), (8, 2), (3, 5)])
def test_a_bridge_between_all_ranks_of_two_sides_opens_in_rounds_of_their_number(sources, destinations):
    pairs = {(a, sources + b) for a in range(sources) for b in range(destinations)}
    assert rounds(pairs) <= sources + destinations - 1


@pytest.mark.ranks(5)
def test_ranks_connect_their_pairs_in_that_order(ranks, monkeypatch):
    connected, connect = [], connector.Connector._compare

    def noted(self, pair, lanes):
        connected.append(pair)
        connect(self, pair, lanes)

    monkeypatch.setattr(connector.Connector, "_compare", noted)
    specs = [LaneSpec(a, b) for a, b in [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 3), (0, 3)]]
    mine = [spec for spec in specs if ranks.rank in spec.pair]
    agreed = dict.fromkeys(mine, torch.empty(2, device="meta"))
    with open_lanes(mine, config=config(), agreed=agreed) as lanes:
        assert connected == sorted((spec.pair for spec in mine), key=opening_key)
        assert list(lanes) == sorted(mine)
        received = {}
        with lanes.batch(by_lane=True):  # a ring of sends that come first would be stuck on a serial stream
            for spec in mine:
                if ranks.rank == spec.source:
                    lanes[spec].isend(torch.full((2,), float(spec.source)))
                else:
                    received[spec] = lanes[spec].irecv()
        for spec, transfer in received.items():
            assert transfer.result().tolist() == [spec.source] * 2
        ranks.barrier()
