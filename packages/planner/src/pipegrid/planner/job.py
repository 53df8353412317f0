"""A job: modules with the costs of their layers, edges, devices, links and the batch of a step."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from attrs import field, frozen

from pipegrid.core.fields import Amount, Count, Index, Name, Rule, Seconds, checked_fields, instance, number
from pipegrid.core.graph import ModuleGraph, ModuleGraphError
from pipegrid.layout import LayerType, LayoutError, balance
from pipegrid.planner.errors import JobError
from pipegrid.plans import SCHEDULES

UNITS = {"B": 1} | {f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]+)\s*")


def bytes_of(value: Any) -> float:
    """A number of bytes from a number or a text such as ``"80GB"``."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2] in UNITS:
        value = float(match[1]) * UNITS[match[2]]
    return float(number().convert(value))


def _rate_of(value: Any) -> float:
    return float(number(above=0.0).convert(bytes_of(value)))


_BYTES = f'a number of bytes, or a text such as "80GB" ({", ".join(UNITS)})'
Bytes: TypeAlias = Annotated[float, Rule(bytes_of, _BYTES)]
GivenBytes: TypeAlias = Annotated[float | str, Rule(bytes_of, _BYTES)]
Rate: TypeAlias = Annotated[float, Rule(_rate_of, f"{_BYTES}, above 0")]  # bytes per second
Sharding: TypeAlias = Literal["none", "optimizer"]
Placing: TypeAlias = Literal["any", "apart", "colocated"]
MOST_LAYERS = 10_000  # layers of a module, at most
DEFAULT_SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v", "v_half")
"""The schedules of a search that names none."""

_WHOLE = [one.name for one in SCHEDULES.values() if one.trains and not one.sliced and one.name != "u_shape"]


def _schedule(name: Any) -> str:
    return _WHOLE[_WHOLE.index(name)]


ScheduleName: TypeAlias = Annotated[
    str, Rule(_schedule, f"a schedule of whole microbatches: {', '.join(_WHOLE)}", tuple(_WHOLE))
]
"""The name of a schedule that the planner has costs for."""

Kind: TypeAlias = Literal["embedding", "encoder", "decoder", "mtp", "loss"]
"""The layer kinds of the standard layout grammar."""

_checked = checked_fields(JobError)


@frozen(field_transformer=_checked)
class Measured:
    """Seconds of one layer for one sample on one GPU.

    Attributes:
        F: the forward.
        I: the half of the backward that gives the gradients of inputs.
        W: the half that gives the gradients of weights.

    Examples:
        >>> Measured(F=0.010, I=0.011, W=0.007)
        Measured(F=0.01, I=0.011, W=0.007)
    """

    F: Amount
    I: Amount
    W: Amount


@frozen(field_transformer=_checked)
class Layers:
    """Equal layers, with the costs of one layer for one sample.

    Attributes:
        kind: the kind of layer.
        count: number of layers.
        flops: of the forward.
        attention_flops: the part of them between activations, without weights; its backward is twice itself, all in
            ``I``.
        seconds: measured on one GPU, in place of both.
        activations: bytes that the backward needs, on one GPU.
        parameters: their number.
        reductions: tensor-parallel all-reduces of a forward, each of the module's ``message``.
        context: bytes of keys and values, which context-parallel ranks exchange.

    Examples:
        >>> Layers("decoder", count=32, flops=1e12, parameters=200e6, activations="40MB").activations
        40000000.0
    """

    kind: Kind
    count: Count = 1
    flops: Amount | None = None
    attention_flops: Amount = 0.0
    seconds: Annotated[Measured, instance(Measured, "Measured(F, I, W), in seconds")] | None = None
    activations: Bytes = 0.0
    parameters: Amount = 0.0
    reductions: Index = 2
    context: Bytes = 0.0

    def __attrs_post_init__(self) -> None:
        if (self.flops is None) == (self.seconds is None):
            given = "neither" if self.flops is None else "both"
            raise JobError(f"the {self.kind} layers have {given} of flops and seconds; give one of them")
        if self.attention_flops > (self.flops or 0.0):
            raise JobError(f"attention_flops is {self.attention_flops:g}, of {self.flops or 0:g} flops of the layer")


