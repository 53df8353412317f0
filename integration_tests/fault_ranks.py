"""A rank of the fault matrix: its case, the job, and the fault."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic as now  # the machine's, whatever clock a case moves

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from kit.processes import write_to
from kit.reach import Reach
from kit.stages import Stage
from pipegrid.bridges import MultiModulePipelineCommunicator, VTPCommunicator, VTPTopology
from pipegrid.fake_nccl import FakeDevice, register
from pipegrid.schedules import (
    Monitor,
    PipelineRuntime,
    Plan,
    clip_grad_norm_,
    dualpipe_v,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    reduce_gradients,
    zero_bubble_h1,
    zero_bubble_v,
)
from pipegrid.testing.clock import MovedClock, moved_clock
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store, torch_compat
from pipegrid.training import attempt_store
from pipegrid.transport import P2PCommunicator, P2PConfig

WORLD, STEPS, MICROBATCHES, FAULTY = 4, 3, 4, "injected failure 4711"

CHAINS = {
    "1f1b": lambda: one_f_one_b(4, MICROBATCHES),
    "interleaved": lambda: interleaved_1f1b(4, MICROBATCHES, num_chunks=2),
    "zero_bubble_h1": lambda: zero_bubble_h1(4, MICROBATCHES),
    "zero_bubble_v": lambda: zero_bubble_v(4, MICROBATCHES),
    "dualpipe_v": lambda: dualpipe_v(4, 2 * MICROBATCHES),
}
SCHEDULES = (*CHAINS, "vtp", "modules", "colocated")
STARTS = ("create", "open", "restart")  # places before the first step


@frozen
class Case:
    """One fault.

    Attributes:
        point: the how manieth action, forward, backward, group or station of a start of that place.
        step: in which it happens.
        days: that pass on a moved clock after the first step.
    """

    schedule: str
    fault: str
    place: str
    rank: int = 1
    point: int = 0
    step: int = 1
    monitor: bool = True
    store: str = "launcher"
    deadline: float = 3.0
    backend: str = "gloo"  # of BACKENDS
    days: float = 0.0


@define
class Injector:
    """A runtime hook, and a function for the places outside of actions: fails once, where its case says."""

    case: Case
    rank: int
    folder: Path
    step: int = 0
    seen: Counter[str] = field(factory=Counter)
    fired: bool = False

    def reach(self, place: str) -> None:
        case = self.case
        if self.fired or (self.rank, self.step, place) != (case.rank, case.step, case.place):
            return
        self.seen[place] += 1
        if self.seen[place] > case.point or place in ("between", "reduce", "clip", "create", "close"):
            self.fired = True
            self.fail()

    def before(self, action: object) -> None:
        del action
        self.reach("before")

    def after(self, action: object) -> None:
        del action
        self.reach("after")

    def fail(self) -> None:
        (self.folder / "fault").write_text(repr(now()))
        match self.case.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "stop" | "stop and continue":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "delay":  # in C, with the interpreter's lock: no thread of this rank runs
                ctypes.PyDLL(None).usleep(int((self.case.deadline + 3) * 1e6))
            case "raise":
                raise RuntimeError(FAULTY)
            case "memory":
                raise MemoryError(FAULTY)
            case "interrupt":
                raise KeyboardInterrupt(FAULTY)


def _stage(number: int, plan: Plan, injector: Injector) -> Stage:
    return Stage(
        plan.graph,
        number,
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), Reach(partial(injector.reach, "backward"))),
        data=lambda microbatch: torch.randn(4, 2, 8),
        loss=lambda output: output.square().mean(),
        before=lambda microbatch: injector.reach("forward"),
    )


def _job(case: Case, config: P2PConfig):
    """Plan, communicator, stages of this rank, and grids by module."""
    if case.schedule in CHAINS:
        plan = lower(CHAINS[case.schedule]())
        placement = [positions[0] for positions in plan.placement]
        communicator = P2PCommunicator(dist.group.WORLD, config, placement=placement)
        return plan, communicator, plan.stages_at[dist.get_rank()], {"model": HyperCommGrid([WORLD], ["pp"])}
    if case.schedule == "vtp":
        vtp = VTPCommunicator(VTPTopology([1, 2, 1]), config)
        return lower(one_f_one_b(3, MICROBATCHES)), vtp, vtp.stages, {"model": HyperCommGrid([WORLD], ["pp"])}
    if case.schedule == "modules":
        grids = {"encoder": HyperCommGrid([2], ["dp"]), "language": HyperCommGrid([2], ["pp"], rank_offset=2)}
    else:
        grids = {"encoder": HyperCommGrid([4], ["dp"]), "language": HyperCommGrid([2, 2], ["dp", "pp"])}
    modules = MultiModulePipelineCommunicator(grids, {"encoder": ["language"]}, config)
    computes = multi_module_1f1b(modules.graph, MICROBATCHES, placement=modules.positions.placement)
    carriers = {edge: f"bridge-{edge.source}-{edge.destination}" for edge in modules.collective_edges}
    return lower(computes, collectives=carriers), modules, modules.stages, grids


def _store(case: Case, rank: int, folder: Path, port: int) -> dist.Store:
    if case.store == "file":
        return dist.FileStore(str(folder / "store"), WORLD)
    if case.store == "rank":
        if rank == 0:
            hosted = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
            (folder / "port.new").write_text(str(hosted.port))
            (folder / "port.new").rename(folder / "port")
            return hosted
        while not (folder / "port").exists():
            time.sleep(0.01)
        port = int((folder / "port").read_text())
    return dist.TCPStore("127.0.0.1", port, WORLD, is_master=False, wait_for_workers=False)


def _together(rank: int, folder: Path, where: str) -> None:
    """Return when all ranks are here."""
    (folder / f"{where}.{rank}").touch()
    while not all((folder / f"{where}.{other}").exists() for other in range(WORLD)):
        time.sleep(0.01)


def _start(case: Case, rank: int, folder: Path, port: int, injector: Injector) -> None:
    """Make the default group: over a store of the case's, or of an attempt under a launcher that starts ranks again."""
    backend, timeout = case.backend, timedelta(seconds=60)
    if backend.startswith("fake_nccl"):
        backend = f"cpu:{register(FakeDevice(serial=case.backend.endswith('serial')))}"
    if case.place != "restart":
        store = _store(case, rank, folder, port)
    else:
        timeout = timedelta(seconds=case.deadline + 10)
        os.environ |= {
            "RANK": f"{rank}",
            "WORLD_SIZE": f"{WORLD}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
        }
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        injector.reach("restart")
        store = attempt_store(timeout=timeout.total_seconds())
        launcher = dist.TCPStore("127.0.0.1", port, is_master=False)
        if launcher.check(["exception_dump"]):
            raise RuntimeError("a signal to dump of the attempt before is there")
        injector.reach("restart")
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=timeout)
    _together(rank, folder, "started")  # so that no fault meets a rank inside of torch's own beginning
    if case.place == "restart":
        launcher.set("exception_dump", "as the watchdog of NCCL does")
        injector.reach("restart")


