"""The search: bounds kept, the same twice, the best by brute force, its positions those of the bridges."""

import ast
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import pipegrid.planner
from pipegrid.planner import (
    Device,
    Job,
    JobError,
    Layers,
    ModuleCosts,
    Network,
    NoFitError,
    parse_job,
    plan,
    read_job,
    refined,
)
from pipegrid.planner.__main__ import main
from pipegrid.planner.choice import Candidate
from pipegrid.planner.grids import arrangements
from pipegrid.planner.model import CostModel
from pipegrid.planner.report import results_table, to_json, why_slower
from pipegrid.planner.script import training_script
from pipegrid.planner.search import _JobSearch
from pipegrid.planner.stages import Shape
from pipegrid.plans import PlanError, lower, stage_places, verify
from pipegrid.plans.generators import v_placement
from pipegrid.reshard import positions_of
from planner_kit.jobs import ALL_SCHEDULES, small_job

VLM = Path(__file__).parents[3] / "docs" / "examples" / "jobs" / "vlm.toml"


def brute_force(job, gpus, capacity):
    """Every arrangement, microbatch size and schedule, each simulated."""
    model, best = CostModel(job), []
    for arrangement in arrangements(job, gpus):
        main_part = arrangement.parts[-1]
        for schedule, chunks in itertools.product(ALL_SCHEDULES, (1, 2)):
            try:
                places = stage_places(schedule, main_part.pp, chunks)
            except PlanError:
                continue
            if len(places) > len(job.module(main_part.module).each) or (schedule == "1f1b") < (main_part.pp == 1):
                continue
            if schedule == "1f1b" and chunks > 1:
                continue
            shape = Shape(model, arrangement, places)
            for microbatch in range(1, job.global_batch + 1):
                lanes = [microbatch % part.dp for part in arrangement.parts]
                if any(lanes) or job.global_batch % microbatch:
                    continue
                try:
                    choice = Candidate(shape, schedule, microbatch).cost()
                except PlanError:
                    continue
                if choice.peak <= capacity:
                    best.append(choice)
    return sorted(one.step for one in best)


def test_the_best_of_a_small_job_are_those_of_brute_force():
    job = small_job(decoder=3, encoder=2)
    planned = plan(job, gpus=4, limit=10_000)
    assert planned.complete
    assert [one.step for one in planned.choices] == pytest.approx(brute_force(job, 4, 80e9)[:10], rel=1e-12)


@pytest.mark.parametrize("capacity", [10e9, 11e9, 13e9])
def test_in_tight_memory_no_choice_of_brute_force_is_faster(capacity):
    """The search also tries layouts that balance memory, so it may be faster."""
    job = small_job(decoder=3, encoder=2)
    fitting = brute_force(job, 4, capacity)
    assert 0 < len(fitting) < len(brute_force(job, 4, 80e9))
    planned = plan(job, gpus=4, memory=capacity, limit=10_000)
    assert planned.complete
    assert planned.winner.peak <= capacity
    assert planned.winner.step <= fitting[0] * (1 + 1e-12)


jobs = st.builds(
    small_job,
    encoder=st.integers(1, 3),
    decoder=st.integers(1, 4),
    batch=st.sampled_from([2, 4, 6]),
    flops=st.sampled_from([0.1, 1.0, 8.0]),
    frozen=st.booleans(),
    alone=st.booleans(),
    schedules=st.sampled_from([("1f1b",), ("1f1b", "zero_bubble_v")]),
)


