"""A rank of a job that survives deaths, its jobs, and where it is killed."""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import sys
import time
import traceback
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import define, evolve, field, frozen

sys.path.insert(0, str(Path(__file__).parent))  # of ranks that a server forks

from kit.processes import write_to
from kit.stages import Stage
from pipegrid.schedules import PipelineRuntime, clip_grad_norm_, one_f_one_b, zero_bubble_h1
from pipegrid.testing.fake_nccl import FakeDevice, Nccl2Rules, register
from pipegrid.topology import GroupSpec, HyperCommGrid, create_groups, destroy_groups, discard_groups
from pipegrid.training.survive import PipelineJob, RankRetiredError, Survivors, handover, init_process_group
from pipegrid.training.survive.connections import end_connections
from pipegrid.transport import P2PConfig, streams

SIZE, SHARES = 5, 12
ANY = -2  # of steps: where a new process comes is the matter of the machine


@frozen
class Kill:
    """``rank`` is killed as it comes to ``place`` for the ``nth`` time (from 0) in ``step``; or it raises ``error``.

    ``process``: which of the processes of the rank, from 0; -1 is the step before a new process has the state.
    """

    rank: int
    place: str
    step: int = 1
    nth: int = 0
    error: Exception | None = None
    process: int = 0

    def __str__(self) -> str:
        return f"{self.rank} at {self.place.replace(' ', '_')} {self.nth} of {self.step}"


@frozen
class Case:
    """A job of ``positions`` x ``replicas`` ranks, and the kills in it.

    ``pairs``: ranks compute only two by two, so the other one of a dead rank retires. ``back``: steps that
    wait for a new process that asks to come in. ``backend``: gloo, or a mode of the fake NCCL, of which no connection
    ends when a process does.
    """

    job: str
    positions: int
    replicas: int
    kills: tuple[Kill, ...] = ()
    schedule: str = "1f1b"
    pairs: bool = False
    back: tuple[int, ...] = ()
    heartbeat: float = 5.0
    deadline: float = 20.0
    backend: str = "gloo"

    @property
    def steps(self) -> int:
        """One before the first kill as a rule, and one after the last."""
        return 2 + max((*(kill.step for kill in self.kills), *self.back), default=0)

    @property
    def world_size(self) -> int:
        return self.positions * self.replicas

    @property
    def retiring(self) -> tuple[int, ...]:
        """The ranks that retire when others die: with ``pairs`` the other ones of each pair."""
        dead = {kill.rank for kill in self.kills if self.pairs and kill.place != "never"}
        return tuple([rank for rank in (one ^ 1 for one in dead) if rank not in dead])


@define
class Places:
    """Kills this process where its case says so."""

    case: Case
    rank: int
    folder: Path
    process: int = 0
    step: int = -1
    seen: Counter[str] = field(factory=Counter)

    def begin(self, step: int) -> None:
        self.step, self.seen = step, Counter()

    def reach(self, place: str) -> None:
        here = self.rank, place, self.seen[place], self.process
        self.seen[place] += 1
        for kill in self.case.kills:
            if kill.step in (self.step, ANY) and (kill.rank, kill.place, kill.nth, kill.process) == here:
                if kill.error is not None:
                    raise kill.error
                (self.folder / f"killed.{self.rank}").write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

    # A hook of a runtime.

    def before(self, action: object) -> None:
        self.reach(action.kind.name)

    def after(self, action: object) -> None:
        self.reach(f"after {action.kind.name}")

    def around(self, survivors: Survivors) -> Survivors:
        """Places in what the survivors do between functions."""
        for name in ("vote", "done"):
            setattr(survivors.epochs, name, self.within(name, getattr(survivors.epochs, name)))
        survivors._build = self.within("build", survivors._build)
        for name in ("send", "receive"):
            setattr(handover._Wire, name, self.within(f"{name} state", getattr(handover._Wire, name)))
        return survivors

    def within(self, name, function):
        def wrapped(*arguments, **options):
            self.reach(name)
            result = function(*arguments, **options)
            self.reach(f"after {name}")
            return result

        return wrapped


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


