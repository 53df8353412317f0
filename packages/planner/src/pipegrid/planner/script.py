"""The skeleton of a training script with the grids, layout and schedule of a choice."""

from __future__ import annotations

from pipegrid.planner.choice import Choice

_HEAD = '''"""Training script of a planned job: fill in `build_stage`, `load_batch` and `loss_of`.

torchrun --nproc-per-node <GPUs of a node> <this file>, {gpus} GPUs in all. Predicted step: {step:.4g} s.
"""

import os

import torch
import torch.distributed as dist

from pipegrid.bridges import EdgeOptions, MultiModulePipelineCommunicator
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.schedules import PipelineConfig, clip_grad_norm_, get_forward_backward_func
from pipegrid.topology import ProcessGroupCollection, data_lane, place

MICROBATCH = {microbatch}  # samples, over all data lanes
NUM_MICROBATCHES = {count}
SEQ_LENGTH = 4096  # of the activations between stages; yours
STEPS = 1000
DTYPE = torch.bfloat16  # of activations and gradients between stages
ON_GPU = torch.cuda.is_available()
'''

_BODY = '''

def build_stage(module: str, kinds: list[str], first: int) -> torch.nn.Module:
    """The layers of a stage, from layer `first` of `module` on, with a method `set_input_tensor`."""
    raise NotImplementedError(f"{module}: {kinds}, from layer {first} on")


def load_batch(step: int, lane: int, lanes: int):
    """An iterator over this lane's share of each microbatch."""
    raise NotImplementedError(f"batch of step {step}, lane {lane} of {lanes}")


def loss_of(output: torch.Tensor):
    """The loss, and what is logged of it."""
    raise NotImplementedError


def main() -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    grids = place(GRIDS, offsets=FIRST_RANKS)
    layouts = {name: PipelineParallelLayerLayout.parse_str_to_list(text) for name, text in LAYOUTS.items()}
    for name, places in PLACES.items():
        if len(layouts[name]) != len(places):
            raise ValueError(f"{name}: layout {LAYOUTS[name]!r} has {len(layouts[name])} stages, PLACES {len(places)}")
    # A rank has a stage of each module whose grid it is in; with modules on the same ranks, several.
    mine = [name for name in grids if grids[name].is_current_rank_in_grid()]
    for name in mine:
        for dim in ("tp", "cp", "dp", "pp"):
            grids[name].create_pg(dim)
    config = PipelineConfig(pipeline_dtype=DTYPE)
    no_gradients = {(name, fed): EdgeOptions(backward=False) for name in FROZEN for fed in TOPOLOGY[name]}
    pipe = MultiModulePipelineCommunicator(grids, TOPOLOGY, config, edges=no_gradients, stage_placement=PLACES)
    models: dict[str, list[torch.nn.Module]] = {name: [] for name in mine}
    for name in mine:
        own = grids[name].coords(dist.get_rank())["pp"]
        for index, at in enumerate(PLACES[name]):
            if at == own:
                first = sum(map(len, layouts[name][:index]))
                stage = build_stage(name, layouts[name][index], first)
                stage.config, stage.module = config, name
                stage.ends = not TOPOLOGY.get(name) and index == len(PLACES[name]) - 1
                models[name].append(stage.to(device).requires_grad_(name not in FROZEN))
    stages = [stage for held in models.values() for stage in held]
    trained = [parameter for stage in stages for parameter in stage.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}], lr=1e-4)  # a rank with frozen modules alone has none
    groups = {name: ProcessGroupCollection.from_grid(grids[name]) for name in mine}

    def batches_of(step: int) -> dict[str, list]:  # each stage reads all microbatches
        return {name: [load_batch(step, *data_lane(grids[name])) for _ in models[name]] for name in mine}

    def of_rank(by_module: dict):  # a rank with one module gives its value, one with several a dict by module
        return by_module if len(mine) > 1 else by_module[mine[0]]

    def forward_step(batches, stage):
        output = stage(batches)
        return (output if stage.ends else {stage.module: output}), loss_of

    train_step = get_forward_backward_func(schedule=SCHEDULE)
    for step in range(STEPS):
        train_step(
            forward_step_func=forward_step,
            data_iterator=of_rank(batches_of(step)),
            model=of_rank(models),
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICROBATCH,
            p2p_communicator=pipe,
            pg_collection=of_rank(groups),
        )
        clip_grad_norm_(of_rank(models), of_rank(groups), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    pipe.destroy()


if __name__ == "__main__":
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    main()
    dist.destroy_process_group()
'''


def training_script(choice: Choice) -> str:
    """A script with the choice's sizes as constants, and the model, the data and the loss left to fill in."""
    shape = choice.shape
    grids = choice.arrangement.grids
    topology: dict[str, list[str]] = {part.module: [] for part in shape.parts}
    for source, destination in shape.job.edges:
        topology[source].append(destination)
    values = {
        "SCHEDULE": choice.schedule,
        "GRIDS": {name: dict(zip(grid.dim_names, grid.shape, strict=True)) for name, grid in grids.items()},
        "FIRST_RANKS": {name: grid.rank_offset for name, grid in grids.items()},
        "TOPOLOGY": topology,
        "FROZEN": [module.name for module in shape.job.modules if module.frozen],
        "LAYOUTS": choice.layouts,
        "PLACES": shape.stage_places,
    }
    head = _HEAD.format(
        gpus=choice.arrangement.gpus,
        step=choice.step,
        microbatch=choice.microbatch,
        count=shape.job.global_batch // choice.microbatch,
    )
    notes = {
        "GRIDS": "sizes, the fastest dim first",
        "TOPOLOGY": "the modules that each module feeds",
        "FROZEN": "modules that run no backward",
        "LAYOUTS": "the layers of each stage",
        "PLACES": "the pp rank of each stage",
    }
    constants = [
        f"{name} = {value!r}" + (f"  # {notes[name]}" if name in notes else "") for name, value in values.items()
    ]
    return head + "\n".join(constants) + "\n" + _BODY
