"""What a step of two ranks waits for: torch's 1F1B, `PipelineRuntime` and `Pipeline` as a script types it.

    python tools/bench/trips.py [--microbatches 4 16] [--steps 12] [--quick]
    python tools/bench/trips.py --calls [--list SIDE]

One layer of 64 x 64 a rank, 1F1B, gloo. First over loopback: milliseconds of a step and the ratio to torch's, each side
in processes of its own (beside the threads and lanes of the others torch's step takes twice as long), three times by
turns; printed is the least of three medians. Gradients of the step before are cleared, as in a training script. A
`Pipeline` returns the mean loss on every rank, which torch's step and the runtime's do not: a second row of each
broadcasts it, as a script would. Then over a wire between two network namespaces, of 10 and of 20 ms one way
(``--delays``): a *trip* is a message that has to arrive before the next can leave, so a step has
(time at 20 ms - time at 10 ms) / 10 ms of them. Beside them what the plan needs, as it is simulated with a transfer of
1 and computes of 0 (a receive that is posted ahead needs less). Some steps announce each message: of a runtime with
``variable_seq_lengths``, and of a `Pipeline` whose batches have other shapes each time. Then the same of other calls:
an evaluation, data parallelism beside DDP, two modules with a clipped norm, a step function with and without
`Survivors`, and each token of `generate`. The wire needs user namespaces and /dev/net/tun, but not root. Where they are
not allowed, the line says so, and the tests that count headers, calls of the store and collectives
(test_training_trips.py) stand for it.

Over the wire sides take turns in each round, two steps each, of which the second counts, and the median of a side is
over its rounds. Two ranks need a core each.

With ``--calls``, in place of times: the Python functions that a step of the last stage enters, by sys.setprofile, for
each number of microbatches; what one microbatch more adds; and with ``--list``, which functions these are.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import fcntl
import heapq
import itertools
import json
import math
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import FrameType
from typing import Any

WIDTH, ROWS, WARMUP, TOKENS = 64, 2, 4, 9
ADDRESSES, PORT = ("10.9.0.1", "10.9.0.2"), 29555
OTHERS = 0  # in place of a number of microbatches
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000


# ---- The ranks


SIDES = (
    "torch",
    "torch, the mean loss on every rank",
    "runtime",
    "runtime, the mean loss on every rank",
    "runtime, headers",
    "Pipeline",
    "Pipeline, monitor",
    "Pipeline, other shapes in each step",
)


def side(name: str, microbatches: int) -> Callable[[], object]:
    """A step of one of `SIDES`, on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from pipegrid.schedules import Forwarded, Monitor, PipelineRuntime, lower, one_f_one_b
    from pipegrid.topology import HyperCommGrid, control_store
    from pipegrid.training import Names, Pipeline
    from pipegrid.transport import Edge, P2PCommunicator, P2PConfig

    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(microbatches * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(ranks))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = x
            for layer in self.layers:
                h = layer(h)
            return (h - y).square()

    class Stage:
        def __init__(self, number: int) -> None:
            self.number, self.model = number, nn.Linear(WIDTH, WIDTH, bias=False)
            self.losses: list[torch.Tensor] = []

        def forward(self, microbatch: int, inputs: Mapping[Edge, torch.Tensor]) -> Forwarded:
            mine = x[ROWS * microbatch : ROWS * (microbatch + 1)]
            y = self.model(inputs[Edge(self.number - 1, self.number)] if inputs else mine)
            if self.number == ranks - 1:
                loss = (y - mine).square().mean()
                self.losses.append(loss.detach())
                return Forwarded({}, loss / microbatches)
            return Forwarded({Edge(self.number, self.number + 1): y})

    def pipeline(monitor: Monitor | bool, *, ragged: bool = False) -> Callable[[], object]:
        job = Pipeline(
            Model,
            "|".join("t" * ranks),
            HyperCommGrid([ranks], ["pp"]),
            names=Names("layers"),
            num_microbatches=microbatches,
            loss=lambda squares, _: squares.mean(),
            monitor=monitor,
        )
        job.step({"x": x, "y": x})  # which is compared with one process, as is the first update
        torch.optim.SGD(job.parameters(), lr=0.0).step()
        if not ragged:
            return cleared(job.parameters(), lambda: job.step({"x": x, "y": x}))
        each = (x.repeat(60, 1)[: 20 + 37 * turn % 101] for turn in itertools.count())  # cut into two sizes mostly

        def step() -> object:
            rows = next(each)
            return job.step({"x": rows, "y": rows})

        return cleared(job.parameters(), step)

    def cleared(parameters: Iterable[nn.Parameter], step: Callable[[], object]) -> Callable[[], object]:
        """A step as in a training script, which has cleared the gradients of the one before."""
        held = list(parameters)

        def begun() -> object:
            for one in held:
                one.grad = None
            return step()

        return begun

    def told(losses: list[torch.Tensor]) -> float:
        """The mean loss of the last rank, on every rank."""
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        losses.clear()
        dist.broadcast(mean, ranks - 1)
        return mean.item()

    everywhere = name.endswith("the mean loss on every rank")
    if name.startswith("torch"):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        stage = PipelineStage(layer, rank, ranks, torch.device("cpu"))
        torchs = Schedule1F1B(stage, microbatches, loss_fn=lambda output, target: (output - target).square().mean())
        target: dict[str, Any] = {"target": x} if rank == ranks - 1 else {}
        given: list[torch.Tensor] = [x] if rank == 0 else []
        losses: list[torch.Tensor] | None = [] if everywhere else None

        def scheduled() -> object:
            torchs.step(*given, **target, losses=losses)
            return None if losses is None else told(losses)

        return cleared(layer.parameters(), scheduled)
    if name.startswith("runtime"):
        agreed, announced = P2PConfig(pipeline_dtype=torch.float32), P2PConfig(variable_seq_lengths=True)
        communicator = P2PCommunicator(None, announced if name.endswith("headers") else agreed)
        own = Stage(rank)
        runtime = PipelineRuntime(lower(one_f_one_b(ranks, microbatches)), {rank: own}, communicator)

        def run() -> object:
            runtime.step()
            if everywhere:
                return told(own.losses)
            own.losses.clear()
            return None

        return cleared(own.model.parameters(), run)
    if name == "Pipeline, monitor":
        label = f"trips {microbatches}"
        return pipeline(Monitor(control_store(label), rank=rank, ranks=range(ranks), deadline=60.0))
    return pipeline(False, ragged=name.endswith("other shapes in each step"))


