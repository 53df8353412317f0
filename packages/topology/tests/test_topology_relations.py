"""The four relations of two grids."""

import itertools

from pipegrid.topology import HyperCommGrid, Relation, relation


def test_every_pair_of_spans_in_a_small_world():
    world = 6
    grids = [
        HyperCommGrid([size], ["dp"], offset, world_size=world)
        for offset in range(world)
        for size in range(1, world - offset + 1)
    ]
    seen = set()
    for a, b in itertools.product(grids, repeat=2):
        ours, theirs = set(a.ranks), set(b.ranks)
        if ours == theirs:
            expected = Relation.EQUAL
        elif not ours & theirs:
            expected = Relation.DISJOINT
        elif ours < theirs or theirs < ours:
            expected = Relation.NESTED
        else:
            expected = Relation.OVERLAPPING
        assert relation(a, b) is expected
        seen.add(expected)
    assert seen == set(Relation)


def test_shapes_do_not_matter():
    a = HyperCommGrid([2, 3], ["tp", "dp"], world_size=6)
    assert relation(a, HyperCommGrid([6], ["cp"], world_size=6)) is Relation.EQUAL