@settings(max_examples=15, deadline=None)
@given(jobs, st.integers(2, 6), st.sampled_from([6e9, 12e9, 80e9]))
def test_choices_keep_to_the_gpus_and_the_memory_and_are_the_same_twice(job, gpus, capacity):
    try:
        planned = plan(job, gpus=gpus, memory=capacity, limit=30)
    except NoFitError as error:
        if error.memory is None:
            raise
        assert error.memory > capacity
        assert plan(job, gpus=gpus, memory=error.memory, limit=30).winner.peak <= error.memory
        return
    for choice in planned.choices:
        assert choice.arrangement.gpus <= gpus
        assert choice.peak <= capacity
        ranks = sorted({rank for grid in choice.arrangement.grids.values() for rank in grid.ranks})
        assert ranks == list(range(choice.arrangement.gpus))
    steps = [one.step for one in planned.choices]
    assert steps == sorted(steps)
    assert to_json(planned) == to_json(plan(job, gpus=gpus, memory=capacity, limit=30))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_bound_is_never_above_the_step_it_bounds(frozen):
    job = small_job(frozen=frozen)
    model = CostModel(job)
    for arrangement in arrangements(job, 4):
        depth = arrangement.parts[-1].pp
        for schedule, chunks in (("1f1b", 1), ("zero_bubble_h1", 1), ("zero_bubble_v", 2), ("gpipe", 1)):
            if chunks * depth > 6 or depth == 1:
                continue
            candidate = Candidate(Shape(model, arrangement, stage_places(schedule, depth, chunks)), schedule, 4)
            assert candidate.least_seconds() <= candidate.cost().step * (1 + 1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_memory_that_is_called_too_little_is_too_little(frozen):
    """Candidates are left out by bounds of their memory, which are never above what they need."""
    job = small_job(encoder=2, decoder=2, batch=4, flops=0.1, activations=4e9, frozen=frozen, schedules=("1f1b",))
    search = _JobSearch(CostModel(job), 4, 80e9, 30)
    for arrangement in arrangements(job, 4):
        for candidate in search.candidates(arrangement):
            made, live = search.planned(candidate)
            peak = candidate.cost(made).peak
            assert search.model.least_memory(arrangement) <= peak
            assert candidate.least_memory(live) <= peak
            assert candidate.least_memory(candidate.least_in_flight()) <= peak


def test_the_hosts_overhead_is_in_every_step():
    job = small_job(alone=True, schedules=("1f1b",))
    slow = evolve(job, device=evolve(job.device, overhead=0.01))
    for choice in plan(slow, gpus=1).choices:
        quick = next(one for one in plan(job, gpus=1).choices if one.microbatch == choice.microbatch)
        computes = len(list(choice.plan.actions(0)))
        assert choice.step == pytest.approx(quick.step + 0.01 * computes)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_refined_choice_is_shorter_in_the_same_memory_and_its_plan_verifies(frozen):
    planned = plan(small_job(batch=16, frozen=frozen, schedules=("1f1b",)), gpus=4, memory="40GB")
    piped = [choice for choice in planned.choices if choice.plan.num_positions > 1]
    better = refined(piped[0], memory=40e9, ahead=2, effort=0.01)
    assert better.step < piped[0].step
    assert better.peak <= 40e9
    assert better.schedule == "search"
    verify(lower(better.plan, collectives=better.shape.collectives, ahead=2))


def test_positions_are_those_of_the_bridges():
    job = small_job()
    model = CostModel(job)
    for arrangement in arrangements(job, 6):
        main_part = arrangement.parts[-1]
        for places in (tuple(range(main_part.pp)), v_placement(main_part.pp)):
            if len(places) > 6:
                continue
            shape = Shape(model, arrangement, places)
            each = {part.module: tuple(range(part.pp)) for part in arrangement.parts} | {main_part.module: places}
            found = positions_of(shape.placed.graph, arrangement.grids, each)
            assert found.placement == shape.placed.placement


def test_a_v_has_one_placement():
    for schedule in ("zero_bubble_v", "v_half", "v_min", "dualpipe_v"):
        assert stage_places(schedule, 4, 2) == v_placement(4)


def test_a_layout_under_the_limit_is_found_where_the_fastest_does_not_fit():
    job = small_job(alone=True, decoder=8, batch=8, activations=4e9, schedules=("1f1b",))
    free = plan(job, gpus=2, memory=1e12).winner
    tight = plan(job, gpus=2, memory=free.peak * 0.9).winner
    assert tight.peak <= free.peak * 0.9
    assert tight.step >= free.step


def test_a_job_that_cannot_fit_says_what_does():
    with pytest.raises(
        NoFitError, match=r"memory is 2 GB per GPU; on 2 GPUs the choice that needs the least takes .* GB"
    ):
        plan(small_job(), gpus=2, memory="2GB")
    with pytest.raises(NoFitError, match=r"gpus is 1; the smallest grids that the modules allow take 2"):
        plan(
            Job((ModuleCosts("m", (Layers("decoder", flops=1),), 1, tp=(2,)),), 1, Device(1, 1e9), Network(1, 1)),
            gpus=1,
        )


JOB = {
    "global_batch": 4,
    "device": {"flops": 1e14, "memory": "80GB", "reserved": "1GB"},
    "links": {"inside": "300GB", "between": 4e10},
    "edges": [["a", "b"]],
    "modules": [
        {"name": "a", "message": 1e6, "layers": [{"kind": "encoder", "count": 2, "flops": 1e12}]},
        {"name": "b", "message": 1e6, "layers": [{"kind": "decoder", "seconds": {"F": 1, "I": 1, "W": 1}}]},
    ],
}


def test_a_job_is_read():
    job = parse_job(json.dumps(JOB), form="json")
    assert (job.device.memory, job.edges, job.module("b").each[0].seconds.F) == (80e9, (("a", "b"),), 1)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (
            ("modules", 1, "layers", 0, "flop"),
            1,
            r"modules\[1\].layers\[0\]: unknown keys \['flop'\] .did you mean 'flops'.*; the keys are kind",
        ),
        (("modules", 0, "layers", 0, "flops"), None, r"modules\[0\].layers\[0\]: .* neither of flops and seconds"),
        (("modules", 0, "layers", 0, "count"), 0, r"modules\[0\].layers\[0\]: Layers.count is 0; .* at least 1"),
        (("modules", 0, "layers"), [], r"modules\[0\]: module 'a' has no layers"),
        (("edges",), [["a", "b"], ["b", "a"]], r"edges: the modules form a cycle"),
        (("edges",), [["a", "c"]], r"edges: .*unknown module 'c'"),
        (("device", "memory"), "80 pounds", r"device: Device.memory is '80 pounds'; .* such as \"80GB\""),
        (("modules",), [], r"modules: the graph has no modules"),
        (("modules",), JOB["modules"][0], r"modules\[0\]: it must have the keys name, layers"),
        (("modules", 0, "layers", 0, "kind"), "loss", r"modules\[0\]: layers of 'a': .*loss"),
        (("modules",), 3, r"modules: it must be a list"),
        (("modules", 1, "name"), "a", r"modules: .*declared twice"),
        (("modules", 0, "frozen"), "yes", r"modules\[0\]: ModuleCosts.frozen is 'yes'; it must be true or false"),
        (("modules", 0, "layers", 0, "count"), 10**9, r"modules\[0\]: module 'a' has 1000000000 layers; at most 10000"),
        (("modules", 1, "layers", 0, "seconds"), 3, r"layers\[0\].seconds: it must have the keys F, I, W"),
        (
            ("training",),
            {"schedules": ["seq1f1b"]},
            r"schedules\[0\] is 'seq1f1b'.*; it must be a schedule of whole microbatches",
        ),
        (("training",), {"schedules": []}, r"training: training.schedules is empty; name at least one"),
        (("training",), {"chunks": []}, r"training: training.chunks is empty; name at least one"),
        (("training",), {"schedules": ["zigzag"]}, r"schedules\[0\] is 'zigzag'; it must be a schedule of whole"),
    ],
)
def test_a_fault_of_a_job_is_one_line_with_its_path(path, value, text):
    job = json.loads(json.dumps(JOB))
    place = job
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(JobError, match=text) as caught:
        parse_job(json.dumps(job), form="json")
    assert "\n" not in str(caught.value)