def rank_main(case: Case, rank: int, folder: Path, port: int, again: bool) -> None:
    """Run the steps of one rank, without the fault where it is ``again``; its outcome is left in ``folder``."""
    write_to(folder / f"log.{rank}")
    faulthandler.register(signal.SIGUSR1)
    injector = Injector(case, rank, folder, fired=again)
    outcome: dict[str, object] = {}
    try:
        with ExitStack() as stack:
            clock = stack.enter_context(moved_clock()) if case.days else None
            _start(case, rank, folder, port, injector)
            _run(case, rank, folder, injector, clock)
        outcome["done"] = True
    except BaseException as error:  # noqa: BLE001 the outcome is written; the traceback is for a person who looks
        traceback.print_exc()
        outcome |= {"type": type(error).__name__, "text": str(error)[:4000]}
    outcome["at"] = now()
    (folder / f"new.{rank}").write_text(json.dumps(outcome))
    (folder / f"new.{rank}").rename(folder / f"outcome.{rank}")
    sys.stderr.flush()
    os._exit(0)


def _run(case: Case, rank: int, folder: Path, injector: Injector, clock: MovedClock | None) -> None:
    config = P2PConfig(pipeline_dtype=torch.float32, deadline=case.deadline, open_deadline=case.deadline + 10)
    made = torch_compat.make_group

    def make_group(*arguments, **options):
        injector.reach("open")
        return made(*arguments, **options)

    torch_compat.make_group = make_group
    if case.step == 0:
        injector.reach("create")
    plan, communicator, numbers, grids = _job(case, config)
    for grid in grids.values():
        if "dp" in grid.dim_names:
            grid.create_pg("dp", timeout=timedelta(seconds=case.deadline + 10))
    own = {name: grid for name, grid in grids.items() if grid.is_current_rank_in_grid()}
    groups = {name: ProcessGroupCollection.from_grid(grid) for name, grid in own.items()}
    injector.reach("restart")
    monitor = None
    if case.monitor:
        watch = control_store("training", timeout=timedelta(seconds=case.deadline))
        # A first step also connects, which a busy machine delays: only faults in it need its deadline.
        first = case.deadline if case.step == 0 else None
        monitor = Monitor(watch, rank=rank, ranks=range(WORLD), deadline=case.deadline, first_deadline=first)
    stages = {number: _stage(number, plan, injector) for number in numbers}
    runtime = PipelineRuntime(plan, stages, communicator, hooks=[injector], monitor=monitor)
    models = {name: torch.nn.ModuleList() for name in own}
    for number, stage in stages.items():
        models[plan.graph.module_of(number)[0]].append(stage.model)

    def finish() -> None:
        injector.reach("reduce")
        reduce_gradients(models, groups, loss_lanes=1, deadline=case.deadline)
        injector.reach("clip")
        clip_grad_norm_(models, groups, 1.0, deadline=case.deadline)

    if case.place not in STARTS:  # a barrier of torch's own would raise torch's own errors
        dist.barrier()
    for step in range(STEPS):
        injector.step = step
        injector.reach("between")
        runtime.step(finish=finish)
        if clock is not None and step == 0:
            _together(rank, folder, "young")
            clock.move(case.days * 24 * 3600)
            _together(rank, folder, "aged")
    injector.step = case.step
    injector.reach("close")
    communicator.destroy() if hasattr(communicator, "destroy") else communicator.close()
    if clock is not None and clock.ended:
        raise RuntimeError(f"waits that ended by their bounds: {clock.ended}")