@frozen(slots=False, field_transformer=_checked)
class ModuleCosts:
    """A model of the job: its layers with their costs, and the grids it may have.

    Attributes:
        name: of the module.
        layers: in the order of the model.
        message: bytes of one sample between two of its layers, and of its output.
        tp: allowed sizes of tensor parallelism.
        cp: allowed sizes of context parallelism.
        dp: allowed numbers of replicas; by default any divisor of the global batch.
        pp: allowed numbers of pipeline stages; by default any of 1, 2, 3, 4, 6, 8, 12, 16, ...
        frozen: the module runs no backward.
        placing: on ranks of its own (``"apart"``), on those of the module at the end of the graph (``"colocated"``), or
            either.

    Examples:
        >>> language = ModuleCosts("language", [Layers("decoder", count=32, flops=1e12)], message="8MB", tp=[1, 2, 4])
        >>> language.message
        8000000.0
    """

    name: Name
    layers: tuple[Annotated[Layers, instance(Layers, "Layers(kind, count, ...)")], ...]
    message: Bytes
    tp: tuple[Count, ...] = field(default=(1,))
    cp: tuple[Count, ...] = field(default=(1,))
    dp: tuple[Count, ...] = field(default=())
    pp: tuple[Count, ...] = field(default=())
    frozen: Annotated[bool, instance(bool, "true or false")] = False
    placing: Placing = "any"

    def __attrs_post_init__(self) -> None:
        if not self.layers:
            raise JobError(f"module {self.name!r} has no layers; give at least one")
        if (count := sum(layers.count for layers in self.layers)) > MOST_LAYERS:
            raise JobError(f"module {self.name!r} has {count} layers; at most {MOST_LAYERS} are planned")
        try:
            balance([0.0] * len(self.each), 1, layers=self.kinds)  # an embedding first, a loss last
        except LayoutError as error:
            raise JobError(f"layers of {self.name!r}: {error}") from None

    @cached_property
    def each(self) -> tuple[Layers, ...]:
        """One entry per layer, in model order."""
        return tuple(layers for layers in self.layers for _ in range(layers.count))

    @cached_property
    def parameters(self) -> float:
        """Parameters of all layers."""
        return sum(layer.parameters for layer in self.each)

    @cached_property
    def activations(self) -> float:
        """Bytes of activations of all layers, for one sample."""
        return sum(layer.activations for layer in self.each)

    @cached_property
    def kinds(self) -> tuple[LayerType, ...]:
        """The kind of each layer."""
        return tuple(LayerType[layer.kind] for layer in self.each)


@frozen(field_transformer=_checked)
class Device:
    """A GPU.

    Attributes:
        flops: FLOP/s that a layer reaches.
        memory: in bytes.
        reserved: bytes that are not the job's own.
        communicator: bytes of the buffers of a communicator.
        overhead: seconds that each compute of a stage, with the messages around it, costs its rank's host in addition.

    Examples:
        >>> Device(flops=400e12, memory="80GB").memory
        80000000000.0
    """

    flops: Seconds
    memory: Bytes | None = None
    reserved: Bytes = 0.0
    communicator: Bytes = 0.0
    overhead: Amount = 0.0


@frozen(field_transformer=_checked)
class Network:
    """Bytes per second of one GPU to others.

    Attributes:
        inside: to those of its node.
        between: to those of other nodes.
        gpus_per_node: GPUs of a node.
        latency: seconds of any message.

    Examples:
        >>> Network(inside="450GB", between="50GB", gpus_per_node=8).between
        50000000000.0
    """

    inside: Rate
    between: Rate
    gpus_per_node: Count = 8
    latency: Amount = 0.0


