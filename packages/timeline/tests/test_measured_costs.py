"""Costs out of recordings: computes, hops, the host's share and memory, and recordings as JSON."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    ActionKind,
    Costs,
    CostsError,
    PlanError,
    dualpipe_v,
    from_text,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
)
from pipegrid.plans.plan import parse_action
from pipegrid.timeline import (
    Aside,
    Recorded,
    Recorder,
    Recording,
    TimelineError,
    Track,
    recorded_costs,
    recording_from_json,
    recording_to_json,
)
from plan_kit.player import play

HOP, HOST = 0.05, 0.002


def run(plan, costs, *, hop=HOP, host=HOST):
    """Tracks of ranks that do what ``costs`` say, whose messages arrive ``hop`` after their posting."""
    orders = [[(p, action) for action in plan.actions(p)] for p in range(plan.num_positions)]

    def message(action):
        return action.edge, action.kind.value[-1], action.microbatch

    received = [{message(action) for _, action in order if action.kind.is_receive} for order in orders]

    def needs(step):
        position, action = step
        way = {"F": "F", "B": "B", "I": "B"}.get(action.kind.value)  # a W and a message need nothing that travels
        edges = plan.graph.stage_edges
        into = [edge for edge in edges if (edge.destination if way == "F" else edge.source) == action.stage]
        needed = [(edge, way, action.microbatch) for edge in into]
        return [(each, hop) for each in needed if each in received[position]]

    def length(step):
        _, action = step
        return host if action.kind.is_message else costs.per_stage(action.kind.value, plan.num_stages)[action.stage]

    def gives(step):
        return [message(step[1])] if step[1].kind.is_send else []

    tracks = []
    for p, times in enumerate(play(orders, needs=needs, length=length, gives=gives)):
        ends = [(action, *time) for (_, action), time in zip(orders[p], times, strict=True)]
        entries = [
            Recorded(n, start, end, end if a.kind.is_message else None) for n, (a, start, end) in enumerate(ends)
        ]
        tracks.append(Track(p, p, entries))
    return Recording(plan, tracks)


@pytest.mark.parametrize("plan", [lower(zero_bubble_h1(3, 5)), lower(interleaved_1f1b(2, 4, num_chunks=2))])
def test_a_run_gives_back_the_costs_that_it_had(plan):
    stages = plan.num_stages
    true = Costs(F=tuple(1.0 + s for s in range(stages)), I=(2.0,) * stages, W=(0.5,) * stages)
    found = recorded_costs(run(plan, true))
    for kind in ("F", "B"):
        assert found.per_stage(kind, stages) == pytest.approx(true.per_stage(kind, stages))
    assert found.overhead == pytest.approx(HOST)
    waits = [seconds for _, seconds in found.latency]
    assert max(waits) <= HOP
    assert min(waits) > HOP / 2  # where the host's own time hid a part
    predicted = simulate(plan, found).makespan
    recording = run(plan, true)
    measured = max(entry.end for track in recording.tracks for entry in track.actions)
    assert predicted == pytest.approx(measured, rel=0.02)


def test_halves_of_a_whole_backward_are_what_is_asked_for():
    recording = run(lower(one_f_one_b(2, 3)), Costs(F=1.0, B=(4.0, 2.0)))
    assert pytest.approx((2.0, 1.0)) == recorded_costs(recording).I
    found = recorded_costs(recording, input_share=0.75)
    assert (pytest.approx((3.0, 1.5)), pytest.approx((1.0, 0.5))) == (found.I, found.W)
    with pytest.raises(CostsError, match=r"input_share is 1.5; it must be a share from 0 to 1"):
        recorded_costs(recording, input_share=1.5)
    with pytest.raises(CostsError, match="no rank recorded stage 1"):
        recorded_costs(Recording(recording.plan, recording.tracks[:1]))


def test_the_recorder_measures_memory_where_it_is_asked_to():
    plan, held = one_f_one_b(1, 2), [0]
    recorder = Recorder(memory=lambda: held[0])
    recorder.start()
    for text, grown in (("0F0", 100), ("0B0", -100), ("0F1", 100), ("0B1", -100)):
        recorder.before(parse_action(text))
        held[0] += grown
        recorder.after(parse_action(text))
    recording = Recording(plan, [recorder.track(plan, rank=0, position=0)])
    assert [entry.memory for entry in recording.tracks[0].actions] == [100, -100, 100, -100]
    assert recorded_costs(recording).activation == (100.0,)
    assert recorded_costs(run(lower(plan), Costs())).activation is None


times = st.floats(0, 1e6)


@given(st.lists(st.tuples(times, times, st.none() | times, st.none() | st.integers(-(2**60), 2**60)), max_size=4))
def test_recordings_survive_json(entries):
    plan = one_f_one_b(2, 2)
    actions = [Recorded(index, *entry) for index, entry in enumerate(entries)]
    recording = Recording(plan, [Track(0, 0, actions, [Aside("optimizer", 1.0, 2.0)]), Track(1, 1, [])])
    assert recording_from_json(recording_to_json(recording)) == recording


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("[", PlanError, "line 1"),
        ("{}", TimelineError, "it must be an object with 'plan' and 'tracks'"),
        ('{"plan": {}, "tracks": 1}', TimelineError, "it must be an object with 'plan' and 'tracks', a list"),
        ('{"plan": {}, "tracks": []}', PlanError, "microbatches"),
    ],
)
def test_other_documents_say_what_is_wrong(text, error, match):
    with pytest.raises(error, match=match):
        recording_from_json(text)


@pytest.mark.parametrize("track", ["1", '{"rank": 0}', '{"rank": -1, "position": 0, "actions": [], "asides": []}'])
def test_a_wrong_track_says_which(track):
    document = recording_to_json(Recording(one_f_one_b(1, 1), [])).replace('"tracks": [\n', '"tracks": [' + track)
    with pytest.raises(TimelineError, match=r"^tracks\[0\]"):
        recording_from_json(document)


def test_edges_without_a_wait_take_the_mean_of_the_others():
    plan = lower(one_f_one_b(3, 4))
    found = recorded_costs(run(plan, Costs(F=(1.0, 1.0, 1.0), B=(2.0, 2.0, 2.0))))
    assert {edge for edge, _ in found.latency} == {Edge(0, 1), Edge(1, 2)}


def test_a_collective_takes_from_the_arrival_of_its_last_rank_until_all_go_on():
    graph = ModuleGraph({"images": 1, "language": 2}, {"images": ["language"]})
    computes = multi_module_1f1b(graph, 4, placement=[(0, 1), 0, 1])
    plan = lower(computes, collectives={Edge(0, 1): "both"})
    true = Costs(F=(1.0, 2.0, 5.0), B=(2.0, 4.0, 10.0), COLLECTIVE=(0.25, 0.25, 0.0))
    played = simulate(plan, true)
    tracks, waited = [], 0.0
    for position in range(2):
        entries, free = [], 0.0
        times = zip(plan.actions(position), played.start[position], played.end[position], strict=True)
        for index, (action, start, end) in enumerate(times):
            if action.kind is ActionKind.COLLECTIVE:  # posted when the rank arrives, seen to be complete much later
                waited += start - free
                entries.append(Recorded(index, free, end + 50.0, end))
            elif action.kind.is_message:
                entries.append(Recorded(index, free, max(free, end), free))
                continue
            else:
                entries.append(Recorded(index, start, end))
            free = end
        tracks.append(Track(position, position, entries))
    assert waited > 0
    found = recorded_costs(Recording(plan, tracks))
    assert pytest.approx(true.COLLECTIVE) == found.COLLECTIVE
    assert found.overhead == 0
    assert simulate(plan, found).makespan == pytest.approx(played.makespan)


def test_pairs_are_measured_by_what_they_save():
    plan = dualpipe_v(2, 5, overlap=True)
    costs = Costs(F=[0.5, 0.6, 0.5, 0.6], I=0.4, W=0.3, B=0.7, hidden=0.2)
    simulation = simulate(plan, costs)
    tracks = [
        Track(p, p, [Recorded(n, *times) for n, times in enumerate(zip(starts, ends, strict=True))])
        for p, (starts, ends) in enumerate(zip(simulation.start, simulation.end, strict=True))
    ]
    found = recorded_costs(Recording(plan, tracks))
    assert found.hidden == pytest.approx((0.2,) * 4)
    assert pytest.approx((0.5, 0.6, 0.5, 0.6)) == found.F
    assert simulate(plan, found).makespan == pytest.approx(simulation.makespan)
    alone = from_text("0: 0F0 (0F1;0B0) (0F2;0B1) 0B2")
    with_lone = Recording(alone, [Track(0, 0, [Recorded(0, 0.0, 1.0), Recorded(5, 9.0, 11.0)])])
    assert recorded_costs(with_lone).hidden == (0.0,)
    none = Recording(alone, [Track(0, 0, [Recorded(0, 0.0, 1.0), Recorded(1, 1.0, 3.0), Recorded(2, 1.0, 3.0)])])
    with pytest.raises(CostsError, match="stage 0 runs B in pairs alone; record a plan without pairs"):
        recorded_costs(none)
