"""Files that a stranger has written, for every reader but that of checkpoints: its typed error, or its data.

Plans (text, CSV, JSON), layouts, job files, costs, recordings, and the record of attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.layout import LayoutError, PipelineParallelLayerLayout
from pipegrid.layout.__main__ import main as layout_main
from pipegrid.planner import JobError, parse_job, read_job
from pipegrid.planner.__main__ import main as planner_main
from pipegrid.plans.simulate import CostsError, costs_from_json, simulate
from pipegrid.schedules import PlanError, from_csv, from_json, from_text, one_f_one_b, to_csv, to_json, to_text
from pipegrid.schedules.__main__ import main as schedules_main
from pipegrid.timeline import Recording, TimelineError, recording_from_json
from pipegrid.training.restart.record import FILE, AttemptRecord, read_attempts

PLAN = one_f_one_b(2, 3)
JOB = """
[[modules]]
name = "language"
layers = [{ kind = "t", count = 4, forward = 1e-3, parameters = 1000, activation = 1000, output = 1000 }]

[devices]
count = 4
memory = 1e9
"""
READERS = {
    "text": (from_text, PlanError, to_text(PLAN)),
    "csv": (from_csv, PlanError, to_csv(PLAN)),
    "json": (from_json, PlanError, to_json(PLAN)),
    "layout": (
        PipelineParallelLayerLayout.from_json,
        LayoutError,
        PipelineParallelLayerLayout("Et*2|t*2L", 2).to_json(),
    ),
    "layout text": (lambda text: PipelineParallelLayerLayout(text, 2), LayoutError, "Et*2|t*2L"),
    "toml": (parse_job, JobError, JOB),
    "job": (partial(parse_job, form="json"), JobError, json.dumps({"modules": [{"name": "a", "layers": []}]})),
    "costs": (costs_from_json, CostsError, '{"F": [1, 2], "I": 1.0, "send": {"0>1": 0.5}}'),
    "recording": (
        recording_from_json,
        (PlanError, TimelineError),
        json.dumps({"plan": json.loads(to_json(PLAN)), "tracks": []}),
    ),
}
HUGE = "9" * 5000
TEXTS = [
    "",
    "\0",
    "\ud800",
    "null",
    "[]",
    "{}",
    "5",
    HUGE,
    f"-{HUGE}",
    "1e999",
    "NaN",
    "Infinity",
    "[" * 200_000,
    "{" * 200_000,
    '{"a":' * 50_000 + "1" + "}" * 50_000,
    "[" * 900 + "]" * 900,
    "a = " + "[" * 50_000 + "]" * 50_000,
    "a = " + "{a=" * 5_000 + "1" + "}" * 5_000,
    "a" + ".a" * 50_000 + " = 1",
    '{"microbatches": 1, "microbatches": 2}',
    '{"F": 1, "F": 2}',
    '{"layout": "EL", "layout": "EL", "pipeline_model_parallel_size": 1}',
    '{"layout": "EL", "pipeline_model_parallel_size": 1e400}',
    '{"layout": "Et*999999999999L", "pipeline_model_parallel_size": 1}',
    "Et*999999999999|L",
    "Et*" + HUGE + "|L",
    "E" + "(t" * 5_000 + ")" * 5_000 + "|L",
    "E((((t*9999)*9999)*9999)*9999)*9999|L",
    '{"modules": [], "modules": []}',
    '{"microbatches": 1e308, "modules": [], "placement": [], "positions": []}',
    '{"microbatches": 999999999999, "modules": [["a", 999999999999]], "placement": [[0]], "positions": [[]]}',
    '{"microbatches": 1, "modules": [["a", 1]], "placement": [[99999999999]], "positions": [["0F0"]]}',
    '{"plan": ' + "[" * 900 + "]" * 900 + ', "tracks": []}',
    "0F999999999,1F999999999",
    "999999999F0",
    "0F" + HUGE,
    "#: placement = " + HUGE,
    "__import__('os').system('false')",
    "!!python/object/apply:os.system ['false']",
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:30]))
@pytest.mark.parametrize("reader", READERS)
def test_a_text_that_means_harm_is_a_typed_error_or_read(reader, text):
    read, kind, _ = READERS[reader]
    with contextlib.suppress(kind):
        read(text)


TWICE = {
    "layout": '{"layout": "E|L", "layout": "E|L", "pipeline_model_parallel_size": 2}',
    "costs": '{"F": 1, "F": 2}',
    "job": '{"modules": [], "modules": []}',
    "json": '{"microbatches": 1, "microbatches": 2}',
    "toml": "a = 1\na = 2",
}


@pytest.mark.parametrize("reader", TWICE)
def test_a_key_that_is_there_twice_is_an_error_and_not_its_last_value(reader):
    read, kind, _ = READERS[reader]
    with pytest.raises(kind, match=r"twice|overwrite"):
        read(TWICE[reader])


@pytest.mark.parametrize("reader", READERS)
@settings(deadline=None, max_examples=60)
@given(choice=st.randoms(use_true_random=False))
def test_a_mutated_text_is_a_typed_error_or_read(reader, choice):
    read, kind, text = READERS[reader]
    made = list(text)
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(made) + 1)
        end = min(len(made), at + choice.randint(1, 6))
        pieces = ["", "".join(made[at:end]) * 2, "9" * 12, "-", "NaN", '"', "\x00", "é", "1e999", ":", "[[", "}"]
        made[at:end] = choice.choice(pieces)
    with contextlib.suppress(kind):
        read("".join(made))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("reader", ["json", "layout", "costs", "recording"])
@settings(deadline=None, max_examples=80)
@given(choice=st.randoms(use_true_random=False), value=JSON)
def test_any_value_anywhere_in_a_document_is_a_typed_error_or_read(reader, choice, value):
    read, kind, text = READERS[reader]
    data = json.loads(text)
    *way, last = choice.choice([path for path in places(data) if path])
    inner = data
    for key in way:
        inner = inner[key]
    inner[last] = value
    with contextlib.suppress(kind):
        read(json.dumps(data))


BYTES = [b"", b"\xff\xfe\x00", b"\x80" * 100, b"\0" * 100, b"[" * 100_000]
COMMANDS = [
    (schedules_main, ["verify", "FILE"], ".json"),
    (schedules_main, ["verify", "FILE"], ".csv"),
    (schedules_main, ["verify", "FILE"], ".txt"),
    (planner_main, ["plan", "FILE", "--gpus", "2"], ".json"),
    (planner_main, ["plan", "FILE", "--gpus", "2"], ".toml"),
    (planner_main, ["what-if", "FILE", "--schedule", "1f1b"], ".json"),
    (planner_main, ["layers", "FILE", "--layout", "Et*2|t*2L"], ".json"),
    (layout_main, ["balance", "--costs", "FILE", "--pp", "2"], ".json"),
]


@pytest.mark.parametrize("data", BYTES, ids=lambda data: repr(data[:6]))
@pytest.mark.parametrize(("command", "arguments", "suffix"), COMMANDS)
def test_a_command_says_what_is_wrong_with_a_file_of_other_bytes(tmp_path, capsys, command, arguments, suffix, data):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(data)
    with contextlib.suppress(SystemExit):
        assert command([str(path) if one == "FILE" else one for one in arguments]) != 0
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert told.err or told.out


def test_a_job_file_that_is_a_folder_or_gone_is_a_typed_error(tmp_path):
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(JobError):
            read_job(path)


LINES = [
    b"",
    b"\xff" * 160,
    b"[" * 160,
    b"5".ljust(160),
    b'{"launch": 1, "restart": "x", "step": "y"}'.ljust(160),
    b'{"launch": "a", "restart": -1, "step": NaN, "end": ""}'.ljust(160),
    b'{"launch": "a", "restart": 0, "step": 1e999, "end": ""}'.ljust(160),
    b'{"launch": "a", "restart": 0, "step": 3, "end": "evil"}'.ljust(160),
    b'{"launch": "a", "restart": 0, "step": 3, "end": "", "x": 1}'.ljust(160),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line[:60]))
def test_a_line_of_attempts_that_is_none_is_passed_over(tmp_path, line):
    good = AttemptRecord(launch="a", restart=1, step=4, end="preempted")
    text = json.dumps({"launch": "a", "restart": 1, "step": 4, "end": "preempted"}).encode().ljust(160)
    (tmp_path / FILE).write_bytes(line + text)
    assert read_attempts(tmp_path) == [good]


def test_a_record_of_attempts_that_leads_elsewhere_is_an_error(tmp_path):
    from pipegrid.training.restart.record import AttemptLine

    outside = tmp_path / "outside"
    outside.write_text("kept")
    for number, make in enumerate((lambda path: path.symlink_to(outside), os.mkfifo)):
        directory = tmp_path / str(number)
        directory.mkdir()
        make(directory / FILE)
        with pytest.raises(OSError, match=FILE):
            read_attempts(directory)
        with pytest.raises(OSError, match=FILE):
            AttemptLine.append(directory, AttemptRecord(launch="a", restart=0))
    assert outside.read_text() == "kept"


def test_a_plan_that_was_read_still_runs():
    """The rival: the files that the mutations start from are good."""
    for read, _, text in (READERS[name] for name in ("text", "csv", "json")):
        assert simulate(read(text)).makespan == simulate(PLAN).makespan
    assert isinstance(recording_from_json(READERS["recording"][2]), Recording)
