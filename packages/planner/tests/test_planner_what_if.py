"""What another schedule would have made of a recorded run, and the layers that its stages were made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.planner import (
    JobError,
    layer_costs,
    layers_toml,
    parse_job,
    what_if,
)
from pipegrid.planner.__main__ import main
from pipegrid.planner.report import what_if_table
from pipegrid.plans import (
    SCHEDULES,
    ActionKind,
    Costs,
    forward_only,
    lower,
    one_f_one_b,
    schedule_for,
    simulate,
    stage_places,
    zero_bubble_h1,
)
from pipegrid.timeline import Recorded, Recording, Track, recording_from_json, recording_to_json


def recorded(plan, costs, *, rank_of=1):
    """The recording of a run that takes exactly what the simulation says."""
    simulation = simulate(plan, costs)
    tracks = []
    for position, (starts, ends) in enumerate(zip(simulation.start, simulation.end, strict=True)):
        entries = [
            Recorded(index, start, end, memory=7 if action.kind is ActionKind.F else None)
            for index, (start, end, action) in enumerate(zip(starts, ends, plan.actions(position), strict=True))
        ]
        tracks.append(Track(rank_of * position, position, entries))
    return Recording(plan, tracks)


UNEVEN = Costs(F=(1.0, 2.0, 3.0, 4.0), I=(2.0, 1.0, 2.0, 1.0), W=(1.0, 1.0, 1.0, 2.0))


def test_what_if_of_the_recorded_schedule_is_the_recorded_step():
    recording = recorded(lower(zero_bubble_h1(4, 8)), UNEVEN)
    found = what_if(recording, schedule="zero_bubble_h1")
    assert found.predicted == pytest.approx(found.measured)
    assert found.reproduced.makespan == pytest.approx(found.measured)
    assert found.other.peak() == 4 * 7


@pytest.mark.parametrize("schedule", ["zero_bubble_v", "1f1b", "interleaved_1f1b", "v_half"])
@pytest.mark.parametrize("pp", [2, 4])
def test_what_if_is_the_simulation_of_the_other_plan_at_the_same_costs(schedule, pp):
    recording = recorded(lower(zero_bubble_h1(4, 8)), UNEVEN)
    found = what_if(recording, schedule=schedule, pp=pp)
    stages = len(stage_places(schedule, pp))
    other = SCHEDULES[schedule].plan(pp, 8)
    assert found.predicted == pytest.approx(simulate(lower(other), UNEVEN.cut_into(stages, slices=4)).makespan)
    read = what_if(recording_from_json(recording_to_json(recording)), schedule=schedule, pp=pp)
    assert read.predicted == found.predicted


def test_gathers_of_sharded_parameters_are_named_where_a_prediction_leaves_them_out():
    plan = one_f_one_b(2, 4)
    assert "gathers" not in what_if_table(what_if(recorded(lower(plan), Costs()), schedule="1f1b"))
    found = what_if(recorded(lower(plan, shard="step"), Costs()), schedule="1f1b")
    assert found.gathers == 2
    assert "gathers parameters 2 times. Recordings do not measure gathers" in what_if_table(found)


def test_what_if_keeps_the_batch_and_halves_whole_backwards_as_asked():
    recording = recorded(lower(one_f_one_b(2, 4)), Costs(F=(1.0, 1.0), B=(3.0, 3.0)))
    assert what_if(recording, schedule="1f1b", microbatches=8).predicted == pytest.approx(9 * 2.0)
    even, uneven = (what_if(recording, schedule="zero_bubble_h1", input_share=share) for share in (0.5, 0.25))
    assert even.other.costs.I == (1.5, 1.5)
    assert uneven.other.costs.W == (2.25, 2.25)


def test_what_if_of_several_modules_keeps_their_stages():
    graph = ModuleGraph([("images", 1), ("language", 2)], [("images", "language")])
    recording = recorded(lower(schedule_for(graph, "1f1b", 6, placement=[0, 1, 2])), Costs(F=1.0, I=1.0, W=1.0))
    found = what_if(recording, schedule="zero_bubble_h1")
    assert found.other.plan.graph == graph
    assert found.predicted < found.measured
    with pytest.raises(JobError, match="'language' was recorded on 2 positions beside other modules"):
        what_if(recording, schedule="1f1b", pp=4)
    with pytest.raises(JobError, match="recorded with 2 stages on 2 positions"):
        what_if(recording, schedule="interleaved_1f1b", chunks=2)


def test_a_recording_without_backwards_predicts_no_training_step():
    forwards = recorded(lower(forward_only(2, 4)), Costs(F=1.0))
    with pytest.raises(JobError, match=r"'1f1b' runs backwards of stages \[0, 1\], which the recorded step did not"):
        what_if(forwards, schedule="1f1b", pp=1)
    with pytest.raises(JobError, match=r"stages \[0, 1\] of 'model' were recorded without a backward"):
        layer_costs(forwards, "t|t")
    graph = ModuleGraph([("images", 1), ("language", 2)], [("images", "language")])
    frozen = lower(schedule_for(graph, "1f1b", 6, placement=[0, 1, 2], forward_only=["images"]))
    found = what_if(recorded(frozen, Costs(F=1.0, I=1.0, W=1.0)), schedule="zero_bubble_h1")
    assert found.other.plan.forward_only == (0,)
    assert layer_costs(recorded(frozen, Costs(F=1.0, I=1.0, W=1.0)), "t", module="images")[0].seconds.I == 0.0


def test_the_command_line_of_what_if(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(recording_to_json(recorded(lower(one_f_one_b(2, 4)), Costs(F=1.0, I=1.0, W=1.0))))
    svg, page = tmp_path / "other.svg", tmp_path / "both.html"
    files = ["--svg", str(svg), "--html", str(page)]
    assert main(["what-if", str(path), "--schedule", "zero_bubble_v", "--pp", "4", *files]) == 0
    printed = capsys.readouterr().out
    assert "recorded, simulated" in printed
    assert "predicted" in printed
    assert svg.read_text().startswith("<svg")
    assert "4 positions, 4 microbatches; 2 positions, 4 microbatches, measured" in page.read_text()
    for wrong in (
        ["--schedule", "none"],
        ["--schedule", "1f1b", "--pp", "0"],
        ["--schedule", "1f1b", "--input-share", "2"],
    ):
        assert main(["what-if", str(path), *wrong]) == 2
    path.write_text('{"plan": 1}')
    assert main(["what-if", str(path), "--schedule", "1f1b"]) == 2
    assert capsys.readouterr().err.count("\n") == 4


@given(
    st.tuples(*[st.floats(0.1, 10)] * 9),
    st.sampled_from(["Et|ttt|tL", "Et*3|t*4|ttL", "E|t|tt|L", "Et|(tt|)*2,L"]),
    st.integers(1, 3),
)
def test_layers_of_a_recorded_run_are_those_that_its_stages_were_made_of(values, layout, samples):
    times = {kind: values[3 * i : 3 * i + 3] for i, kind in enumerate(("embedding", "decoder", "loss"))}
    stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
    each = [[samples * sum(times[layer.name][i] for layer in stage) for stage in stages] for i in range(3)]
    costs = Costs(F=each[0], I=each[1], W=each[2])
    found = layer_costs(recorded(lower(zero_bubble_h1(len(stages), 4)), costs), layout, samples=samples)
    assert [layer.kind for layer in found] == ["embedding", "decoder", "loss"]
    assert sum(layer.count for layer in found) == sum(map(len, stages))
    for layer in found:
        assert pytest.approx(times[layer.kind], rel=1e-6) == (layer.seconds.F, layer.seconds.I, layer.seconds.W)
    assert parse_job(JOB_HEAD + layers_toml(found)).modules[0].layers[1].count == found[1].count


JOB_HEAD = """
global_batch = 4
device = { flops = 1e12 }
links = { inside = 1e9, between = 1e9 }
[[modules]]
name = "language"
message = 1e6
"""


def test_kinds_that_stages_cannot_tell_apart_say_so(tmp_path, capsys):
    recording = recorded(lower(one_f_one_b(2, 2)), Costs(F=(3.0, 5.0), B=(6.0, 10.0)))
    with pytest.raises(JobError, match=r"cannot tell 'loss' from 'embedding', 'decoder'; record another layout"):
        layer_costs(recording, "Et|ttL")
    found = layer_costs(recording, "Et|ttL", free=["embedding"])
    assert [layer.seconds.F for layer in found] == pytest.approx([0.0, 3.0, 0.0])  # the loss would be below 0
    with pytest.raises(JobError, match="has 3 stages; 'model' was recorded with 2"):
        layer_costs(recording, "E|t|L")
    with pytest.raises(JobError, match="module is 'images'; the recorded modules are model"):
        layer_costs(recording, "Et|tL", module="images")
    path = tmp_path / "run.json"
    path.write_text(recording_to_json(recording))
    assert main(["layers", str(path), "--layout", "Et|ttL", "--free", "embedding"]) == 0
    assert capsys.readouterr().out.count("[[modules.layers]]") == 3
    assert main(["layers", str(path), "--layout", "Et|nonsense"]) == 2