@frozen(field_transformer=_checked)
class Training:
    """Bytes per parameter, how the replicas of a module share them, and which schedules are tried.

    Attributes:
        parameter_bytes: of the weight.
        gradient_bytes: of its gradient.
        optimizer_bytes: of the optimizer's states.
        sharding: ``"optimizer"`` divides the optimizer's states among the dp and cp ranks (Rajbhandari et al. 2020,
            stage 1); ``"none"`` keeps them whole.
        schedules: names, of any but the U and those with slices.
        chunks: stages per position, where a schedule runs any number.
        microbatch: samples over all replicas; by default 1 to 4 for each replica.

    Examples:
        >>> Training(sharding="none", schedules=["1f1b"]).optimizer_bytes
        12.0
    """

    parameter_bytes: Amount = 2.0
    gradient_bytes: Amount = 4.0
    optimizer_bytes: Amount = 12.0
    sharding: Sharding = "optimizer"
    schedules: tuple[ScheduleName, ...] = DEFAULT_SCHEDULES
    chunks: tuple[Count, ...] = (2,)
    microbatch: tuple[Count, ...] = ()

    def __attrs_post_init__(self) -> None:
        for name in ("schedules", "chunks"):
            if not getattr(self, name):
                raise JobError(f"training.{name} is empty; name at least one, or leave it out")


def _pair(value: Any) -> tuple[str, str]:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(isinstance(name, str) for name in value):
        raise ValueError
    return value[0], value[1]


NamedEdge: TypeAlias = Annotated[tuple[str, str], Rule(_pair, "a pair of names: a module and one that it feeds")]


@frozen(slots=False, field_transformer=_checked)
class Job:
    """A training job: its models, batch and hardware.

    Attributes:
        modules: the models of the job.
        global_batch: samples of a step.
        device: one GPU.
        links: between GPUs.
        edges: pairs of names: which module feeds which.
        training: bytes per parameter, and the schedules to try.

    Examples:
        >>> module = ModuleCosts("language", [Layers("decoder", count=32, flops=1e12)], message="8MB")
        >>> job = Job([module], global_batch=64, device=Device(flops=400e12), links=Network("450GB", "50GB"))
        >>> job.training.sharding
        'optimizer'
    """

    modules: tuple[Annotated[ModuleCosts, instance(ModuleCosts, "a ModuleCosts(name, layers, message)")], ...]
    global_batch: Count
    device: Annotated[Device, instance(Device, "a Device(flops, memory, ...)")]
    links: Annotated[Network, instance(Network, "a Network(inside, between, ...)")]
    edges: tuple[NamedEdge, ...] = ()
    training: Annotated[Training, instance(Training, "a Training(...)")] = field(factory=Training)

    def __attrs_post_init__(self) -> None:
        graph = self.graph
        for source, fed in self.edges:
            if self.module(fed).frozen and not self.module(source).frozen:
                raise JobError(f"edges: {source!r} is trained and feeds the frozen {fed!r}: no gradient returns")
        if all(self.module(name).frozen for name in graph.sinks):
            raise JobError(f"modules: {graph.order[-1]!r}, the end of the graph, is frozen; a step must train it")
        for at, module in enumerate(self.modules):
            if module.placing == "colocated" and module.name == graph.order[-1]:
                raise JobError(f"modules[{at}].placing: {module.name!r} is the end of the graph; others join its ranks")

    @cached_property
    def graph(self) -> ModuleGraph:
        """The modules as a graph, a stage each."""
        try:
            return ModuleGraph([(module.name, 1) for module in self.modules], self.edges)
        except ModuleGraphError as error:
            names = [module.name for module in self.modules]
            raise JobError(f"{'edges' if names and len(set(names)) == len(names) else 'modules'}: {error}") from None

    def module(self, name: str) -> ModuleCosts:
        """The module called ``name``."""
        return next(module for module in self.modules if module.name == name)
