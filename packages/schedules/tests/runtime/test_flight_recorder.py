"""The record of a rank's failure: its own file, and torch's NCCL flight recorder; it never hides the failure."""

from __future__ import annotations

import json

import pytest
import torch

from pipegrid.schedules import PipelineError, PipelineRuntime, lower, one_f_one_b
from pipegrid.schedules.runtime import flight_recorder
from pipegrid.schedules.runtime.flight_recorder import FlightRecorder, nccl_dump
from pipegrid.transport import Communicator

from ..kit.stages import Scale, raising

PLAN = lower(one_f_one_b(1, 2))


def failed(folder):
    stage = Scale(PLAN, 0, raising(ValueError("bad sample in microbatch 0"), at=0))
    with pytest.raises(PipelineError) as caught:
        PipelineRuntime(PLAN, {0: stage}, None, failure_dir=folder).step()
    return str(caught.value)


def test_a_failed_step_leaves_its_place_the_cause_and_versions(tmp_path):
    text = failed(tmp_path / "made" / "here")
    (path,) = (tmp_path / "made" / "here").glob("*.json")  # NCCL's own record lies beside it where torch has NCCL
    assert f"\nRecorded in {path}" in text
    record = json.loads(path.read_text())
    assert path.name == "rank0.json"
    assert record["first_failure"] == text.splitlines()[0]
    assert record["error"] == "ValueError: bad sample in microbatch 0"
    assert record["place"] == "position 0, step 1 of 4: 0F0"
    assert record["plan"] == PLAN.digest
    assert record["versions"]["torch"] == torch.__version__


def test_a_later_attempt_keeps_the_earlier_record(tmp_path):
    for _ in range(3):
        failed(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["rank0-1.json", "rank0-2.json", "rank0.json"]


def test_without_a_folder_nothing_is_written_or_said():
    assert "ecorded" not in failed(None)


def test_a_folder_that_cannot_be_written_does_not_hide_the_failure(tmp_path):
    taken = tmp_path / "a file"
    taken.write_text("")
    text = failed(taken)
    assert "ValueError: bad sample in microbatch 0" in text.splitlines()[0]
    assert f"The failure was not recorded in {taken}: " in text


def test_a_lane_that_cannot_be_described_does_not_hide_the_failure(tmp_path):
    class Odd(Communicator):
        def describe(self):
            return {"lane": 1 / 0}

    recorder = FlightRecorder(tmp_path, 3, Odd())
    assert recorder.record(PLAN, "lost", "lost", "nowhere").startswith(f"\nRecorded in {tmp_path / 'rank3.json'}; ")
    record = json.loads((tmp_path / "rank3.json").read_text())
    assert record["error"] == "lost"
    assert record["lanes"] == {"not taken": "ZeroDivisionError: division by zero"}


def test_the_nccl_flight_recorder_is_written_beside_under_the_name_that_torchs_reader_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "nccl_dump", lambda: lambda: b"a pickle")
    text = FlightRecorder(tmp_path, 3, Communicator()).record(PLAN, "lost", "lost", "nowhere")
    assert text.endswith(f" who holds the job up: pipegrid explain {tmp_path}")
    assert (tmp_path / "nccl_trace_rank_3").read_bytes() == b"a pickle"


def test_torch_dumps_the_flight_recorder_where_it_has_nccl():
    assert (nccl_dump() is not None) == torch.distributed.is_nccl_available()