def others() -> Mapping[str, Callable[[], object]]:
    """Other calls of a `Pipeline`, on this rank, and DDP."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipegrid.schedules import one_f_one_b
    from pipegrid.survive import PipelineJob, PipelineWorld, Survivors
    from pipegrid.topology import HyperCommGrid, control_store
    from pipegrid.training import Names, Pipeline, PipelineModule
    from survive_job import MICROBATCHES
    from survive_job import Stage as Part

    torch.manual_seed(0)
    ranks = dist.get_world_size()
    x = torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    batch = {"x": x, "y": x}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return (x - y).square()

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.layer(x + 0.0 * y).unsqueeze(0)  # by bridges: a sequence, rows, columns
            return h

    class Decoder(Encoder):
        def set_input_tensor(self, received: Mapping[str, torch.Tensor]) -> None:
            self.received = received["encoder"]

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            del x
            h: torch.Tensor = self.layer(self.received).squeeze(0) - y
            return h.square()

    def updated(job: Pipeline) -> Pipeline:
        job.step(batch)
        torch.optim.SGD(job.parameters(), lr=0.01).step()  # the next step compares this first update
        return job

    given: dict[str, Any] = {"loss": lambda squares, _: squares.mean(), "monitor": False}
    grid, names = HyperCommGrid([ranks], ["pp"]), Names("layers")
    chain = updated(Pipeline(Model, "t|t", grid, names=names, num_microbatches=4, **given))
    replicas = updated(Pipeline(Model, "tt", HyperCommGrid([ranks], ["dp"]), names=names, num_microbatches=1, **given))
    modules = updated(
        Pipeline(
            {
                "encoder": PipelineModule(Encoder, None, HyperCommGrid([1], ["dp"])),
                "decoder": PipelineModule(Decoder, None, HyperCommGrid([1], ["dp"], rank_offset=1)),
            },
            topology={"encoder": ["decoder"]},
            num_microbatches=4,
            **given,
        )
    )
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, tie_word_embeddings=False, **sizes)
    writer = Pipeline(lambda: LlamaForCausalLM(config), "Et|tL", grid, monitor=False)
    prompt = {"input_ids": torch.arange(8).reshape(2, 4)}
    wrapped = DistributedDataParallel(Model())

    def data_parallel() -> None:
        wrapped.zero_grad()
        wrapped(**batch).mean().backward()

    def clipped() -> None:
        modules.step(batch)
        modules.clip(1.0)

    two = HyperCommGrid([1, ranks], ["dp", "pp"])
    two.create_pg("pp")
    part, worlds = Part(dist.get_rank(), WIDTH), list[PipelineWorld]()
    job, number = PipelineJob(two, one_f_one_b(ranks, MICROBATCHES), part.config), itertools.count()
    survivors = Survivors(control_store("trips survive"), job, modules=part).__enter__()
    survivors.run("the world", worlds.append)

    return {
        "evaluate, M = 1": lambda: chain.evaluate([batch]),
        "evaluate, M = 4": lambda: chain.evaluate(batch),
        "DDP": data_parallel,
        "data parallel": lambda: replicas.step(batch),
        "two modules, M = 4": lambda: modules.step(batch),
        "and their norm clipped": clipped,
        f"a step function, M = {MICROBATCHES}": lambda: part.step(worlds[0]),
        "the same by Survivors": lambda: survivors.run(f"step {next(number)}", part.step),
        "1 token": lambda: writer.generate(prompt, 1),
        f"{TOKENS} tokens": lambda: writer.generate(prompt, TOKENS),
    }


def run_rank(options: argparse.Namespace) -> None:
    """Measure all sides on this rank, in turn; rank 0 prints milliseconds by microbatches and side, as JSON."""
    import torch.distributed as dist

    where = f"tcp://{options.address}:{options.port}"
    dist.init_process_group("gloo", where, timedelta(seconds=120), rank=options.rank, world_size=2)
    found: dict[str, dict[str, float]] = {}
    for microbatches in [*options.microbatches, *([OTHERS] if options.others else [])]:
        steps = others() if microbatches == OTHERS else {name: side(name, microbatches) for name in options.sides}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            for _ in range(WARMUP):
                step()
        for _ in range(options.steps * (1 if len(steps) > 1 else 5)):  # a side alone is soon measured
            for name, step in steps.items():
                if len(steps) > 1:  # so that what comes before is the same side, for which a rank may be late
                    step()
                begun = time.perf_counter()
                step()
                times[name].append(1e3 * (time.perf_counter() - begun))
        found[str(microbatches)] = {name: statistics.median(each) for name, each in times.items()}
    if options.rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the sides are not closed one by one


def run_calls(options: argparse.Namespace) -> None:
    """Count the Python calls of a step of each side on this rank; the last one prints them by side, as JSON."""
    import torch.distributed as dist

    where = f"tcp://{options.address}:{options.port}"
    dist.init_process_group("gloo", where, timedelta(seconds=120), rank=options.rank, world_size=2)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for microbatches in options.microbatches:
        for name in SIDES:
            step = side(name, microbatches)
            for _ in range(WARMUP):
                step()
            found.setdefault(str(microbatches), {})[name] = calls_of(step)
    dist.barrier()
    if options.rank == 1:
        print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the sides are not closed one by one


def calls_of(step: Callable[[], object]) -> dict[str, int]:
    """How often each Python function is entered (a generator: each time), by the end of its path and its name."""
    entered: Counter[str] = Counter()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = frame.f_code.co_filename.replace("site-packages", "src").rpartition("/src/")[2]
            entered[f"{path}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(enter)
    try:
        step()
    finally:
        sys.setprofile(None)
    return dict(entered)


def rank_command(options: argparse.Namespace, rank: int, address: str, port: int) -> list[str]:
    """Starts a rank."""
    counts = [str(count) for count in options.microbatches]
    given = ["--rank", str(rank), "--address", address, "--port", str(port), "--steps", str(options.steps)]
    given += [f"--{name}" for name in ("calls", "others") if getattr(options, name)]
    return [sys.executable, __file__, *given, "--microbatches", *counts, "--sides", *options.sides]


# ---- A wire between two network namespaces


def plug(address: str) -> int:
    """An interface ``wire`` in this namespace; the descriptor on which its packets are read and written."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", b"wire", IFF_TUN | IFF_NO_PI))
    up = f"ip link set lo up; ip addr add {address}/24 dev wire; ip link set wire mtu 9000 txqueuelen 2000 up"
    subprocess.run(up, shell=True, check=True)
    return end