# ---- Sums of shares, which the ranks that live divide among themselves.


class LateDevice:
    """In the place of `torch.cuda`: the host waits for no collective, and one with a dead rank ends by an abort."""

    def __init__(self):
        self.works = []

    def is_initialized(self):
        return True

    is_available = is_initialized

    def current_device(self):
        return 0

    def synchronize(self, device):
        while self.works:
            work, world = self.works.pop()
            try:
                work.wait()
            except RuntimeError:  # a kernel has no errors: it waits for its data, until the abort of its group
                while not world.aborted:
                    time.sleep(0.001)


class Members:
    """The world of plain functions: a group of the ranks that live."""

    def __init__(self, epoch, device=None):
        self.device = device
        self.members, spec = epoch.members, GroupSpec(epoch.members, f"members of epoch {epoch.number}")
        self.groups = create_groups([spec], backend="gloo", timeout=timedelta(seconds=300))
        self.group, self.aborted = self.groups[spec], False

    def abort(self, cause):
        self.aborted = True
        end_connections(self.groups.values(), cause)

    def close(self):
        (discard_groups if self.aborted else destroy_groups)(self.groups)

    def reduce(self, tensor, operation=dist.ReduceOp.SUM):
        work = dist.all_reduce(tensor, operation, group=self.group, async_op=True)
        if self.device is None:
            work.wait()
        else:
            self.device.works.append((work, self))
        return tensor


def share(step: int, number: int) -> torch.Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + number))


def sums(case: Case, places: Places, store) -> dict[str, object]:
    """Each step adds a sum of shares to a weight, divided by its largest element: two functions of all ranks."""
    rank, weight = dist.get_rank(), torch.zeros(SIZE, dtype=torch.float64)
    device = LateDevice() if case.job == "late sums" else None
    if device is not None:
        streams.cuda = device
    survivors = Survivors(
        store,
        partial(Members, device=device),
        modules={},
        heartbeat=case.heartbeat,
        deadline=case.deadline,
        retire=lambda dead: [one ^ 1 for one in dead if case.pairs],
    )

    def total(step, world):
        own = [share(step, n) for n in range(SHARES) if world.members[n % len(world.members)] == rank]
        places.reach("compute")
        result = world.reduce(torch.stack(own).sum(0))
        places.reach("after sum")
        return result

    def largest(value, world):
        places.reach("largest")
        result = world.reduce(value.abs().max(), dist.ReduceOp.MAX)
        places.reach("after largest")
        return result

    with places.around(survivors):
        for step in range(case.steps):
            places.begin(step)
            places.reach("between")
            value = survivors.run(f"sum {step}", partial(total, step))
            places.reach("in between")
            weight += value / survivors.run(f"largest {step}", partial(largest, value))
            places.reach("update")
    return {"weights": {"weight": weight}, "events": [str(event) for event in survivors.events]}


def sums_alone(case: Case) -> dict[str, torch.Tensor]:
    weight = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(case.steps):
        value = torch.stack([share(step, number) for number in range(SHARES)]).sum(0)
        weight += value / value.abs().max()
    return {"weight": weight}


# ---- A pipeline of data-parallel replicas.

MICROBATCHES, WIDTH = 4, 6


def module(number: int) -> torch.nn.Module:
    torch.manual_seed(number)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()


def batch(step: int, unit: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + unit))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def loss_of(output, units):
    return output.square().sum() / units


@frozen
class History:
    """What a script has of its steps."""

    norms: list[torch.Tensor] = field(factory=list)
    losses: list[torch.Tensor] = field(factory=list)

    def state_dict(self):
        return {"norms": self.norms, "losses": self.losses}

    def load_state_dict(self, state):
        self.norms[:], self.losses[:] = state["norms"], state["losses"]


