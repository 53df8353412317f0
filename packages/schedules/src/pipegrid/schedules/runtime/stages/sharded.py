"""Stages that ``fully_shard`` has sharded, gathered, freed and reduced where the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field

from pipegrid.autograd.fsdp import is_fsdp, let_plan_decide, outermost, reduce_scatter
from pipegrid.core.errors import StepArgumentError
from pipegrid.plans.plan import Action, ActionKind
from pipegrid.schedules.runtime.stages.stage import RuntimeStage, modules_of


@define(eq=False)
class ShardedStage:
    """A stage sharded by ``fully_shard``, whose parameters the plan gathers and frees, and whose gradients it reduces.

    During a step FSDP2's own gathers find the parameters gathered, and it neither frees them nor reduces gradients;
    after it, it does both as usual.
    """

    number: int
    stage: RuntimeStage
    reductions: int  # ``REDUCE_GRAD`` in a step
    _left: int = field(default=0, init=False)
    _modules: tuple[Any, ...] = field(default=(), init=False)
    _roots: tuple[Any, ...] = field(default=(), init=False)
    _pending: list[Any] = field(factory=list, init=False)

    def begin(self) -> None:
        """Find the sharded modules, and leave their parameters to the plan."""
        self._pending.clear()
        self._left = self.reductions
        self._modules = tuple(dict.fromkeys(module for _, module in modules_of(self.stage) if is_fsdp(module)))
        if not self._modules:
            raise StepArgumentError(
                f"the plan gathers the parameters of stage {self.number} ({self.number}UNSHARD), and nothing in the "
                "stage is sharded by fully_shard"
            )
        self._roots = outermost(self._modules)
        for root in self._roots:
            let_plan_decide(root, plan=True)

    def end(self) -> None:
        """Leave the parameters to FSDP2."""
        for root in self._roots:
            let_plan_decide(root, plan=False)
        self._modules = self._roots = ()

    def unshard(self) -> None:
        """``UNSHARD``: start to gather. FSDP2 waits in a module's forward and before its backward."""
        self._pending += [module.unshard(async_op=True) for module in self._modules]

    def wait(self) -> None:
        """Wait until all is gathered."""
        while self._pending:
            self._pending.pop().wait()

    def reshard(self) -> None:
        """``RESHARD``."""
        self.wait()
        for module in self._modules:
            module.reshard()

    def reduce(self) -> None:
        """``REDUCE_GRAD``; after the last of a step gradients may be read."""
        self.wait()
        self._left -= 1
        for root in self._roots:
            reduce_scatter(root, last=not self._left)


def in_evaluation(actions: Sequence[Action]) -> set[int]:
    """The places of those gathers and releases that an evaluation needs: with a forward between them."""
    kept: set[int] = set()
    opened: dict[int, int] = {}  # per gathered stage, the place of its gather
    used: set[int] = set()
    for place, action in enumerate(actions):
        if action.kind is ActionKind.F:
            used.add(action.stage)
        elif action.kind is ActionKind.UNSHARD:
            opened[action.stage] = place
            used.discard(action.stage)
        elif action.kind is ActionKind.RESHARD and action.stage in used:
            kept |= {opened[action.stage], place}
    return kept