def carry(ends: tuple[int, int], seconds: float, processes: list[subprocess.Popen[bytes]]) -> None:
    """Carry packets from end to end, each ``seconds`` late, until the processes have ended."""
    due: list[tuple[float, int, int, bytes]] = []
    count = 0
    while any(process.poll() is None for process in processes):
        wait = max(0.0, due[0][0] - time.monotonic()) if due else 0.05
        for end in select.select(ends, [], [], min(wait, 0.05))[0]:
            packet = os.read(end, 65536)
            count += 1
            heapq.heappush(due, (time.monotonic() + seconds, count, ends[1 - ends.index(end)], packet))
        while due and due[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(due)
            os.write(end, packet)


def run_wired(options: argparse.Namespace) -> None:
    """In a namespace of its own: rank 0 here, rank 1 in another, the wire between the two."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1"}
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        rights = array.array("i", [plug(ADDRESSES[1])])
        there.sendmsg([b"w"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        here.close()
        there.recv(1)
        ended = subprocess.run(rank_command(options, 1, ADDRESSES[0], PORT), check=False).returncode
        os._exit(ended & 0xFF)
    other = array.array("i", here.recvmsg(1, socket.CMSG_SPACE(4))[1][0][2])[0]
    ends = plug(ADDRESSES[0]), other
    here.send(b"g")
    first = subprocess.Popen(rank_command(options, 0, ADDRESSES[0], PORT))
    carry(ends, options.wire / 1e3, [first])
    os.waitpid(child, os.WNOHANG)
    sys.exit(first.returncode)


# ---- The tables


def loopback(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Milliseconds over loopback of the sides, in one pair of processes, or the calls of a step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    commands = [rank_command(options, rank, "127.0.0.1", port) for rank in range(2)]
    first = subprocess.Popen(commands[0], env=environment, stdout=subprocess.PIPE)
    second = subprocess.Popen(commands[1], env=environment, stdout=subprocess.PIPE)
    printed = [process.communicate(timeout=options.limit)[0] for process in (first, second)]
    if first.returncode or second.returncode:
        raise SystemExit(f"ranks ended with {first.returncode} and {second.returncode}")
    return _read(printed[0] or printed[1])


def wired(options: argparse.Namespace, delay: float) -> dict[str, dict[str, float]]:
    """Milliseconds over a wire of so many milliseconds one way.

    Raises:
        OSError, subprocess.CalledProcessError: namespaces are not allowed here.
    """
    counts = [str(count) for count in options.microbatches]
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, __file__, "--wire", str(delay)]
    command += ["--steps", str(options.steps), "--others", "--microbatches", *counts, "--sides", *options.sides]
    return _read(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=options.limit).stdout)


def _read(output: bytes) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(output.splitlines()[-1])
    return found


def print_calls(options: argparse.Namespace) -> None:
    """Calls of a step for the fewest and the most microbatches, and what each microbatch between them has added."""
    found = loopback(options)
    few, most = min(map(int, found)), max(map(int, found))
    print(f"Python calls of a step on the last stage: M = {few}, M = {most}, for each microbatch (of pipegrid's own)")
    for name in found[str(few)]:
        least, largest = found[str(few)][name], found[str(most)][name]
        added = {each: (largest.get(each, 0) - least.get(each, 0)) / (most - few) for each in least | largest}
        own = sum(count for each, count in added.items() if each.startswith("pipegrid/"))
        total = f"{sum(least.values())}, {sum(largest.values())}, {sum(added.values()):.1f} ({own:.1f})"
        print(f"  {name}: {total}", flush=True)
        if name == options.list:
            for each, count in sorted(added.items(), key=lambda one: (-one[1], one[0])):
                once = least.get(each, 0) - few * count
                print(f"    {count:6.2f} a microbatch, {once:7.1f} a step  {each}")


def main() -> None:
    """Print both tables, or the calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="few steps of few microbatches; the figures say little")
    parser.add_argument("--calls", action="store_true", help="count Python calls in place of times")
    parser.add_argument("--list", metavar="SIDE", help="with --calls: the functions of a side, such as Pipeline")
    parser.add_argument(
        "--delays", type=float, nargs=2, default=[10.0, 20.0], help="of the wire, ms one way; longer on a busy machine"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each table")
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=SIDES, metavar="SIDE", help="all, or these")
    parser.add_argument("--others", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--wire", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        (run_calls if options.calls else run_rank)(options)
    if options.wire is not None:
        run_wired(options)
    if options.quick:
        options.microbatches, options.steps = options.microbatches[:1], 3
    if options.calls:
        print_calls(options)
        return
    print("loopback, milliseconds a step (over torch's)")
    alone = [argparse.Namespace(**vars(options) | {"sides": [name]}) for name in options.sides] * (
        1 if options.quick else 3
    )
    rounds = [loopback(each) for each in alone]
    for count in map(str, options.microbatches):
        times = {name: min(found[count][name] for found in rounds if name in found[count]) for name in options.sides}
        least = times.get("torch", math.nan)
        row = "  ".join(f"{name} {each:.1f} ({each / least:.2f})" for name, each in times.items())
        print(f"  M = {count}: {row}", flush=True)
    print("trips a step")
    try:
        near, far = (wired(options, delay) for delay in options.delays)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"  not measured, as namespaces or /dev/net/tun are not allowed here: {error}")
        return
    for count in near:
        longer = options.delays[1] - options.delays[0]
        trips = {name: (far[count][name] - near[count][name]) / longer for name in near[count]}
        if int(count) == OTHERS:
            more = trips.pop(f"{TOKENS} tokens") - trips["1 token"]
            trips["each token more"] = more / (TOKENS - 1)
        label = "others" if int(count) == OTHERS else f"M = {count}: the plan {critical_path(int(count)):.1f} "
        print(f"  {label} {'  '.join(f'{name} {each:.1f}' for name, each in trips.items())}", flush=True)


def critical_path(microbatches: int) -> float:
    """Trips of the plan of two ranks."""
    from pipegrid.schedules import Costs, lower, one_f_one_b, simulate

    return simulate(lower(one_f_one_b(2, microbatches)), Costs(F=0.0, I=0.0, W=0.0, latency=1.0)).makespan


if __name__ == "__main__":
    main()
