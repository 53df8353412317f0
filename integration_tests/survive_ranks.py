"""A rank of a job that survives deaths, in a process of its own."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pipegrid.fake_nccl import FakeDevice, Nccl2Rules, register
from pipegrid.survive import RankRetiredError, init_process_group

from .kit.processes import write_to
from .survive_cases import Case, Places
from .survive_pipelines import page, pipeline, pipeline_alone
from .survive_sums import sums, sums_alone

JOBS = {"sums": sums, "late sums": sums, "pipeline": pipeline, "page": page}
ALONE = {"sums": sums_alone, "late sums": sums_alone, "pipeline": pipeline_alone}


def rank_main(case: Case, rank: int, port: int, folder: str, process: int = 0) -> None:
    """Run the job of ``case`` as ``rank``; its outcome is a file. ``process``: of the rank, from 0."""
    path = Path(folder)
    write_to(path / f"log.{rank}")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(rank + 1000 * process)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=30))
    backend = case.backend
    if backend != "gloo":
        nccl2 = Nccl2Rules() if backend in ("nccl2", "lazy") else None
        device = FakeDevice(serial=backend == "serial", nccl2=nccl2, lazy=backend in ("legacy", "lazy"))
        device.watchdog.store = store
        backend = f"cpu:{register(device)}"
    init_process_group(backend, store=store, rank=rank, world_size=case.world_size, timeout=timedelta(seconds=60))
    places = Places(case, rank, path, process)
    outcome, retired = dict[str, object](), False
    try:
        outcome = JOBS[case.job](case, places, dist.PrefixStore("epochs", store.clone()))
    except BaseException as error:  # noqa: BLE001 -- written down for the test
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
        retired = isinstance(error, RankRetiredError)
    outcome["at"] = time.monotonic()
    torch.save(outcome, path / f"outcome.{rank}.part")
    (path / f"outcome.{rank}.part").rename(path / f"outcome.{rank}")
    if retired:
        raise RankRetiredError(outcome["error"])
    os._exit(1 if "error" in outcome else 0)  # the store's process may end first
