"""Rings of watchers among the members of an epoch: a killed process is noticed long before its silence is."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

from pipegrid.topology import serve_store

RANKS = """
import json, os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from pipegrid.monitor import Epochs
from pipegrid.topology import job_store
from pipegrid.survive.neighbours import Neighbours

said, ranks, deaths = Path(sys.argv[1]), 4, json.loads(sys.argv[2])
rank = next((rank for rank in range(1, ranks) if os.fork() == 0), 0)  # before there are threads
dist.init_process_group("gloo", store=job_store("world"), rank=rank, world_size=ranks)
epochs = Epochs(job_store("epochs"), rank=rank, ranks=range(ranks), heartbeat=60.0)
ring = Neighbours(epochs.lost, members=epochs.current.members, name="epoch 0")

def say(*words):
    with (said / str(rank)).open("a") as file:
        print(json.dumps(words), file=file, flush=True)

number = 0
while number < 4:
    if [rank, number] in deaths:
        say("dies", time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    if epochs.done(f"step {number}"):
        number += 1
        continue
    result = epochs.vote(f"step {number}")
    say("result", time.time(), result.epoch.members, result.dead)
    number += result.committed
    ring.close()
    ring = Neighbours(epochs.lost, members=epochs.current.members, name=f"epoch {result.epoch.number}")
say("finished", time.time())
ring.close()
epochs.close()
"""


def run(deaths, folder):
    """What each of 4 ranks said, by rank."""
    with serve_store():
        command = [sys.executable, "-c", RANKS, str(folder), json.dumps(deaths)]
        process = subprocess.Popen(command, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        end, said = time.monotonic() + 90, [[]] * 4
        try:
            while time.monotonic() < end and not all(lines and lines[-1][0] in ("finished", "dies") for lines in said):
                time.sleep(0.05)
                files = [folder / str(rank) for rank in range(4)]
                said = [[json.loads(line) for line in f.read_text().splitlines()] if f.exists() else [] for f in files]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return said


def test_a_killed_member_is_lost_at_once_and_the_ring_closes_behind_it(tmp_path):
    said = run([[2, 1], [3, 3]], tmp_path)
    times = {rank: lines[-1][1] for rank, lines in enumerate(said) if lines[-1][0] == "dies"}
    assert sorted(times) == [2, 3], said
    for rank in (0, 1):
        (_, first, members, dead), (_, second, left, also), (end, _) = said[rank]
        assert (members, left, end) == ([0, 1, 3], [0, 1], "finished")
        assert dead == {"2": "rank 1 lost rank 2: its process has ended without a word"}
        assert also == {"3": "rank 1 lost rank 3: its process has ended without a word"}  # watched by 1, once 2 is out
        assert first - times[2] < 20  # the heartbeat is 60 s
        assert second - times[3] < 20
