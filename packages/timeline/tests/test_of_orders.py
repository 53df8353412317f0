"""Timelines of orders: every launch is drawn once, and what gets stuck is what the proof says."""

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipegrid.plans import PlanError
from pipegrid.plans.orders import prove_order
from pipegrid.timeline import order_timeline
from pipegrid.timeline.kinds import BEHIND, STUCK
from plan_kit.launches import MODELS, random_orders


@given(random_orders(), st.sampled_from(MODELS), st.booleans(), st.booleans())
def test_a_timeline_has_every_launch_and_a_cycle_where_the_proof_has_one(found, model, buffered, drains):
    options = {"buffered": buffered, "drains": drains}
    try:
        prove_order(found, model, **options)
        stuck = False
    except PlanError as error:
        if error.faults[0].rule != "cycle":
            return
        stuck = True
    drawn = order_timeline(found, model, **options)
    never = [span for span in drawn.spans if span.kind in (STUCK, BEHIND)]
    assert bool(never) == bool(drawn.flows) == stuck
    computes = Counter(span.label for span in drawn.spans if "compute" in drawn.rows[span.row])
    wanted = Counter(launch.text for launches in found.ranks for launch in launches if launch.is_compute)
    assert computes == wanted
    parts = sum(
        len({message.group for message in launch.messages}) if launch.batched and model.batched != "none"
        else len(launch.messages)
        for launches in found.ranks
        for launch in launches
    )  # fmt: skip
    assert len(drawn.spans) == computes.total() + parts
    for row in range(len(drawn.rows)):
        own = [span for span in drawn.spans if span.row == row]
        assert all(before.end <= after.start for before, after in itertools.pairwise(own)), own
