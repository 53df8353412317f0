"""``python -m pipegrid.search``: what a person types, and what they get to see."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from pipegrid.core.edge import Edge
from pipegrid.core.order import ORDER_MODELS
from pipegrid.plans import lower, offload, one_f_one_b, to_csv, to_torch, v_half, with_skips
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.registry import SCHEDULES, find_schedule
from pipegrid.plans.plan import from_csv, from_text
from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.simulate.simulation import simulate
from pipegrid.plans.verify.verify import verify
from pipegrid.search.__main__ import main
from pipegrid.search.compare import compare, comparison_table

CROSSED = """\
0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
"""

LONG = ', "modules": [["m", 1]], "placement": [[0]], "positions": [["0F0"]]}'


def test_show_draws_in_every_form(tmp_path, capsys):
    files = {name: tmp_path / f"out.{name}" for name in ("svg", "html", "json", "csv")}
    options = ["--svg", str(files["svg"]), "--html", str(files["html"]), "--perfetto", str(files["json"])]
    options += ["--plan", str(files["csv"])]
    assert main(["show", "1f1b", "--pp", "4", "--microbatches", "8", *options]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "1f1b: 4 positions, 8 microbatches"
    assert shown[1] == "makespan 33 · bubble 27.3% · peak live microbatches 4"
    assert sum("|" in line for line in shown) == 4
    ET.parse(files["svg"])
    assert "<title>1f1b: 4 positions, 8 microbatches</title>" in files["html"].read_text()
    assert json.loads(files["json"].read_text())["traceEvents"]
    assert verify(from_csv(files["csv"].read_text())).num_microbatches == 8


GOOD = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_several_files_are_verified_with_a_report_and_a_picture_of_what_hangs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("good.csv", "crossed.txt", "cut.json", "orders.json")
    orders = '{"ranks": [["0SEND_F0", "1RECV_B0"], ["1SEND_B0", "1RECV_F0"]], "placement": [0, 1]}'
    orders = orders.replace('"1RECV_B0"', '"0RECV_B0"')
    for name, text in zip(names, (GOOD, CROSSED, '{"ranks": [', orders), strict=True):
        (tmp_path / name).write_text(text)
    assert main(["verify", *names, "--junit", "out.xml", "--pictures", "drawn", "--order", "nccl2"]) == 2
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line.endswith((": proved", ": FAULTY", ": not read"))] == [
        "good.csv: proved",
        "crossed.txt: FAULTY",
        "cut.json: not read",
        "orders.json: FAULTY",
    ]
    assert "2 positions wait for each other in a cycle" in printed.err
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["crossed.svg", "orders.svg"]
    assert "never ends" in (tmp_path / "drawn" / "crossed.svg").read_text()
    suite = ET.parse(tmp_path / "out.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "2", "1")
    cases = {(case.get("classname"), case.get("name")): case[0] for case in suite}
    assert cases["good.csv", "nccl2"].tag == "system-out"
    assert "position 0, step 3: 0SEND_F1>1 waits for" in cases["crossed.txt", "verify"].text
    assert "deadlock under nccl2" in cases["orders.json", "nccl2"].get("message")
    assert cases["cut.json", "read"].tag == "error"


def test_one_file_has_a_report_as_well_and_its_status_is_that_of_its_faults(tmp_path, capsys):
    for name, text, status in (("good.csv", GOOD, 0), ("bad.txt", CROSSED, 1), ("none.csv", None, 2)):
        if text is not None:
            (tmp_path / name).write_text(text)
        assert main(["verify", str(tmp_path / name), "--junit", str(tmp_path / "out.xml")]) == status
        assert ET.parse(tmp_path / "out.xml").getroot()[0].get("tests") == "1"
    assert "No such file" in capsys.readouterr().err


def test_a_report_has_no_character_that_xml_cannot_have(tmp_path):
    (tmp_path / "odd.json").write_text(json.dumps({"ranks": [[{"send": "a\u0001b", "to": 1}], []]}))
    assert main(["verify", str(tmp_path / "odd.json"), "--junit", str(tmp_path / "out.xml")]) == 1
    ET.parse(tmp_path / "out.xml")


def test_one_picture_is_of_one_file(tmp_path, capsys):
    assert main(["verify", "a.csv", "b.csv", "--svg", str(tmp_path / "out.svg")]) == 2
    assert "--svg and --html are for one file; --pictures DIR" in capsys.readouterr().err


def test_export_writes_what_torch_loads_and_prints_the_proof(tmp_path, capsys):
    out = tmp_path / "plan.csv"
    assert main(["export", "v_half", "--pp", "2", "--microbatches", "4", "--to", "torch", "--out", str(out)]) == 0
    assert out.read_text() == to_torch(lower(v_half(2, 4)))
    assert capsys.readouterr().err.count("no deadlock under") == len(ORDER_MODELS)
    assert main(["export", "v_half", "--pp", "2", "--microbatches", "4", "--to", "torch", "--waits"]) == 0
    written = capsys.readouterr()
    assert written.out == to_torch(lower(v_half(2, 4)), waits=True)
    assert written.err.count("no deadlock under") == len(ORDER_MODELS)
    assert main(["export", "v_half", "--pp", "2", "--microbatches", "4", "--to", "torch", "--computes"]) == 0
    assert capsys.readouterr().out == to_csv(v_half(2, 4))


def test_export_of_what_torch_does_not_run_is_an_error(capsys):
    assert main(["export", "forward_only", "--pp", "2", "--microbatches", "4", "--to", "torch"]) == 2
    assert "torch.distributed.pipelining runs no plan with stages without a backward" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*SCHEDULES, "greedy"])
def test_show_knows_every_schedule(name, capsys):
    cut = name.startswith("seq1f1b")
    assert main(["show", name, "--pp", "2", "--microbatches", "4", *(["--slices", "3"] if cut else [])]) == 0
    slices = " of 3 slices" if cut else ""
    assert capsys.readouterr().out.startswith(f"{name}: 2 positions, 4 microbatches{slices}\n")


def test_1f1b_in_chunks_is_interleaved_1f1b(capsys):
    sizes = ["--pp", "4", "--microbatches", "8"]
    assert main(["show", "1f1b", *sizes, "--chunks", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("interleaved_1f1b: 4 positions, 8 microbatches\nmakespan 28.5 · bubble 15.8%")
    assert main(["show", "interleaved_1f1b", *sizes]) == 0
    assert capsys.readouterr().out == shown
    assert main(["show", "1f1b", *sizes, "--chunks", "1"]) == 0
    assert capsys.readouterr().out.startswith("1f1b: ")


def test_show_lowers_and_takes_costs(tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"F": 0.002, "I": 0.002, "W": 0.001, "latency": 0.0005}))
    plan = tmp_path / "plan.txt"
    options = ["--costs", str(costs), "--unit", "s", "--lower", "--plan", str(plan), "--chunks", "2"]
    assert main(["show", "interleaved-1f1b", "--pp", "2", "--microbatches", "2", *options]) == 0
    assert " ms · bubble" in capsys.readouterr().out
    assert from_text(plan.read_text()).has_communication
    assert main(["show", str(plan), "--costs", str(costs)]) == 0
    assert "plan.txt: 2 positions, 2 microbatches" in capsys.readouterr().out


def test_show_greedy_keeps_to_the_cap(capsys):
    options = ["--memory-limit", "2", "--chunks", "2"]
    assert main(["show", "greedy", "--pp", "4", "--microbatches", "8", *options]) == 0
    assert "peak live microbatches 2" in capsys.readouterr().out


def test_show_search_keeps_to_the_cap_and_the_time_limit(capsys):
    options = ["--memory-limit", "2", "--chunks", "2", "--objective", "span", "--time-limit", "0.5"]
    assert main(["show", "search", "--pp", "4", "--microbatches", "8", *options]) == 0
    assert "peak live microbatches" in capsys.readouterr().out


def test_verify_prints_the_proof(tmp_path, capsys):
    table = tmp_path / "plan.csv"
    for path, encoding in ((table, "utf-8"), (tmp_path / "SHEET.CSV", "utf-8-sig")):  # as spreadsheets write it
        path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", encoding=encoding)
        assert main(["verify", str(path)]) == 0
        assert "2 positions, 2 microbatches" in capsys.readouterr().out


def test_verify_prints_the_cycle_of_a_crossed_send(tmp_path, capsys):
    table = tmp_path / "crossed.txt"
    table.write_text(CROSSED)
    assert main(["verify", str(table)]) == 1
    said = capsys.readouterr().err
    assert "[cycle]" in said
    assert "0SEND_F1>1 waits for position 1, step 4: 1RECV_F1<0" in said
    assert "1SEND_B0>0 waits for position 0, step 4: 0RECV_B0<1" in said
    assert main(["verify", str(table), "--buffered"]) == 0
    assert main(["verify", str(table), "--buffered", "--memory-limit", "1"]) == 1
    assert "2 microbatches are live at once; the limit is 1" in capsys.readouterr().err


def test_compare_prints_a_table_fastest_first(capsys):
    assert main(["compare", "--pp", "4", "--microbatches", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["schedule", "makespan", "bubble"]
    makespans = [float(line[len("interleaved_zero_bubble (2 chunks)") :].split()[0]) for line in lines[2:]]
    assert makespans == sorted(makespans)
    assert len(lines) == 2 + sum(schedule.trains and not schedule.sliced for schedule in SCHEDULES.values()) + 1
    (row,) = (line for line in lines if line.startswith("1f1b "))
    assert row.split() == ["1f1b", "33", "27.3%", "15.8%", "4", "4"]


def test_a_terminal_shows_the_same_table_drawn_by_rich(monkeypatch):
    pytest.importorskip("rich", reason="the extra `cli` is not installed")
    rows = compare(4, 8, names=["1f1b", "gpipe"])
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", comparison_table(rows, terminal=True)).splitlines()
    plain = comparison_table(rows).splitlines()
    assert [line.replace("│", " ").split() for line in drawn[3:5]] == [line.split() for line in plain[2:]]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert comparison_table(rows, terminal=True).splitlines() == plain


def test_compare_puts_what_does_not_fit_last():
    rows = compare(4, 8, memory_limit=3)
    fits = [row.fits for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert {row.name.split()[0] for row in rows if row.fits} == {"v_half", "v_min", "greedy"}
    (best,) = (row for row in rows if row.schedule == "greedy")
    assert (best.makespan, best.peak_until_weight) == (rows[0].makespan, rows[0].peak_until_weight)


def test_compare_cuts_the_same_model_for_every_schedule():
    costs = Costs(F=[1, 2], I=1, W=[1, 1, 2, 2], overhead=0.0)
    for row in compare(2, 4, costs=costs, names=["1f1b", "zero_bubble_v", "greedy"]):
        stages = row.plan.num_stages
        simulation = simulate(row.plan, costs.cut_into(stages, slices=2))
        assert simulation.makespan == row.makespan
        assert sum(simulation.busy) == pytest.approx(4 * (3 + 2 + 6))


def test_compare_refuses_unknown_names():
    with pytest.raises(
        PlanError, match=r"there is no schedule 'gpip' to compare .did you mean 'gpipe'.*; choose from gpipe"
    ):
        compare(2, 4, names=["gpip"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["show", "gpip", "--pp", "2", "--microbatches", "2"],
            "there is no schedule 'gpip' (did you mean 'gpipe'?); the schedules are gpipe",
        ),
        (["show", "job.toml"], "job.toml is a job, not a plan; draw it with: python -m pipegrid.planner show job.toml"),
        (["show", "no-such.txt"], "No such file or directory: 'no-such.txt'"),
        (["show", "TABLE", "--pp", "4"], "--pp is for a schedule by name"),
        (["show", "gpipe", "--time-limit", "4"], "--time-limit is for search; gpipe does not use it"),
        (["show", "gpipe"], "gpipe needs --pp and --microbatches"),
        (
            ["show", "v_half", "--pp", "2", "--microbatches", "2", "--chunks", "3"],
            "num_chunks is 3; v_half has 2 per position",
        ),
        (["show", "1f1b", "--pp", "0", "--microbatches", "2"], "num_positions is 0"),
        (["compare", "--pp", "2", "--microbatches", "2", "--costs", "BAD"], "'G' is not a cost; the costs are F, I"),
        (["verify", "TABLE"], "table.txt: line 1, column 8: found"),
        (["verify", "no-such-file"], "no-such-file"),
        (["verify", "BYTES"], "bytes.txt is not UTF-8 text: byte 0xff at offset 3"),
        (["compare", "--pp", "2", "--microbatches", "2", "--costs", "BYTES"], "is not UTF-8 text"),
        (["verify", "DEEP"], "expected JSON (brackets nest too deeply)"),
        (["verify", "LONG"], "is no finite number"),
        (["show", "1f1b", "--pp", "2", "--microbatches", "2", "--costs", "DEEP"], "brackets nest too deeply"),
        (
            ["show", "1f1b", "--pp", "2", "--microbatches", "2", "--costs", "NULL"],
            "F is None; it must be a finite number",
        ),
        (["show", "greedy", "--pp", "2", "--microbatches", "2", "--chunks", "0"], "num_chunks is 0"),
        (["show", "greedy", "--pp", "2", "--microbatches", "2", "--chunks", "-1"], "num_chunks is -1"),
        (
            ["show", "search", "--pp", "2", "--microbatches", "2", "--slices", "2"],
            "--slices is 2; search orders whole microbatches",
        ),
        (["compare", "--pp", "2", "--microbatches", "2", "--chunks", "0"], "num_chunks is 0"),
        (["show", "greedy", "--pp", "2", "--microbatches", "2", "--memory-limit", "nan"], "memory_limit is nan"),
        (["compare", "--pp", "2", "--microbatches", "2", "--memory-limit", "-1"], "memory_limit is -1.0"),
        (
            ["show", "1f1b", "--pp", "2", "--microbatches", "2", "--memory-limit", "2"],
            "--memory-limit is for greedy and search",
        ),
    ],
)
def test_bad_input_is_explained(arguments, message, tmp_path, capsys):
    (tmp_path / "costs.json").write_text('{"G": 1}')
    (tmp_path / "table.txt").write_text("0: 0F0 0X1\n")
    (tmp_path / "bytes.txt").write_bytes(b"0: \xff\n")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "long.json").write_text('{"microbatches": ' + "9" * 5000 + LONG)
    (tmp_path / "null.json").write_text('{"F": null}')
    places = {
        "BAD": str(tmp_path / "costs.json"),
        "TABLE": str(tmp_path / "table.txt"),
        "BYTES": str(tmp_path / "bytes.txt"),
        "DEEP": str(tmp_path / "deep.json"),
        "LONG": str(tmp_path / "long.json"),
        "NULL": str(tmp_path / "null.json"),
    }
    assert main([places.get(word, word) for word in arguments]) == 2
    assert message in capsys.readouterr().err


def test_verify_reads_batches_in_order_or_as_simultaneous(tmp_path, capsys):
    plan = tmp_path / "plan.txt"
    apart = CROSSED.replace("0SEND_F1>1 0RECV_B0<1", "[0SEND_F1>1 0RECV_B0<1]")
    plan.write_text(apart.replace("1SEND_B0>0 1RECV_F1<0", "[1SEND_B0>0 1RECV_F1<0]"))
    assert main(["verify", str(plan)]) == 1
    assert "write their batches in one order" in capsys.readouterr().err
    assert main(["verify", str(plan), "--batches", "simultaneous"]) == 0
    assert "2 communicators per rank" in capsys.readouterr().out


def test_verify_prints_the_fewest_communicators(tmp_path, capsys):
    plan = tmp_path / "plan.txt"
    plan.write_text(str(lower(one_f_one_b(3, 4))))
    assert main(["verify", str(plan), "--communicators"]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("1 per rank, the fewest under every order model, also with waits for the whole device")
    assert second == "  0: positions 0, 1, 2: F0>1 B1>0 F1>2 B2>1"


def totals(printed):
    return [line.split() for line in printed.splitlines() if line.startswith("all ")]


def test_show_and_verify_print_the_slots_of_messages(tmp_path, capsys):
    assert main(["show", "interleaved_1f1b", "--pp", "4", "--chunks", "4", "--microbatches", "8", "--buffers"]) == 0
    assert totals(capsys.readouterr().out) == [["all", "240", "102", "65"], ["all", "240", "240", "220", "87"]]
    plan, orders = tmp_path / "plan.txt", tmp_path / "orders.json"
    plan.write_text(str(lower(one_f_one_b(3, 6))))
    assert main(["verify", str(plan), "--buffers"]) == 0
    assert totals(capsys.readouterr().out) == [["all", "24", "5", "5"], ["all", "24", "24", "15", "13"]]
    plan.write_text(str(offload(lower(with_skips(one_f_one_b(3, 6), [Edge(0, 2)])), memory_limit=2)))
    assert main(["verify", str(plan), "--buffers"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-6].split()[:5] == ["position", "received", "kept", "sent", "offloaded"]
    assert totals(printed)[1] == ["all", "30", "6", "36", "6", "25", "22", "3"]
    orders.write_text('{"ranks": [["0SEND_F0"], ["1RECV_F0"]], "placement": [0, 1]}')
    assert main(["verify", str(orders), "--buffers"]) == 2
    assert "--buffers is for plans" in capsys.readouterr().err


def test_verify_draws_what_it_plays(tmp_path, capsys):
    plan, picture, page = (tmp_path / f"plan.{end}" for end in ("txt", "svg", "html"))
    plan.write_text(str(lower(one_f_one_b(2, 2))))
    assert main(["verify", str(plan), "--svg", str(picture)]) == 0  # of every model, as no order is given
    assert picture.read_text().count("plan under ") >= 6
    assert main(["verify", str(plan), "--html", str(page)]) == 0
    assert "plan under nccl" in page.read_text()
    capsys.readouterr()
    crossed = tmp_path / "crossed.json"
    sends, receives = [{"send": name, "to": 1} for name in "xy"], [{"receive": name, "from": 0} for name in "yx"]
    crossed.write_text(json.dumps({"ranks": [sends, receives]}))
    picture.unlink()
    assert main(["verify", str(crossed), "--svg", str(picture)]) == 1  # crossed messages cannot be played
    assert "the other way round" in capsys.readouterr().err
    assert not picture.exists()
    assert main(["verify", str(crossed), "--communicators"]) == 2
    assert "is for plans" in capsys.readouterr().err


def test_verify_refuses_a_limit_that_is_none_as_it_refuses_a_plan(tmp_path, capsys):
    table = tmp_path / "plan.csv"
    table.write_text("0F0,0B0\n")
    for limit in ("nan", "-1"):
        assert main(["verify", str(table), "--memory-limit", limit]) == 2
        assert "give a number from 0" in capsys.readouterr().err


def test_costs_per_edge_serve_the_schedules_whose_edges_they_are_of(tmp_path, capsys):
    costs, plan = tmp_path / "costs.json", tmp_path / "plan.txt"
    costs.write_text('{"latency": {"0>1": 0.5, "1>2": 1, "2>3": 0.5}}')
    given = ["--costs", str(costs)]
    assert main(["show", "1f1b", "--pp", "4", "--microbatches", "8", *given, "--plan", str(plan)]) == 0
    shown = capsys.readouterr().out.splitlines()[1]
    assert main(["show", str(plan), *given]) == 0
    assert capsys.readouterr().out.splitlines()[1] == shown
    # Four stages, be they on four positions or on two.
    assert main(["show", "zero_bubble_v", "--pp", "2", "--microbatches", "8", *given]) == 0
    assert main(["show", "zero_bubble_v", "--pp", "4", "--microbatches", "8", *given]) == 2
    assert "latency is given per edge; a model cut anew has other edges" in capsys.readouterr().err
    assert main(["compare", "--pp", "4", "--microbatches", "8", *given]) == 0
    *table, left_out = capsys.readouterr().out.splitlines()
    compared = [one for one in SCHEDULES.values() if one.trains and not one.sliced]
    assert {line.split()[0] for line in table[2:]} == {"greedy", *(one.name for one in compared if one.chunks == 1)}
    assert {"1f1b", "zero_bubble_h1"} < {line.split()[0] for line in table[2:]}
    assert left_out.startswith("left out, as ")
    assert left_out.endswith(f": {', '.join(one.name for one in compared if one.chunks != 1)}")
    assert main(["compare", "--pp", "7", "--microbatches", "8", *given]) == 2


def test_names_are_forgiving():
    assert find_schedule("Zero-Bubble-V").name == "zero_bubble_v"
    assert find_schedule("one_f_one_b").name == "1f1b"


def test_runs_as_a_module_without_torch(tmp_path):
    blocked = "import sys; sys.modules['torch'] = None; import runpy; "
    run = "sys.argv = ['x', 'show', '1f1b', '--pp', '2', '--microbatches', '2']; "
    module = "runpy.run_module('pipegrid.search', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", blocked + run + module],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "makespan 9" in done.stdout


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="the system has no SIGPIPE")
def test_the_command_line_ends_quietly_where_nobody_reads_on():
    """As into ``head -1`` once it has its line; here it has none to begin with, so that time decides nothing."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pipegrid.search", "show", "1f1b", "--pp", "2", "--microbatches", "2"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_simulate_prints_the_figures_of_each_position(capsys):
    assert main(["simulate", "zero_bubble_v", "--pp", "4", "--microbatches", "8"]) == 0
    first, _, _, *rows = capsys.readouterr().out.splitlines()
    assert first == "zero_bubble_v: makespan 25.5, span 24, bubble 5.9%"
    assert rows[3].split() == ["3", "1.5", "25.5", "24", "5.9%", "4", "4"]
    assert main(["simulate", "1f1b", "--pp", "2", "--microbatches", "4", "--memory-limit", "3"]) == 2
    assert "--memory-limit is for greedy and search; 1f1b does not use it" in capsys.readouterr().err


def test_search_prints_its_bound_and_writes_the_plan(tmp_path, capsys):
    out = tmp_path / "best.csv"
    assert main(["search", "--pp", "4", "--microbatches", "8", "--memory-limit", "2", "--plan", str(out)]) == 0
    assert re.fullmatch(r"makespan 41, peak 2, from [\w ]+: the best on its placement\n", capsys.readouterr().out)
    assert simulate(from_csv(out.read_text()), Costs()).makespan == 41
    assert verify(from_csv(out.read_text()), memory_limit=2).num_microbatches == 8