def pipeline(case: Case, places: Places, store) -> dict[str, object]:
    rank, (positions, replicas) = dist.get_rank(), (case.positions, case.replicas)
    grid = HyperCommGrid([replicas, positions], ["dp", "pp"])
    units, at = replicas * MICROBATCHES, grid.coords(rank)
    model = module(at["pp"])
    optimizer, losses = optimizer_of(model), list[torch.Tensor]()
    plan = SCHEDULES[case.schedule](positions, MICROBATCHES)
    config = P2PConfig(deadline=20.0, open_deadline=300.0)
    job = PipelineJob(grid, plan, config, timeout=300.0)

    def reduce(world):
        places.reach("REDUCE")
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=world.groups.dp)
        places.reach("after REDUCE")

    def loss(output):
        found = loss_of(output, units)
        losses.append(found.detach())
        return found

    def train(world):
        losses.clear()
        if getattr(world, "runtime", None) is None:
            stage = Stage(
                plan.graph,
                at["pp"],
                model,
                data=lambda unit: batch(places.step, unit if world.plan.routes else unit + at["dp"] * MICROBATCHES),
                loss=loss,
                before=lambda unit: places.reach("forward"),
            )
            reducers = {at["pp"]: partial(reduce, world)} if world.plan.routes else {}
            world.runtime = PipelineRuntime(
                world.proof,
                {at["pp"]: stage},
                world.communicator,
                replica=world.actor.replica if world.plan.routes else None,
                reducers=reducers,
                hooks=[places],
            )
        optimizer.zero_grad()
        world.runtime.step(finish=None if world.plan.routes else partial(reduce, world))
        # Here, not in a later function: what is on one rank only may die with it.
        total = sum(losses, torch.zeros((), dtype=torch.float64))
        dist.all_reduce(total, group=world.job_group)
        places.reach("after step")
        return total

    def norm_of(world):
        places.reach("norm")
        norm = clip_grad_norm_(model, world.groups, math.inf, job_group=world.job_group)
        places.reach("after norm")
        return norm

    history = History()
    survivors = Survivors(
        store,
        job,
        modules=model,
        state={"optimizer": optimizer, "history": history},
        heartbeat=case.heartbeat,
        deadline=case.deadline,
        retire=job.retire,
    )
    return train_on(survivors, case, places, model, at["pp"], optimizer, train, norm_of, history)


def train_on(survivors, case, places, model, number, optimizer, train, norm_of, history) -> dict[str, object]:
    """The outcome of the steps of a job: this rank's stage is ``number``."""
    with places.around(survivors):
        for step in survivors.steps(range(case.steps)):
            places.begin(step)
            places.reach("between")
            if step in case.back and dist.get_rank() == survivors.epochs.current.members[0]:
                while len(survivors.epochs.current.members) < case.world_size and not survivors.epochs.asking:
                    time.sleep(0.02)
            history.losses.append(survivors.run(f"step {step}", train))
            places.reach("in between")
            history.norms.append(survivors.run(f"norm {step}", norm_of, keep_gradients=False))
            places.reach("optimizer")
            for parameter in model.parameters():
                parameter.grad.mul_(1.0 / history.norms[-1])
            optimizer.step()
            places.reach("after optimizer")
    weights = {f"{number}.{name}": value for name, value in model.state_dict().items()}
    weights |= {"norms": torch.stack(history.norms), "losses": torch.stack(history.losses)}
    return {"weights": weights, "events": [str(event) for event in survivors.events]}


