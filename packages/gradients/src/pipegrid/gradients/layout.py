"""The gradients of a set of parameters: over which ranks each is summed, by what it is divided, who counts it.

Attributes of a parameter, Megatron's and ours, are read here only. All that finishes gradients (buckets, norm,
replicas, ties) reads a `GradientLayout`; `pipegrid.gradients.main_grad` has the place of a gradient itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from attrs import define, field, frozen, setters

from pipegrid.gradients.dtensors import fsdp_divisors, is_dtensor, mesh_ranks, replicating_groups
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.groups import collection_of, replica_group, replica_group_or_none, require_groups, size_of
from pipegrid.gradients.main_grad import Modules, accumulation_dtype, named_modules


@define
class TieMark:
    """The mark of a tied parameter (``parameter.tied``)."""

    name: str = field(on_setattr=setters.frozen)
    # Its ``REDUCE`` also sums over replicas; the data-parallel reduction must not repeat that.
    over_replicas: bool = field(on_setattr=setters.frozen)
    summed: bool = field(default=False, eq=False)  # the ``REDUCE`` of this step is done, and its result not yet used


class Marks(NamedTuple):
    """The attributes of a parameter that decide on its gradient."""

    tie: TieMark | None = None  # ``tied``; None for a parameter that is not tied
    replica: bool = False  # ``tied_replica``, another copy of the tie counts for the norm
    expert: bool = False  # ``allreduce=False`` (Megatron's) or ``expert``, with replicas of its own
    # ``sequence_parallel`` (Megatron's) or ``partial_over_tp``: whole on every tp rank, its gradient a part.
    partial: bool = False
    sharded: bool = False  # ``tensor_model_parallel``, over tp


_NO_MARKS = Marks()


def marks_of(parameter: torch.nn.Parameter) -> Marks:
    """The marks of a parameter."""
    if type(parameter) is torch.nn.Parameter and not vars(parameter):  # most parameters carry none
        return _NO_MARKS
    mark = partial(getattr, parameter)
    return Marks(
        mark("tied", None),
        bool(mark("tied_replica", False)),
        mark("allreduce", True) is False or bool(mark("expert", False)),
        bool(mark("sequence_parallel", False) or mark("partial_over_tp", False)),
        bool(mark("tensor_model_parallel", False)),
    )


@frozen(eq=False)
class ParameterGradient:
    """The gradient of one parameter."""

    module: str  # the name of the first module that has the parameter
    # Of the parameter in that module; of a module with several stages here behind the stage's place among them.
    name: str
    parameter: torch.nn.Parameter
    marks: Marks  # its attributes, when the layout was made
    # The group of replicas, that of an expert's view for an expert's; None where there is no group.
    replicas: dist.ProcessGroup | None
    tensor: dist.ProcessGroup | None  # the tensor-parallel ranks, likewise
    module_replicas: int  # the number of replicas of the module
    mesh: frozenset[int]  # the ranks that hold the shards of a DTensor; none of another parameter
    # The groups inside of the mesh that hold a shard alike: over these, the gradient may be parts of a sum.
    alike: tuple[dist.ProcessGroup, ...]
    by_fsdp: bool  # whether ``fully_shard`` reduces it
    divided: float  # by this ``fully_shard`` has divided it; else 1
    dtype: torch.dtype  # in which it accumulates

    @property
    def summed_over(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The tp ranks and the replicas that a reduction sums it over, in this order; None: not over them.

        Not over replicas where ``fully_shard`` or the ``REDUCE`` of a tie has summed over them.
        """
        done = self.by_fsdp or (self.marks.tie is not None and self.marks.tie.over_replicas)
        return (
            self.tensor if self.marks.partial and size_of(self.tensor) > 1 else None,
            None if done or size_of(self.replicas) == 1 else self.replicas,
        )

    @property
    def bucket(self) -> tuple[object, ...]:
        """The key of the bucket: parameters with equal keys share one; a tied parameter is alone."""
        alone = None if self.marks.tie is None else id(self.parameter)
        form = self.dtype, self.parameter.device, self.marks.expert, self.marks.partial
        return *form, bool(self.alike), self.by_fsdp, self.divided, alone

    def __str__(self) -> str:
        return f"a parameter of shape {tuple(self.parameter.shape)} in module {self.module!r}"


@frozen(eq=False)
class GradientLayout:
    """The gradients of ``modules``: of each parameter once, trained or not, in their order.

    It holds the parameters, and is made for one step or one call: ``fully_shard`` replaces its parameters in each step.
    """

    modules: Modules
    collections: Any
    gradients: tuple[ParameterGradient, ...]

    @classmethod
    def of(cls, modules: Modules, collections: Any) -> GradientLayout:
        """The layout over the process groups of ``collections``."""
        divided: dict[int, float | None] = {}
        for _, module in named_modules(modules):
            divided |= fsdp_divisors(module)
        return cls(modules, collections, tuple(_gradients(modules, collections, divided)))

    @property
    def device(self) -> torch.device | None:
        """The device of the first parameter; None without parameters."""
        return self.gradients[0].parameter.device if self.gradients else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules."""
        return tuple(dict.fromkeys(name for name, _ in named_modules(self.modules)))

    @property
    def trained(self) -> Iterator[ParameterGradient]:
        """The gradients of parameters that require one."""
        return (each for each in self.gradients if each.parameter.requires_grad)

    def require_groups(self, dims: Iterable[str] = ()) -> None:
        """Raise GradientError for a module without a group that a sum, or with ``dims`` a norm, needs.

        Its grid's sizes demand it, or an expert or cp ranks do; ``dims``, where a parameter is not sharded.
        """
        whole = {each.module for each in self.gradients if not (is_dtensor(each.parameter) or each.marks.sharded)}
        for name in self.names:
            require_groups(self.collections, name, dims if name in whole else ())
            replica_group(self.collections, name)
        for each in self.trained:
            if each.marks.expert and each.replicas is None and each.module_replicas > 1:
                raise GradientError(
                    f"{each} is an expert's (allreduce=False, expert), and its collection has no expt_dp group to sum "
                    "it over: ProcessGroupCollection.from_grid(grid, expert_view=...)"
                )


def _gradients(modules: Modules, collections: Any, divided: dict[int, float | None]) -> Iterator[ParameterGradient]:
    seen: set[int] = set()
    held = [name for name, _ in named_modules(modules)]
    for place, (module, stage) in enumerate(named_modules(modules)):
        prefix = f"{place - held.index(module)}." if held.count(module) > 1 else ""
        collection = collection_of(collections, module)
        own = replica_group_or_none(collection)
        plain = own, getattr(collection, "tp", None)
        expert = getattr(collection, "expt_dp", None), getattr(collection, "expt_tp", None)
        for name, parameter in stage.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            marks, by_fsdp = marks_of(parameter), id(parameter) in divided
            replicas, tensor = expert if marks.expert else plain
            yield ParameterGradient(
                module=module,
                name=prefix + name,
                parameter=parameter,
                marks=marks,
                replicas=replicas,
                tensor=tensor,
                module_replicas=size_of(own),
                mesh=mesh_ranks(parameter),
                alike=tuple(replicating_groups(parameter)),
                by_fsdp=by_fsdp,
                divided=(divided[id(parameter)] or size_of(replicas)) if by_fsdp else 1.0,
                dtype=accumulation_dtype(parameter),
            )
