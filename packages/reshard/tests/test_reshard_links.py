"""What "auto" chooses once it knows the links."""

from __future__ import annotations

import pytest

from pipegrid.reshard import Links, Sizes, axis_names, boundary_side, plan_reshard
from pipegrid.reshard.errors import BridgeError
from reshard_kit.grids import grid

SOURCES, DESTINATIONS = (0, 1), (2, 3, 4, 5)
MEGABYTE = Sizes((4, 64, 1024), axes=axis_names(3))
KILOBYTE = Sizes((1, 16, 16), axes=axis_names(3))


def side(end, *ranks):
    """A side of ``tp`` copies on these ranks."""
    return boundary_side(grid(ranks[0], tp=len(ranks)), end)


def chosen(sizes, links, *, source=SOURCES, destination=DESTINATIONS, backward=False):
    """The strategy that "auto" takes."""
    src, dst = side("source", *source), side("destination", *destination)
    plans = {
        strategy: plan_reshard(src, dst, sizes, strategy=strategy, links=links, backward=backward)
        for strategy in ("auto", "direct", "leader")
    }
    assert plans["auto"].adjoint().adjoint() == plans["auto"]
    assert plans["direct"].transfers != plans["leader"].transfers
    return next(s for s in ("direct", "leader") if plans[s].transfers == plans["auto"].transfers)


def test_a_link_of_ones_own_makes_sharing_pay():
    links = Links(bandwidth=1e9, latency=1e-5)
    assert chosen(MEGABYTE, links) == "direct"
    assert chosen(MEGABYTE, links, backward=True) == "direct"


def test_one_uplink_carries_the_same_bytes_either_way_so_fewer_messages_win():
    for shared in ((SOURCES,), (SOURCES, DESTINATIONS)):
        links = Links(bandwidth=1e9, latency=1e-5, shared=shared)
        assert chosen(MEGABYTE, links) == "leader"
        assert chosen(MEGABYTE, links, backward=True) == "leader"


def test_links_that_share_the_same_ranks_are_equal_however_these_are_listed():
    assert Links(1e9, 0.0, shared=[(1, 0)]) == Links(1e9, 0.0, shared=[(0, 1)])


def test_tiny_tensors_are_sent_whole():
    """Two messages per sender against one: 2 L + n / (2 bw) against L + n / bw meet at n = 2 L bw = 20 kB."""
    links = Links(bandwidth=1e9, latency=1e-5)
    assert chosen(KILOBYTE, links) == "leader"
    below, above = Sizes((1, 1, 4900), axes=axis_names(3)), Sizes((1, 1, 5100), axes=axis_names(3))
    assert (chosen(below, links), chosen(above, links)) == ("leader", "direct")


def test_messages_without_latency_are_shared_even_over_one_uplink():
    assert chosen(MEGABYTE, Links(bandwidth=1e9, latency=0.0, shared=(SOURCES,))) == "direct"


def test_without_links_bytes_decide():
    assert chosen(MEGABYTE, None) == "direct"
    assert chosen(KILOBYTE, None) == "leader"


def test_the_busiest_link_counts_and_a_local_copy_is_free():
    links = Links(bandwidth=100.0, latency=1.0, shared=((0, 1),))
    assert links.link_of(1) == links.link_of(0)
    assert links.seconds([]) == links.seconds([(0, 0, 1e9)]) == 0.0
    assert links.seconds([(0, 2, 100.0), (1, 3, 300.0)]) == 1 + 1 + 1 + 3
    assert links.seconds([(2, 0, 100.0), (3, 4, 300.0), (0, 2, 100.0)]) == 1 + 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"bandwidth": 0.0, "latency": 0.0}, r"Links.bandwidth is 0\.0; it must be a finite number above 0"),
        ({"bandwidth": float("nan"), "latency": 0.0}, "Links.bandwidth is nan"),
        ({"bandwidth": 1.0, "latency": -1.0}, r"Links.latency is -1\.0; it must be a finite number of at least 0"),
        ({"bandwidth": 1.0, "latency": 0.0, "shared": [(0, 1), (1, 2)]}, "Links.shared is .*; a rank has one link"),
        ({"bandwidth": 1.0, "latency": 0.0, "shared": [0, 1]}, "Links.shared is .*; it must be a list of sets of"),
    ],
)
def test_links_that_cannot_be(arguments, text):
    with pytest.raises(BridgeError, match=text):
        Links(**arguments)
