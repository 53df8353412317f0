"""Dumps of the fake NCCL: what torch's own analyser reads of them, and when they are written."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from .waiting import until

pytestmark = pytest.mark.thorough

fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")


def batch(group, operations):
    group._start_coalescing(torch.device("cpu"))
    for verb, peer in operations:
        verb(torch.zeros(2), peer, group)
    return group._end_coalescing(torch.device("cpu"))


def entries_of(path):
    return pickle.loads(path.read_bytes())["entries"]


@pytest.mark.ranks(2, backend="fake_nccl")
def test_torchs_analyser_finds_the_collective_that_a_rank_has_not_launched(ranks, caplog):
    dist.all_reduce(torch.zeros(3))
    if ranks.rank == 0:
        dist.all_reduce(torch.zeros(4, dtype=torch.float64), async_op=True)
    prefix = ranks.shared_path / "nccl_trace_rank_"
    assert ranks.fake_device.dump(prefix).name == f"nccl_trace_rank_{ranks.rank}"
    ranks.barrier()
    if ranks.rank == 0:
        caplog.set_level("INFO", "Flight Recorder")
        fr_trace.main([str(ranks.shared_path), "-p", "nccl_trace_rank_"])
        said = caplog.text
        assert "Not all ranks joining collective, sequence number: 2" in said
        assert "missing ranks: {1}" in said
    ranks.barrier()
    if ranks.rank == 1:
        dist.all_reduce(torch.zeros(4, dtype=torch.float64))


@pytest.mark.ranks(2, backend="fake_nccl")
def test_entries_have_names_states_sizes_and_one_number_for_a_batch(ranks):
    group, other = dist.group.WORLD, 1 - ranks.rank
    dist.all_reduce(torch.zeros(3))
    batch(group, [(dist.isend, other), (dist.irecv, other)]).wait()
    if ranks.rank == 0:
        dist.isend(torch.zeros(4, dtype=torch.float64), 1)
        assert until(lambda: any(entry.started for entry in ranks.fake_device.unfinished()))
        entries = entries_of(ranks.fake_device.dump(ranks.shared_path / "dump_"))
        assert [
            (one["profiling_name"], one["state"], one["p2p_seq_id"], one["collective_seq_id"]) for one in entries
        ] == [
            ("nccl:all_reduce", "completed", 0, 1),
            ("nccl:send 0->1", "completed", 1, 1),
            ("nccl:recv 0<-1", "completed", 1, 1),
            ("nccl:coalesced", "completed", 1, 1),
            ("nccl:send 0->1", "started", 2, 1),
        ]
        assert (entries[1]["input_sizes"], entries[2]["input_sizes"]) == ([[2]], [[2]])
        assert (entries[-1]["input_sizes"], entries[-1]["input_dtypes"]) == ([[4]], ["Double"])
    ranks.barrier()
    if ranks.rank == 1:
        dist.irecv(torch.zeros(4, dtype=torch.float64), 0).wait()


@pytest.mark.ranks(2, backend="fake_nccl")
def test_the_watchdog_writes_a_dump_before_it_ends_an_entry(ranks):
    device = ranks.fake_device
    device.recorder.prefix = str(ranks.shared_path / "dump_")
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    dist.barrier(group)
    if ranks.rank == 0:
        dist.all_reduce(torch.zeros(1), group=group, async_op=True)
        assert until(lambda: device.violations)
        (violation,) = device.violations
        assert "was ended by the watchdog" in violation
        device.violations.clear()
        entries = entries_of(ranks.shared_path / "dump_0")
        assert [one["state"] for one in entries if one["profiling_name"] == "nccl:all_reduce"] == ["started"]
        assert entries[-1]["timeout_ms"] == 300
    ranks.barrier()
    assert not (ranks.shared_path / "dump_1").exists()


@pytest.mark.ranks(1, backend="fake_nccl")
def test_a_device_without_a_prefix_writes_nothing(ranks, monkeypatch):
    monkeypatch.setattr(ranks.fake_device.recorder, "prefix", None)
    assert ranks.fake_device.dump() is None