def pipeline_alone(case: Case) -> dict[str, torch.Tensor]:
    models = [module(number) for number in range(case.positions)]
    optimizers, units, norms, totals = [optimizer_of(model) for model in models], case.replicas * MICROBATCHES, [], []
    for step in range(case.steps):
        totals.append(torch.zeros((), dtype=torch.float64))
        for unit in range(units):
            value = batch(step, unit)
            for model in models:
                value = model(value)
            loss = loss_of(value, units)
            loss.backward()
            totals[-1] += loss.detach()
        gradients = [parameter.grad for model in models for parameter in model.parameters()]
        norms.append(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        for gradient in gradients:
            gradient.mul_(1.0 / norms[-1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {f"{n}.{name}": value for n, model in enumerate(models) for name, value in model.state_dict().items()}
    return {**weights, "norms": torch.stack(norms), "losses": torch.stack(totals)}


def page(case: Case, places: Places, store) -> dict[str, object]:
    """The training loop of the page, on two stages that sum their gradients; the groups are made already."""
    text = (Path(__file__).parents[1] / "docs/concepts/survive.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Survivors(" in block)
    code = re.sub(r"^init_process_group.*$", "", code, flags=re.MULTILINE).replace("[3, 2]", "[1, 2]")
    rank = dist.get_rank()
    stage = module(rank)

    def forward_backward(world, step):
        stage(batch(step, rank)).square().sum().backward()
        for parameter in stage.parameters():
            dist.all_reduce(parameter.grad, group=world.groups.dp)

    names = {
        "rank": rank,
        "store": store,
        "stage": stage,
        "config": P2PConfig(open_deadline=300.0),
        "steps": case.steps,
        "optimizer": optimizer_of(stage),
        "forward_backward": forward_backward,
        "norm_of": lambda world: clip_grad_norm_(stage, world.groups, math.inf, job_group=world.job_group),
        "scale": lambda stage, norm: torch.nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, norm),
    }
    exec(code, names)
    return {"weights": stage.state_dict(), "events": names["survivors"].events}


SCHEDULES = {"1f1b": one_f_one_b, "zero_bubble": zero_bubble_h1}
JOBS = {"sums": sums, "late sums": sums, "pipeline": pipeline, "page": page}
ALONE = {"sums": sums_alone, "late sums": sums_alone, "pipeline": pipeline_alone}
PLACES = {
    "sums": (
        "between",
        "compute",
        "after sum",
        "done",
        "after done",
        "in between",
        "largest",
        "after largest",
        "update",
    ),
    # Of every rank; the messages are those of its position.
    "pipeline": (
        "between",
        "forward",
        "F",
        "after F",
        "B",
        "after B",
        "REDUCE",
        "after REDUCE",
        "after step",
        "done",
        "after done",
        "in between",
        "norm",
        "after norm",
        "optimizer",
        "after optimizer",
    ),
}
TO_THE_NEXT = ("SEND_F", "after SEND_F", "RECV_B", "after RECV_B")
TO_THE_ONE_BEFORE = ("RECV_F", "after RECV_F", "SEND_B", "after SEND_B")
HALVES = ("I", "after I", "W", "after W")  # of the backwards of a schedule that splits them


def whole_matrix(case: Case) -> list[Case]:
    """Every rank at every place of its own, in as few runs as leave one replica of each position."""
    places = [place for place in PLACES["pipeline"] if case.schedule == "1f1b" or place not in ("B", "after B")]
    places += () if case.schedule == "1f1b" else HALVES
    left = {}
    for rank in range(case.world_size):
        position = rank // case.replicas
        before, after = position > 0, position < case.positions - 1
        left[rank] = [*places, *(TO_THE_NEXT if after else ()), *(TO_THE_ONE_BEFORE if before else ())]
    cases = []
    while any(left.values()):
        chosen = []
        for position in range(case.positions):
            ranks = sorted(range(position * case.replicas, (position + 1) * case.replicas), key=lambda r: -len(left[r]))
            chosen += [rank for rank in ranks[: case.replicas - 1] if left[rank]]
        kills = [Kill(rank, left[rank].pop(), step) for step, rank in enumerate(chosen, start=1)]
        cases.append(evolve(case, kills=tuple(kills)))
    return cases
