"""The command line prints the table of the seed, balances from files, and exits with 2 and a caret on bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.layout.__main__ import main

SEED = "Et*3|(tt|)*29,m|L"


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"embedding": 0.5, "decoder": [1.0] * 12, "loss": 1.5}))
    return path


@pytest.fixture
def memory(tmp_path):
    path = tmp_path / "memory.json"
    path.write_text(json.dumps({"embedding": 1, "decoder": {"fixed": 2, "per_microbatch": 1}, "loss": 0}))
    return path


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_it_prints_the_table_of_the_seed():
    result = subprocess.run(
        [sys.executable, "-m", "pipegrid.layout", SEED, "--pp", "16"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{SEED}\n\n{PipelineParallelLayerLayout(SEED, 16).pretty_repr()}\n"


def test_a_bad_string_exits_with_2_and_a_caret():
    result = subprocess.run(
        [sys.executable, "-m", "pipegrid.layout", "Et*3|(tx|)*29,m|L", "--pp", "16"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (2, "")
    headline, shown, marker = result.stderr.splitlines()
    assert headline.startswith("error: layout string, column 7 (from 0): found 'x', expected a layer")
    assert (shown, marker) == ("  Et*3|(tx|)*29,m|L", "         ^")


def test_json(capsys):
    status, out, _ = run(capsys, "Et|tL", "--pp", 2, "--json")
    data = json.loads(out)
    assert status == 0
    assert data["stages"] == [["embedding", "decoder"], ["decoder", "loss"]]
    again = PipelineParallelLayerLayout(data["layout"], data["pipeline_model_parallel_size"])
    assert again == PipelineParallelLayerLayout("Et|tL", 2)


def test_it_checks_a_layout_against_a_model(capsys):
    assert run(capsys, SEED, "--pp", 16, "--num-layers", 61, "--mtp-num-layers", 1)[0] == 0
    status, _, err = run(capsys, SEED, "--pp", 16, "--num-layers", 62)
    assert status == 2
    assert "has 61 decoder layers, the model 62" in err


def test_a_report_beside_the_table(capsys, costs, memory, tmp_path):
    picture = tmp_path / "out.svg"
    status, out, _ = run(
        capsys, "E(t*3|)*4L", "--pp", 5, "--costs", costs, "--memory", memory, "--limit", 30, "--svg", picture
    )
    assert status == 0
    assert "PP rank 0    embedding,decoder*3" in out
    assert "imbalance (max / mean) 1.2500" in out
    assert "memory: PP rank 0 is fullest, 26 of 30" in out
    ET.parse(picture)


def test_registered_symbols(capsys):
    status, out, _ = run(capsys, "vv|v", "--pp", 2, "--symbol", "v=vision")
    assert status == 0
    assert "PP rank 0  vision*2" in out


def test_balance(capsys, costs, memory):
    status, out, _ = run(capsys, "balance", "--costs", costs, "--pp", 4)
    assert status == 0
    assert out.splitlines()[0] == "Et*3|t*3|t*4|ttL"
    assert out.endswith("proven optimal\n")
    status, out, _ = run(
        capsys, "balance", "--costs", costs, "--pp", 2, "--vpp", 2, "--memory", memory, "--limit", "60,50", "--json"
    )
    data = json.loads(out)
    assert (status, data["optimal"], data["gap"]) == (0, True, 0)
    assert data["lower_bound"] == data["report"]["bottleneck"]
    assert all(a <= b for a, b in zip(data["report"]["rank_memory"], [60, 50], strict=True))


def test_balance_with_costs_per_kind(capsys, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"embedding": 1, "decoder": 1, "loss": 1}')
    status, out, _ = run(capsys, "balance", "--costs", path, "--pp", 2, "--layers", "Et*4L")
    assert (status, out.splitlines()[0]) == (0, "Ett|ttL")


def test_even(capsys, costs):
    status, out, _ = run(capsys, "even", 12, "--pp", 2, "--vpp", 2, "--account-for-loss", "--costs", costs)
    assert status == 0
    assert out.splitlines()[0] == "Et*4|t*3|t*3|ttL"
    assert "bottleneck 4.5 (stage 0)" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["|*1000000", "--pp", 1], "more than 1,000,000 stages"),
        (["t|t|t", "--pp", 2], "3 stages do not divide by pipeline_model_parallel_size 2"),
        (["t|t", "--pp", 2, "--symbol", "v"], "symbols has 'v': ''; it must be one ASCII letter and a name"),
        (["t|t", "--pp", 2, "--svg", "x.svg"], "--svg need --costs"),
        (["t|t", "--pp", 2, "--limit", "3"], "--limit, --microbatches and --svg need --costs"),
        (["balance", "--pp", 2, "--costs", "no/such/file.json"], "No such file or directory: 'no/such/file.json'"),
    ],
)
def test_bad_input_exits_with_2_and_the_reason(capsys, arguments, reason):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert reason in err


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "3", '{"decoder": "x"}', '{"decoder": [1, null]}', "[1e400]"])
def test_a_bad_costs_file_exits_with_2(capsys, tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_text(content)
    status, out, err = run(capsys, "balance", "--pp", 2, "--costs", path)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")


def test_a_limit_that_is_no_number(capsys, costs, memory):
    status, _, err = run(capsys, "balance", "--costs", costs, "--pp", 2, "--memory", memory, "--limit", "8GB")
    assert status == 2
    assert "--limit '8GB' must be a number" in err


def test_an_infeasible_limit_names_the_stage(capsys, costs, memory):
    status, _, err = run(capsys, "balance", "--costs", costs, "--pp", 2, "--memory", memory, "--limit", "10")
    assert status == 2
    assert "the tightest is stage" in err


def test_a_picture_that_cannot_be_written(capsys, costs, tmp_path):
    target = tmp_path / "no" / "out.svg"
    status, _, err = run(capsys, "balance", "--costs", costs, "--pp", 2, "--svg", target)
    assert status == 2
    assert f"No such file or directory: '{target}'" in err


@pytest.mark.parametrize("command", [[], ["balance"], ["even"]])
def test_missing_arguments_exit_with_2(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert "the following arguments are required: --pp" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="the system has no SIGPIPE")
def test_the_command_line_ends_quietly_when_its_output_is_closed():
    """As into ``head -1`` once it has its line; here it has none to begin with, so that time decides nothing."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pipegrid.layout", SEED, "--pp", "16"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
