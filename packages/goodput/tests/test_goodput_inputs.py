"""Durations, files, mistakes and the command line of goodput."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.goodput import Failures, Outage, Scenario, Throughput, goodput, random_failures, read_failures, simulate
from pipegrid.goodput.__main__ import main
from pipegrid.goodput.durations import duration_text, seconds_of
from pipegrid.planner import JobError


def test_durations_are_read_and_written():
    texts = {"90s": 90, "10m": 600, "12h": 43200, "1h30m": 5400, "1.5d": 129600, "250ms": 0.25, "1d 2h": 93600}
    for text, seconds in texts.items():
        assert seconds_of(text) == pytest.approx(seconds)
    assert seconds_of(12) == 12.0
    written = {0: "0s", 0.25: "250ms", 12.5: "12.5s", 59.9: "59.9s", 90: "1m 30s", 3600: "1h", 5400: "1h 30m"}
    written |= {86399.9: "24h", 129600: "1d 12h", math.inf: "never"}
    for seconds, text in written.items():
        assert duration_text(seconds) == text


@given(st.floats(1e-3, 1e8))
def test_a_written_duration_is_read_as_about_the_same(seconds):
    assert seconds_of(duration_text(seconds)) == pytest.approx(seconds, rel=0.02)


def test_random_failures_are_as_often_as_asked_and_the_same_again():
    failures = random_failures(16, mtbf="2h", repair="30m", seed=7)
    assert failures == random_failures(16, mtbf="2h", repair="30m", seed=7)
    assert failures != random_failures(16, mtbf="2h", repair="30m", seed=8)
    assert failures.duration == 7200 * 1000
    assert 850 < failures.count < 1100
    assert all(outage.end - outage.start == pytest.approx(1800) for outage in failures.outages)


def test_outages_of_a_node_that_overlap_are_one():
    outages = [Outage("a", 10, 20), Outage("b", 15, "never"), Outage("a", 15, 30), Outage("a", 40, 41)]
    assert Failures(outages, 41).events == ((10, False, 0), (15, False, 1), (30, True, 0), (40, False, 0))


def test_a_trace_is_read_from_a_file(tmp_path):
    path = tmp_path / "failures.csv"
    path.write_text("time,node,back\n6h,node10,\n12h30m,node4,14h\n")
    assert read_failures(path).outages == (Outage("node10", 21600), Outage("node4", 45000, 50400))
    assert read_failures(path).duration == 50400
    assert read_failures(path, duration="1d").duration == 86400
    path.write_text("node,time\nnode10,6h\n")
    assert read_failures(path).outages == (Outage("node10", 21600),)


def scenario_of(**options):
    known = {
        "throughput": Throughput({4: 8.0, 3: 5.0}, 100),
        "failures": Failures([Outage("a", 10)], 100),
        "restart": 1.0,
        "checkpoint": 1.0,
    }
    return Scenario(**known | options)


MISTAKES = {
    "a duration without a unit": (lambda: scenario_of(restart="10"), "Scenario.restart is '10'; .* \"1h30m\""),
    "a unit that is none": (lambda: scenario_of(checkpoint="3min"), "Scenario.checkpoint is '3min'"),
    "a duration below zero": (lambda: scenario_of(replan=-1), "Scenario.replan is -1; it must be a number of seconds"),
    "no number": (lambda: scenario_of(write=math.nan), "Scenario.write is nan"),
    "a truth for a duration": (lambda: scenario_of(promote=True), "Scenario.promote is True"),
    "a restart by no nodes": (lambda: scenario_of(restart={}), "Scenario.restart is {}"),
    "a restart by names": (lambda: scenario_of(restart={"all": 3}), "Scenario.restart is {'all': 3}"),
    "spares below zero": (lambda: scenario_of(spares=-1), "Scenario.spares is -1"),
    "another way without spares": (lambda: scenario_of(without_spares="stop"), "it must be 'restart' or 'wait'"),
    "a table for a throughput": (lambda: scenario_of(throughput={4: 8.0}), "must be a Throughput"),
    "a table without rows": (lambda: Throughput({}, 1), "Throughput.table is {} .*; it must be numbers of nodes"),
    "a table of zeros": (lambda: Throughput({4: 0}, 1), "Throughput.table is {4: 0}"),
    "no nodes": (lambda: Throughput({0: 1.0}, 1), "Throughput.table is {0: 1.0}"),
    "a negative rate": (lambda: Throughput({4: -1.0}, 1), "Throughput.table is {4: -1.0}"),
    "a number of nodes twice": (lambda: Throughput([(4, 1.0), ("4", 2.0)], 1), "each once"),
    "a table that is a number": (lambda: Throughput(4, 1), "Throughput.table is 4"),
    "more nodes than are counted": (lambda: Throughput({10**9: 1.0}, 1), "Throughput.table is {1000000000: 1.0}"),
    "more nodes than are drawn": (lambda: random_failures(10**9, mtbf="1h"), "an integer of 1 to 100000"),
    "no batch": (lambda: Throughput({4: 1.0}, 0), "Throughput.batch is 0; it must be a finite number above 0"),
    "back before it fails": (lambda: Outage("a", 20, 10), "node 'a' fails at 20 s and is back before that, at 10 s"),
    "a node without a name": (lambda: Outage("", 1), "Outage.node is ''"),
    "a run of no time": (lambda: Failures([], 0), "Failures.duration is 0"),
    "tuples for outages": (lambda: Failures([("a", 1, 2)], 10), r"Failures.outages\[0\] is .* must be an Outage"),
    "more nodes than there are": (
        lambda: scenario_of(failures=Failures([Outage(name, 1) for name in "abcde"], 10)),
        "5 nodes fail; the throughput has 4 nodes",
    ),
    "no mean time": (lambda: random_failures(4, mtbf=0), "mtbf is 0; .* above 0"),
    "no nodes to fail": (lambda: random_failures(0, mtbf="1h"), "nodes is 0"),
    "too many failures": (lambda: random_failures(4, mtbf="1ms", duration="365d"), "at most 1000000 failures"),
    "a policy that is none": (lambda: goodput(scenario_of(), policies=("pray",)), r"policies\[0\] is 'pray'"),
    "no policies": (lambda: goodput(scenario_of(), policies=()), "policies is empty; name at least one of restart"),
    "a policy alone": (lambda: goodput(scenario_of(), policies="restart"), "policies is 'restart'; .* list or tuple"),
    "no interval": (lambda: goodput(scenario_of(), every=0), "every is 0; .* above 0"),
    "a dict for a scenario": (lambda: goodput({"restart": 1}), "scenario is .* must be a Scenario"),
    "only spares left": (
        lambda: goodput(scenario_of(spares=2)),
        "spares is 2; without them no row of the throughput is left, which begins with 3 nodes",
    ),
    "no file": (lambda: read_failures("/nowhere.csv"), "/nowhere.csv: .*No such file"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_a_typed_error_that_names_value_and_rule(what):
    call, text = MISTAKES[what]
    with pytest.raises(JobError, match=text):
        call()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("6h,node1\n", ":2: the columns are 6h, node1|: no failures"),
        ("time,node\nsoon,node1\n", ":2: time is 'soon'"),
        ("time,node\n6h,node1,7h\n", ":2: the columns are time, node"),
        ("time,node,why\n6h,node1,fan\n", ":2: the columns are time, node, why; they must be"),
        ("time,node,back\n6h,node1,5h\n", ":2: node 'node1' fails at 21600 s and is back before"),
        ("time,node\n6h,\n", ":2: Outage.node is ''"),
        ("time,node\n", ": no failures; give the duration of the run"),
        ("", ": no failures"),
        ('time,node\n"6h,node1', ":.*end of"),
        ("time,node\n\xff".encode("latin-1"), ":.*decode"),
    ],
)
def test_a_file_of_failures_that_is_none(tmp_path, text, error):
    path = tmp_path / "failures.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JobError, match=f"{path}({error})"):
        read_failures(path)


TABLE = "batch = 800\n[throughput]\n8 = 80\n7 = 70\n6 = 60\n"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "throughput.toml"
    path.write_text(TABLE)
    return path


def line(path, *further):
    return [str(path), "--mtbf", "12h", "--restart", "10m", "--checkpoint", "30s", "--for", "20d", *further]


def test_the_command_line_prints_a_row_for_each_policy_and_the_best(table, capsys):
    assert main(line(table)) == 0
    printed = capsys.readouterr().out
    assert "8 nodes, 20d: " in printed
    assert [row.split()[0] for row in printed.splitlines()[5:8]] == ["re-plan", "restart", "spare"]
    assert "best: re-plan" in printed
    assert "Daly's formula" in printed
    assert "elsewhere a prediction, as spare is" in printed


def test_the_command_line_prints_json(table, capsys):
    assert main(line(table, "--policy", "restart", "--every", "1h", "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    (outcome,) = data["outcomes"]
    assert (outcome["policy"], outcome["every"], data["nodes"], data["step"]) == ("restart", 360, 8, 10.0)
    scenario = Scenario(Throughput({8: 80, 7: 70, 6: 60}, 800), random_failures(8, mtbf="12h", duration="20d"), 600, 30)
    assert outcome["goodput"] == simulate(scenario, "restart", 360).goodput


def test_the_command_line_takes_a_job_and_a_file_of_failures(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(
        "global_batch = 4\ndevice = {flops = 1e14, memory = '80GB'}\nlinks = {inside = 3e11, between = 4e10, "
        "gpus_per_node = 1}\n[training]\nschedules = ['1f1b']\n[[modules]]\nname = 'm'\nmessage = 1e6\n"
        "[[modules.layers]]\nkind = 'decoder'\ncount = 4\nflops = 1e12\n"
    )
    trace = tmp_path / "failures.csv"
    trace.write_text("time,node,back\n1h,b,2h\n5h,a,\n")
    given = [str(job), "--nodes", "4", "--failures", str(trace), "--restart", "5m", "--checkpoint", "20s"]
    assert main([*given, "--for", "8h"]) == 0
    assert "4 nodes, 8h: 2 failures, one every 4h, 1 nodes never back; a step takes 120ms" in capsys.readouterr().out
    assert main(given[:1] + given[3:]) == 2
    assert "a job has no number of nodes; give --nodes" in capsys.readouterr().err


def test_a_job_of_one_size_has_no_spares_and_waits_for_repairs(tmp_path, capsys):
    table = tmp_path / "throughput.json"
    table.write_text('{"batch": 800, "throughput": {"8": 80}}')
    assert main(line(table, "--json")) == 0
    outcomes = {outcome["policy"]: outcome for outcome in json.loads(capsys.readouterr().out)["outcomes"]}
    assert set(outcomes) == {"restart", "re-plan"}
    assert outcomes["restart"]["lost"]["waiting"] > 0
    assert main(line(table, "--policy", "spare")) == 2
    assert "spares is 1; without them no row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("batch = 1", "modules"),
        ("[throughput]\n8 = 1", "the keys are 'throughput'; they must be 'batch' and 'throughput'"),
        ("batch = 1\nnodes = 3\n[throughput]\n8 = 1", "the keys are 'batch', 'nodes', 'throughput'"),
        ("batch = 1\n[throughput]\neight = 1", "Throughput.table is {'eight': 1}"),
        ("batch = [", "not TOML"),
    ],
)
def test_a_file_of_neither_a_job_nor_a_throughput(tmp_path, text, error, capsys):
    path = tmp_path / "file.toml"
    path.write_text(text)
    assert main(line(path)) == 2
    assert error in capsys.readouterr().err