def test_text_that_is_no_toml_says_where(tmp_path):
    (tmp_path / "job.toml").write_text("modules = [")
    with pytest.raises(JobError, match=r"job.toml: not TOML: .*at end of document"):
        read_job(tmp_path / "job.toml")


def test_the_script_compiles_and_names_what_exists():
    planned = plan(small_job(), gpus=4)
    script = training_script(planned.winner)
    tree = ast.parse(script)
    compile(tree, "train.py", "exec")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipegrid."):
            name = node.module.split(".")[1]
            text = Path(__file__).parents[2].joinpath(name, "src", "pipegrid", name, "__init__.py").read_text()
            for alias in node.names:
                assert f'"{alias.name}"' in text, f"{node.module} has no public {alias.name}"


def test_the_command_line(tmp_path, capsys):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB))
    files = ["--svg", str(tmp_path / "t.svg"), "--html", str(tmp_path / "t.html"), "--code", str(tmp_path / "train.py")]
    assert main(["plan", str(path), "--gpus", "2", "--explain", "--dry-run", *files]) == 0
    printed = capsys.readouterr().out
    assert "activations" in printed
    assert "no other is faster" in printed
    assert "communicators of a rank: at most" in printed
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    assert (tmp_path / "t.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["plan", str(path), "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 2
    assert main(["plan", str(path), "--gpus", "2", "--json", "--search", "0.01", "--dry-run"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["searched"]["step"] <= found["choices"][0]["step"]
    assert main(["plan", str(path), "--gpus", "2", "--memory", "1B"]) == 1
    assert main(["plan", str(tmp_path / "none.toml"), "--gpus", "2"]) == 2
    (tmp_path / "run.json").write_bytes(b"\xff")
    assert main(["what-if", str(tmp_path / "run.json"), "--schedule", "1f1b"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_a_job_is_drawn_with_all_its_modules(tmp_path, capsys):
    job = str(Path(__file__).parents[3] / "docs/examples/jobs/vlm.toml")
    files = ["--svg", str(tmp_path / "job.svg"), "--html", str(tmp_path / "job.html")]
    assert main(["show", job, "--gpus", "64", "--schedule", "zero-bubble-v", *files]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("vision: ")
    assert "\nlanguage: Et" in shown
    assert "\nzero_bubble_v, tp=" in shown
    rows = [line for line in shown.splitlines() if "|" in line and "(position" in line]
    assert {line.split(".")[0].split()[0] for line in rows} == {"vision", "language"}
    assert "vision" in (tmp_path / "job.svg").read_text()
    assert "zero_bubble_v, tp=" in (tmp_path / "job.html").read_text()
    assert main(["show", job, "--gpus", "64", "--schedule", "zbv8"]) == 2
    assert "there is no schedule 'zbv8'" in capsys.readouterr().err
    assert main(["show", job, "--gpus", "64", "--choice", "11"]) == 2
    assert "--choice 11: the table has the choices 1 to 10" in capsys.readouterr().err
    small = tmp_path / "job.json"
    small.write_text(json.dumps(JOB))
    assert main(["show", str(small), "--gpus", "1", "--schedule", "zero_bubble_h1"]) == 2
    assert "allow 'b' only pp above 1" in capsys.readouterr().err
    misspelled = tmp_path / "wrong.json"
    misspelled.write_text(json.dumps(JOB | {"training": {"schedules": ["zero_buble_v"]}}))
    assert main(["show", str(misspelled), "--gpus", "2"]) == 2
    assert "(did you mean 'zero_bubble_v'?)" in capsys.readouterr().err


def test_the_table_and_the_reason_of_the_runner_up():
    planned = plan(small_job(), gpus=4)
    assert len(results_table(planned).splitlines()) == 2 + len(planned.choices)
    assert "longer" in why_slower(planned.choices[0], planned.choices[-1])
    free = evolve(planned.winner, makespan=0.0, busy=0.0)
    assert "longer: +" in why_slower(free, planned.winner)


def test_the_example_is_read():
    job = read_job(VLM)
    assert sum(module.parameters for module in job.modules) == pytest.approx(76.1e9, rel=0.01)


def test_the_package_works_with_torch_blocked():
    program = "import sys; sys.modules['torch'] = None\nfrom pipegrid.planner.__main__ import main"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("", "")


def test_the_public_names_are_pinned():
    assert set(pipegrid.planner.__all__) == {
        "Device", "Job", "JobError", "Layers", "Measured", "ModuleCosts", "Network", "NoFitError", "Training",
        "dry_run", "plan", "read_job", "refined", "what_if",
    }  # fmt: skip
    further = (
        "Choice", "DryRun", "Memory", "Planned", "Survival", "WhatIf", "count_survivable", "layer_costs", "layers_toml",
        "parse_job", "survivable", "survivable_table",
    )  # fmt: skip
    for name in further:  # imported from it as well
        assert getattr(pipegrid.planner, name).__name__ == name
