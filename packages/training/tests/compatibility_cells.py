"""The columns of the compatibility table: one way to run a family each, compared with the model in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch._dynamo
from attrs import field, frozen
from torch import nn
from torch.distributed.fsdp import fully_shard

from pipegrid.schedules import Monitor, PipelineConfig, PipelineError, get_forward_backward_func, stage_places
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store
from pipegrid.training import compile_layers, generate, pipeline_stage, tie_stage_parameters
from pipegrid.transport import P2PCommunicator
from stages_kit.chain import step as through_stages
from stages_kit.gradients import gradient_errors, named_in
from stages_kit.models import loss_of

from .compatibility_family import Family
from .kit.parallel import sharded

MICROBATCHES, NEW_TOKENS = 3, 4
SECONDS = (
    200.0  # for an action of a step, in which layers may compile; the program ends a cell that takes longer in all
)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_LOSS = 2e-6  # relative: Hugging Face computes losses of texts in float32


class WrongNumbersError(AssertionError):
    """A loss, a gradient or a token is not that of one process."""


class FailsAloneError(RuntimeError):
    """The model fails in one process as well, without pipegrid."""


@frozen
class World:
    """The ranks that a cell runs on, with the groups of its grid, made once."""

    rank: int
    size: int
    grids: dict[tuple[int, int], HyperCommGrid] = field(factory=dict)
    cells: Iterator[int] = field(factory=lambda: iter(range(1 << 30)))

    def grid(self, dp: int) -> HyperCommGrid:
        """``dp`` replicas of a pipeline over all ranks."""
        shape = (dp, self.size // dp)
        if shape not in self.grids:
            self.grids[shape] = HyperCommGrid(list(shape), ["dp", "pp"])
            self.grids[shape].create_pgs(["dp", "pp"])
        return self.grids[shape]


def whole_model(family: Family) -> nn.Module:
    """The model in one process, with the values that stages start with."""
    torch.manual_seed(3)
    return family.make().to(family.dtype)


def as_given(family: Family, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch in the dtype of the model."""
    return {
        name: value.to(family.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


# -- What is compared.


def require_equal_losses(found: list[float], expected: list[float]) -> None:
    """Raise unless each microbatch has the loss of one process."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not abs(one - other) <= _LOSS * abs(other):
            raise WrongNumbersError(f"loss of microbatch {number}: {one:.6f} / {other:.6f}")


def require_equal_gradients(
    family: Family, stages: list[nn.Module], whole: nn.Module, alone: Callable[[Family], nn.Module] | None = None
) -> None:
    """Raise unless every parameter of the stages has the gradient of one process, by the error measure of the docs.

    ``alone``: the model in one process, rounding as the stages do; a larger error is right up to twice its error.
    """
    worst, where = _largest_error(stages, whole)
    if worst > TOLERANCE[family.dtype] and (alone is None or worst > 2 * _largest_error([alone(family)], whole)[0]):
        raise WrongNumbersError(f"gradient of {where}: error {worst:.3g}")


def _largest_error(stages: list[nn.Module], whole: nn.Module) -> tuple[float, str]:
    errors = gradient_errors(named_in(stages), whole)
    return max(((error, name) for name, _, _, error in errors), default=(0.0, ""))


# -- A step over ranks.


def step(
    family: Family,
    world: World,
    schedule: str,
    *,
    dp: int = 1,
    prepare: Callable[[nn.Module, HyperCommGrid], None] | None = None,
    shard: str | None = None,
    alone: Callable[[Family], nn.Module] | None = None,
) -> None:
    """One training step of a schedule on ``world.size // dp`` pipeline ranks; ``alone``: of the comparison."""
    grid = world.grid(dp)
    places, stages, lane = _stages(family, world, grid, schedule)
    placement = None if len(places) == grid.shape[1] else places
    ties = tie_stage_parameters(stages[0].ties, stages, grid, placement=placement)
    for stage in stages:
        if prepare is not None:
            prepare(stage, grid)

    def run(config: PipelineConfig, common: dict) -> list[float]:
        return get_forward_backward_func(schedule=schedule)(**common)

    losses = _over_ranks(
        family,
        world,
        grid,
        stages,
        places,
        run,
        lambda number: family.batch(10 * lane + number),
        tied_parameters=ties,
        shard=shard,
    )
    whole, expected = whole_model(family), {}
    for replica in range(dp):
        for number in range(MICROBATCHES):
            loss = loss_of(whole(**as_given(family, family.batch(10 * replica + number))))
            (loss / MICROBATCHES / dp).backward()
            expected[replica, number] = loss.item()
    if any(stage.is_last for stage in stages):
        require_equal_losses(losses, [expected[lane, number] for number in range(MICROBATCHES)])
    require_equal_gradients(family, stages, whole, alone)


def _stages(family, world, grid, schedule, model=None):
    """The place of every stage, this rank's stages, and its replica."""
    at = grid.coords(world.rank)
    places = stage_places(schedule, grid.shape[1])
    numbers = [stage for stage, place in enumerate(places) if place == at["pp"]]
    torch.manual_seed(3)
    stages = pipeline_stage(model or family.make, family.layouts[len(places)], numbers, names=family.names)
    stages = [stage.to(family.dtype) for stage in stages]
    for stage in stages:
        stage.place(places)
        stage.look(lambda own=stage: own(**as_given(family, family.batch(0))))  # finds what stages hand on
    return places, stages, at["dp"]


def _over_ranks(family, world, grid, stages, places, run, batch, **options):
    """``run`` of a config and the arguments that step functions take, with a monitor."""
    number = next(world.cells)
    store = control_store(f"cell {number} of {world.size}")
    monitor = Monitor(store, rank=world.rank, ranks=range(world.size), deadline=SECONDS, interval=0.1)
    config = PipelineConfig(
        pipeline_dtype=family.dtype, variable_seq_lengths=True, deadline=SECONDS, monitor=monitor, **options
    )
    for stage in stages:
        stage.config = config
    groups = ProcessGroupCollection.from_grid(grid)
    placement = None if len(places) == grid.shape[1] else places
    graph = stages[0].graph if stages[0].skips else None
    communicator = P2PCommunicator(groups.pp, config, placement=placement if graph is None else places, graph=graph)
    found = run(
        config,
        {
            "forward_step_func": _forward_step,
            "data_iterator": [(as_given(family, batch(m)) for m in range(MICROBATCHES)) for _ in stages],
            "model": stages,
            "num_microbatches": MICROBATCHES,
            "p2p_communicator": communicator,
            "pg_collection": groups,
        },
    )
    monitor.close()
    communicator.close()
    return found


def _forward_step(batches, stage):
    return stage(**next(batches)), _loss


def _loss(output):
    loss = loss_of(output)
    return loss, loss.item()


# -- The columns.


def fsdp2(family: Family, world: World) -> None:
    """FSDP2 over two replicas of two stages, gathered and reduced by the plan."""
    try:
        step(
            family,
            world,
            "1f1b",
            dp=2,
            shard="step",
            prepare=lambda stage, grid: sharded(stage, grid.to_device_mesh(["dp"])),
        )
    except PipelineError as error:
        if "managed by another FSDP group" in str(error.__cause__):
            _require_sharded_alone(family, world)
        raise


def _require_sharded_alone(family: Family, world: World) -> None:
    """Raise where ``fully_shard`` of the whole model and its layers fails as well, without a pipeline."""
    whole, mesh = whole_model(family), world.grid(2).to_device_mesh(["dp"])
    for name in pipeline_stage(whole, family.layouts[2], 0, names=family.names).assignment.layers:
        fully_shard(whole.get_submodule(name), mesh=mesh)
    fully_shard(whole, mesh=mesh)
    try:
        whole(**as_given(family, family.batch(0)))
    except Exception as error:
        text = str(error).splitlines()[0]
        raise FailsAloneError(
            f"fully_shard of the layers, without a pipeline: {type(error).__name__}: {text}"
        ) from error


# Dynamo compiles a forward a few times, and then leaves it in eager mode without a word.
@torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
def compiled(family: Family, world: World) -> None:
    """Layers compiled such that their backwards run in halves, under ZB-V."""
    with warnings.catch_warnings():  # Dynamo looks at the gradient of what arrived, which is no leaf of its graph
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        try:
            step(
                family,
                world,
                "zero_bubble_v",
                prepare=lambda stage, grid: compile_layers(stage, compile="split", backend="aot_eager"),
                alone=_compiled_alone,
            )
        except PipelineError as error:
            if not isinstance(error.__cause__, ValueError):
                _require_compiled_alone(family)
            raise


def _compiled_alone(family: Family) -> nn.Module:
    """The model as one stage, compiled alike, with the gradients of a step: its parts in float32 round alike."""
    stage = pipeline_stage(whole_model(family), family.layouts[2].replace("|", ""), 0, names=family.names)
    compile_layers(stage, compile="split", backend="aot_eager")
    for number in range(MICROBATCHES):
        (loss_of(stage(**as_given(family, family.batch(number)))) / MICROBATCHES).backward()
    return stage


def _require_compiled_alone(family: Family) -> None:
    """Raise where layers compiled by torch, whole and in one process, fail as well."""
    whole = whole_model(family)
    for name in pipeline_stage(whole, family.layouts[2], 0, names=family.names).assignment.layers:
        whole.get_submodule(name).compile(backend="aot_eager", dynamic=False)
    try:
        loss_of(whole(**as_given(family, family.batch(0)))).backward()
    except Exception as error:
        text = str(error).splitlines()[0]
        raise FailsAloneError(f"torch.compile of the layers, in one process: {type(error).__name__}: {text}") from error


def generated(family: Family, world: World) -> None:
    """Greedy tokens of two stages, and those of the model's own ``generate``."""
    grid = world.grid(1)
    whole = whole_model(family)
    with torch.no_grad():  # words that follow from the prompt, not the same one at every place
        for parameter in whole.parameters():
            parameter.mul_(4)
    places, stages, _ = _stages(family, world, grid, "1f1b", model=whole)
    prompt = family.prompt or (lambda seed, length: unlabelled(family.batch(seed)))

    def run(config, common):
        return generate(max_new_tokens=NEW_TOKENS, schedule="1f1b", **common)

    found = _over_ranks(family, world, grid, stages, places, run, lambda number: prompt(number, 4 + number))
    whole.eval()
    for number, tokens in enumerate(found):
        batch = as_given(family, prompt(number, 4 + number))
        expected = whole.generate(
            **batch, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )[:, -NEW_TOKENS:]
        if not torch.equal(tokens, expected):
            raise WrongNumbersError(f"tokens of microbatch {number}: {tokens.tolist()} / {expected.tolist()}")


def unlabelled(batch):
    """A batch of a model without a prompt, and without padding."""
    return {name: value for name, value in batch.items() if name not in ("labels", "attention_mask")}


def compared(family: Family, world: World) -> None:
    """All stages in this process, one microbatch, beside the whole model."""
    del world
    torch.manual_seed(3)
    stages = [
        stage.to(family.dtype) for stage in pipeline_stage(family.make, family.layouts[3], range(3), names=family.names)
    ]
    batch, whole = as_given(family, family.batch(0)), whole_model(family)
    held = {name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)}
    if held != dict(whole.named_parameters(remove_duplicate=False)).keys():
        raise WrongNumbersError("the stages do not have the parameters of the model")
    loss = loss_of(whole(**batch))
    loss.backward()
    require_equal_losses([through_stages(stages, batch, loss_of).item()], [loss.item()])
    require_equal_gradients(family, stages, whole)


COLUMNS: dict[str, tuple[int, Callable[[Family, World], None]]] = {
    "stages, one process": (1, compared),
    "1F1B": (2, partial(step, schedule="1f1b")),
    "interleaved 1F1B": (2, partial(step, schedule="interleaved_1f1b")),
    "ZB-V": (2, partial(step, schedule="zero_bubble_v")),
    "ZB-V, compile split": (2, compiled),
    "generate": (2, generated),
    "FSDP2 x 1F1B": (4, fsdp2),
}
"""Ways to run a family, with the number of ranks of each."""
